"""`kvtools sql`: questions to tables in SQL."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtools.cli.json_text import dumps, string_keys
from kvtools.cli.layout import columns, shown
from kvtools.cli.options import (
    DEFAULT_MEMORY,
    AsJson,
    DryRun,
    Force,
    Memory,
    Source,
    bytes_of,
    check_output_options,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.cli.standard_output import write_bytes
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import UsageError
from kvtools.remote.stored import read_bytes
from kvtools.replace_output import check_free, check_not_read
from kvtools.sql.output import check_format, column_labels, csv_header, csv_rows, json_lines, write_result
from kvtools.sql.query import query
from kvtools.sql.result import QueryResult

_NUMBERS_SHOWN = 8
_BLOCK_ROWS = 10_000
"""How many rows of text are aligned together."""


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH... QUERY", help="Checkpoints of any dialect, and one SELECT.", show_default=False),
    ] = None,
    *,
    attach: Annotated[
        list[str] | None,
        typer.Option(
            "--attach", metavar="NAME=PATH", help="A checkpoint whose tables are NAME.table; may be repeated."
        ),
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="FILE", help="Take the query from a file; - for stdin.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="OUT",
            help="Write the answer: OUT.parquet, OUT.csv, OUT.jsonl.",
            callback=no_standard_output,
        ),
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    rows_as_json: Annotated[bool, typer.Option("--json-lines", help="Print a JSON object for each row.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads of DuckDB; all processors.")
    ] = None,
) -> None:
    """Ask tables in SQL, without converting them: one SELECT, as DuckDB reads it.

    Each table has the columns key, value (a vector, FLOAT[dim]), its slots by their names ("Adam.m", in quotes), freq
    and version where it has them, norm (of value) and part. Only what a query asks for is read. A table whose name has
    a slash is put in quotes: "ads/emb". A query reads nothing but the tables, and changes nothing.

    \b
    Examples:
      kvtools sql model.ckpt-100 "select key, freq, norm from user_emb order by freq desc limit 20"
      kvtools sql model.ckpt-100 "select part, count(*), avg(norm) from item_emb group by part"
      kvtools sql model.ckpt-100 "select * from user_emb where freq < 3" --output cold.parquet
      kvtools sql --attach a=model.ckpt-100 --attach b=model.ckpt-200 "from a.user_emb anti join b.user_emb using (key)"
    """
    if sum([as_json, rows_as_json, as_csv]) > 1 or (output is not None and (rows_as_json or as_csv)):
        raise UsageError("printing an answer: got several of --json, --json-lines, --csv and --output, expected one")
    check_output_options(output, force=force, dry_run=dry_run)
    if threads is not None and threads < 1:
        raise UsageError(f"got --threads {threads}, expected 1 or more")
    if output is not None:
        check_format(Path(output))
    text, paths = _text(arguments or [], attach or [], file)
    sources, read = _sources(paths, attach or [], source, memory)
    if output is not None:
        check_not_read(Path(output).absolute(), [*read, *([] if file in (None, "-") else [file])])
        check_free(Path(output).absolute(), force=force)
    with contextlib.ExitStack() as ended:
        with progress_bar("reading") as progress:
            result = ended.enter_context(
                query(sources, text, memory=bytes_of(memory), threads=threads, progress=progress)
            )
            if output is not None:
                rows = write_result(result, Path(output), force=force, dry_run=dry_run, wide_as_text=string_keys())
                if as_json:
                    print(dumps({"output": output, "rows": rows, "dry_run": dry_run}))
                else:
                    print(f"{'would write' if dry_run else 'wrote'} {rows:,} rows to {output}")
                return
            batches = result.batches()
            first = list(_until_block(batches))
        # The bar is gone before anything is printed.
        _print(result, itertools.chain(first, batches), as_json, rows_as_json, as_csv)


def _print(result: QueryResult, batches: Iterator[Any], as_json: bool, rows_as_json: bool, as_csv: bool) -> None:
    if as_json:
        _print_json(result, batches)
    elif rows_as_json:
        labels = column_labels(result)
        for batch in batches:
            for line in json_lines(batch, labels, dumps, wide_as_text=string_keys()):
                print(line)
    elif as_csv:
        write_bytes(csv_header(result).encode())
        for batch in batches:
            write_bytes(csv_rows(batch))
    else:
        _print_text(result, batches)


def _text(arguments: list[str], attach: list[str], file: str | None) -> tuple[str, list[str]]:
    """Return the query, and the paths before it."""
    if file is not None:
        try:
            text = sys.stdin.buffer.read() if file == "-" else read_bytes(file)
            return text.decode("utf-8-sig"), arguments
        except OSError as error:
            raise UsageError(f"reading the query '{file}': {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"reading the query '{file}': it is no UTF-8: {error.reason}") from error
    if len(arguments) < (1 if attach else 2):
        got = f"got {shown(arguments[0])!r} alone" if arguments else "got nothing"
        raise UsageError(f'asking tables: {got}, expected a PATH and a query, as in model.ckpt "select * from user"')
    return arguments[-1], arguments[:-1]


def _sources(
    paths: list[str], attach: list[str], source: Source, memory: str
) -> tuple[dict[str, Checkpoint], list[Path | str]]:
    """Open the checkpoints by the names under which a query has them; return the paths of all, too."""
    sources: dict[str, Checkpoint] = {}
    read: list[Path | str] = []
    for path in paths:
        opened = source.open(path, memory, lenient=True)
        read.append(opened.path)
        here = sources.get("")
        if here is None:
            sources[""] = opened
            continue
        for name in opened.tables:
            if name in here.tables:
                raise UsageError(
                    f"asking tables: both '{here.path}' and '{opened.path}' have a table '{name}'; give them names,"
                    f" --attach old={paths[0]} --attach new={path}"
                )
        tables, broken = {**here.tables, **opened.tables}, {**here.broken, **opened.broken}
        sources[""] = dataclasses.replace(here, tables=tables, broken=broken)
    for each in attach:
        name, equals, path = each.partition("=")
        if not (name and equals and path):
            raise UsageError(f"got --attach {each!r}, expected NAME=PATH, as in old=model.ckpt-100")
        if name in sources:
            raise UsageError(f"got --attach {name}=... twice, expected a name for each")
        sources[name] = source.open(path, memory, lenient=True)
        read.append(sources[name].path)
    return sources, read


def _until_block(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of the first block of text."""
    rows = 0
    for batch in batches:
        yield batch
        rows += len(batch)
        if rows >= _BLOCK_ROWS:
            return


