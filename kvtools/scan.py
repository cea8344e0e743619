"""The rows of a table within a range of keys, in the order of the keys or as they lie, in bounded memory.

No table is sorted on disk, so for the order of keys they are streamed, as many times as it takes to find the next ones
that fit in memory: once for some millions of rows. Of the other columns only the rows wanted are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvtools.dialects.chunk import ALL_COLUMNS, KEYS, Array, Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.schema import row_bytes
from kvtools.errors import UsageError
from kvtools.get import read_rows
from kvtools.read_ahead import read_ahead
from kvtools.row_filter import RowFilter
from kvtools.top import BestRows

Order = Literal["key", "stream"]
"""The order of rows: of their keys, smallest first, or as they lie in the parts of the table."""

_KEY_ROWS = 1 << 18
_CHUNK_BYTES = 1 << 22
_BYTES_PER_ROW = 256
"""What a row takes while the next ones are looked for: its key, its order and its number, some times over."""


def order_named(name: str) -> Order:
    """Return the order of this name; raises `UsageError` if there is none.

    >>> order_named("stream")
    'stream'
    """
    if name not in get_args(Order):
        raise UsageError(f"reading a range of keys: got the order {name!r}, expected key or stream")
    return name  # type: ignore[return-value]


@dataclass(frozen=True)
class KeyRange:
    """The keys from `first` to `last`, both of them in it; None where it has no end.

    Raises:
        UsageError: `first` is above `last`.
    """

    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if self.first is not None and self.last is not None and self.first > self.last:
            raise UsageError(
                f"reading a range of keys: got {self.first} to {self.last}, expected the smaller one first"
            )

    @property
    def whole(self) -> bool:
        """Whether every key is in it."""
        return self.first is None and self.last is None

    def contains(self, keys: Array) -> npt.NDArray[np.bool_]:
        """Return which keys [n], of any integer type, are in the range, bool [n].

        >>> KeyRange(-1, 2**64).contains(np.array([-2, -1, 7])).tolist()
        [False, True, True]
        """
        limits = np.iinfo(keys.dtype)
        first, last = int(limits.min), int(limits.max)
        low = first if self.first is None else self.first
        high = last if self.last is None else self.last
        if low > last or high < first:
            return np.zeros(len(keys), np.bool_)
        inside = np.ones(len(keys), np.bool_)
        if low > first:
            inside &= keys >= keys.dtype.type(low)
        if high < last:
            inside &= keys <= keys.dtype.type(high)
        return inside


def scan(
    table: TableReader,
    keys: KeyRange | None = None,
    columns: Columns = ALL_COLUMNS,
    *,
    order: Order = "key",
    limit: int | None = None,
    where: RowFilter | None = None,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> Iterator[Chunk]:
    """Yield the rows of a range of keys, in chunks.

    Where all rows are wanted as they lie, columns are checked against their checksums; else keys are, and what of the
    others is read as `kvtools.get.read_rows` does it.

    Args:
        table: the table.
        keys: the range; all keys if None.
        columns: what to read beside the keys.
        order: "key", rows of one key as they lie, or "stream": as they lie.
        limit: stop after so many rows; all if None.
        where: which rows count.
        memory: bytes to stay within.
        progress: called as keys are read.

    Raises:
        UsageError: the limit is negative.

    Example:
        >>> from kvtools.array_table import ArrayTable
        >>> table = ArrayTable("emb", np.array([5, -7, 9, 1]), np.zeros((4, 2)))
        >>> [chunk.keys.tolist() for chunk in scan(table, KeyRange(0), limit=2)]
        [[1, 5]]
    """
    keys = keys or KeyRange()
    if keys.whole and order == "stream":
        _check(limit)
        yield from _streamed(table, columns, where, limit, progress)
        return
    for rows in rows_in_range(table, keys, order=order, limit=limit, where=where, memory=memory, progress=progress):
        yield from read_rows(table, rows, columns, memory=memory)


def rows_in_range(
    table: TableReader,
    keys: KeyRange,
    *,
    order: Order = "key",
    limit: int | None = None,
    where: RowFilter | None = None,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the numbers of the rows that `scan` gives, int64 [n], some at a time; see there."""
    _check(limit)
    read = where.columns_of(table) if where else KEYS
    if limit == 0:
        return
    if order == "stream":
        left = table.rows if limit is None else limit
        for chunk, row in _numbered(table, read, progress):
            found = np.flatnonzero(_counts(chunk, keys, where))[:left]
            left -= len(found)
            if len(found):
                yield row + found
            if not left:
                return
        return
    most = max(1, memory // _BYTES_PER_ROW)
    left, after = table.rows if limit is None else limit, _Place(None, -1)
    while left:
        best = BestRows(min(most, left), True, table.key_dtype)
        for chunk, row in _numbered(table, read, progress):
            inside = _counts(chunk, after.range(keys), where)
            if after.key is not None:
                inside &= (chunk.keys != after.key) | (row + np.arange(len(chunk)) > after.row)
            best.add(chunk.keys, chunk.keys, row, inside)
        top = best.result(table.schema.name)
        if len(top.rows):
            yield top.rows
        left -= len(top.rows)
        if len(top.rows) == top.passed:
            return
        after = _Place(int(top.keys[-1]), int(top.rows[-1]))


@dataclass(frozen=True)
class _Place:
    """Behind which row to go on: its key, None before the first one, and its number."""

    key: int | None
    row: int

    def range(self, keys: KeyRange) -> KeyRange:
        return keys if self.key is None else dataclasses.replace(keys, first=self.key)


def _check(limit: int | None) -> None:
    if limit is not None and limit < 0:
        raise UsageError(f"reading a range of keys: got a limit of {limit}, expected 0 or more")


def _streamed(
    table: TableReader, columns: Columns, where: RowFilter | None, limit: int | None, progress: Progress | None
) -> Iterator[Chunk]:
    left = table.rows if limit is None else limit
    if not left:
        return
    for chunk, _ in _numbered(table, columns | (where.columns_of(table) if where else KEYS), progress):
        kept = chunk if where is None else chunk.take(np.flatnonzero(where.mask(chunk)))
        kept = kept.take(slice(left)) if len(kept) > left else kept
        left -= len(kept)
        if len(kept):
            yield kept
        if not left:
            return


def _numbered(table: TableReader, columns: Columns, progress: Progress | None) -> Iterator[tuple[Chunk, int]]:
    """Yield all rows, and the number of each chunk's first one."""
    rows = max(1, min(_KEY_ROWS, _CHUNK_BYTES // row_bytes(table.schema, columns)))
    row = 0
    for chunk in read_ahead(table.chunks(columns, rows=rows)):
        yield chunk, row
        row += len(chunk)
        if progress:
            progress(table.schema.name, row, table.rows)


def _counts(chunk: Chunk, keys: KeyRange, where: RowFilter | None) -> npt.NDArray[Any]:
    inside = keys.contains(chunk.keys)
    return inside & where.mask(chunk) if where is not None and inside.any() else inside
