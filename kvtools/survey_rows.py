"""What thresholds on frequency, age and norm would cut of a table, alone and together: from one reading of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtools.dialects.chunk import Array, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import VersionUnit
from kvtools.row_norms import as_floats, row_norms, rows_not_finite

FREQUENCIES = (1, 2, 3, 4, 5, 8, 10, 15, 20, 30, 50, 100, 200, 500, 1000)
DAYS = (7, 14, 30, 60, 90, 180, 365)
NORM_PERCENTILES = (0.5, 1, 2, 5, 10, 20, 30, 50)
_DAY = 86_400
_SAMPLE = 100_000
_MOST_STEPS = 8
_RUNS = 64


@dataclass(frozen=True)
class Thresholds:
    """What was tried: `freqs`, `ages` (seconds or steps, the largest first) and `norms` (the smallest first)."""

    freqs: tuple[int, ...] = ()
    ages: tuple[int, ...] = ()
    norms: tuple[float, ...] = ()


@dataclass(frozen=True)
class Cut:
    """What one threshold of each kind, or none, would cut: rows, and lookups of these; None where nobody counts."""

    freq: int | None
    age: int | None
    norm: float | None
    rows: int
    lookups: int | None

    @property
    def criteria(self) -> int:
        """How many thresholds these are."""
        return sum(each is not None for each in (self.freq, self.age, self.norm))


@dataclass(frozen=True)
class Survey:
    """What the rows of a table are like.

    `lookups` are those that find a row: the sum of its frequencies, or the log's; None where nobody counts. `never`
    rows were not looked up at all. `not_finite` rows have a NaN or an infinity, `largest` is the largest absolute value
    of the others; `zeros` rows are zeros alone, and `lookups_of_zeros` find these. `now` is what ages were counted
    from. `waited[n]` is how many lookups would have found no row yet, had keys got their rows with the n-th, and
    `rare[n]` how many keys would have got none.
    """

    rows: int
    lookups: int | None
    never: int
    zeros: int
    lookups_of_zeros: int
    not_finite: int
    largest: float
    thresholds: Thresholds
    now: int | None
    waited: dict[int, int] = field(default_factory=dict)
    rare: dict[int, int] = field(default_factory=dict)
    cells: Array = field(repr=False, default_factory=lambda: np.zeros((1, 1, 1), np.int64))
    weights: Array = field(repr=False, default_factory=lambda: np.zeros((1, 1, 1), np.float64))

    def cuts(self) -> list[Cut]:
        """Return what every combination of thresholds would cut, none at all first."""
        kept_rows, kept_weights = (_at_least(cells) for cells in (self.cells, self.weights))
        all_rows, all_weights = int(kept_rows[0, 0, 0]), float(kept_weights[0, 0, 0])
        found = []
        freqs, ages, norms = (
            (None, *self.thresholds.freqs),
            (None, *self.thresholds.ages),
            (None, *self.thresholds.norms),
        )
        for i, j, k in itertools.product(range(len(freqs)), range(len(ages)), range(len(norms))):
            lookups = None if self.lookups is None else round(all_weights - float(kept_weights[i, j, k]))
            found.append(Cut(freqs[i], ages[j], norms[k], all_rows - int(kept_rows[i, j, k]), lookups))
        return found


def survey_rows(
    table: TableReader,
    *,
    norms: tuple[float, ...] = (),
    counts: Callable[[Array], Array] | None = None,
    free_zeros: bool = False,
    now: int | None = None,
    version_unit: VersionUnit | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Read a table once, and say what thresholds would cut.

    Args:
        table: the table.
        norms: the thresholds on norms, the smallest first.
        counts: tells how often keys [n] are looked up, int64 [n]; their frequencies count if None.
        free_zeros: a lookup of a row of zeros loses nothing: a missing key gives zeros.
        now: what ages are counted from, Unix seconds or a step; the largest version if None.
        version_unit: what versions count, where the files do not say.
        progress: called as rows are read.
    """
    schema = table.schema
    unit = version_unit or schema.version_unit
    aged = schema.has_versions and unit != "unknown"
    ages_from, ages = _ages(table, unit, now) if aged else (None, ())
    thresholds = Thresholds(FREQUENCIES if schema.has_freqs else (), ages, norms)
    shape = (len(thresholds.freqs) + 1, len(ages) + 1, len(norms) + 1)
    cells, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float64)
    counted = counts is not None or schema.has_freqs
    zeros = not_finite = done = lookups = never = of_zeros = 0
    largest = 0.0
    waited, rare = dict.fromkeys(FREQUENCIES[1:], 0), dict.fromkeys(FREQUENCIES[1:], 0)
    columns = Columns(values=True, freqs=schema.has_freqs, versions=bool(ages))
    for chunk in table.chunks(columns):
        assert chunk.values is not None
        floats = as_floats(chunk.values)
        bad = rows_not_finite(chunk.values)
        not_finite += int(np.count_nonzero(bad))
        size = np.abs(floats[~bad]).max(initial=0)
        largest = max(largest, float(size))
        zero = ~bad & ~floats.any(axis=1)
        zeros += int(np.count_nonzero(zero))
        at = [np.zeros(len(chunk), np.intp) for _ in range(3)]
        weight = np.zeros(len(chunk), np.int64)
        if chunk.freqs is not None:
            freqs = np.maximum(chunk.freqs.astype(np.int64), 0)
            at[0] = np.searchsorted(np.array(thresholds.freqs), freqs, side="right")
            weight = freqs
        if counts is not None:
            weight = counts(chunk.keys)
        if chunk.versions is not None:
            at[1] = _age_cells(chunk.versions, unit, ages_from or 0, ages)
        if norms:
            lengths = row_norms(chunk.values, "l2").astype(np.float64)
            lengths[bad] = np.inf  # as clipping has it: no small row
            at[2] = np.searchsorted(np.array(norms), lengths, side="right")
        if counted:
            lookups += int(weight.sum())
            of_zeros += int(weight[zero].sum())
            never += int(np.count_nonzero(weight == 0))
            for least in waited:
                waited[least] += int(np.maximum(np.minimum(weight, least) - 1, 0).sum())
                rare[least] += int(np.count_nonzero(weight < least))
        if free_zeros:
            weight = np.where(zero, 0, weight)
        flat = np.ravel_multi_index(tuple(at), shape)
        cells += np.bincount(flat, minlength=cells.size).reshape(shape)
        weights += np.bincount(flat, weight, minlength=cells.size).reshape(shape)
        done += len(chunk)
        if progress:
            progress(schema.name, done, schema.rows)
    return Survey(
        done,
        lookups if counted else None,
        never,
        zeros,
        of_zeros,
        not_finite,
        largest,
        thresholds,
        ages_from,
        waited if counted else {},
        rare if counted else {},
        cells,
        weights,
    )


