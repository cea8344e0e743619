"""Histograms of rows that stream by: norms by decades, frequencies by octaves, versions by time.

Each has a bounded number of bins, so that it takes the same memory whatever is counted, and two of them merge without
loss of what either says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.dialects.schema import VersionUnit

Array = npt.NDArray[Any]

BINS_PER_DECADE = 10
_LOWEST, _HIGHEST = -20, 20
NORM_EDGES = np.array(
    [
        float(f"1e{decade}") * 10 ** (step / BINS_PER_DECADE)
        for decade in range(_LOWEST, _HIGHEST)
        for step in range(BINS_PER_DECADE)
    ]
    + [float(f"1e{_HIGHEST}")]
)
"""The bounds between the bins of norms: powers of ten exactly, and nine between each two."""

_SUB_BITS = 5
"""A float's exponent and this many bits of its mantissa: at most one edge lies among the floats that share them."""

_EXACT = 4096
"""Frequencies below this have a bin each."""
_SUB_BINS = 64
"""The bins of each octave of frequencies from there on."""
_FIRST_OCTAVE = _EXACT.bit_length() - 1
_ZIPF_OFF = math.log(1.5)
_ZIPF_LEAST = 0.4
_FREQ_BINS = _EXACT + (64 - _FIRST_OCTAVE) * _SUB_BINS

_VERSION_BINS = 4096
_TIME_WIDTHS = (1, 10, 60, 600, 3600, 6 * 3600, 86400, 7 * 86400)
"""Bin widths of seconds that people read, each a multiple of the one before; then doubling."""


def norm_bins(norms: Array) -> Array:
    """Return the number of the bin of each norm of 0 or more, [n], as `np.searchsorted(edges, norms, "right")`.

    float32 norms are compared with the edges as float32, as `kvtools.clip` compares them with a threshold.

    >>> norm_bins(np.array([0.0, 1e-20, 1.0])).tolist()
    [0, 1, 201]
    """
    first, _, above, shift = _norm_lookup(norms.dtype)
    bits: Array = np.ascontiguousarray(norms).view(np.int32 if norms.dtype.itemsize == 4 else np.int64)
    bins: Array = first.take(np.right_shift(bits, shift))
    bins += norms >= above.take(bins)
    return bins


def near_an_edge(norms: Array, bins: Array, error: float) -> Array:
    """Tell which norms, bool [n], are of another bin than `bins` if they are wrong by this share of themselves."""
    _, below, above, _ = _norm_lookup(norms.dtype)
    return (norms * (1 - error) < below.take(bins)) | (norms * (1 + error) >= above.take(bins))


@functools.cache
def _norm_lookup(dtype: np.dtype[Any]) -> tuple[Array, Array, Array, int]:
    """Return the bin in which each group of floats begins, the edges of each bin, and by what to shift to the group."""
    word, mantissa, exponent = (np.uint32, 23, 8) if dtype == np.float32 else (np.uint64, 52, 11)
    shift = mantissa - _SUB_BITS
    edges = NORM_EDGES.astype(dtype)
    groups: Array = np.arange(1 << (exponent + _SUB_BITS), dtype=word)
    firsts = np.nan_to_num((groups << word(shift)).view(dtype), nan=np.inf, posinf=np.inf)
    first = np.searchsorted(edges, firsts, side="right").astype(np.intp)
    # Nothing is in a bin above the last, not even infinity: no comparison with NaN is true.
    return first, np.append(dtype.type(0), edges), np.append(edges, dtype.type(np.nan)), shift


