"""Choose the k rows of the highest score, exactly k, in bounded memory.

The k-th largest score is found digit by digit, 16 bits at a time, by counting: four passes over the scores, whatever
their order, and no sorting (radix select). Equal scores at the edge are told apart by key, the smallest first, so that
the choice depends neither on the order of the rows nor on the parts they are in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.dialects.chunk import KEYS, Array
from kvtools.dialects.interface import TableReader
from kvtools.key_join import row_numbers
from kvtools.row_mask import RowMask

Scores = npt.NDArray[np.uint64]

_DIGIT = 16
_STEP = 1 << 18
_SIGN = np.uint64(1 << 63)


def sortable(numbers: npt.NDArray[Any]) -> Scores:
    """Return uint64 numbers in the order of `numbers` [n], integers or non-negative floats; NaN is above all.

    >>> np.argsort(sortable(np.array([2.0, np.nan, np.inf, 0.0]))).tolist()
    [3, 0, 2, 1]
    >>> np.argsort(sortable(np.array([5, -1, 0]))).tolist()
    [1, 2, 0]
    """
    if numbers.dtype.kind == "f":
        wide = numbers.astype(np.float64)
        bits = (wide + 0.0).view(np.uint64)
        return np.where(np.isnan(wide), np.uint64(2**64 - 1), bits)
    if numbers.dtype.kind == "u":
        return numbers.astype(np.uint64)
    flipped: Scores = numbers.astype(np.int64).view(np.uint64) ^ _SIGN
    return flipped


def keep_top(table: TableReader, mask: RowMask, scores: Scores, count: int, *, memory: int) -> int:
    """Clear all rows of `mask` but the `count` of the highest score, and return how many were cleared.

    Args:
        table: the table, whose keys decide between equal scores.
        mask: the rows to choose from.
        scores: a score for each row of the table, counted along all parts, uint64 [rows].
        count: how many rows to keep; all if there are no more.
        memory: bytes to stay within.
    """
    spans = list(row_spans(table))

    def candidates() -> Iterator[Scores]:
        for part, start, rows, row in spans:
            yield scores[row : row + rows][mask.get(part, start, rows)]

    total = sum(mask.kept_rows())
    if total <= count:
        return 0
    edge, wanted, equal = kth_largest(candidates, count) if count else (np.uint64(2**64 - 1), 0, 0)
    if count == 0:
        for part, start, rows, row in spans:
            mask.clear(row + np.flatnonzero(mask.get(part, start, rows)))
        return total
    key_edge, skipped = (np.uint64(0), 0)
    if wanted < equal:
        key_edge, skipped = _key_edge(table, mask, scores, edge, wanted, equal, memory)
    for part, start, rows, row in spans:
        here = scores[row : row + rows]
        mask.clear(row + np.flatnonzero(mask.get(part, start, rows) & (here < edge)))
    if wanted < equal:
        for number, keys in _tied(table, mask, scores, edge):
            order = ~sortable(keys)
            drop = order < key_edge
            # Rows of one key and one score: the later ones stay, as they do when a table is read.
            same = np.flatnonzero(order == key_edge)
            drop[same[:skipped]] = True
            skipped -= min(skipped, len(same))
            mask.clear(number[drop])
    return total - count


def kth_largest(scores: Callable[[], Iterator[Scores]], k: int) -> tuple[np.uint64, int, int]:
    """Return the k-th largest of a stream of scores, how many equal to it are among the k largest, and how many are.

    >>> [int(number) for number in kth_largest(lambda: iter([np.array([5, 9, 5, 1, 5], np.uint64)]), 3)]
    [5, 2, 3]
    """
    prefix, equal = 0, 0
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        counts = np.zeros(1 << _DIGIT, np.int64)
        for chunk in scores():
            if shift < 64 - _DIGIT:
                chunk = chunk[chunk >> np.uint64(shift + _DIGIT) == np.uint64(prefix)]
            digits = (chunk >> np.uint64(shift)) & np.uint64((1 << _DIGIT) - 1)
            counts += np.bincount(digits.astype(np.int64), minlength=1 << _DIGIT)
        above = np.cumsum(counts[::-1])
        place = int(np.searchsorted(above, k))
        digit = len(counts) - 1 - place
        equal = int(counts[digit])
        k -= int(above[place]) - equal
        prefix = prefix << _DIGIT | digit
    return np.uint64(prefix), k, equal


def _key_edge(
    table: TableReader, mask: RowMask, scores: Scores, edge: np.uint64, wanted: int, equal: int, memory: int
) -> tuple[np.uint64, int]:
    """Return the largest key kept among rows of score `edge`, turned round, and how many rows with it are left out."""
    orders = row_numbers(equal, memory=memory).view(np.uint64)
    at = 0
    for _, keys in _tied(table, mask, scores, edge):
        orders[at : at + len(keys)] = ~sortable(keys)
        at += len(keys)
    key_edge, kept, same = kth_largest(lambda: (orders[i : i + _STEP] for i in range(0, equal, _STEP)), wanted)
    return key_edge, same - kept


def _tied(table: TableReader, mask: RowMask, scores: Scores, edge: np.uint64) -> Iterator[tuple[Array, Array]]:
    """Yield the row numbers and the keys of the rows that are kept and have this score."""
    row = 0
    for part in range(table.parts):
        start = 0
        for chunk in table.chunks(KEYS, rows=_STEP, part=part):
            here = np.flatnonzero(mask.get(part, start, len(chunk)) & (scores[row : row + len(chunk)] == edge))
            yield row + here, chunk.keys[here]
            start += len(chunk)
            row += len(chunk)


def row_spans(table: TableReader) -> Iterator[tuple[int, int, int, int]]:
    """Yield runs of rows: part, first row of the part, how many, first row counted along all parts."""
    row = 0
    for part, rows in enumerate(table.schema.part_rows):
        for start in range(0, rows, _STEP):
            yield part, start, min(_STEP, rows - start), row + start
        row += rows