def _at_least(cells: Array) -> Array:
    """Return the sums over all cells that are not before each one, along any axis."""
    for axis in range(cells.ndim):
        cells = np.flip(np.cumsum(np.flip(cells, axis), axis), axis)
    return cells


def _ages(table: TableReader, unit: VersionUnit, now: int | None) -> tuple[int | None, tuple[int, ...]]:
    """Return what ages are counted from, and the ages that some rows have and others not, the largest first."""
    largest, smallest = 0, None
    for chunk in table.chunks(Columns(versions=True), rows=1 << 18):
        versions = chunk.versions
        assert versions is not None
        dated = versions[versions > 0]
        if len(dated):
            largest = max(largest, int(dated.max()))
            smallest = min(int(dated.min()), int(dated.min()) if smallest is None else smallest)
    if smallest is None:
        return None, ()
    if unit == "steps":
        start = largest if now is None else now
        span = start - smallest
        exponents = range(int(math.log10(span)) + 1 if span > 0 else 0)
        steps = sorted({digit * 10**exponent for exponent in exponents for digit in (1, 2, 5)}, reverse=True)
        return start, tuple(step for step in steps if step < span)[:_MOST_STEPS]
    per = _DAY if unit == "days" else 1
    start = largest * per if now is None else now
    return start, tuple(day * _DAY for day in reversed(DAYS) if day * _DAY < start - smallest * per)


def _age_cells(versions: Array, unit: VersionUnit, now: int, ages: Sequence[int]) -> Array:
    """Return of how many ages, the largest first, a row passes all: clipping by one of these keeps it."""
    dated = versions.astype(np.int64)
    per = _DAY if unit == "days" else 1
    oldest = np.array([(now - age) // per for age in ages], np.int64)  # rises, as ages fall
    passed = np.searchsorted(oldest, dated, side="right")
    if unit != "steps":
        passed[dated == 0] = len(ages)  # which is no time
    return passed


def sample_of(table: TableReader, rows: int = _SAMPLE, size: int = 64 << 20) -> Array:
    """Return the values [n, dim] of rows from all over a table: all where there are no more than
    `rows`, of `size` bytes."""
    of_row = max(1, table.dim * table.value_dtype.itemsize)
    most = max(_RUNS, min(rows, size // of_row))
    if table.rows <= most:
        values = [chunk.values for chunk in table.chunks(Columns(values=True)) if chunk.values is not None]
        return np.concatenate([np.empty((0, table.dim), table.value_dtype), *values])
    run = most // _RUNS
    starts = np.linspace(0, table.rows - run, _RUNS).astype(np.int64)
    found = table.take((starts[:, None] + np.arange(run)).reshape(-1), Columns(values=True)).values
    assert found is not None
    return found


def norm_thresholds(values: Array) -> tuple[float, ...]:
    """Return norms of two digits at percentiles of those of rows [n, dim]; zeros and what is not finite
    do not count."""
    norms: Any = row_norms(values, "l2").astype(np.float64)
    norms = norms[np.isfinite(norms) & (norms > 0)]
    if not len(norms):
        return ()
    return tuple(sorted({_two_digits(float(norm)) for norm in np.percentile(norms, NORM_PERCENTILES)}))


def _two_digits(number: float) -> float:
    """Return a number rounded to two digits.

    >>> _two_digits(0.012345), _two_digits(456.0)
    (0.012, 460.0)
    """
    return float(f"{number:.1e}")