@dataclass
class NormHistogram:
    """Norms in ten bins per decade from 1e-20 to 1e20, with one below and one above.

    Example:
        >>> norms = NormHistogram()
        >>> norms.add(np.array([0.5, 2.0, 2.0]))
        >>> norms.rows, norms.below(1.0), norms.largest
        (3, 1, 2.0)
    """

    counts: Array = field(default_factory=lambda: np.zeros(len(NORM_EDGES) + 1, np.int64))
    total: np.longdouble = field(default_factory=np.longdouble)
    smallest: float = math.inf
    largest: float = -math.inf

    @property
    def rows(self) -> int:
        """How many norms were added."""
        return int(self.counts.sum())

    def add(self, norms: Array, bins: Array | None = None) -> None:
        """Count finite norms [n]; `bins` are their bins, if they are known."""
        if not len(norms):
            return
        self.counts += np.bincount(norm_bins(norms) if bins is None else bins, minlength=len(self.counts))
        self.smallest = min(self.smallest, float(norms.min()))
        self.largest = max(self.largest, float(norms.max()))
        self.total += norms.sum(dtype=np.longdouble if self.largest > 1e150 else np.float64)

    def merge(self, other: NormHistogram) -> None:
        """Count what another histogram counted, too."""
        self.counts += other.counts
        self.total += other.total
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    def below(self, threshold: float) -> int:
        """Return how many norms are below the largest edge that is no larger than `threshold`."""
        return int(self.counts[: np.searchsorted(NORM_EDGES, threshold, side="right")].sum())

    def quantile(self, share: float) -> float | None:
        """Return about the norm that this share of the norms is at most; None if nothing was added.

        It is off by no more than the width of a bin, a quarter of itself.
        """
        rows = self.rows
        if not rows:
            return None
        wanted = share * rows
        ends = np.cumsum(self.counts)
        at = min(int(np.searchsorted(ends, wanted)), len(ends) - 1)
        low = float(NORM_EDGES[at - 1]) if at else 0.0
        high = float(NORM_EDGES[at]) if at < len(NORM_EDGES) else self.largest
        low, high = max(low, self.smallest), min(high, self.largest)
        inside = (wanted - (ends[at] - self.counts[at])) / max(int(self.counts[at]), 1)
        if low <= 0 or high <= low:
            return high if inside > 0 else low
        return float(low * (high / low) ** min(max(inside, 0.0), 1.0))

    def bars(self, bins_per_bar: int = 1) -> list[tuple[float, float, int]]:
        """Return (from, to, rows) of the bins from the first to the last that is not empty, some to a bar.

        Norms below 1e-20, and those of 1e20 and more, have a bar of their own, however far the next one is.
        """
        filled = np.flatnonzero(self.counts)
        if not len(filled):
            return []
        edges = np.concatenate([[0.0], NORM_EDGES, [math.inf]])
        bars = [(0.0, float(edges[1]), int(self.counts[0]))] if self.counts[0] else []
        between = filled[(filled > 0) & (filled < len(NORM_EDGES))]
        if len(between):
            first, last = int(between[0]), int(between[-1])
            for low in range(first - (first - 1) % bins_per_bar, last + 1, bins_per_bar):
                high = min(low + bins_per_bar, len(NORM_EDGES))
                bars.append((float(edges[low]), float(edges[high]), int(self.counts[low:high].sum())))
        if self.counts[-1]:
            bars.append((float(edges[-2]), math.inf, int(self.counts[-1])))
        return bars


