"""`kvtools migrate`: tables from any dialect into any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtools.cli.account import print_account
from kvtools.cli.clip_options import describe, print_choices
from kvtools.cli.options import (
    AsJson,
    BatchRows,
    Compression,
    CompressionLevel,
    EngineName,
    Output,
    Partition,
    Parts,
    Source,
    Where,
    bytes_of,
    engine_named,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.clip import Choice, rows_that_meet
from kvtools.clip_policy import version_unit_of
from kvtools.dialects.detect import dialect_for, dialect_named
from kvtools.dialects.dialect import Dialect
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.errors import BadInputError, CheckFailedError
from kvtools.migrate import output_of, write_tables
from kvtools.row_filter import condition_of
from kvtools.shown_tables import counted
from kvtools.table_view import with_version_unit
from kvtools.written_bytes import row_bytes_in


def run(
    path: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint prefix, file or folder of any dialect, or a URL.")
    ],
    out: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="What to write: a prefix, file, folder or URL.", callback=no_standard_output
        ),
    ],
    *,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="DIALECT", help="The dialect to write, if DST's suffix does not tell it."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            metavar="NAME",
            help="Only this table, or those like 'deep/*', and no dense variables; may be repeated.",
        ),
    ] = None,
    where: Where = None,
    parts: Parts = None,
    partition: Partition = None,
    compression: Compression = None,
    compression_level: CompressionLevel = None,
    batch_rows: BatchRows = None,
    version_unit: Annotated[
        str | None,
        typer.Option(
            "--version-unit", metavar="seconds|days|steps", help="What versions count, where SRC does not say."
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the output again and compare every row, before it is in place.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Write nothing if anything would be lost; exit 3.")] = False,
    output: Output,
    engine: EngineName = "local",
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Move tables to another dialect: every row, with its slots, frequency and version where DST can hold them.

    DST appears whole or not at all. What its dialect cannot hold is left out and named at the end. Types are
    changed only to ones that hold every number exactly; for others see `kvtools cast`.

    \b
    Examples:
      kvtools migrate model.ckpt-100 tables.h5
      kvtools migrate model.ckpt-100 moved/model.ckpt --to tfplugin --parts 4 --verify
      kvtools migrate model.ckpt-100 tables.parquet --table user_emb --compression zstd
      kvtools migrate model.ckpt-100 hot.parquet --where 'freq >= 100' --table user_emb
      kvtools migrate model.ckpt-100 tables.npz --dry-run --json
    """
    target = dialect_named(to) if to else dialect_for(out)
    runs_on = engine_named(engine)
    options = output.options(
        compression=compression,
        compression_level=compression_level,
        batch_rows=batch_rows,
        partition=partition,
    )
    checkpoint = source.open_for(table or [], path, output.memory)
    tables = checkpoint.select(table or [])
    if not tables:
        raise BadInputError(
            f"migrating '{path}': it has no key-value tables, only"
            f" {counted(len(checkpoint.variables), 'dense variable')}; see `kvtools inspect`,"
            " or say --dialect if this is not what it is"
        )
    unit = version_unit_of(version_unit, "--version-unit")
    if unit is not None:
        tables = with_version_unit(tables, unit)
    beside = None if table else checkpoint
    gone = _gone(checkpoint, tables, out, target) if table else None
    if gone and strict:
        raise CheckFailedError(f"writing '{out}' as {target.name}: this would be lost: {gone}; nothing was written")
    condition = condition_of(where)
    choices: list[Choice] = []
    if condition is not None:
        with progress_bar("choosing rows of") as progress:
            names = [one.schema.name for one in tables]
            tables, choices = rows_that_meet(
                tables,
                condition,
                size=row_bytes_in(target.name, names, compression=options.compression),
                memory=bytes_of(output.memory),
                workers=output.workers,
                progress=progress,
            )
        if not as_json:
            print_choices(choices)
            print()
    with progress_bar("reading" if output.dry_run else "migrating") as progress:
        account = write_tables(
            tables,
            out,
            target,
            beside=beside,
            parts=parts,
            options=options,
            workers=output.workers,
            engine=runs_on,
            progress=progress,
            strict=strict,
            verify=verify,
        )
    if gone:
        account = dataclasses.replace(account, losses=(*account.losses, gone))
    more: dict[str, Any] = {"source": path, "from": checkpoint.dialect, "dry_run": output.dry_run}
    if condition is not None:
        more["clipped"] = [describe(choice) for choice in choices]
    print_account(account, as_json=as_json, planned=output.dry_run, whole=condition is None, **more)


def _gone(checkpoint: Checkpoint, tables: Sequence[TableReader], out: str, target: Dialect) -> str | None:
    """Say what of SRC is not among `tables` and goes with it, where DST takes its place."""
    if "://" in out or Path(output_of(out, target, [checkpoint])).absolute() != Path(checkpoint.path).absolute():
        return None
    chosen = {one.schema.name for one in tables}
    others = [f"'{name}'" for name in (*checkpoint.tables, *checkpoint.broken) if name not in chosen]
    what = [f"{counted(len(others), 'table')} ({', '.join(others[:5])}{', ...' * (len(others) > 5)})"] if others else []
    if checkpoint.variables:
        what.append(counted(len(checkpoint.variables), "dense variable"))
    if not what:
        return None
    return f"{' and '.join(what)} of '{checkpoint.path}', which this replaces: --table leaves them out"
