"""`kvtools inspect`: what is in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from kvtools.cli.key_arguments import are_keys, spread_option
from kvtools.cli.layout import columns, shown, size
from kvtools.cli.progress import progress_bar

from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import UsageError
from kvtools.inspect import KeyRow, describe, describe_row, describe_table, find_rows

_VARIABLES_SHOWN = 10
_VALUES_SHOWN = 8


def run(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint prefix, its folder, or a SavedModel folder.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    tables_only: Annotated[bool, typer.Option("--tables", help="List only the tables.")] = False,
    keys: Annotated[
        list[str] | None,
        typer.Option("--keys", metavar="K...", help="Show the rows of these keys, in each table with them."),
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option("--table", metavar="NAME", help="Only this table; may be repeated.")
    ] = None,
) -> None:
    """Show what is in a checkpoint: its key-value tables, its dense variables, the rows of single keys.

    Only the index is read, so it answers at once whatever the size. With --keys, the tables' keys are
    read too, and the rows that were asked for.

    \b
    Examples:
      kvtools inspect model.ckpt-100
      kvtools inspect exported_savedmodel --json
      kvtools inspect model.ckpt-100 --table user_emb --keys 17 -3
    """
    wanted = _parse_keys(keys) if keys else []
    checkpoint = open_checkpoint(path)
    tables = checkpoint.select(table or [])
    rows: list[KeyRow] = []
    if wanted:
        with progress_bar("reading keys of") as progress:
            rows = find_rows(tables, wanted, progress=progress)
    report = describe(checkpoint)
    report["tables"] = [describe_table(reader.schema) for reader in tables]
    if tables_only:
        report["variables"] = []
    if as_json:
        if wanted:
            report["rows"] = [describe_row(row) for row in rows]
        print(json.dumps(report))
    elif wanted:
        _print_rows(rows, wanted)
    else:
        _print_report(report, list_variables=not tables_only)


def prepare_arguments(arguments: Sequence[str]) -> list[str]:
    """Let `--keys` take all the numbers that follow it."""
    return spread_option(arguments, "--keys")


def _parse_keys(texts: Sequence[str]) -> list[int]:
    keys = []
    for text in texts:
        if not are_keys(text) or len(text) > 10_000:
            raise UsageError(
                f"looking up keys: got --keys {text[:60]!r}, expected integers; string keys are not stored as such"
            )
        for number in filter(None, text.split(",")):
            if len(number) > 40:
                raise UsageError(f"looking up keys: got --keys {number[:40]}..., expected 64-bit integers")
            keys.append(int(number))
    return keys


def _print_report(report: dict[str, Any], *, list_variables: bool) -> None:
    print(f"{report['path']} ({report['dialect']})")
    if report["tables"]:
        print()
        print(
            columns(
                ["table", "dialect", "key", "value", "dim", "rows", "parts", "slots", "bytes"],
                [
                    [
                        shown(table["name"]),
                        table["dialect"],
                        table["key_dtype"],
                        table["value_dtype"],
                        str(table["dim"]),
                        f"{table['rows']:,}",
                        str(table["parts"]),
                        shown(", ".join(table["slots"])) or "-",
                        size(table["bytes"]),
                    ]
                    for table in report["tables"]
                ],
                right=frozenset({4, 5, 6, 8}),
            )
        )
    else:
        print("no key-value tables")
    if not list_variables:
        return
    variables = sorted(report["variables"], key=lambda variable: -variable["bytes"])
    total = sum(variable["bytes"] for variable in variables)
    print()
    print(f"{len(variables)} dense variables, {size(total)}")
    if variables:
        print(
            columns(
                ["variable", "dtype", "shape", "bytes"],
                [
                    [
                        shown(variable["name"]),
                        variable["dtype"],
                        str(variable["shape"]),
                        size(variable["bytes"]),
                    ]
                    for variable in variables[:_VARIABLES_SHOWN]
                ],
                right=frozenset({3}),
            )
        )
    if len(variables) > _VARIABLES_SHOWN:
        print(f"and {len(variables) - _VARIABLES_SHOWN} smaller ones; --json lists all")


def _print_rows(rows: Sequence[KeyRow], wanted: Sequence[int]) -> None:
    if rows:
        print(
            columns(
                ["table", "key", "freq", "version", "|value|", "slot norms", "value"],
                [
                    [
                        shown(row.table),
                        str(row.key),
                        "-" if row.freq is None else str(row.freq),
                        "-" if row.version is None else str(row.version),
                        f"{row.l2:.6g}",
                        ", ".join(f"{shown(name)} {norm:.6g}" for name, norm in row.slots_l2.items()) or "-",
                        " ".join(f"{float(value):.6g}" for value in row.value[:_VALUES_SHOWN])
                        + (" ..." if len(row.value) > _VALUES_SHOWN else ""),
                    ]
                    for row in rows
                ],
                right=frozenset({1, 2, 3, 4}),
            )
        )
    found = {row.key for row in rows}
    missing = [str(key) for key in dict.fromkeys(wanted) if key not in found]
    if missing:
        print(f"in no table: {', '.join(missing)}")
