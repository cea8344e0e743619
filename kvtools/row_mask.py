"""Which rows of a table are kept: one bit per row, in memory or, if that is too much, in a temporary file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtools.dialects.chunk import Array
from kvtools.scratch_array import scratch_array

_WORD = 8
"""Bytes whose bits are counted together."""
_BITS_SET = np.array([number.bit_count() for number in range(256)], np.uint8)


class RowMask:
    """One bit per row of a table: whether the row is kept. Parts can be filled from different threads.

    >>> mask = RowMask([3, 2], memory=1 << 20)
    >>> mask.put(0, 0, np.array([True, False, True]))
    >>> mask.put(1, 0, np.array([False, True]))
    >>> mask.kept_rows(), mask.rows_of(np.array([2, 0])).tolist()
    ((2, 1), [4, 0])
    """

    def __init__(self, part_rows: Sequence[int], *, memory: int, kept: bool = False) -> None:
        """Make a mask that keeps all rows, or none; above a quarter of `memory` its bits go to a temporary file."""
        self._part_rows, self._memory = tuple(part_rows), memory
        self._starts = np.cumsum([0, *part_rows])  # the first row of each part, counted along all parts
        # Each part begins a word of its own, so that no two threads write one byte.
        words = [-(-rows // (8 * _WORD)) for rows in part_rows]
        self._bytes = np.cumsum([0, *words]) * _WORD
        self._bits = _zeros(int(self._bytes[-1]), memory)
        self._before: Array | None = None
        if kept:
            for part, rows in enumerate(part_rows):
                first = self._bytes[part]
                self._bits[first : first + rows // 8] = 255
                if rows % 8:
                    self._bits[first + rows // 8] = (1 << rows % 8) - 1

    def others(self) -> RowMask:
        """Return a mask that keeps the rows that this one does not.

        >>> mask = RowMask([3, 2], memory=1 << 20)
        >>> mask.put(0, 0, np.array([True, False, True]))
        >>> mask.others().kept_rows()
        (1, 2)
        """
        others = RowMask(self._part_rows, memory=self._memory, kept=True)
        step = 1 << 20
        for start in range(0, len(self._bits), step):
            others._bits[start : start + step] ^= self._bits[start : start + step]
        return others

    def put(self, part: int, start: int, kept: npt.NDArray[np.bool_]) -> None:
        """Keep rows from `start` of a part where `kept` [n] is true; the rows were not kept before."""
        if not len(kept):
            return
        first, skipped = divmod(start, 8)
        if skipped:
            kept = np.concatenate([np.zeros(skipped, np.bool_), kept])
        packed = np.packbits(kept, bitorder="little")
        first += int(self._bytes[part])
        packed[0] |= self._bits[first]
        self._bits[first : first + len(packed)] = packed
        self._before = None

    def get(self, part: int, start: int, rows: int) -> npt.NDArray[np.bool_]:
        """Return whether each of `rows` rows from `start` of a part is kept, bool [rows]."""
        first, skipped = divmod(start, 8)
        end = -(-(start + rows) // 8)
        offset = int(self._bytes[part])
        bits = np.unpackbits(self._bits[offset + first : offset + end], bitorder="little")
        kept: npt.NDArray[np.bool_] = bits[skipped : skipped + rows].view(np.bool_)
        return kept

    def clear(self, rows: Array) -> None:
        """Keep no longer the rows of these numbers, int64 [n], counted along all parts, each named once."""
        part = np.searchsorted(self._starts, rows, side="right") - 1
        inside = rows - self._starts[part]
        at = self._bytes[part] + (inside >> 3)
        np.bitwise_and.at(self._bits, at, ~(np.uint8(1) << (inside & 7).astype(np.uint8)))
        self._before = None

    def kept_rows(self) -> tuple[int, ...]:
        """Return how many rows of each part are kept."""
        before = self._counts()
        return tuple(np.diff(before[self._bytes // _WORD]).tolist())

    def rows_of(self, numbers: Array) -> Array:
        """Return the row numbers, counted along all parts, of the kept rows of these numbers, int64 [n]."""
        numbers = np.asarray(numbers, np.int64)
        before = self._counts()
        word = np.searchsorted(before, numbers, side="right") - 1
        bits = self._bits.reshape(-1, _WORD)[word]
        nth = np.cumsum(np.unpackbits(bits, axis=1, bitorder="little"), axis=1, dtype=np.uint8)
        bit = np.argmax(nth == (numbers - before[word] + 1)[:, None], axis=1)
        at = word * _WORD * 8 + bit
        part = np.searchsorted(self._bytes * 8, at, side="right") - 1
        rows: Array = at - self._bytes[part] * 8 + self._starts[part]
        return rows

    def _counts(self) -> Array:
        """Return how many rows are kept before each word, and in all, int64 [words + 1]."""
        if self._before is None:
            words = len(self._bits) // _WORD
            counts = np.zeros(words + 1, np.int64)
            step = 1 << 16
            for start in range(0, words, step):
                bits = self._bits[start * _WORD : (start + step) * _WORD]
                counts[start + 1 : start + 1 + step] = _BITS_SET[bits].reshape(-1, _WORD).sum(axis=1)
            self._before = np.cumsum(counts)
        return self._before


def _zeros(size: int, memory: int) -> npt.NDArray[np.uint8]:
    if size <= memory // 4:
        return np.zeros(size, np.uint8)
    return scratch_array(size, np.uint8, prefix="kvtools-mask-")
