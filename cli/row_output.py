"""Rows as `kvtools get`, `scan` and `top` print them: aligned text, JSON, JSON lines, CSV, or a file of any dialect."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvtools.cli.json_text import dumps
from kvtools.cli.layout import columns, shown, shown_numbers
from kvtools.cli.options import DryRun, Force, Output, check_output_options, no_standard_output
from kvtools.cli.standard_output import write_bytes
from kvtools.csv_rows import csv_header, csv_lines
from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.detect import dialect_for, dialect_named
from kvtools.dialects.dialect import Dialect
from kvtools.dialects.interface import TableReader
from kvtools.dialects.schema import TableSchema
from kvtools.errors import UsageError, one_line
from kvtools.get import ColumnChoice, choose_columns
from kvtools.json_numbers import json_numbers
from kvtools.migrate import check_output, output_of, write_tables
from kvtools.read_ahead import read_ahead
from kvtools.replace_output import check_free, check_not_read, replace_files
from kvtools.row_filter import tables_with
from kvtools.sql.columns import slot_names
from kvtools.table_names import is_pattern

_TEXT_FILES = {".csv": "csv", ".jsonl": "json-lines", ".ndjson": "json-lines"}
"""The form in which rows are written to a file that is no checkpoint, by how its name ends; as `kvtools sql`."""
_TABLES_SAID = 3
_LINES_AT_ONCE = 1000
"""So many rows are aligned with each other; they are held in memory until then."""


OutputDialect = Annotated[
    str | None, typer.Option("--to", metavar="DIALECT", help="The dialect of OUT, if its name does not tell.")
]


@dataclass(frozen=True)
class RowForms:
    """In which form rows come out, and which columns of them."""

    choose: Annotated[
        str | None,
        typer.Option(
            "--columns", metavar="NAMES", help="Of value, freq, version, norm, part, slots and slots' own names."
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    json_lines: Annotated[bool, typer.Option("--json-lines", help="Print a JSON object for each row.")] = False
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values, of one table.")] = False
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="OUT",
            help="Write the rows: OUT.npz, OUT.parquet, any dialect; OUT.csv, OUT.jsonl.",
            callback=no_standard_output,
        ),
    ] = None
    force: Force = False
    dry_run: DryRun = False

    def target(self, to: str | None, *, option: str = "--to") -> Dialect | None:
        """Return the dialect to write, `to` of this option or what the file's name tells, None where no tables are
        written.

        Raises:
            UsageError: several forms are asked for, nothing tells the dialect, or an option is of what is written
                where nothing is.
        """
        if sum([self.as_json, self.json_lines, self.as_csv, self.output is not None and not self.as_json]) > 1:
            raise UsageError("printing rows: got several of --json, --json-lines, --csv and --output, expected one")
        if self.output is None:
            if to:
                raise UsageError(f"printing rows: got the dialect {to} and no --output, expected both or neither")
            check_output_options(self.output, force=self.force, dry_run=self.dry_run)
            return None
        if not to and Path(self.output).suffix.lower() in _TEXT_FILES:
            return None
        if self.choose is not None:
            raise UsageError(
                f"got --columns and --output {self.output}: tables are written with all their columns; leave --columns"
                " out, or write OUT.csv or OUT.jsonl"
            )
        return dialect_named(to) if to else dialect_for(self.output, option=option)

    def check_place(self, target: Dialect | None, read: Sequence[str | os.PathLike[str]]) -> None:
        """Raise, before anything is read, what keeps rows from being written: a place that may not be replaced, or
        that is one of `read`."""
        if self.output is None:
            return
        if target is None:
            check_not_read(Path(self.output).absolute(), read)
            check_free(Path(self.output).absolute(), force=self.force)
        else:
            output = output_of(self.output, target, [])
            check_not_read(Path(output).absolute(), read)
            check_output(output, target, force=self.force)

    @property
    def text(self) -> bool:
        """Whether rows are printed for people."""
        return not (self.as_json or self.json_lines or self.as_csv or self.output is not None)

    def choice(self, tables: Sequence[TableReader], target: Dialect | None) -> ColumnChoice:
        """Return the columns that are asked for; raises where no table has one, or CSV is asked of several tables."""
        if self.is_csv(target) and len(tables) != 1:
            raise UsageError(f"printing rows as CSV: got {len(tables)} tables, expected one; name it with --table")
        return choose_columns(self.choose.split(",") if self.choose else [], tables)

    def write(self, tables: Sequence[TableReader], target: Dialect, memory: str, **more: Any) -> None:
        """Write tables to the file that is asked for, and say so; `more` is what JSON has beside."""
        assert self.output is not None
        options = Output(self.force, memory, dry_run=self.dry_run).options()
        write_tables(tables, self.output, target, options=options)
        self.tell_written(sum(table.rows for table in tables), target, **more)

    def tell_written(self, rows: int, target: Dialect | None, **more: Any) -> None:
        """Say how many rows were written, or would have been."""
        if self.as_json:
            dialect = {} if target is None else {"dialect": target.name}
            print(dumps({"output": self.output, **dialect, "rows": rows, "dry_run": self.dry_run, **more}))
            return
        done = "would write" if self.dry_run else "wrote"
        print(f"{done} {rows:,} rows to {self.output}{'' if target is None else f' ({target.name})'}")

    def is_csv(self, target: Dialect | None = None) -> bool:
        """Whether rows come out as comma-separated values."""
        if self.output is None:
            return self.as_csv
        return target is None and _TEXT_FILES[Path(self.output).suffix.lower()] == "csv"


@dataclass(frozen=True)
class Rows:
    """Some rows of a table: a chunk that has what is to be shown, and more `numbers` [n] of its rows, by name."""

    table: TableReader
    chunk: Chunk
    numbers: Mapping[str, Array] = field(default_factory=dict)

    def chosen(self, choice: ColumnChoice) -> Rows:
        """Return these with the chosen columns alone; `numbers` stay, and those that are computed come to them."""
        return Rows(self.table, choice.shown(self.chunk), {**self.numbers, **choice.numbers(self.chunk)})


def tables_for(
    tables: Sequence[TableReader], needs: Sequence[Callable[[TableReader], object]], names: Sequence[str] | None
) -> list[TableReader]:
    """Return the tables that have what is needed, and say on stderr which have not; see `tables_with`."""
    able, without = tables_with(tables, needs, all_named=bool(names) and not any(map(is_pattern, names or ())))
    for table, error in without[:_TABLES_SAID]:
        print(f"kvtools: {shown(table.schema.name)} is left out: {one_line(str(error))}", file=sys.stderr)
    if len(without) > _TABLES_SAID:
        print(f"kvtools: {len(without) - _TABLES_SAID:,} more tables are left out", file=sys.stderr)
    return able


def print_rows(
    rows: Iterator[Rows], forms: RowForms, choice: ColumnChoice, table: TableReader | None, **more: Any
) -> None:
    """Print rows in the form that is asked for, as they come, or write them to a file of lines of text.

    Args:
        rows: rows that have what `choice` asks for, and perhaps more.
        forms: the form.
        choice: which columns.
        table: the one table, for CSV.
        more: what JSON has beside the rows.
    """
    chosen = (some.chosen(choice) for some in rows)
    if forms.output is not None:
        _write_lines(chosen, forms, choice, table, more)
    elif forms.as_json:
        sys.stdout.write('{"rows": [')
        for number, record in enumerate(_records(chosen)):
            sys.stdout.write((", " if number else "") + dumps(record))
        print("]" + (f", {dumps(more)[1:]}" if more else "}"))
    elif forms.json_lines:
        for record in _records(chosen):
            print(dumps(record))
    elif forms.as_csv and table is not None:
        for lines in _csv_blocks(table, choice, chosen):
            write_bytes(lines)
    else:
        _print_text(chosen, choice)


def _write_lines(
    rows: Iterator[Rows], forms: RowForms, choice: ColumnChoice, table: TableReader | None, more: dict[str, Any]
) -> None:
    """Write rows to a file of comma-separated values or JSON lines, which appears whole or not at all; and say so."""
    assert forms.output is not None
    target, count = Path(forms.output), 0

    def counted() -> Iterator[Rows]:
        nonlocal count
        for some in rows:
            count += len(some.chunk)
            yield some

    with replace_files(target, force=forms.force, dry_run=forms.dry_run) as staging, staging.open("wb") as file:
        if table is not None and forms.is_csv():
            file.writelines(_csv_blocks(table, choice, counted()))
        else:
            file.writelines(f"{dumps(record)}\n".encode() for record in _records(counted()))
    forms.tell_written(count, None, **more)


def _records(rows: Iterator[Rows]) -> Iterator[dict[str, Any]]:
    for some in rows:
        chunk = some.chunk
        columns = {"value": chunk.values, "freq": chunk.freqs, "version": chunk.versions, **some.numbers}
        listed = {name: json_numbers(column) for name, column in columns.items() if column is not None}
        slots = {name: json_numbers(column) for name, column in chunk.slots.items()}
        for row, key in enumerate(chunk.keys.tolist()):
            record = {"table": some.table.schema.name, "key": key}
            record.update((name, column[row]) for name, column in listed.items())
            if slots:
                record["slots"] = {name: column[row] for name, column in slots.items()}
            yield record


def _csv_blocks(table: TableReader, choice: ColumnChoice, rows: Iterator[Rows]) -> Iterator[bytes]:
    """Yield rows as comma-separated values, the line of names first."""
    more: tuple[str, ...] | None = None
    for some in read_ahead(rows):
        if more is None:
            yield _csv_header(table.schema, choice, more := tuple(some.numbers))
        chunk = some.chunk
        columns = [chunk.keys, chunk.freqs, chunk.versions, *some.numbers.values(), chunk.values, *chunk.slots.values()]
        yield from csv_lines([column for column in columns if column is not None])
    if more is None:
        yield _csv_header(table.schema, choice, choice.computed)


def _csv_header(schema: TableSchema, choice: ColumnChoice, more: Sequence[str]) -> bytes:
    asked = choice.columns
    names = ["key", *["freq"] * (asked.freqs and schema.has_freqs)]
    names += ["version"] * (asked.versions and schema.has_versions)
    names += more
    names += [f"value.{i}" for i in range(schema.dim)] if asked.values else []
    for slot, label in zip(schema.slots, slot_names([slot.name for slot in schema.slots]), strict=True):
        if asked.slots and (choice.slots is None or slot.name in choice.slots):
            names += [f"{label}.{i}" for i in range(slot.width)]
    return f"{csv_header(names)}\n".encode()


def _print_text(rows: Iterator[Rows], choice: ColumnChoice) -> None:
    lines: list[list[str]] = []
    more: tuple[str, ...] = ()
    for some in rows:
        chunk, more = some.chunk, tuple(some.numbers)
        for row, key in enumerate(chunk.keys.tolist()):
            lines.append(
                [
                    shown(some.table.schema.name),
                    str(key),
                    "-" if chunk.freqs is None else f"{chunk.freqs[row]}",
                    "-" if chunk.versions is None else f"{chunk.versions[row]}",
                    *(_number(column[row]) for column in some.numbers.values()),
                    "-" if chunk.values is None else shown_numbers(chunk.values[row]),
                    *(f"{shown(name)} {shown_numbers(slot[row])}" for name, slot in chunk.slots.items()),
                ]
            )
            if len(lines) == _LINES_AT_ONCE:
                _print_lines(lines, choice, more)
                lines.clear()
    if lines:
        _print_lines(lines, choice, more)


def _print_lines(lines: Sequence[Sequence[str]], choice: ColumnChoice, more: Sequence[str]) -> None:
    width = max(map(len, lines))
    value = 4 + len(more)
    header = ["table", "key", "freq", "version", *more, "value", *["slot"] * (width - value - 1)]
    asked = choice.columns
    numbers = [2] * asked.freqs + [3] * asked.versions + list(range(4, value))
    kept = [0, 1, *numbers, *[value] * asked.values, *range(value + 1, width)]
    padded = [[*line, *[""] * (width - len(line))] for line in lines]
    right = frozenset(range(1, 2 + len(numbers)))
    print(columns([header[i] for i in kept], [[line[i] for i in kept] for line in padded], right=right))


def _number(number: Any) -> str:
    return f"{float(number):.6g}" if isinstance(number, np.floating) else str(number)