@dataclass
class FrequencyHistogram:
    """Frequencies: a bin for each below 4,096, then 64 to an octave, with their number and sum in each.

    Counts below a power of two are exact; ranks and shares are exact among frequencies below 4,096 and off by less
    than 1.6 percent above.

    Example:
        >>> freqs = FrequencyHistogram()
        >>> freqs.add(np.array([0, 1, 1, 98]))
        >>> freqs.rows, freqs.below(2), freqs.total, round(freqs.top_share(0.25), 2)
        (4, 3, 100, 0.98)
    """

    counts: Array = field(default_factory=lambda: np.zeros(_FREQ_BINS, np.int64))
    sums: Array = field(default_factory=lambda: np.zeros(_FREQ_BINS, np.float64))
    smallest: float = math.inf
    largest: float = 0.0

    @property
    def rows(self) -> int:
        """How many frequencies were added."""
        return int(self.counts.sum())

    @property
    def total(self) -> int:
        """The sum of all frequencies; exact below 2**53."""
        return int(self.sums.sum())

    def add(self, freqs: Array) -> None:
        """Count frequencies [n] of any real type; fractions are dropped, below 0 or NaN counts as 0."""
        if not len(freqs):
            return
        if freqs.dtype.kind not in "iu":
            freqs = np.nan_to_num(freqs.astype(np.float64)).clip(0, 2.0**62).astype(np.int64)
        lowest, highest = int(freqs.min()), int(freqs.max())
        if lowest < 0:
            freqs, lowest, highest = freqs.clip(0), 0, max(0, highest)
        few = freqs if highest < _EXACT else freqs[freqs < _EXACT]
        counts = np.bincount(few.astype(np.intp))
        self.counts[: len(counts)] += counts
        self.sums[: len(counts)] += counts * np.arange(len(counts))
        if highest >= _EXACT:
            many = freqs[freqs >= _EXACT].astype(np.float64)
            mantissa, exponent = np.frexp(many)  # number = mantissa * 2**exponent, mantissa in [0.5, 1)
            octave = np.minimum(exponent.astype(np.intp) - 1, 63) - _FIRST_OCTAVE
            bins = octave * _SUB_BINS + ((mantissa - 0.5) * (2 * _SUB_BINS)).astype(np.intp)
            self.counts[_EXACT:] += np.bincount(bins, minlength=_FREQ_BINS - _EXACT)
            self.sums[_EXACT:] += np.bincount(bins, weights=many, minlength=_FREQ_BINS - _EXACT)
        self.smallest = min(self.smallest, lowest)
        self.largest = max(self.largest, highest)

    def merge(self, other: FrequencyHistogram) -> None:
        """Count what another histogram counted, too."""
        self.counts += other.counts
        self.sums += other.sums
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    def below(self, threshold: int) -> int:
        """Return how many frequencies are below `threshold`: any up to 4,096, or a power of two."""
        return int(self.counts[: _freq_bin(threshold)].sum())

    def thresholds(self, shares: Sequence[float]) -> list[tuple[int, int, int]]:
        """Return, for each share of the rows, a frequency below which about so many are: (it, their number, their sum).

        All are different, none cuts nothing or everything, and all numbers are exact.

        >>> freqs = FrequencyHistogram()
        >>> freqs.add(np.array([1, 1, 2, 9]))
        >>> freqs.thresholds([0.1, 0.5, 0.7])
        [(2, 2, 2), (3, 3, 4)]
        """
        rows, sums = (np.concatenate([[0], np.cumsum(counts)]) for counts in (self.counts, self.sums))
        possible = np.flatnonzero((rows > 0) & (rows < self.rows))
        if not len(possible):
            return []
        at = sorted({int(possible[np.argmin(np.abs(rows[possible] - share * self.rows))]) for share in shares})
        return [(_freq_edge(i), int(rows[i]), int(sums[i])) for i in at]

    def edge(self, number: int) -> int:
        """Return the smallest frequency of a bin.

        >>> FrequencyHistogram().edge(7), FrequencyHistogram().edge(4096 + 64)
        (7, 8192)
        """
        return _freq_edge(number)

    def bars(self) -> list[tuple[int, int, int]]:
        """Return (from, to, rows): frequency 0, then an octave each, from the first to the last that is not empty."""
        edges = [0] + [1 << octave for octave in range(64)]
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        at = [0, *(_freq_bin(edge) for edge in edges[1:]), _FREQ_BINS]
        rows = [int(ends[at[i + 1]] - ends[at[i]]) for i in range(len(edges))]
        filled = [i for i, n in enumerate(rows) if n]
        if not filled:
            return []
        edges.append(1 << 64)
        return [(edges[i], edges[i + 1], rows[i]) for i in range(filled[0], filled[-1] + 1)]

    def ranked(self) -> tuple[Array, Array]:
        """Return the bins that are not empty, most frequent first: their rows, int64 [m], and mean frequencies [m]."""
        filled = np.flatnonzero(self.counts)[::-1]
        return self.counts[filled], self.sums[filled] / self.counts[filled]

    def top_share(self, share: float) -> float | None:
        """Return which part of all frequency is that of the most frequent keys, `share` of all; None if there is none.

        At least one key is taken.
        """
        if not self.rows or not self.sums.sum():
            return None
        rows, means = self.ranked()
        wanted = max(1, math.ceil(share * self.rows))
        before = np.concatenate([[0], np.cumsum(rows)[:-1]])
        taken = np.clip(wanted - before, 0, rows)
        return float((taken * means).sum() / self.sums.sum())

    def frequency_of_rank(self, ranks: Array) -> Array:
        """Return the frequency of the keys of these ranks [n], from 1, the most frequent, to the number of rows."""
        rows, means = self.ranked()
        return np.asarray(means[np.searchsorted(np.cumsum(rows), ranks)])

    def zipf_exponent(self) -> float | None:
        """Return s of frequency ~ rank**-s, where that holds for a good part of the ranks; see `zipf_fit`."""
        fit = self.zipf_fit()
        return None if fit is None else fit.exponent

    def zipf_fit(self) -> ZipfFit | None:
        """Fit frequency ~ rank**-s to the widest range of ranks in which it is off by a factor of 1.5 at most.

        The range is widest on a logarithmic scale, on which the ranks that are looked at are evenly spaced; keys of
        frequency 0 are left out. None where fewer than ten others are there, or where the range is less than two fifths
        of the scale: then there is no such law.
        """
        seen = self.rows - int(self.counts[0])
        if seen < 10:
            return None
        ranks = np.unique(np.geomspace(1, seen, 100).astype(np.int64))
        x, y = np.log(ranks), np.log(self.frequency_of_rank(ranks))
        ends = np.unique(np.linspace(0, len(ranks) - 1, min(len(ranks), 34)).astype(np.int64))
        firsts, lasts = np.repeat(ends, len(ends)), np.tile(ends, len(ends))
        wide = (x[lasts] - x[firsts] >= _ZIPF_LEAST * x[-1]) & (lasts - firsts >= 4)
        firsts, lasts = firsts[wide], lasts[wide]
        order = np.lexsort((lasts, firsts, x[firsts] - x[lasts]))
        firsts, lasts = firsts[order], lasts[order]
        slopes, levels = _lines(x, y, firsts, lasts)
        for first, last, slope, level in zip(firsts, lasts, slopes, levels, strict=True):
            inside = slice(first, last + 1)
            if np.abs(level + slope * x[inside] - y[inside]).max() <= _ZIPF_OFF:
                return ZipfFit(max(0.0, -float(slope)), math.exp(level), int(ranks[first]), int(ranks[last]))
        return None


