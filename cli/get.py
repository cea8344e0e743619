"""`kvtools get`: the rows of keys."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import numpy as np
import typer

from kvtools.cli.key_arguments import key_words, mark_negative
from kvtools.cli.options import DEFAULT_MEMORY, Memory, Source, SourcePath, Tables, Where, bytes_of
from kvtools.cli.progress import progress_bar
from kvtools.cli.row_output import OutputDialect, RowForms, Rows, print_rows, tables_for
from kvtools.cli.scan_rows import print_scan
from kvtools.dialects.chunk import Array
from kvtools.dialects.interface import TableReader
from kvtools.errors import CheckFailedError, UsageError
from kvtools.get import ChosenRows, passing_rows, read_rows, rows_of_keys
from kvtools.key_file import keys_from
from kvtools.row_filter import condition_of

prepare_arguments = mark_negative

_MISSING_SHOWN = 20


def run(
    path: SourcePath,
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY...", help="Keys, negative ones too.")] = None,
    *,
    keys_file: Annotated[
        str | None,
        typer.Option("--keys-file", metavar="FILE", help="More keys: text, or integers as .npy; - for stdin."),
    ] = None,
    where: Where = None,
    table: Tables = None,
    to: OutputDialect = None,
    forms: RowForms,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if any key is in no table.")] = False,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
) -> None:
    """Print the rows of keys, in the order of the keys, from each table that has them.

    Text shows the first 8 numbers of a row; --json, --json-lines, --csv and --output have all of them.
    Keys that are in no table are named on stderr; where none is in a table, the exit status is 3. What is
    printed or written is whole all the same, without rows if there are none.

    With --where and keys, only rows that meet the condition are shown; with --where and no keys, all that do.

    \b
    Examples:
      kvtools get model.ckpt-100 17 -3
      kvtools get model.ckpt-100 --table user_emb --keys-file ids.txt --csv > rows.csv
      kvtools get tables.h5 --table user_emb --keys-file ids.npy --output rows.npz
      kvtools get model.ckpt-100 --where 'freq >= 1000 and norm < 0.1' --columns freq,norm
      cut -f1 clicks.tsv | kvtools get model.ckpt-100 --keys-file - --columns value --json-lines
    """
    target = forms.target(to)
    condition = condition_of(where)
    words = key_words(keys or [])
    given = bool(words) or keys_file is not None
    if (not given and condition is None) or (keys and not words):
        raise UsageError("looking up keys: got none, expected some after PATH, or --keys-file, or --where")
    wanted = keys_from(words, keys_file, sys.stdin.buffer) if given else np.empty(0, np.int64)
    checkpoint = source.open_for(table or [], path, memory)
    forms.check_place(target, [checkpoint.path, *([] if keys_file in (None, "-") else [keys_file])])
    tables = checkpoint.select(table or [])
    if condition is not None:
        tables = tables_for(tables, [condition.columns_of], table)
    choice = forms.choice(tables, target)
    if not given and condition is not None:
        print_scan(tables, forms, choice, target, memory, order="stream", where=condition, missing=[])
        return
    missing = np.ones(len(wanted), np.bool_)
    filtered = np.zeros(len(wanted), np.bool_)
    found: list[tuple[TableReader, Array]] = []
    with progress_bar("reading keys of") as progress:
        for reader in tables:
            rows = rows_of_keys(reader, wanted, progress=progress)
            missing &= rows < 0
            there = np.flatnonzero(rows >= 0)
            if condition is not None:
                passed = passing_rows(reader, rows[there], condition, memory=bytes_of(memory))
                filtered[there[~passed]] = True
                there = there[passed]
                filtered[there] = False
            found.append((reader, rows[there]))
    more: dict[str, Any] = {"missing": [int(key) for key in wanted[missing]]}
    if condition is not None:
        more["filtered"] = int(filtered.sum())
    if target is not None:
        # A table without a hit is left out beside others; where there is no hit at all, OUT has tables without rows.
        hits = [one for one in found if len(one[1])] or found
        forms.write([ChosenRows(reader, _first_of_each(rows)) for reader, rows in hits], target, memory, **more)
    else:
        some = (
            Rows(reader, chunk)
            for reader, rows in found
            for chunk in read_rows(reader, rows, choice.to_read, memory=bytes_of(memory))
        )
        print_rows(some, forms, choice, tables[0] if tables else None, **more)
    _tell_missing(wanted[missing], len(wanted))
    if filtered.any():
        print(f"kvtools: {filtered.sum():,} of {len(wanted):,} keys do not meet --where", file=sys.stderr)
    if (missing.any() and strict) or (len(wanted) and not any(len(rows) for _, rows in found)):
        raise typer.Exit(CheckFailedError.exit_code)


def _first_of_each(rows: Array) -> Array:
    """Return the numbers without repetitions, in their order: a table has one row of a key."""
    _, first = np.unique(rows, return_index=True)
    once: Array = rows[np.sort(first)]
    return once


def _tell_missing(missing: Array, asked: int) -> None:
    if len(missing):
        few = ", ".join(str(key) for key in missing[:_MISSING_SHOWN]) + ", ..." * (len(missing) > _MISSING_SHOWN)
        keys = "1 key" if asked == 1 else f"{asked:,} keys"
        print(f"kvtools: looking up {keys}: {len(missing):,} in no table: {few}", file=sys.stderr)
