"""`kvtools inspect`: what is in a checkpoint."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvtools.chain_place import is_chain
from kvtools.cli.json_text import dumps
from kvtools.cli.key_arguments import are_keys, spread_option
from kvtools.cli.layout import columns, shown, shown_numbers, size, total
from kvtools.cli.options import AsJson, Sort, Source, SourcePath, Tables, check_readable, sorted_tables
from kvtools.cli.progress import progress_bar
from kvtools.cli.terminal import prose, styled
from kvtools.errors import UsageError, one_line
from kvtools.inspect import (
    KeyRow,
    describe,
    describe_row,
    describe_table,
    find_rows,
    first_rows,
    sample_rows,
)
from kvtools.key_file import check_range
from kvtools.shown_tables import counted

_VARIABLES_SHOWN = 10
_MOST_ROWS = 1_000_000


def run(
    path: SourcePath,
    *,
    as_json: AsJson = False,
    tables_only: Annotated[bool, typer.Option("--tables", help="List only the tables.")] = False,
    keys: Annotated[
        list[str] | None,
        typer.Option("--keys", metavar="K...", help="Show the rows of these keys, in each table with them."),
    ] = None,
    head: Annotated[int | None, typer.Option("--head", metavar="N", help="Show each table's first N rows.")] = None,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="N", help="Show N rows of each table, drawn at random.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Which rows --sample draws.")] = 0,
    slots: Annotated[
        bool, typer.Option("--slots", help="Show the optimizer slots: their widths and types, and their numbers.")
    ] = False,
    parts: Annotated[
        bool, typer.Option("--parts", help="Show the rows of each part, the extra arrays and what versions count.")
    ] = False,
    table: Tables = None,
    sort: Sort = None,
    source: Source,
) -> None:
    """Show what is in a checkpoint: its key-value tables, its dense variables, some of its rows.

    Only the index is read, so it answers at once whatever the size. With --head or --sample, the rows shown are read
    too; with --keys, all keys and the rows that were asked for. Of a chain's folder, the members are listed by their
    records, and rows are those after the last increment.

    \b
    Examples:
      kvtools inspect model.ckpt-100
      kvtools inspect exported --json
      kvtools inspect model.ckpt-100 --table user_emb --keys 17 -3
      kvtools inspect model.ckpt-100 --sample 5 --slots
      kvtools inspect model.ckpt-100 --tables --parts
      kvtools inspect model.ckpt-100 --tables --sort bytes
      kvtools inspect train
    """
    if sum(option is not None for option in (keys or None, head, sample)) > 1:
        raise UsageError("inspecting: got more than one of --keys, --head and --sample, expected one of them")
    for option, count in (("--head", head), ("--sample", sample)):
        if count is not None and not 1 <= count <= _MOST_ROWS:
            raise UsageError(f"inspecting: got {option} {count}, expected 1 to {_MOST_ROWS}")
    wanted = _parse_keys(keys) if keys else []
    if is_chain(path) and not (wanted or head is not None or sample is not None):
        _inspect_chain(path, source, table or [], sort, as_json=as_json, show_slots=slots, show_parts=parts)
        return
    checkpoint = source.open(path, lenient=True)
    check_readable(checkpoint, table or [])
    tables = sorted_tables(checkpoint.select(table or []), sort)
    rows: list[KeyRow] = []
    if wanted:
        with progress_bar("reading keys of") as progress:
            rows = find_rows(tables, wanted, progress=progress)
    elif head is not None:
        rows = [row for reader in tables for row in first_rows(reader, head)]
    elif sample is not None:
        rows = [row for reader in tables for row in sample_rows(reader, sample, seed=seed)]
    show_rows = bool(wanted) or head is not None or sample is not None
    report = describe(checkpoint)
    report["tables"] = [describe_table(reader.schema) for reader in tables]
    if table:
        report["unreadable"] = []
    if tables_only:
        report["variables"] = []
    if as_json:
        if show_rows:
            report["rows"] = [describe_row(row, slots=slots) for row in rows]
        print(dumps(report))
    elif show_rows:
        _print_rows(rows, wanted, show_slots=slots)
    else:
        _print_report(report, list_variables=not tables_only, show_slots=slots, show_parts=parts)
    check_readable(checkpoint, table or [], any_table=True)


def _inspect_chain(
    path: str,
    source: Source,
    names: Sequence[str],
    sort: str | None,
    *,
    as_json: bool,
    show_slots: bool,
    show_parts: bool,
) -> None:
    """Show the members of a chain, and the tables of its newest full checkpoint; raises what keeps it from being
    whole."""
    inspect_chain = importlib.import_module("kvtools.cli.inspect_chain")  # with all that folds chains: seldom needed
    chain, full = inspect_chain.look_into(path, source, names, sort)
    if as_json:
        print(dumps({**chain.to_dict(), "full": full}))
    else:
        inspect_chain.print_chain(chain)
        if full is not None:
            print()
            _print_report(full, list_variables=not names, show_slots=show_slots, show_parts=show_parts)
    if chain.fault is not None:
        raise chain.fault


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
            check_range(number, f"looking up keys: got --keys {number[:40]}")
            keys.append(int(number))
    return keys


def _print_report(report: dict[str, Any], *, list_variables: bool, show_slots: bool, show_parts: bool) -> None:
    print(f"{report['path']} ({report['dialect']})")
    tables, unreadable = report["tables"], report["unreadable"]
    if tables:
        print()
        print(
            columns(
                ["table", "dialect", "key", "value", "dim", "rows", "parts", "slots", "bytes"],
                [
                    [
                        shown(table["name"]),
                        table["dialect"],
                        table["key_dtype"],
                        table["rows_as"] or table["value_dtype"],
                        str(table["dim"]),
                        f"{table['rows']:,}",
                        str(table["parts"]),
                        shown(", ".join(table["slots"])) or "-",
                        size(table["bytes"]),
                    ]
                    for table in tables
                ],
                right=frozenset({4, 5, 6, 8}),
            )
        )
        together = total(len(tables), sum(one["rows"] for one in tables), sum(one["bytes"] for one in tables))
        if together:
            print(together)
    elif not unreadable:
        print("no key-value tables")
    for table in tables:
        for note in table["notes"]:
            print(prose(f"note: {shown(table['name'])}: {shown(note)}"))
    for broken in unreadable:
        line = prose(f"unreadable: {shown(broken['table'])}: {one_line(broken['error'])}")
        print(styled("unreadable:", "red") + line.removeprefix("unreadable:"))
    if show_slots:
        _print_slots(tables)
    if show_parts:
        _print_parts(tables)
    if not list_variables:
        return
    variables = sorted(report["variables"], key=lambda variable: -variable["bytes"])
    in_all = sum(variable["bytes"] for variable in variables)
    print()
    print(f"{counted(len(variables), 'dense variable')}, {size(in_all)}")
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


def _print_slots(tables: Sequence[dict[str, Any]]) -> None:
    lines = [
        [shown(table["name"]), shown(slot["name"]), slot["dtype"], str(slot["width"])]
        for table in tables
        for slot in table["slot_columns"]
    ]
    print()
    print(columns(["table", "slot", "dtype", "width"], lines, right=frozenset({3})) if lines else "no slots")


def _print_parts(tables: Sequence[dict[str, Any]]) -> None:
    lines, extras = [], []
    for table in tables:
        name = shown(table["name"])
        freqs, versions = table["freq_dtype"] or "-", table["version_dtype"] or "-"
        unit = table["version_unit"] or "-"
        rule = table["partition"] or "-"
        for part, rows in enumerate(table["part_rows"]):
            lines.append([name, str(part), f"{rows:,}", rule, freqs, versions, unit])
            name = freqs = versions = unit = rule = ""
        extras += [
            [shown(table["name"]), shown(extra["name"]), extra["dtype"], str(extra["shape"])]
            for extra in table["extras"]
        ]
    header = ["table", "part", "rows", "partition", "freq", "version", "unit"]
    print()
    print(columns(header, lines, right=frozenset({1, 2})))
    if extras:
        print()
        print(columns(["table", "extra", "dtype", "shape"], extras))


def _print_rows(rows: Sequence[KeyRow], wanted: Sequence[int], *, show_slots: bool) -> None:
    if rows:
        lines = []
        for row in rows:
            lines.append(
                [
                    shown(row.table),
                    str(row.key),
                    "-" if row.freq is None else str(row.freq),
                    "-" if row.version is None else str(row.version),
                    f"{row.l2:.6g}",
                    ", ".join(f"{shown(name)} {norm:.6g}" for name, norm in row.slots_l2.items()) or "-",
                    shown_numbers(row.value),
                ]
            )
            if show_slots:
                lines += [
                    ["", "", "", "", "", f"  {shown(name)}", shown_numbers(slot)] for name, slot in row.slots.items()
                ]
        print(
            columns(
                ["table", "key", "freq", "version", "norm", "slot norms", "value"],
                lines,
                right=frozenset({1, 2, 3, 4}),
            )
        )
    elif not wanted:
        print("no rows")
    found = {row.key for row in rows}
    missing = [str(key) for key in dict.fromkeys(wanted) if key not in found]
    if missing:
        print(prose(f"in no table: {', '.join(missing)}"))
