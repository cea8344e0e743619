"""Of a damaged table the rows whose bytes are proven good by the format's checksums, and what of it is lost.

How much goes with a damaged byte is for the format to say: most have one checksum for a column of a part, so that the
part goes; a snapshot has one for each mebibyte, so that the rows in it go. Where a format has none, nothing is proven:
rows that can be read are kept, and it is said that nobody knows whether they are what was written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvtools.dialects.chunk import ALL_COLUMNS, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import Progress
from kvtools.engine import run_all
from kvtools.errors import KvtoolsError
from kvtools.table_view import TableView, replace_schema

_TAKEN = 1 << 16

Runs = tuple[tuple[int, int], ...]
"""Rows of a part that are good, as (first, behind the last), in order."""


class ProvenRows(TableView):
    """Some runs of rows of each part of a table, and some of its extra arrays; `runs` has those of each part."""

    def __init__(self, source: TableReader, runs: tuple[Runs, ...], extras: frozenset[str]) -> None:
        rows = tuple(sum(stop - start for start, stop in of_part) for of_part in runs)
        kept = tuple(extra for extra in source.schema.extras if extra.name in extras)
        super().__init__(source, replace_schema(source, part_rows=rows, extras=kept))
        self._runs = runs
        before = np.cumsum([0, *source.schema.part_rows]).tolist()
        places = [(before[part] + start, stop - start) for part, of in enumerate(runs) for start, stop in of]
        self._first = np.array([first for first, _ in places], np.int64)
        self._here = np.cumsum([0, *(count for _, count in places)])[:-1]

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the good rows of one part; see `TableReader.read_part`."""
        if self._runs[part] == ((0, self.source.schema.part_rows[part]),):
            yield from self.source.read_part(part, columns, rows, verify)
            return
        before = sum(self.source.schema.part_rows[:part])
        for start, stop in self._runs[part]:
            for first in range(start, stop, rows):
                numbers = np.arange(before + first, before + min(first + rows, stop))
                chunk = self.source.take(numbers, columns)
                yield Chunk(chunk.keys, chunk.values, chunk.slots, chunk.freqs, chunk.versions, part)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        rows = self.row_numbers(rows)
        if not len(self._here):
            return self.source.take(rows, columns)
        run = np.searchsorted(self._here, rows, side="right") - 1
        return self.source.take(self._first[run] + rows - self._here[run], columns)


def prove(
    table: TableReader, *, workers: int | None = None, progress: Progress | None = None
) -> tuple[TableReader, tuple[str, ...]]:
    """Read a table with all its columns, and return what of it can be read and is what was written.

    Returns:
        The table itself where nothing is wrong with it, else its good rows; and what is lost, a sentence each.
    """
    schema = table.schema
    lock, done = threading.Lock(), 0

    def read(part: int) -> tuple[Runs, str]:
        nonlocal done
        rows = schema.part_rows[part]
        count = 0
        fault = ""
        try:
            for chunk in table.chunks(ALL_COLUMNS, part=part):
                _check_lengths(chunk)
                count += len(chunk)
                with lock:
                    done += len(chunk)
                    if progress:
                        progress(schema.name, done, schema.rows)
        except (KvtoolsError, _UnevenError) as error:
            fault = str(error)
        if not fault and count != rows:
            fault = f"it has {count} rows, its index says {rows}"
        if not fault:
            return ((0, rows),), ""
        if not table.take_is_checked:
            return (), fault
        before = sum(schema.part_rows[:part])
        return tuple(_joined(_good(table, before, 0, rows))), fault

    runs: list[Runs] = []
    lost: list[str] = []
    for part, (good, fault) in enumerate(run_all(read, range(schema.parts), workers=workers)):
        runs.append(good)
        rows = schema.part_rows[part]
        gone = rows - sum(stop - start for start, stop in good)
        if fault:
            which = f"part {part}: " if schema.parts > 1 else ""
            lost.append(f"{which}{gone:,} of {rows:,} rows: {fault}")
    extras = set()
    for extra in schema.extras:
        try:
            table.extra(extra.name)
            extras.add(extra.name)
        except KvtoolsError as error:
            lost.append(f"{extra.name.replace('_', ' ')}: {error}")
    if not lost:
        return table, ()
    return ProvenRows(table, tuple(runs), frozenset(extras)), tuple(lost)


class _UnevenError(Exception):
    """Says that columns of a part have different numbers of rows."""


def _check_lengths(chunk: Chunk) -> None:
    columns: dict[str, Any] = {"values": chunk.values, "freqs": chunk.freqs, "versions": chunk.versions, **chunk.slots}
    for name, column in columns.items():
        if column is not None and len(column) != len(chunk):
            raise _UnevenError(f"{len(column)} rows of {name} beside {len(chunk)} keys")


def _good(table: TableReader, before: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield runs of rows that can be read, by cutting what cannot in halves."""
    for first in range(start, stop, _TAKEN):
        yield from _halved(table, before, first, min(first + _TAKEN, stop))


def _halved(table: TableReader, before: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    try:
        table.take(np.arange(before + start, before + stop), ALL_COLUMNS)
        yield start, stop
    except KvtoolsError:
        if stop - start > 1:
            middle = (start + stop) // 2
            yield from _halved(table, before, start, middle)
            yield from _halved(table, before, middle, stop)


def _joined(runs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield runs, those that touch as one.

    >>> list(_joined(iter([(0, 2), (2, 3), (5, 6)])))
    [(0, 3), (5, 6)]
    """
    at: tuple[int, int] | None = None
    for start, stop in runs:
        if at is not None and at[1] == start:
            at = at[0], stop
            continue
        if at is not None:
            yield at
        at = start, stop
    if at is not None:
        yield at