def _lines(x: Array, y: Array, firsts: Array, lasts: Array) -> tuple[Array, Array]:
    """Return slopes and levels [n] of the lines of least squares through the points `firsts` to `lasts` [n].

    >>> x = np.arange(4.0)
    >>> _lines(x, 2 * x + 1, np.array([0, 1]), np.array([3, 3]))
    (array([2., 2.]), array([1., 1.]))
    """
    points = lasts - firsts + 1

    def sums(of: Array) -> Array:
        until = np.concatenate([[0.0], np.cumsum(of)])
        return np.asarray(until[lasts + 1] - until[firsts])

    sum_x, sum_y = sums(x), sums(y)
    slopes = (points * sums(x * y) - sum_x * sum_y) / (points * sums(x * x) - sum_x * sum_x)
    return slopes, (sum_y - slopes * sum_x) / points


@dataclass(frozen=True)
class ZipfFit:
    """frequency = `scale` * rank ** -`exponent`, for the ranks from `first` to `last`."""

    exponent: float
    scale: float
    first: int
    last: int

    def frequencies(self, ranks: Array) -> Array:
        """Return what the law says of ranks [n]."""
        return np.asarray(self.scale * np.asarray(ranks, np.float64) ** -self.exponent)


def _freq_edge(number: int) -> int:
    """Return the smallest frequency of a bin."""
    if number <= _EXACT:
        return number
    octave, sub = divmod(number - _EXACT, _SUB_BINS)
    return ((_SUB_BINS + sub) << (octave + _FIRST_OCTAVE)) // _SUB_BINS


def _freq_bin(frequency: int) -> int:
    """Return the bin in which a frequency up to 4,096, or a power of two, stands first."""
    if frequency <= _EXACT:
        return frequency
    return _EXACT + (frequency.bit_length() - 1 - _FIRST_OCTAVE) * _SUB_BINS


