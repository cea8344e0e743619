"""From a batch of keys to the numbers of their rows, all in NumPy.

Every key is scrambled by a one-to-one function of 64 bits, and the scrambled keys are sorted: the top bits
of one then tell, through a directory of about one entry per key, where in the sorted array it would be,
within a few places. A lookup thus reads the directory and one short run, in place of a binary search's
twenty or thirty jumps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class KeyIndex:
    """Finds rows by key; where `keys` [rows] (int32, int64 or uint64) has a key twice, its last row counts.

    Takes 16 to 28 bytes a key. `duplicates` counts the rows that a later one hides.

    Example:
        >>> KeyIndex(np.array([7, -3, 7])).find(np.array([-3, 7, 8])).tolist()
        [1, 2, -1]
    """

    def __init__(self, keys: npt.NDArray[Any]) -> None:
        scrambled = _scramble(keys)
        order = np.argsort(scrambled, kind="stable")
        scrambled = scrambled[order]
        last = np.append(scrambled[1:] != scrambled[:-1], True) if len(keys) else np.empty(0, np.bool_)
        self.duplicates = len(keys) - int(np.count_nonzero(last))
        if self.duplicates:
            scrambled, order = scrambled[last], order[last]
        self._scrambled = scrambled
        self._rows = order.astype(np.int32) if len(keys) < 1 << 31 else order
        bits = max(1, (len(scrambled) - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        buckets = np.arange(1 << bits, dtype=np.uint64) << self._shift
        starts = np.append(np.searchsorted(scrambled, buckets), len(scrambled))
        self._starts = starts.astype(np.uint32) if len(scrambled) < 1 << 32 else starts

    def find(self, keys: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the row of each of `keys` [n], int64 [n], -1 where there is none."""
        rows = np.full(len(keys), -1, np.int64)
        if not len(self._scrambled):
            return rows
        wanted = _scramble(keys)
        bucket = (wanted >> self._shift).astype(np.int64)
        place, end = self._starts[bucket].astype(np.int64), self._starts[bucket + 1].astype(np.int64)
        pending = np.flatnonzero(place < end)
        while len(pending):
            at = place[pending]
            candidate = self._scrambled[at]
            target = wanted[pending]
            hit = candidate == target
            rows[pending[hit]] = self._rows[at[hit]]
            # Runs are sorted: past a larger one the key cannot come any more.
            pending = pending[candidate < target]
            place[pending] += 1
            pending = pending[place[pending] < end[pending]]
        return rows


def _scramble(keys: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Map keys one-to-one to 64 mixed bits: the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    mixed: npt.NDArray[np.uint64] = keys.astype(np.uint64 if keys.dtype.kind == "u" else np.int64).view(np.uint64)
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        mixed = (mixed ^ (mixed >> shift)) * multiplier
    return mixed ^ (mixed >> _SHIFTS[2])
