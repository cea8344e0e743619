"""Choose the rows of several tables that are worth the most within a number of bytes, in bounded memory.

Rows are compared by a score: what they are looked up per byte (frequency), or their norm or version as it is. The
smallest score that still fits is found digit by digit, 16 bits at a time, by adding up the bytes of the rows of each
digit, as `kvtools.top_rows` counts rows: four passes over the scores and no sorting. Of rows of equal score as many as
fit are kept: tables in their order, in each table the smallest keys first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtools.dialects.interface import TableReader
from kvtools.row_mask import RowMask
from kvtools.top_rows import Scores, keep_top, row_spans

_DIGIT = 16


def keep_within(
    tables: Sequence[TableReader],
    masks: Sequence[RowMask],
    scores: Sequence[Scores],
    sizes: Sequence[int],
    budget: int,
    *,
    memory: int,
) -> list[int]:
    """Clear rows of `masks` until what is kept of all tables fits into `budget` bytes; returns how many of each.

    Args:
        tables: the tables, whose keys decide between equal scores.
        masks: the rows to choose from, of each table.
        scores: a score for each row of each table, counted along all parts, uint64 [rows]; they are compared across
            tables.
        sizes: the bytes of a row of each table.
        budget: bytes for all of them.
        memory: bytes to stay within.
    """
    kept = [sum(mask.kept_rows()) for mask in masks]
    if sum(count * size for count, size in zip(kept, sizes, strict=True)) <= budget:
        return [0] * len(tables)
    edge = _smallest_that_fits(tables, masks, scores, sizes, budget)
    above, equal = [0] * len(tables), [0] * len(tables)
    for number, (table, mask, of_rows) in enumerate(zip(tables, masks, scores, strict=True)):
        for part, start, rows, row in row_spans(table):
            some = of_rows[row : row + rows][mask.get(part, start, rows)]
            above[number] += int(np.count_nonzero(some > edge))
            equal[number] += int(np.count_nonzero(some == edge))
    room = budget - sum(count * size for count, size in zip(above, sizes, strict=True))
    cut = []
    for table, mask, of_rows, size, more, same in zip(tables, masks, scores, sizes, above, equal, strict=True):
        fitting = min(same, room // size)
        room -= fitting * size
        cut.append(keep_top(table, mask, of_rows, more + fitting, memory=memory))
    return cut


def _smallest_that_fits(
    tables: Sequence[TableReader],
    masks: Sequence[RowMask],
    scores: Sequence[Scores],
    sizes: Sequence[int],
    budget: int,
) -> np.uint64:
    """Return the score of which not all rows fit beside all those above it; there is one."""
    prefix, room = 0, budget
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        bytes_of = np.zeros(1 << _DIGIT, np.int64)
        for table, mask, of_rows, size in zip(tables, masks, scores, sizes, strict=True):
            for part, start, rows, row in row_spans(table):
                some = of_rows[row : row + rows][mask.get(part, start, rows)]
                if shift < 64 - _DIGIT:
                    some = some[some >> np.uint64(shift + _DIGIT) == np.uint64(prefix)]
                digits = (some >> np.uint64(shift)) & np.uint64((1 << _DIGIT) - 1)
                bytes_of += np.bincount(digits.astype(np.int64), minlength=1 << _DIGIT) * size
        above = np.cumsum(bytes_of[::-1])
        place = int(np.searchsorted(above, room, side="right"))
        digit = len(bytes_of) - 1 - place
        room -= int(above[place]) - int(bytes_of[digit])
        prefix = prefix << _DIGIT | digit
    return np.uint64(prefix)