@dataclass
class VersionHistogram:
    """Versions in bins of one width, a round number of its unit, that grows until at most 4,096 bins are enough.

    Version 0 stands for "never set" and is counted in `unset` alone.

    Example:
        >>> versions = VersionHistogram("steps")
        >>> versions.add(np.array([0, 5, 100_000]))
        >>> versions.unset, versions.oldest, versions.width, versions.bars(50_000)
        (1, 5, 50, [(0, 50000, 1), (50000, 100000, 0), (100000, 150000, 1)])
    """

    unit: VersionUnit = "unknown"
    width: int = 1
    start: int = 0
    counts: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    unset: int = 0
    oldest: int | None = None
    newest: int | None = None

    @property
    def rows(self) -> int:
        """How many versions other than 0 were added."""
        return int(self.counts.sum())

    def add(self, versions: Array) -> None:
        """Count versions [n] of any integer type."""
        if versions.dtype.kind not in "iu":
            versions = np.nan_to_num(versions.astype(np.float64)).clip(-(2.0**62), 2.0**62).astype(np.int64)
        if versions.dtype.itemsize < 4:
            versions = versions.astype(np.int64)
        dated = versions
        if not versions.all():
            dated = versions[versions != 0]
            self.unset += len(versions) - len(dated)
        if not len(dated):
            return
        low = int(dated.min())
        self._cover(low, int(dated.max()))
        first = low // self.width
        bins = dated // dated.dtype.type(self.width) - dated.dtype.type(first)
        at = first - self.start // self.width
        counts = np.bincount(bins.astype(np.intp))
        self.counts[at : at + len(counts)] += counts

    def merge(self, other: VersionHistogram) -> None:
        """Count what another histogram counted, too."""
        self.unset += other.unset
        if other.oldest is None or other.newest is None:
            return
        self._widen(other.width)
        self._cover(other.oldest, other.newest)
        bins = (other.start + np.arange(len(other.counts)).astype(object) * other.width) // self.width
        np.add.at(self.counts, (bins - self.start // self.width).astype(np.int64), other.counts)

    def next_width(self, width: int) -> int:
        """Return the next larger width: a multiple of `width` that people read."""
        if self.unit == "seconds":
            return next((wider for wider in _TIME_WIDTHS if wider > width), 2 * width)
        if self.unit == "days":
            return next((wider for wider in (1, 7) if wider > width), 2 * width)
        return width * (5 if str(width)[0] == "1" else 2)

    def readable_width(self, bars: int) -> int:
        """Return the smallest width with which `bars` bars are enough."""
        width = self.width
        while self.oldest is not None and self.newest is not None:
            if self.newest // width - self.oldest // width < bars:
                break
            width = self.next_width(width)
        return width

    def bars(self, width: int | None = None) -> list[tuple[int, int, int]]:
        """Return (from, to, rows) of bins of `width`, one of the widths that follow on `self.width`."""
        if self.oldest is None or self.newest is None:
            return []
        width = width or self.width
        first = self.oldest // width
        rows = np.zeros(self.newest // width - first + 1, np.int64)
        bins = (self.start + np.arange(len(self.counts)).astype(object) * self.width) // width - first
        filled = self.counts > 0
        np.add.at(rows, bins[filled].astype(np.int64), self.counts[filled])
        return [((first + i) * width, (first + i + 1) * width, int(n)) for i, n in enumerate(rows)]

    def age_of(self, share: float) -> int | None:
        """Return how much older than the newest row this share of the dated rows is at most; None if there is none.

        It may be too large by the width of a bin.

        >>> versions = VersionHistogram("steps")
        >>> versions.add(np.array([10, 70, 95, 100]))
        >>> versions.age_of(0.5), versions.age_of(1.0)
        (5, 90)
        """
        if self.oldest is None or self.newest is None:
            return None
        seen = np.cumsum(self.counts[::-1])
        at = len(seen) - 1 - int(np.searchsorted(seen, max(1, math.ceil(share * int(seen[-1])))))
        return self.newest - max(self.oldest, self.start + at * self.width)

    def _cover(self, low: int, high: int) -> None:
        """Make room for versions from `low` to `high`."""
        low = low if self.oldest is None else min(low, self.oldest)
        high = high if self.newest is None else max(high, self.newest)
        width = self.width
        while high // width - low // width >= _VERSION_BINS:
            width = self.next_width(width)
        self._widen(width)
        self.oldest, self.newest = low, high
        first, bins = low // width, high // width - low // width + 1
        if first * width != self.start or bins != len(self.counts):
            counts = np.zeros(bins, np.int64)
            at = self.start // width - first
            counts[at : at + len(self.counts)] = self.counts if len(self.counts) else 0
            self.counts, self.start = counts, first * width

    def _widen(self, width: int) -> None:
        while self.width < width:
            wider = self.next_width(self.width)
            if len(self.counts):
                first = self.start // wider
                bins = (self.start // self.width + np.arange(len(self.counts)).astype(object)) // (wider // self.width)
                counts = np.zeros(int(bins[-1]) - first + 1, np.int64)
                np.add.at(counts, (bins - first).astype(np.int64), self.counts)
                self.counts, self.start = counts, first * wider
            self.width = wider