def _print_json(result: QueryResult, batches: Iterator[Any]) -> None:
    labels = column_labels(result)
    types = [{"name": label, "type": str(field.type)} for label, field in zip(labels, result.schema, strict=True)]
    sys.stdout.write(f'{{"columns": {json.dumps(types)}, "rows": [')
    between = ""
    for batch in batches:
        for line in json_lines(batch, labels, dumps, wide_as_text=string_keys()):
            sys.stdout.write(between + line)
            between = ", "
    print("]}")


def _print_text(result: QueryResult, batches: Iterator[Any]) -> None:
    import pyarrow.types as types

    header = [shown(label) for label in column_labels(result)]
    right = frozenset(
        at
        for at, field in enumerate(result.schema)
        if types.is_integer(field.type) or types.is_floating(field.type) or types.is_decimal(field.type)
    )
    first = True
    while True:
        lines: list[list[str]] = []
        for batch in _until_block(batches):
            cells = [[_cell(value) for value in column.to_pylist()] for column in batch.columns]
            lines += [list(row) for row in zip(*cells, strict=True)]
        if not lines and not first:
            return
        print(columns(header, lines, right=right))
        first = False


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return " ".join(_cell(each) for each in value[:_NUMBERS_SHOWN]) + " ..." * (len(value) > _NUMBERS_SHOWN)
    return shown(str(value))
