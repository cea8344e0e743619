"""What thresholds of frequency, norm and age cut together: how many rows, and how many lookups they had.

A row is kept if it passes all thresholds, so what several cut is not the sum of what each does. Rows are counted once
by the interval between thresholds in which each criterion has them; from there any combination is an addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.dialects.chunk import Chunk
from kvtools.thresholds import Threshold

Array = npt.NDArray[Any]
State = tuple[int, int, int]
"""Which threshold of frequency, norm and age is set: 0 is none, 1 the first."""

NOTHING: State = (0, 0, 0)


@dataclass(frozen=True)
class Kept:
    """Rows that are left, and the sum of their frequencies; None where there are none."""

    rows: int
    lookups: int | None


@dataclass
class Cuts:
    """The rows of a table by the thresholds that they pass.

    `axes` are the thresholds of frequency, norm and age, each cutting more than the one before; `timed` says that
    versions are times. `counts`, int64 [F + 1, N + 1, A + 1], are the rows that pass so many of each, and `lookups` the
    sums of their frequencies, float64, which is exact below 2**53, or None.

    Example:
        >>> from kvtools.histogram import FrequencyHistogram
        >>> from kvtools.thresholds import freq_thresholds
        >>> freqs = FrequencyHistogram()
        >>> freqs.add(np.array([1, 1, 5]))
        >>> cuts = Cuts((freq_thresholds(freqs), [], []), timed=False, counted=True)
        >>> cuts.add(Chunk(np.arange(3), freqs=np.array([1, 1, 5])), np.ones(3))
        >>> cuts.kept((1, 0, 0))
        Kept(rows=1, lookups=5)
    """

    axes: tuple[Sequence[Threshold], Sequence[Threshold], Sequence[Threshold]]
    timed: bool
    counted: bool
    counts: Array = field(init=False)
    lookups: Array | None = field(init=False)

    def __post_init__(self) -> None:
        shape = tuple(len(axis) + 1 for axis in self.axes)
        self.counts = np.zeros(shape, np.int64)
        self.lookups = np.zeros(shape, np.float64) if self.counted else None

    def add(self, chunk: Chunk, norms: Array) -> None:
        """Count the rows of a chunk with what it has of frequencies and versions; `norms` [n] are its rows'."""
        freqs, versions = _integers(chunk.freqs), _integers(chunk.versions)
        # How many thresholds a row passes; a NaN, and a time that is none, pass all.
        passed = [np.zeros(len(chunk), np.int64) for _ in self.axes]
        for number, column in ((0, freqs), (1, norms), (2, versions)):
            axis = self.axes[number]
            if axis and column is not None:
                edges = np.array([threshold.value for threshold in axis], column.dtype)
                passed[number] = np.searchsorted(edges, column, side="right")
        if self.timed and versions is not None:
            passed[2][versions == 0] = len(self.axes[2])
        cells = np.ravel_multi_index(tuple(passed), self.counts.shape)
        self.counts += np.bincount(cells, minlength=self.counts.size).reshape(self.counts.shape)
        if self.lookups is not None and chunk.freqs is not None:
            sums = np.bincount(cells, weights=np.maximum(chunk.freqs.astype(np.int64), 0), minlength=self.counts.size)
            self.lookups += sums.reshape(self.counts.shape)

    def merge(self, other: Cuts) -> None:
        """Count what another counted by the same thresholds, too."""
        self.counts += other.counts
        if self.lookups is not None and other.lookups is not None:
            self.lookups += other.lookups

    def kept(self, state: State) -> Kept:
        """Return what passes the thresholds that are set."""
        region = tuple(slice(number, None) for number in state)
        return Kept(int(self.counts[region].sum()), None if self.lookups is None else int(self.lookups[region].sum()))

    def chosen(self, state: State) -> list[Threshold]:
        """Return the thresholds that are set."""
        return [axis[number - 1] for axis, number in zip(self.axes, state, strict=True) if number]


def _integers(column: Array | None) -> Array | None:
    """Return counters as int64 [n], the largest that there is for larger ones."""
    if column is None or column.dtype != np.uint64:
        return None if column is None else column.astype(np.int64)
    return np.minimum(column, np.uint64(np.iinfo(np.int64).max)).astype(np.int64)
