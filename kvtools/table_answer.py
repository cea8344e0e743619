"""What a table is like, and what to do about it, in sentences: what a report begins with.

Each piece of advice is a command, and what it says of rows and bytes is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtools.dialects.chunk import KEYS_AND_VALUES
from kvtools.dialects.schema import TableSchema, row_bytes
from kvtools.explore.command import ClipSource, clip_command, shell_quoted, table_option
from kvtools.short_numbers import short_number
from kvtools.stats import TableStats, part_skew
from kvtools.thresholds import Threshold, age_thresholds, freq_thresholds

LOOKUPS_TO_LOSE = 0.01
"""Advice to cut by frequency costs no larger share of a table's lookups than this."""

_WORTH = 0.05
"""Nor does it save a smaller share of its rows than this."""
_MOST = 0.8
"""A threshold of age that cuts more than this tells of a table that is no longer trained, not of rows to leave out."""
_LONG = {"seconds": 90 * 86_400, "days": 90}
_UNEVEN = 1.5
_SMALLEST = 1e-20
"""A row of numbers below this is as good as one of zeros."""


@dataclass(frozen=True)
class Advice:
    """Something to do: why, in a sentence; the command that does it; the bytes that it saves, by which threshold."""

    text: str
    command: str
    bytes: int = 0
    threshold: Threshold | None = None


def describe_table(schema: TableSchema, stats: TableStats) -> list[str]:
    """Say what a table is like, in sentences.

    >>> describe_table(TableSchema("emb", "npz", "int64", "float32", 4, (0,)), TableStats.empty(
    ...     TableSchema("emb", "npz", "int64", "float32", 4, (0,))))
    ['It has no rows.']
    """
    if not stats.rows:
        return ["It has no rows."]
    told = []
    freqs, norms, versions = stats.freqs, stats.fine.get("l2"), stats.versions
    if freqs is not None and freqs.total:
        rare = freq_thresholds(freqs, [50])
        told.append(f"The top 1% of keys get {_share(freqs.top_share(0.01) or 0.0)} of all lookups")
        if rare and rare[0].lookups is not None:
            told[-1] += (
                f"; the {_share(rare[0].rows / stats.rows)} of rows that were seen fewer than {rare[0].label} times"
                f" get {_share(rare[0].lookups / freqs.total)}"
            )
        told[-1] += "."
    if norms is not None and norms.rows:
        low, middle, high = (norms.quantile(share) or 0.0 for share in (0.05, 0.5, 0.95))
        told.append(f"The median norm is {middle:.3g}; nine of ten rows are between {low:.3g} and {high:.3g}.")
    if versions is not None and versions.rows:
        half, most = versions.age_of(0.5) or 0, versions.age_of(0.9) or 0
        told.append(
            f"Half of the rows were written in the last {_span(half, versions.unit)} before the newest,"
            f" nine of ten in the last {_span(most, versions.unit)}."
        )
    if schema.slots:
        beside = 1 - row_bytes(schema, KEYS_AND_VALUES) / row_bytes(schema)
        told.append(f"Optimizer slots and counters are {_share(beside)} of its bytes.")
    return told


def advise_table(schema: TableSchema, stats: TableStats, path: str) -> list[Advice]:
    """Say what to do about a table of the checkpoint at `path`: what is wrong first, then what saves most."""
    source = ClipSource.of(path, schema.dialect)
    option = table_option(schema.name)
    target = shell_quoted(source.output)
    wrong = []
    bad = _faults(stats)
    if bad:
        place = f"{shell_quoted(source.path)} {target} {option}"
        wrong.append(
            Advice(f"It has {', '.join(bad)}: repair says what it would do.", f"kvtools repair {place} --dry-run")
        )
    saving = [
        _cut(schema, threshold, source, _sentence(threshold, stats))
        for threshold in (_rare(stats), _small(stats), _old(stats))
        if threshold is not None
    ]
    saving.sort(key=lambda advice: -advice.bytes)
    uneven = part_skew(schema)["max_over_mean"]
    if schema.parts > 1 and uneven > _UNEVEN and stats.rows >= 100 * schema.parts:
        saving.append(
            Advice(
                f"Its largest part has {uneven:.2f} times the rows of the mean: whoever holds it is the slowest.",
                f"kvtools reshard {shell_quoted(source.path)} {target} --parts {schema.parts} {option}",
            )
        )
    return [*wrong, *saving]


