"""`kvtools get`: the rows of keys."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import typer

from kvtools.cli.key_arguments import key_words, mark_negative
from kvtools.cli.layout import columns, shown
from kvtools.cli.options import (
    DEFAULT_MEMORY,
    DryRun,
    Force,
    Memory,
    Output,
    Source,
    SourcePath,
    Tables,
    bytes_of,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.detect import dialect_for, dialect_named
from kvtools.dialects.interface import TableReader
from kvtools.errors import CheckFailedError, UsageError
from kvtools.get import ChosenRows, ColumnChoice, choose_columns, read_rows, rows_of_keys
from kvtools.json_numbers import json_numbers
from kvtools.key_file import keys_from
from kvtools.migrate import write_tables

prepare_arguments = mark_negative

_VALUES_SHOWN = 8
_MISSING_SHOWN = 20


def run(
    path: SourcePath,
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY...", help="Keys, negative ones too.")] = None,
    *,
    keys_file: Annotated[
        str | None,
        typer.Option("--keys-file", metavar="FILE", help="More keys: text, or integers as .npy; - for stdin."),
    ] = None,
    table: Tables = None,
    choose: Annotated[
        str | None,
        typer.Option("--columns", metavar="NAMES", help="Of values, freqs, versions, slots and slots' names; all."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    json_lines: Annotated[bool, typer.Option("--json-lines", help="Print a JSON object for each row.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values, of one table.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="OUT",
            help="Write the rows: OUT.npz, OUT.parquet, any dialect.",
            callback=no_standard_output,
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="DIALECT", help="The dialect of OUT, if its name does not tell.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if any key is in no table.")] = False,
    force: Force = False,
    dry_run: DryRun = False,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
) -> None:
    """Print the rows of keys, in the order of the keys, from each table that has them.

    Text shows the first 8 numbers of a row; --json, --json-lines, --csv and --output have all of them.
    Keys that are in no table are named on stderr; where none is in a table, the exit status is 3. What is
    printed or written is whole all the same, without rows if there are none.

    \b
    Examples:
      kvtools get model.ckpt-100 17 -3
      kvtools get model.ckpt-100 --table user_emb --keys-file ids.txt --csv > rows.csv
      kvtools get tables.h5 --table user_emb --keys-file ids.npy --output rows.npz
      cut -f1 clicks.tsv | kvtools get model.ckpt-100 --keys-file - --columns values --json-lines
    """
    if sum([as_json, json_lines, as_csv, output is not None]) > 1:
        raise UsageError("printing rows: got several of --json, --json-lines, --csv and --output, expected one")
    if not keys and keys_file is None:
        raise UsageError("looking up keys: got none, expected some after PATH, or --keys-file")
    target = None if output is None else dialect_named(to) if to else dialect_for(output)
    wanted = keys_from(key_words(keys or []), keys_file, sys.stdin.buffer)
    checkpoint = source.open_for(table or [], path, memory)
    tables = checkpoint.select(table or [])
    if as_csv and len(tables) != 1:
        raise UsageError(f"printing rows as CSV: got {len(tables)} tables, expected one; name it with --table")
    choice = choose_columns((choose or "").split(",") if choose else [], tables)
    missing = np.ones(len(wanted), np.bool_)
    found: list[tuple[TableReader, Array]] = []
    with progress_bar("reading keys of") as progress:
        for reader in tables:
            rows = rows_of_keys(reader, wanted, progress=progress)
            missing &= rows < 0
            found.append((reader, rows[rows >= 0]))
    if output is not None and target is not None:
        # A table without a hit is left out beside others; where there is no hit at all, OUT has tables without rows.
        hits = [one for one in found if len(one[1])] or found
        chosen = [ChosenRows(reader, _first_of_each(rows)) for reader, rows in hits]
        write_tables(chosen, output, target, options=Output(force, memory, dry_run=dry_run).options())
        done = "would write" if dry_run else "wrote"
        print(f"{done} {sum(reader.rows for reader in chosen):,} rows to {output} ({target.name})")
    else:
        chunks = (
            (reader, choice.shown(chunk))
            for reader, rows in found
            for chunk in read_rows(reader, rows, choice.columns, memory=bytes_of(memory))
        )
        if as_json:
            _print_json(chunks, wanted[missing])
        elif json_lines:
            for record in _records(chunks):
                print(json.dumps(record))
        elif as_csv:
            _print_csv(tables[0], choice, chunks)
        else:
            _print_text(chunks, choice)
    _tell_missing(wanted[missing], len(wanted))
    if missing.any() and (strict or missing.all()):
        raise typer.Exit(CheckFailedError.exit_code)


def _first_of_each(rows: Array) -> Array:
    """Return the numbers without repetitions, in their order: a table has one row of a key."""
    _, first = np.unique(rows, return_index=True)
    once: Array = rows[np.sort(first)]
    return once


def _records(chunks: Iterator[tuple[TableReader, Chunk]]) -> Iterator[dict[str, Any]]:
    for reader, chunk in chunks:
        values = None if chunk.values is None else json_numbers(chunk.values)
        slots = {name: json_numbers(rows) for name, rows in chunk.slots.items()}
        freqs = None if chunk.freqs is None else json_numbers(chunk.freqs)
        versions = None if chunk.versions is None else json_numbers(chunk.versions)
        for row, key in enumerate(chunk.keys.tolist()):
            record: dict[str, Any] = {"table": reader.schema.name, "key": key}
            if values is not None:
                record["value"] = values[row]
            if freqs is not None:
                record["freq"] = freqs[row]
            if versions is not None:
                record["version"] = versions[row]
            if slots:
                record["slots"] = {name: rows[row] for name, rows in slots.items()}
            yield record


def _print_json(chunks: Iterator[tuple[TableReader, Chunk]], missing: Array) -> None:
    sys.stdout.write('{"rows": [')
    for number, record in enumerate(_records(chunks)):
        sys.stdout.write((", " if number else "") + json.dumps(record))
    print(f'], "missing": {json.dumps([int(key) for key in missing])}}}')


def _print_csv(reader: TableReader, choice: ColumnChoice, chunks: Iterator[tuple[TableReader, Chunk]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    schema, chosen = reader.schema, choice.columns
    header = ["key"]
    header += ["freq"] * (chosen.freqs and schema.has_freqs) + ["version"] * (chosen.versions and schema.has_versions)
    header += [f"value.{i}" for i in range(schema.dim)] if chosen.values else []
    slots = [slot for slot in schema.slots if chosen.slots and (choice.slots is None or slot.name in choice.slots)]
    header += [f"{slot.name}.{i}" for slot in slots for i in range(slot.width)]
    writer.writerow(header)
    for _, chunk in chunks:
        numbers = [chunk.keys, chunk.freqs, chunk.versions]
        lists = [column.tolist() for column in numbers if column is not None]
        wide = [chunk.values] if chunk.values is not None else []
        rows = [json_numbers(column) for column in [*wide, *chunk.slots.values()]]
        for row in range(len(chunk)):
            writer.writerow([*(column[row] for column in lists), *(n for column in rows for n in column[row])])


def _print_text(chunks: Iterator[tuple[TableReader, Chunk]], choice: ColumnChoice) -> None:
    lines = []
    for reader, chunk in chunks:
        for row, key in enumerate(chunk.keys.tolist()):
            lines.append(
                [
                    shown(reader.schema.name),
                    str(key),
                    "-" if chunk.freqs is None else f"{chunk.freqs[row]}",
                    "-" if chunk.versions is None else f"{chunk.versions[row]}",
                    "-" if chunk.values is None else _numbers(chunk.values[row]),
                    *(f"{shown(name)} {_numbers(slot[row])}" for name, slot in chunk.slots.items()),
                ]
            )
    if not lines:
        return
    width = max(map(len, lines))
    header = ["table", "key", "freq", "version", "value", *["slot"] * (width - 5)]
    asked = choice.columns
    kept = [0, 1, *[2] * asked.freqs, *[3] * asked.versions, *[4] * asked.values, *range(5, width)]
    padded = [line + [""] * (width - len(line)) for line in lines]
    right = frozenset(at for at, column in enumerate(kept) if column in (1, 2, 3))
    print(columns([header[i] for i in kept], [[line[i] for i in kept] for line in padded], right=right))


def _numbers(row: Array) -> str:
    return " ".join(f"{float(value):.6g}" for value in row[:_VALUES_SHOWN]) + (" ..." * (len(row) > _VALUES_SHOWN))


def _tell_missing(missing: Array, asked: int) -> None:
    if len(missing):
        few = ", ".join(str(key) for key in missing[:_MISSING_SHOWN]) + ", ..." * (len(missing) > _MISSING_SHOWN)
        keys = "1 key" if asked == 1 else f"{asked:,} keys"
        print(f"kvtools: looking up {keys}: {len(missing):,} in no table: {few}", file=sys.stderr)
