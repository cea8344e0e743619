"""Norms in bins whose edges are short decimal numbers, as fine as what was seen lets them be.

An edge is a threshold that a person types, such as 0.0127: how many norms are below it is exact, to the row, as
`kvtools.clip` compares them. Norms that lie close together get bins of many digits, others bins of few.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LOWEST, HIGHEST = 1e-20, 1e20
"""What is below and above has no bin of its own."""

_MOST_BINS = 8192
_MOST_DIGITS = 8
_SPARE = 64
"""Bins beyond the largest norm seen, and below the smallest, so that the next chunk seldom needs another window."""


@dataclass
class DecimalHistogram:
    """Norms of 0 or more in bins between decimal numbers of `digits` digits; those below 1e-20 are `under`.

    `start` is the number of the first bin: bins are counted along all numbers of so many digits, see `edge_of`. `over`
    counts norms of 1e20 and more.

    Example:
        >>> norms = DecimalHistogram()
        >>> norms.add(np.array([0.0, 0.121, 0.125, 0.13]))
        >>> norms.rows, norms.under, norms.below(0.125)
        (4, 1, 2)
    """

    digits: int = _MOST_DIGITS
    start: int = 0
    counts: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    under: int = 0
    over: int = 0
    smallest: float = math.inf
    largest: float = -math.inf
    _edges: Array = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)

    @property
    def rows(self) -> int:
        """How many norms were added."""
        return self.under + self.over + int(self.counts.sum())

    @property
    def edges(self) -> Array:
        """The edges of the bins, float64 [bins + 1]; empty where there are no bins."""
        if len(self.counts) and len(self._edges) != len(self.counts) + 1:
            self._edges = edges_of(self.start, len(self.counts) + 1, self.digits)
        return self._edges

    def add(self, norms: Array) -> None:
        """Count norms [n], float32 or float64; one that is NaN or infinite is left out."""
        norms = norms[np.isfinite(norms)]
        if not len(norms):
            return
        self.smallest = min(self.smallest, float(norms.min()))
        self.largest = max(self.largest, float(norms.max()))
        lowest, highest = norms.dtype.type(LOWEST), norms.dtype.type(HIGHEST)
        if not (lowest <= norms.min() and norms.max() < highest):
            self.under += int(np.count_nonzero(norms < lowest))
            self.over += int(np.count_nonzero(norms >= highest))
            norms = norms[(norms >= lowest) & (norms < highest)]
            if not len(norms):
                return
        self._cover(norms.min(), norms.max())
        # As clip compares: a threshold is made a number of the norms' own type first.
        bins = np.searchsorted(self.edges.astype(norms.dtype), norms, side="right") - 1
        self.counts += np.bincount(bins, minlength=len(self.counts))

    def merge(self, other: DecimalHistogram) -> None:
        """Count what another histogram counted, too."""
        self.under += other.under
        self.over += other.over
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)
        filled = np.flatnonzero(other.counts)
        if not len(filled):
            return
        first, last = (edge_of(other.start + int(filled[at]), other.digits) for at in (0, -1))
        if self.digits > other.digits:
            self._coarsen(other.digits)
        self._cover(first, last)
        bins = np.array([_coarser(other.start + int(at), other.digits, self.digits) for at in filled]) - self.start
        np.add.at(self.counts, bins, other.counts[filled])

    def below(self, threshold: float) -> int:
        """Return how many norms are below the largest edge that is no larger than `threshold`; 1e-20 is the first."""
        if not len(self.counts):
            return self.under + (self.over if threshold > self.largest else 0)
        if threshold > self.largest:
            return self.rows
        return self.under + int(self.counts[: max(0, int(np.searchsorted(self.edges, threshold, "right")) - 1)].sum())

    def quantile(self, share: float) -> float | None:
        """Return about the norm that this share of the norms is at most, off by a bin; None if nothing was added."""
        rows = self.rows
        if not rows:
            return None
        ends = self.under + np.cumsum(self.counts)
        wanted = max(1, math.ceil(share * rows))
        if wanted <= self.under:
            return self.smallest
        if wanted > rows - self.over:
            return self.largest
        at = int(np.searchsorted(ends, wanted))
        return float(min(max(math.sqrt(self.edges[at] * self.edges[at + 1]), self.smallest), self.largest))

    def thresholds(self, shares: Sequence[float]) -> list[tuple[float, int]]:
        """Return, for each share of the rows, an edge below which about so many lie, and how many do: all different.

        Of edges that cut nearly the same the shortest number is taken.

        >>> norms = DecimalHistogram()
        >>> norms.add(np.linspace(1, 2, 1000))
        >>> norms.thresholds([0.25, 0.5])
        [(1.25, 250), (1.5, 500)]
        """
        if not len(self.counts):
            return []
        rows = self.rows
        below = self.under + np.concatenate([[0], np.cumsum(self.counts)])
        known = (self.edges >= LOWEST) & (self.edges <= HIGHEST)
        found: dict[int, tuple[float, int]] = {}
        for share in shares:
            slack = max(0.02 * min(share, 1 - share) * rows, 0.5)
            off = np.where(known, np.abs(below - share * rows), np.inf)
            near = np.flatnonzero(off <= slack)
            if not len(near):  # many rows in one bin
                near = np.array([int(np.argmin(off))])
            at = min(near.tolist(), key=lambda i: (_length(self.start + i, self.digits), off[i]))
            if below[at] > 0:
                found.setdefault(int(below[at]), (float(self.edges[at]), int(below[at])))
        return [found[count] for count in sorted(found)]

    def bars(self, cuts: Sequence[float]) -> list[tuple[float, float, int]]:
        """Return (from, to, rows) between neighbouring ones of the edges that are nearest to `cuts`, ascending."""
        if not len(self.counts):
            return []
        right = np.clip(np.searchsorted(self.edges, cuts), 1, len(self.counts))
        near = right - (np.asarray(cuts) - self.edges[right - 1] < self.edges[right] - np.asarray(cuts))
        at = np.unique(near)
        below = np.concatenate([[0], np.cumsum(self.counts)])
        return [
            (float(self.edges[a]), float(self.edges[b]), int(below[b] - below[a]))
            for a, b in itertools.pairwise(at.tolist())
        ]

    def _cover(self, low: Any, high: Any) -> None:
        """Make bins for norms from `low` to `high`, of fewer digits if they would be too many."""
        if len(self.counts):
            dtype = np.asarray(low).dtype  # in which an edge may be rounded past the norm
            ends = self.edges[[0, -1]].astype(dtype)
            if ends[0] <= low and high < ends[1]:
                return
        while True:
            first, last = bin_of(float(low), self.digits) - 1, bin_of(float(high), self.digits) + 1
            stop = self.start + len(self.counts)
            grows = not len(self.counts) or first < self.start, not len(self.counts) or last >= stop
            if len(self.counts):
                first, last = min(first, self.start), max(last, stop - 1)
            if last - first < _MOST_BINS:
                break
            self._coarsen(self.digits - 1)
        spare = min(_SPARE, (_MOST_BINS - (last - first)) // 2)
        first, last = first - spare * grows[0], last + spare * grows[1]
        counts = np.zeros(last - first + 1, np.int64)
        counts[self.start - first : self.start - first + len(self.counts)] = self.counts
        self.counts, self.start, self._edges = counts, first, np.zeros(0)

    def _coarsen(self, digits: int) -> None:
        """Join bins until their edges have so many digits."""
        if len(self.counts):
            filled = np.flatnonzero(self.counts)
            bins = np.array([_coarser(self.start + int(at), self.digits, digits) for at in filled], np.int64)
            start = _coarser(self.start, self.digits, digits)
            counts = np.zeros(_coarser(self.start + len(self.counts) - 1, self.digits, digits) - start + 1, np.int64)
            np.add.at(counts, bins - start, self.counts[filled])
            self.counts, self.start, self._edges = counts, start, np.zeros(0)
        self.digits = digits


def edge_of(number: int, digits: int) -> float:
    """Return the decimal number of `digits` digits that has this number along all of them; 1.0 has 0.

    >>> edge_of(0, 2), edge_of(27, 2), edge_of(90, 2), edge_of(-1, 2)
    (1.0, 3.7, 10.0, 0.99)
    """
    decade, within = divmod(number, 9 * 10 ** (digits - 1))
    return float(f"{10 ** (digits - 1) + within}e{decade - digits + 1}")


def edges_of(start: int, count: int, digits: int) -> Array:
    """Return so many decimal numbers of `digits` digits one after the other, float64 [count]: `edge_of` of each.

    >>> edges_of(88, 4, 2).tolist()
    [9.8, 9.9, 10.0, 11.0]
    """
    decades, within = np.divmod(np.arange(start, start + count), 9 * 10 ** (digits - 1))
    mantissas, exponents = within + 10 ** (digits - 1), decades - digits + 1
    # Powers of ten up to 10**22 are exact, so one multiplication or division rounds as reading the number does.
    powers = np.array([10.0**exponent for exponent in range(23)])[np.minimum(np.abs(exponents), 22)]
    edges = np.where(exponents < 0, mantissas / powers, mantissas * powers)
    for at in np.flatnonzero(np.abs(exponents) > 22).tolist():
        edges[at] = edge_of(start + at, digits)
    return np.asarray(edges)


def bin_of(norm: float, digits: int) -> int:
    """Return the number of the largest decimal number of so many digits that is no larger than a norm above 0.

    >>> bin_of(3.79, 2), bin_of(0.99, 2)
    (27, -1)
    """
    mantissa, exponent = f"{norm:.17e}".split("e")
    whole = int(mantissa[0] + mantissa[2 : digits + 1])
    number: int = int(exponent) * 9 * 10 ** (digits - 1) + whole - 10 ** (digits - 1)
    while edge_of(number, digits) > norm:  # printed, it may have been rounded
        number -= 1
    while edge_of(number + 1, digits) <= norm:
        number += 1
    return number


def _coarser(number: int, digits: int, fewer: int) -> int:
    """Return the bin of fewer digits in which a bin lies.

    >>> _coarser(27, 2, 1), _coarser(-1, 2, 1)
    (2, -1)
    """
    decade, within = divmod(number, 9 * 10 ** (digits - 1))
    mantissa: int = (10 ** (digits - 1) + within) // 10 ** (digits - fewer)
    coarser: int = decade * 9 * 10 ** (fewer - 1) + mantissa - 10 ** (fewer - 1)
    return coarser


@functools.lru_cache(1 << 14)
def _length(number: int, digits: int) -> int:
    """Return how many digits a decimal number has but zeros at its end."""
    within = number % (9 * 10 ** (digits - 1))
    return len(str(10 ** (digits - 1) + within).rstrip("0"))
