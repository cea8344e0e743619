"""The rows of a table that come first by a number: the most frequent keys, the largest norms, the newest rows.

The table is streamed once. What is kept meanwhile is as many rows as are asked for and some more, whatever its size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.dialects.chunk import KEYS, Array, Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import row_bytes
from kvtools.engine import run_all
from kvtools.errors import BadInputError, UsageError
from kvtools.read_ahead import read_ahead
from kvtools.row_filter import RowFilter
from kvtools.row_norms import row_norms
from kvtools.top_rows import Scores, sortable

_KEY_ROWS = 1 << 18
_CHUNK_BYTES = 1 << 22
_PENDING = 1 << 16
_SIGN = np.int64(np.iinfo(np.int64).min)


@dataclass(frozen=True)
class Ranking:
    """What rows are compared by: a number for each.

    `name` is what a user calls it; `columns_of` what of a table is to be read for it, which raises `BadInputError`
    where the table has it not; `numbers` gives the numbers of a chunk, integers or floats [n].
    """

    name: str
    columns_of: Callable[[TableReader], Columns]
    numbers: Callable[[Chunk], Array]


@dataclass(frozen=True)
class Top:
    """The rows of a table that come first, the very first one first.

    `rows` are their numbers, int64 [k], `keys` [k] their keys and `numbers` [k] what they were compared by. `passed`
    counts the rows that were compared; `without` those left out, as what they would be compared by is NaN or null.
    """

    table: str
    rows: npt.NDArray[np.int64]
    keys: Array
    numbers: Array
    passed: int
    without: int


BUILT_IN = ("freq", "version", "norm", "value-abs")
"""What rows can be compared by without an expression: `value-abs` is the largest absolute value in a row."""


def ranking(by: str) -> Ranking:
    """Return the ranking by "freq", "version", "norm", "value-abs" or an expression such as "freq / norm".

    Raises:
        UsageError: it is no expression.
        MissingDependencyError: it is an expression, and DuckDB, which evaluates it, is not installed.

    >>> ranking("norm").numbers(Chunk(np.array([7]), values=np.float32([[3, 4]]))).tolist()
    [5.0]
    """
    if by not in BUILT_IN:
        return _expression(by)

    def columns_of(table: TableReader) -> Columns:
        schema = table.schema
        if (by == "freq" and not schema.has_freqs) or (by == "version" and not schema.has_versions):
            has = "frequencies" if by == "freq" else "versions"
            raise BadInputError(f"ranking table '{schema.name}' by {by}: it has no {has}")
        return Columns(freqs=by == "freq", versions=by == "version", values=by in ("norm", "value-abs"))

    def numbers(chunk: Chunk) -> Array:
        if by in ("freq", "version"):
            column = chunk.freqs if by == "freq" else chunk.versions
            assert column is not None
            return column
        assert chunk.values is not None
        return row_norms(chunk.values, "l2" if by == "norm" else "abs")

    return Ranking(by, columns_of, numbers)


def top_rows(
    table: TableReader,
    by: Ranking | str,
    limit: int,
    *,
    ascending: bool = False,
    where: RowFilter | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Top:
    """Return the `limit` rows with the largest numbers, or the smallest; of equal ones those with the smallest keys.

    Rows whose number is NaN are left out, and counted. An infinity is larger than all other numbers.

    Args:
        table: the table; it is streamed once.
        by: what to compare, as `ranking` takes it.
        limit: how many rows; all if there are no more.
        ascending: the smallest numbers first.
        where: which rows count.
        workers: how many parts to read at once.
        progress: called as rows are read.

    Raises:
        UsageError: the limit is negative, or `by` no expression.
        BadInputError: the table has nothing of what is to be compared.

    Example:
        >>> from kvtools.array_table import ArrayTable
        >>> table = ArrayTable("emb", np.array([5, 6, 7]), np.zeros((3, 2)), freqs=np.array([1, 9, 9]))
        >>> top_rows(table, "freq", 2).keys.tolist()
        [6, 7]
    """
    if limit < 0:
        raise UsageError(f"ranking table '{table.schema.name}': got a limit of {limit}, expected 0 or more")
    by = ranking(by) if isinstance(by, str) else by
    columns = by.columns_of(table) | (where.columns_of(table) if where else KEYS)
    starts = np.cumsum([0, *table.schema.part_rows])
    size = max(1, min(_KEY_ROWS, _CHUNK_BYTES // row_bytes(table.schema, columns)))
    lock, done = threading.Lock(), 0

    def read(part: int) -> BestRows:
        nonlocal done
        best, row = BestRows(limit, ascending, table.key_dtype), int(starts[part])
        chunks = table.chunks(columns, part=part, rows=size)
        for chunk in chunks if table.parts > 1 else read_ahead(chunks):
            kept = where.mask(chunk) if where else None
            numbers = by.numbers(chunk)
            best.add(numbers, chunk.keys, row, kept)
            row += len(chunk)
            if progress:
                with lock:
                    done += len(chunk)
                    progress(table.schema.name, done, table.rows)
        return best

    best = BestRows(limit, ascending, table.key_dtype)
    for of_part in run_all(read, range(table.parts), workers=workers):
        best.join(of_part)
    return best.result(table.schema.name)


def overall(tops: Sequence[Top], limit: int, *, ascending: bool = False) -> list[tuple[int, int]]:
    """Return the first rows of several tables together: (which of `tops`, which of its rows), the very first one first.

    Equal numbers are in the order of the tables, then of their keys.

    >>> one = Top("a", np.array([0, 1]), np.array([5, 6]), np.array([9, 2]), 2, 0)
    >>> other = Top("b", np.array([3]), np.array([5]), np.array([4]), 1, 0)
    >>> overall([one, other], 2)
    [(0, 0), (1, 0)]
    """
    sign = 1 if ascending else -1
    found = [
        (sign * number, which, at) for which, top in enumerate(tops) for at, number in enumerate(top.numbers.tolist())
    ]
    return [(which, at) for _, which, at in sorted(found)[:limit]]


class BestRows:
    """The rows with the largest numbers, or the smallest, of what was added so far; of equal ones those of the smallest
    keys, and of these the first ones."""

    def __init__(self, limit: int, ascending: bool, key_dtype: np.dtype[Any]) -> None:
        self.limit, self.ascending = limit, ascending
        self.passed = self.without = 0
        self._pending: list[tuple[Scores, Scores, Array, Array, Array]] = []
        self._waiting = 0
        self._edge: tuple[np.uint64, np.uint64] | None = None  # of the last row that counts: its order, its key's
        self._key_dtype = key_dtype
        self._number_dtype: np.dtype[Any] = np.dtype(np.int64)

    def add(self, numbers: Array, keys: Array, first: int, kept: npt.NDArray[np.bool_] | None) -> None:
        """Add rows: their numbers and keys [n], the first one's row number, and which of them count."""
        self._number_dtype = numbers.dtype
        if numbers.dtype.kind == "f":
            told = ~np.isnan(numbers)
            lost = int(np.count_nonzero(~told if kept is None else kept & ~told))
            if lost:
                kept = told if kept is None else kept & told
                self.without += lost
        self.passed += len(numbers) if kept is None else int(np.count_nonzero(kept))
        if not self.limit:
            return
        order = _ordered(numbers)
        if self.ascending:
            order = ~order
        if self._edge is not None:
            near = order >= self._edge[0]
            at = np.flatnonzero(near if kept is None else near & kept)
        else:
            at = np.arange(len(numbers)) if kept is None else np.flatnonzero(kept)
        if not len(at):
            return
        ties, order = sortable(keys[at]), order[at]
        if self._edge is not None:
            inside = (order > self._edge[0]) | (ties < self._edge[1])
            at, ties, order = at[inside], ties[inside], order[inside]
        self._take(order, ties, first + at, keys[at], numbers[at])

    def join(self, other: BestRows) -> None:
        """Add what another one has."""
        self.passed += other.passed
        self.without += other.without
        if other._pending:
            self._number_dtype = other._number_dtype
        for rows in other._pending:
            self._take(*rows)

    def result(self, table: str) -> Top:
        """Return the best rows."""
        self._prune()
        if not self._pending:
            none = np.empty(0, np.int64)
            empty = np.empty(0, self._key_dtype), np.empty(0, self._number_dtype)
            return Top(table, none, *empty, self.passed, self.without)
        _, _, rows, keys, numbers = self._pending[0]
        return Top(table, rows, keys, numbers, self.passed, self.without)

    def _take(self, order: Scores, ties: Scores, rows: Array, keys: Array, numbers: Array) -> None:
        self._pending.append((order, ties, rows, keys, numbers))
        self._waiting += len(order)
        if self._waiting >= 2 * self.limit + _PENDING or (self._edge is None and self._waiting > self.limit):
            self._prune()

    def _prune(self) -> None:
        if not self._pending:
            return
        order, ties, rows, keys, numbers = (np.concatenate(column) for column in zip(*self._pending, strict=True))
        if len(order) > 4 * self.limit:
            # All that is above the edge, and at it: few, unless many are equal.
            near = np.flatnonzero(order >= np.partition(order, len(order) - self.limit)[len(order) - self.limit])
            order, ties, rows, keys, numbers = (column[near] for column in (order, ties, rows, keys, numbers))
        first = np.lexsort((rows, ties, ~order))[: self.limit]
        self._pending = [(order[first], ties[first], rows[first], keys[first], numbers[first])]
        self._waiting = len(first)
        if len(first) == self.limit:
            self._edge = order[first[-1]], ties[first[-1]]


def _ordered(numbers: Array) -> Scores:
    """Return uint64 numbers in the order of integers, or of floats without NaN [n].

    >>> np.argsort(_ordered(np.array([2.0, -1.0, -np.inf, 0.5]))).tolist()
    [2, 1, 3, 0]
    """
    if numbers.dtype.kind != "f":
        return sortable(numbers)
    bits = (numbers.astype(np.float64) + 0.0).view(np.int64)  # of the two zeros one
    return np.asarray(bits ^ ((bits >> 63) | _SIGN)).view(np.uint64)


def _expression(by: str) -> Ranking:
    from kvtools.where import Expression  # DuckDB is asked for where there is an expression

    expression = Expression.parse(by)
    return Ranking(by, expression.columns_of, expression.values)
