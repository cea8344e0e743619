"""What the rows of a table are like: norms, frequencies, ages, bad numbers, and what leaving rows out would save.

The parts of a table are counted one by one, each in one pass and in bounded memory, on threads or on a Ray cluster;
what they give adds up to the table's statistics (`TableStats.merge`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtools._row_stats import row_stats
from kvtools.decimal_histogram import DecimalHistogram
from kvtools.dialects.chunk import ALL_COLUMNS, KEYS, Chunk
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.schema import TableSchema
from kvtools.engine import Engine, default_workers, run_all
from kvtools.histogram import FrequencyHistogram, NormHistogram, VersionHistogram, near_an_edge, norm_bins
from kvtools.json_numbers import json_numbers
from kvtools.key_join import count_repeated
from kvtools.quantized_rows import stored_row_bytes
from kvtools.row_norms import row_norms

Array = npt.NDArray[Any]

NORM_THRESHOLDS = tuple(float(f"1e{decade}") for decade in range(-8, 1))
"""The thresholds of which `clip_savings` tells what they would cut; each is an edge of the norms' bins."""

_KEY_ROWS = 1 << 18
_RUN_ROWS = 1 << 15
"""Of parts with fewer rows several are one shard of work."""
_COUNTS = (
    "rows",
    "zero_rows",
    "nan_rows",
    "inf_rows",
    "denormal_rows",
    "nan_elements",
    "inf_elements",
    "denormal_elements",
)
_FLOAT_BITS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "float16": (np.uint16, 10),
    "bfloat16": (np.uint16, 7),
    "float32": (np.uint32, 23),
    "float64": (np.uint64, 52),
}
"""The unsigned type of the same size, and how many bits of it are the mantissa."""


_CHUNKS = 8
"""How many usual chunks are counted at once: much is done per chunk in Python, where only one thread is at a time."""


