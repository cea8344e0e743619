"""Thresholds of `kvtools clip` that are percentiles of the data: of frequency, of norm and of age.

Each comes with what it cuts, exactly, and as a command line and a policy file have it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

import numpy as np

from kvtools.decimal_histogram import DecimalHistogram
from kvtools.dialects.schema import VersionUnit
from kvtools.histogram import FrequencyHistogram, VersionHistogram

Criterion = Literal["freq", "norm", "age"]

PERCENTILES = (1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 75, 80, 85, 90, 95, 98, 99)

_DAY = 86_400
_UNITS = ((7 * _DAY, "d", 7), (_DAY, "d", 1), (3600, "h", 1), (60, "m", 1), (1, "s", 1))
_YEAR_9999 = 253_402_300_800
_MOST = 10**18
"""Ages and moments of more digits are none that `kvtools clip` takes."""


@dataclass(frozen=True)
class Threshold:
    """One value of a criterion, and the rows that it cuts by itself.

    A row is cut whose frequency is less than `value`, whose norm is, or whose version is (but version 0 where versions
    are times). `options` are those of `kvtools clip`, `policy` the lines of a policy file that say the same. `lookups`
    is the sum of the frequencies of the rows that are cut, where it is known.
    """

    criterion: Criterion
    value: float
    label: str
    options: tuple[str, ...]
    policy: tuple[str, ...]
    rows: int
    lookups: int | None = None


def freq_thresholds(freqs: FrequencyHistogram, percentiles: Sequence[float] = PERCENTILES) -> list[Threshold]:
    """Return thresholds of frequency, ascending.

    >>> freqs = FrequencyHistogram()
    >>> freqs.add(np.array([1, 1, 2, 9]))
    >>> [(one.options, one.rows, one.lookups) for one in freq_thresholds(freqs)]
    [(('--min-freq', '2'), 2, 2), (('--min-freq', '3'), 3, 4)]
    """
    return [
        Threshold("freq", value, f"{value:,}", ("--min-freq", str(value)), (f"min-freq = {value}",), rows, lookups)
        for value, rows, lookups in freqs.thresholds([percentile / 100 for percentile in percentiles])
    ]


def norm_thresholds(
    norms: DecimalHistogram, percentiles: Sequence[float] = PERCENTILES, *, norm: Literal["l2", "abs"] = "l2"
) -> list[Threshold]:
    """Return thresholds of the Euclidean norm, or of the largest absolute value ("abs"), ascending.

    >>> norms = DecimalHistogram()
    >>> norms.add(np.linspace(1, 2, 1000))
    >>> [(one.options, one.policy, one.rows) for one in norm_thresholds(norms, [50])]
    [(('--l2', '1.5'), ('clip-l2 = 1.5',), 500)]
    """
    option = "--l2" if norm == "l2" else "--max-abs"
    return [
        Threshold("norm", value, f"{value:.9g}", (option, repr(value)), (f"clip-{norm} = {value!r}",), rows)
        for value, rows in norms.thresholds([percentile / 100 for percentile in percentiles])
        if rows < norms.rows
    ]


def age_thresholds(versions: VersionHistogram, percentiles: Sequence[float] = PERCENTILES) -> list[Threshold]:
    """Return thresholds of age, the highest first, so that each cuts more than the one before; none of unknown units.

    Ages are counted from just after the newest version, which the options name: they cut the same whenever they are
    used.

    >>> versions = VersionHistogram("days")
    >>> versions.add(np.arange(20000, 20100))
    >>> [(one.options, one.rows) for one in age_thresholds(versions, [10])]
    [(('--older-than', '90d', '--now', '2025-01-12'), 10)]
    """
    unit = versions.unit
    if unit == "unknown" or versions.oldest is None or versions.newest is None or versions.oldest < 0:
        return []
    width = versions.width
    now = (versions.newest // width + 1) * width
    if now * (_DAY if unit == "days" else 1) >= _MOST:
        return []
    undated = versions.unset if unit == "steps" else 0
    below = undated + np.concatenate([[0], np.cumsum(versions.counts)])
    ages = [now - (versions.start + i * width) for i in range(len(below))]
    rows = versions.rows + undated
    found: dict[int, Threshold] = {}
    for percentile in percentiles:
        share = percentile / 100
        off = np.where((below > 0) & (below < rows), np.abs(below - share * rows), np.inf)
        near = np.flatnonzero(off <= max(0.02 * min(share, 1 - share) * rows, float(off.min())))
        if not math.isfinite(float(off.min())):
            return []
        at = max(near.tolist(), key=lambda i: (_roundness(ages[i], unit), -off[i]))
        age, moment = _age_text(ages[at], unit), _moment_text(now, unit)
        quoted = age if unit == "steps" else f'"{age}"'
        quoted_moment = moment if moment.isdigit() else f'"{moment}"'
        found.setdefault(
            int(below[at]),
            Threshold(
                "age",
                now - ages[at],
                f"{ages[at]:,} steps" if unit == "steps" else age,
                ("--older-than", age, "--now", moment),
                (f"older-than = {quoted}", f"now = {quoted_moment}"),
                int(below[at]),
            ),
        )
    return [found[count] for count in sorted(found)]


def _roundness(age: int, unit: VersionUnit) -> int:
    """Tell how much better a number is to read than others.

    >>> _roundness(3600, "seconds") > _roundness(3660, "seconds"), _roundness(5000, "steps") > _roundness(5100, "steps")
    (True, True)
    """
    if unit == "seconds":
        return -next(i for i, (size, _, _) in enumerate(_UNITS) if age % size == 0)
    if unit == "days":
        return int(age % 7 == 0)
    return -len(str(age).rstrip("0"))


def _age_text(age: int, unit: VersionUnit) -> str:
    """Write an age as `--older-than` takes it.

    >>> _age_text(86400, "seconds"), _age_text(5400, "seconds"), _age_text(3, "days"), _age_text(500, "steps")
    ('1d', '90m', '3d', '500')
    """
    if unit == "steps":
        return str(age)
    if unit == "days":
        return f"{age}d"
    size, letter, times = next(one for one in _UNITS if age % one[0] == 0)
    return f"{age // size * times}{letter}"


def _moment_text(moment: int, unit: VersionUnit) -> str:
    """Write a moment as `--now` takes it.

    >>> _moment_text(1700000000, "seconds"), _moment_text(20000, "days"), _moment_text(700, "steps")
    ('2023-11-14T22:13:20', '2024-10-04', '700')
    """
    if unit == "steps":
        return str(moment)
    seconds = moment * (_DAY if unit == "days" else 1)
    if seconds >= _YEAR_9999:
        return str(seconds)
    text = datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    return text.removesuffix("T00:00:00")