def _cut(schema: TableSchema, threshold: Threshold, source: ClipSource, text: str) -> Advice:
    size = threshold.rows * row_bytes(schema)
    return Advice(
        f"{text}: {short_number(size, binary=True)} saved.",
        clip_command(source, [(schema.name, [threshold])], source.output),
        size,
        threshold,
    )


def _rare(stats: TableStats) -> Threshold | None:
    """Return the highest threshold of frequency that costs few lookups and saves rows that are worth it."""
    if stats.freqs is None or not stats.freqs.total:
        return None
    lost = LOOKUPS_TO_LOSE * stats.freqs.total
    cheap = [one for one in freq_thresholds(stats.freqs) if one.lookups is not None and one.lookups <= lost]
    return cheap[-1] if cheap and cheap[-1].rows >= _WORTH * stats.rows else None


def _small(stats: TableStats) -> Threshold | None:
    """Return the threshold that cuts rows of zeros, and of what is as good as that, if they are many."""
    largest = stats.fine.get("abs")
    if largest is None or largest.under < _WORTH * stats.rows or largest.under == stats.rows:
        return None
    policy = (f"clip-abs = {_SMALLEST!r}",)
    return Threshold("norm", _SMALLEST, f"{_SMALLEST:g}", ("--max-abs", repr(_SMALLEST)), policy, largest.under)


def _old(stats: TableStats) -> Threshold | None:
    """Return a threshold of age that cuts rows last written long before the newest, if they are many."""
    versions = stats.versions
    if versions is None or versions.unit not in _LONG:
        return None
    newest = versions.newest or 0
    long = [one for one in age_thresholds(versions) if newest - one.value >= _LONG[versions.unit]]
    old = [one for one in long if _WORTH * stats.rows <= one.rows <= _MOST * stats.rows]
    return old[-1] if old else None


def _sentence(threshold: Threshold, stats: TableStats) -> str:
    rows = f"{threshold.rows:,} rows ({_share(threshold.rows / stats.rows)})"
    if threshold.criterion == "freq":
        freqs = stats.freqs
        assert freqs is not None and threshold.lookups is not None
        lost = _share(threshold.lookups / freqs.total)
        return f"Leave out {rows} that were seen fewer than {threshold.label} times, and get {lost} of lookups"
    if threshold.criterion == "age":
        return f"Leave out {rows} that were last written more than {threshold.label} before the newest"
    return f"Leave out {rows} of zeros, or of numbers below {threshold.label}"


def _faults(stats: TableStats) -> list[str]:
    slots = sum(slot.nan_rows + slot.inf_rows for slot in stats.slots.values())
    found: Sequence[tuple[int, str]] = (
        (stats.values.nan_rows, "rows with NaN"),
        (stats.values.inf_rows, "rows with infinities"),
        (slots, "slot rows with NaN or infinity"),
        (stats.repeated_keys, "rows of keys that come again"),
    )
    return [f"{count:,} {name}" for count, name in found if count]


def _span(amount: int, unit: str) -> str:
    """Write an age.

    >>> _span(7200, "seconds"), _span(3, "days"), _span(1200, "steps")
    ('2.0 hours', '3 days', '1,200 steps')
    """
    if unit == "seconds":
        for size, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
            if amount >= 2 * size or (name == "minutes" and amount >= 60):
                return f"{amount / size:,.1f} {name}"
    return f"{amount:,} {'versions' if unit == 'unknown' else unit}"


def _share(part: float) -> str:
    """Write a share; one that is not 0 is not shown as 0.

    >>> _share(0.4142), _share(1e-6), _share(0.0)
    ('41%', '<0.1%', '0%')
    """
    percent = 100 * part
    return "<0.1%" if 0 < percent < 0.1 else ">99.9%" if 99.9 < percent < 100 else f"{percent:.2g}%"