@dataclass
class ColumnStats:
    """What the rows of one column, values or a slot, are like.

    A row with a NaN or an infinity has no norm; it is counted in `nan_rows` or `inf_rows` (or both). `smallest`,
    `largest`, `mean` and `squares` (the sum of squared deviations from the mean) are those of the `elements` finite
    numbers; the squares of float64 may be more than it holds.
    """

    rows: int = 0
    abs: NormHistogram = field(default_factory=NormHistogram)
    l2: NormHistogram = field(default_factory=NormHistogram)
    zero_rows: int = 0
    nan_rows: int = 0
    inf_rows: int = 0
    denormal_rows: int = 0
    nan_elements: int = 0
    inf_elements: int = 0
    denormal_elements: int = 0
    elements: int = 0
    smallest: float = math.inf
    largest: float = -math.inf
    mean: float = 0.0
    squares: np.longdouble = field(default_factory=np.longdouble)

    @property
    def std(self) -> float:
        """The standard deviation of the finite numbers; 0 if there are none."""
        return float(np.sqrt(self.squares / self.elements)) if self.elements else 0.0

    def add(self, values: Array) -> None:
        """Count rows [n, width] of any real type.

        >>> column = ColumnStats()
        >>> column.add(np.array([[3.0, -4.0], [0.0, 0.0], [np.nan, 1.0]]))
        >>> column.zero_rows, column.nan_rows, column.l2.largest, column.mean
        (1, 1, 5.0, 0.0)
        """
        self.rows += len(values)
        if not values.size:
            return
        if values.dtype.name not in _FLOAT_BITS:
            values = values.astype(np.float64)
        values = np.ascontiguousarray(values)
        if values.dtype == np.float32:
            largest, squares, total = self._measure(values)
        else:
            largest, squares, total = self._largest_of_rows(values), None, None
        numbers = values.astype(np.float32) if values.dtype.itemsize < 4 else values
        finite = np.isfinite(largest)
        if not finite.all():
            self._count_non_finite(numbers[~finite])
            self._add_moments(numbers[np.isfinite(numbers)].astype(np.float64))
            numbers, largest = numbers[finite], largest[finite]
            squares = None
        else:
            squares = self._add_plain_moments(numbers, float(largest.max()), squares, total)
        if len(numbers):
            self.zero_rows += len(largest) - int(np.count_nonzero(largest))
            self.abs.add(largest)
            self._add_l2(numbers, largest, squares)

    def merge(self, other: ColumnStats) -> None:
        """Count what another counted, too."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.abs.merge(other.abs)
        self.l2.merge(other.l2)
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)
        self._merge_moments(other.elements, other.mean, other.squares)

    def _measure(self, values: Array) -> tuple[Array, Array, float]:
        """Return each row's largest absolute value and sum of squares, float32 [n], and the sum of all numbers.

        The same as `_largest_of_rows` and the sums of `_add_plain_moments`, in one pass.
        """
        largest, squares = np.empty(len(values), np.float32), np.empty(len(values), np.float32)
        total, low = row_stats(values, largest, squares)
        if low < (1 << 24) - 1:
            self._count_denormals(values.view(np.uint32) << np.uint32(1), np.uint32(1 << 24))
        return largest, squares, total

    def _largest_of_rows(self, values: Array) -> Array:
        """Return the largest absolute value of each row, float32 or float64 [n], and count the denormal numbers.

        Without their sign, floats are ordered as their bits are, and integers are quicker to compare than floats, of
        which each might be a NaN. A row with a NaN gives NaN, since NaN has the largest bits.
        """
        word, mantissa = _FLOAT_BITS[values.dtype.name]
        bits = values.view(word) << word(1)
        top = np.maximum.reduceat(bits.ravel(), np.arange(0, bits.size, bits.shape[1])) >> word(1)
        # A denormal number has bits in its mantissa alone.
        first_normal = word(1 << (mantissa + 1))
        if bits.min() < first_normal:
            self._count_denormals(bits, first_normal)
        largest: Array = top.view(values.dtype)
        return largest.astype(np.float32) if values.dtype.itemsize < 4 else largest

    def _count_denormals(self, bits: Array, first_normal: Any) -> None:
        denormal = (bits > 0) & (bits < first_normal)
        self.denormal_elements += int(np.count_nonzero(denormal))
        self.denormal_rows += int(np.count_nonzero(denormal.any(axis=1)))

    def _count_non_finite(self, rows: Array) -> None:
        nan, inf = np.isnan(rows), np.isinf(rows)
        self.nan_elements += int(np.count_nonzero(nan))
        self.inf_elements += int(np.count_nonzero(inf))
        self.nan_rows += int(np.count_nonzero(nan.any(axis=1)))
        self.inf_rows += int(np.count_nonzero(inf.any(axis=1)))

    def _add_plain_moments(
        self, numbers: Array, largest: float, squares: Array | None, total: float | None
    ) -> Array | None:
        """Count finite numbers [n, width]; return each row's sum of squares in their own type, if that is of use.

        `squares` [n] and the numbers' `total` are given where they are known.
        """
        if largest > 1e15 or 0 < largest < 1e-15:  # squares or sums may over- or underflow float32
            self._add_moments(numbers.astype(np.float64).ravel())
            return None
        if squares is None or total is None:
            squares = np.asarray(np.einsum("ij,ij->i", numbers, numbers))
            total = float(np.einsum("ij->i", numbers).sum(dtype=np.float64))
        mean = total / numbers.size
        of_squares = float(squares.sum(dtype=np.float64))
        deviations = of_squares - numbers.size * mean * mean
        if (
            deviations < 1e-3 * of_squares
        ):  # nearly all the same: too little is left of the difference of two large numbers
            self._add_moments(numbers.astype(np.float64).ravel())
        else:
            if largest > min(-self.smallest, self.largest):  # else no number is beyond those that were seen
                self.smallest = min(self.smallest, float(numbers.min()))
                self.largest = max(self.largest, float(numbers.max()))
            self._merge_moments(numbers.size, mean, deviations)
        return squares

    def _add_moments(self, numbers: Array) -> None:
        if not len(numbers):
            return
        self.smallest = min(self.smallest, float(numbers.min()))
        self.largest = max(self.largest, float(numbers.max()))
        if max(-self.smallest, self.largest) > 1e150:  # sums or squares may overflow float64
            numbers = numbers.astype(np.longdouble)
        mean = numbers.mean()
        self._merge_moments(len(numbers), float(mean), np.square(numbers - mean).sum())

    def _merge_moments(self, elements: int, mean: float, squares: np.floating[Any] | float) -> None:
        """Add the moments of other numbers (Chan, Golub and LeVeque, https://doi.org/10.2307/2683386)."""
        if not elements:
            return
        total = self.elements + elements
        apart = np.longdouble(mean) - self.mean
        self.mean = float(self.mean + apart * elements / total)
        self.squares += squares + apart * apart * self.elements * elements / total
        self.elements = total

    def _add_l2(self, numbers: Array, largest: Array, squares: Array | None) -> None:
        """Count the Euclidean norms of finite rows [n, width].

        The sums of squares in the rows' own type are good enough for most rows. Those that may belong to another bin,
        or whose squares under- or overflow, are summed once more as `kvtools.clip` sums them.
        """
        if squares is None:
            norms = row_norms(numbers, "l2")
            self.l2.add(norms)
            return
        info = np.finfo(numbers.dtype)
        norms = np.sqrt(squares, dtype=np.float64)
        bins = norm_bins(norms)
        unsure = near_an_edge(norms, bins, numbers.shape[1] * float(info.eps))
        unsure |= (squares < float(info.tiny) * 1e8) & (largest > 0)
        again = np.flatnonzero(unsure)
        if len(again):
            norms[again] = row_norms(numbers[again], "l2")
            bins[again] = norm_bins(norms[again])
        self.l2.add(norms, bins)


@dataclass
class TableStats:
    """What the rows of a table are like; `slots` by name, `freqs` and `versions` None where there is no such column.

    `repeated_keys` are the rows whose key stands again in a later row. `fine` has the norms of the values, "l2" and
    "abs", in bins as fine as they need, where they were asked for.
    """

    rows: int
    values: ColumnStats
    slots: dict[str, ColumnStats]
    freqs: FrequencyHistogram | None
    versions: VersionHistogram | None
    repeated_keys: int = 0
    fine: dict[Literal["l2", "abs"], DecimalHistogram] = field(default_factory=dict)

    @staticmethod
    def empty(schema: TableSchema, *, fine: bool = False) -> TableStats:
        """Return the statistics of no rows."""
        return TableStats(
            rows=0,
            values=ColumnStats(),
            slots={slot.name: ColumnStats() for slot in schema.slots},
            freqs=FrequencyHistogram() if schema.has_freqs else None,
            versions=VersionHistogram(schema.version_unit) if schema.has_versions else None,
            fine={"l2": DecimalHistogram(), "abs": DecimalHistogram()} if fine else {},
        )

    def add(self, chunk: Chunk) -> None:
        """Count the rows of a chunk with all columns."""
        self.rows += len(chunk)
        if chunk.values is not None:
            self.values.add(chunk.values)
            for norm, norms in self.fine.items():
                norms.add(row_norms(chunk.values, norm))
        for name, slot in chunk.slots.items():
            self.slots[name].add(slot)
        if self.freqs is not None and chunk.freqs is not None:
            self.freqs.add(chunk.freqs)
        if self.versions is not None and chunk.versions is not None:
            self.versions.add(chunk.versions)

    def merge(self, other: TableStats) -> None:
        """Count what another counted of the same table, too."""
        self.rows += other.rows
        self.repeated_keys += other.repeated_keys
        self.values.merge(other.values)
        for name, slot in other.slots.items():
            self.slots[name].merge(slot)
        for norm, norms in other.fine.items():
            self.fine[norm].merge(norms)
        if self.freqs is not None and other.freqs is not None:
            self.freqs.merge(other.freqs)
        if self.versions is not None and other.versions is not None:
            self.versions.merge(other.versions)


@dataclass(frozen=True)
class StatsTask:
    """One shard of work: parts of a table to count, or (`parts` None) the whole table's keys to compare."""

    reader: TableReader
    parts: range | None
    memory: int
    threads: int = 1
    fine: bool = False


def count_shard(task: StatsTask, progress: Progress | None = None) -> TableStats:
    """Do a shard of work; return what it found of its table."""
    table = task.reader
    stats = TableStats.empty(table.schema, fine=task.fine)
    if task.parts is None:
        # The keys' checksums are checked where the parts are counted.
        keys = (chunk.keys for chunk in table.chunks(KEYS, rows=_KEY_ROWS, verify=False))
        stats.repeated_keys = count_repeated(keys, table.rows, memory=task.memory)
        return stats
    # Each of n threads counts every n-th chunk by itself, so that sums do not depend on which of them is quicker.
    counted = [stats, *(TableStats.empty(table.schema, fine=task.fine) for _ in range(1, task.threads))]
    at_work: list[Future[None] | None] = [None] * task.threads
    rows = _CHUNKS * table.chunk_rows(ALL_COLUMNS)
    pool = ThreadPoolExecutor(task.threads, thread_name_prefix="kvtools-stats") if task.threads > 1 else None
    with pool or contextlib.nullcontext():
        chunks = (chunk for part in task.parts for chunk in table.chunks(ALL_COLUMNS, rows=rows, part=part))
        for number, chunk in enumerate(chunks):
            turn = number % task.threads
            before = at_work[turn]
            if before is not None:
                before.result()
            if pool is None:
                stats.add(chunk)
            else:
                at_work[turn] = pool.submit(counted[turn].add, chunk)
            if progress:
                progress(table.schema.name, len(chunk), table.rows)
        for last in filter(None, at_work):
            last.result()
    for other in counted[1:]:
        stats.merge(other)
    return stats


def table_stats(
    tables: Sequence[TableReader],
    *,
    fine: bool = False,
    memory: int = DEFAULT_MEMORY,
    workers: int | None = None,
    engine: Engine = "local",
    progress: Progress | None = None,
) -> dict[str, TableStats]:
    """Return the statistics of each of `tables`, by name; see `each_table_stats`.

    Example:
        ```python
        checkpoint = kvtools.open("model.ckpt-100")
        stats = table_stats(checkpoint.select([]))["user_emb"]
        print(stats.values.zero_rows, stats.values.l2.below(1e-6))
        ```
    """
    found = each_table_stats(tables, fine=fine, memory=memory, workers=workers, engine=engine, progress=progress)
    return {table.schema.name: stats for table, stats in found}


def each_table_stats(
    tables: Sequence[TableReader],
    *,
    fine: bool = False,
    memory: int = DEFAULT_MEMORY,
    workers: int | None = None,
    engine: Engine = "local",
    progress: Progress | None = None,
) -> Iterator[tuple[TableReader, TableStats]]:
    """Yield each of `tables` with its statistics; reads every byte of them once, and the keys twice.

    The statistics of a table take some 200 KB: whoever has thousands of them keeps what they say, and not them.

    Args:
        tables: any readers, with different names.
        fine: count norms in fine bins, too: see `TableStats.fine`.
        memory: bytes to hold at most while repeated keys are looked for; more spills to disk.
        workers: parts at once; the processors there are if None.
        engine: where the parts are counted; see `kvtools.engine`.
        progress: called as rows are read.

    Raises:
        CorruptFileError: the data is damaged.
    """
    processors = workers or default_workers()
    at_once = max(1, min(processors, len(tables)))
    parts = sum(table.schema.parts for table in tables)
    threads = max(1, processors // max(parts, 1)) if engine == "local" else 1
    shards = [(None, *_runs_of_parts(table.schema)) for table in tables]
    tasks = [
        StatsTask(table, run, memory // at_once, threads, fine)
        for table, runs in zip(tables, shards, strict=True)
        for run in runs
    ]
    done: dict[str, int] = {}
    lock = threading.Lock()

    def advance(name: str, rows: int, total: int) -> None:
        with lock:
            done[name] = done.get(name, 0) + rows
            if progress:
                progress(name, done[name], total)

    function = functools.partial(count_shard, progress=advance) if engine == "local" else count_shard
    results = run_all(function, tasks, workers=workers, engine=engine)
    for table, runs in zip(tables, shards, strict=True):
        schema = table.schema
        total = TableStats.empty(schema, fine=fine)
        for stats in itertools.islice(results, len(runs)):
            total.merge(stats)
            if engine != "local":
                advance(schema.name, stats.rows, schema.rows)
        yield table, total


def _runs_of_parts(schema: TableSchema) -> Iterator[range]:
    """Yield runs of parts to count together: a large part alone, small ones until they are worth the histograms.

    >>> list(_runs_of_parts(TableSchema("emb", "tfplugin", "int64", "float32", 4, (10, 0, 100_000, 10))))
    [range(0, 3), range(3, 4)]
    """
    first = rows = 0
    for part, more in enumerate(schema.part_rows):
        rows += more
        if rows >= _RUN_ROWS or part == schema.parts - 1:
            yield range(first, part + 1)
            first, rows = part + 1, 0


def clip_savings(schema: TableSchema, stats: TableStats) -> dict[str, list[dict[str, Any]]]:
    """Return what each threshold would cut: lists "abs", "l2" and "freq" of {"threshold", "rows", "bytes"}.

    As `kvtools.clip` cuts: rows whose norm is below the threshold, none with a NaN or an infinity. The thresholds are
    `NORM_THRESHOLDS`; for "freq", powers of two until all rows are cut (an empty list where there are no frequencies).
    """
    width = stored_row_bytes(schema)

    def saving(threshold: float, rows: int) -> dict[str, Any]:
        return {"threshold": threshold, "rows": rows, "bytes": rows * width}

    savings = {
        "abs": [saving(threshold, stats.values.abs.below(threshold)) for threshold in NORM_THRESHOLDS],
        "l2": [saving(threshold, stats.values.l2.below(threshold)) for threshold in NORM_THRESHOLDS],
        "freq": [],
    }
    if stats.freqs is not None:
        for octave in range(64):
            rows = stats.freqs.below(1 << octave)
            savings["freq"].append(saving(1 << octave, rows))
            if rows == stats.freqs.rows:
                break
    return savings


def part_skew(schema: TableSchema) -> dict[str, float]:
    """Return how uneven a table's parts are: the largest over the mean, and the standard deviation over the mean.

    >>> part_skew(TableSchema("emb", "tfplugin", "int64", "float32", 4, (30, 10)))
    {'max_over_mean': 1.5, 'coefficient_of_variation': 0.5}
    """
    mean = schema.rows / schema.parts if schema.parts else 0.0
    if not mean:
        return {"max_over_mean": 1.0, "coefficient_of_variation": 0.0}
    spread = math.sqrt(sum((rows - mean) ** 2 for rows in schema.part_rows) / schema.parts)
    return {"max_over_mean": max(schema.part_rows) / mean, "coefficient_of_variation": spread / mean}


def describe_stats(schema: TableSchema, stats: TableStats) -> dict[str, Any]:
    """Return a table's statistics as `kvtools stats --json` prints them: numbers, and null where there are none."""
    values = _describe_column(stats.values)
    return {
        "name": schema.name,
        "dialect": schema.dialect,
        "key_dtype": schema.key_dtype,
        "value_dtype": schema.value_dtype,
        "dim": schema.dim,
        "rows": stats.rows,
        "bytes": schema.bytes,
        "row_bytes": stored_row_bytes(schema),
        "repeated_keys": stats.repeated_keys,
        "values": values,
        "clip": clip_savings(schema, stats),
        "freqs": None if stats.freqs is None else _describe_freqs(stats.freqs),
        "versions": None if stats.versions is None else _describe_versions(stats.versions),
        "parts": {"count": schema.parts, "rows": list(schema.part_rows), **part_skew(schema)},
        "slots": [
            {
                "name": slot.name,
                "width": slot.width,
                "dtype": slot.dtype,
                **_describe_column(stats.slots[slot.name]),
            }
            for slot in schema.slots
        ],
    }


def _describe_column(column: ColumnStats) -> dict[str, Any]:
    some = column.elements > 0
    return {
        "min": _number(column.smallest) if some else None,
        "max": _number(column.largest) if some else None,
        "mean": _number(column.mean) if some else None,
        "std": _number(column.std) if some else None,
        "zero_rows": column.zero_rows,
        "nan_rows": column.nan_rows,
        "inf_rows": column.inf_rows,
        "denormal_rows": column.denormal_rows,
        "nan_elements": column.nan_elements,
        "inf_elements": column.inf_elements,
        "denormal_elements": column.denormal_elements,
        "abs": _describe_norms(column.abs),
        "l2": _describe_norms(column.l2),
    }


def _describe_norms(norms: NormHistogram) -> dict[str, Any]:
    rows = norms.rows
    return {
        "rows": rows,
        "min": _number(norms.smallest) if rows else None,
        "max": _number(norms.largest) if rows else None,
        "mean": _number(float(norms.total / rows)) if rows else None,
        "median": _optional(norms.quantile(0.5)),
        "p90": _optional(norms.quantile(0.9)),
        "p99": _optional(norms.quantile(0.99)),
        "histogram": _bars(norms.bars()),
    }


def _describe_freqs(freqs: FrequencyHistogram) -> dict[str, Any]:
    rows = freqs.rows
    return {
        "total": freqs.total,
        "min": int(freqs.smallest) if rows else None,
        "max": int(freqs.largest) if rows else None,
        "mean": freqs.total / rows if rows else None,
        "top_1_percent_share": freqs.top_share(0.01),
        "top_10_percent_share": freqs.top_share(0.1),
        "zipf_exponent": freqs.zipf_exponent(),
        "histogram": _bars(freqs.bars()),
    }


def _describe_versions(versions: VersionHistogram) -> dict[str, Any]:
    return {
        "unit": versions.unit,
        "unset": versions.unset,
        "oldest": versions.oldest,
        "newest": versions.newest,
        "median_age": versions.age_of(0.5),
        "p90_age": versions.age_of(0.9),
        "width": versions.width,
        "histogram": [bar for bar in _bars(versions.bars()) if bar["rows"]],
    }


def _bars(bars: Sequence[tuple[float, float, int]]) -> list[dict[str, Any]]:
    return [{"from": _number(low), "to": _number(high), "rows": rows} for low, high, rows in bars]


def _optional(value: float | None) -> Any:
    return None if value is None else _number(value)


def _number(value: float) -> Any:
    return value if isinstance(value, int) else json_numbers(np.array([value]))[0]
