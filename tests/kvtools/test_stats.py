from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvtools.clip import Clip
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import TableReader
from kvtools.dialects.schema import SlotSchema, TableSchema
from kvtools.key_join import count_repeated
from kvtools.stats import (
    NORM_THRESHOLDS,
    ColumnStats,
    StatsTask,
    TableStats,
    clip_savings,
    count_shard,
    describe_stats,
    each_table_stats,
    table_stats,
)

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


class ArrayTable(TableReader):
    """A table of arrays, a list of chunks per part."""

    def __init__(self, schema: TableSchema, parts: list[Chunk]) -> None:
        self.schema = schema
        self.arrays = parts

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        whole = self.arrays[part]
        for start in range(0, len(whole), rows):
            yield whole.take(slice(start, start + rows))

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        raise NotImplementedError


def check_column(column: ColumnStats, values: np.ndarray) -> None:
    """Compare with plain NumPy over the whole array."""
    wide = values.astype(np.float64)
    finite = np.isfinite(wide).all(axis=1)
    assert column.rows == len(values)
    assert column.nan_rows == np.count_nonzero(np.isnan(wide).any(axis=1))
    assert column.inf_rows == np.count_nonzero(np.isinf(wide).any(axis=1))
    assert column.nan_elements == np.count_nonzero(np.isnan(wide))
    assert column.inf_elements == np.count_nonzero(np.isinf(wide))
    assert column.zero_rows == np.count_nonzero((wide == 0).all(axis=1))
    tiny = float(ml_dtypes.finfo(values.dtype).tiny)
    denormal = (np.abs(wide) < tiny) & (wide != 0)
    assert column.denormal_elements == np.count_nonzero(denormal)
    assert column.denormal_rows == np.count_nonzero(denormal.any(axis=1))
    assert column.abs.rows == column.l2.rows == np.count_nonzero(finite)
    numbers = wide[np.isfinite(wide)]
    assert column.elements == len(numbers)
    if len(numbers):
        assert column.smallest == numbers.min() and column.largest == numbers.max()
        scale = np.abs(numbers).max()
        assert column.mean == pytest.approx(numbers.mean(), rel=1e-5, abs=1e-5 * scale)
        assert column.std == pytest.approx(numbers.std(), rel=1e-3, abs=1e-6 * scale)
    for threshold in NORM_THRESHOLDS:
        # What `kvtools clip` would cut is what it says, to the row.
        for norm, histogram in (("abs", column.abs), ("l2", column.l2)):
            cut = ~Clip(norm, threshold).keep(values[finite])  # type: ignore[arg-type]
            assert histogram.below(threshold) == np.count_nonzero(cut)
    if finite.any():
        assert column.l2.largest == pytest.approx(np.linalg.norm(wide[finite], axis=1).max(), rel=1e-5)
        assert column.abs.largest == np.abs(wide[finite]).max()


def spread_values(rng: np.random.Generator, rows: int, dim: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Normal numbers of many sizes, with zero rows, exact thresholds, NaN, infinities and denormal numbers."""
    values = rng.normal(size=(rows, dim)) * 10.0 ** rng.uniform(-10, 2, (rows, 1))
    values[rng.random(rows) < 0.1] = 0
    for row in range(0, rows, 7):
        values[row] = 0
        values[row, rng.integers(dim)] = rng.choice([1e-8, -1e-5, 1e-3, 1.0, -1.0, 0.1])
    with np.errstate(over="ignore", under="ignore"):
        values = values.astype(dtype)
    values[rng.random(values.shape) < 0.002] = np.nan
    values[rng.random(values.shape) < 0.002] = -np.inf
    values[rng.random(values.shape) < 0.01] = ml_dtypes.finfo(dtype).smallest_subnormal
    values[rng.random(values.shape) < 0.01] = ml_dtypes.finfo(dtype).tiny
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 2, 17, 64])
def test_column_against_numpy(dtype: str, dim: int) -> None:
    values = spread_values(np.random.default_rng(dim), 3000, dim, DTYPES[dtype])
    column, merged = ColumnStats(), ColumnStats()
    for piece in np.array_split(values, 11):
        column.add(piece)
        other = ColumnStats()
        other.add(piece)
        merged.merge(other)
    check_column(column, values)
    check_column(merged, values)
    whole = ColumnStats()
    whole.add(values)
    assert np.array_equal(whole.abs.counts, merged.abs.counts)
    assert np.array_equal(whole.l2.counts, merged.l2.counts)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None)
@given(data=st.data())
def test_any_values(dtype: str, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(0, 6), st.integers(1, 4)))
    word = {2: np.uint16, 4: np.uint32, 8: np.uint64}[DTYPES[dtype].itemsize]
    values = data.draw(hnp.arrays(word, shape)).view(DTYPES[dtype])
    # What overflows while NumPy's own norm is taken is not what is tested here.
    with np.errstate(all="ignore"):
        values = np.where(np.abs(values.astype(np.float64)) > 1e150, DTYPES[dtype].type(1), values)
        column = ColumnStats()
        column.add(values)
        check_column(column, values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_at_the_ends_of_the_range(dtype: str) -> None:
    largest, tiny = np.finfo(dtype).max, np.finfo(dtype).tiny
    values = np.array([[largest, -largest], [tiny, tiny], [1e-30, 0], [1e18, 1e18]], dtype)
    with np.errstate(all="raise", under="ignore"):
        column = ColumnStats()
        column.add(values)
    assert column.l2.rows == 4 and column.zero_rows == 0
    assert column.smallest == -largest and column.largest == largest
    assert column.l2.below(1e-8) == 2


def test_moments_of_numbers_whose_sums_and_squares_overflow() -> None:
    values = np.array([[1e308, -1e308], [1e308, 1e308], [1.5e308, 0]])
    column, merged = ColumnStats(), ColumnStats()
    with np.errstate(all="raise", under="ignore"):
        column.add(values)
        for row in values:
            other = ColumnStats()
            other.add(row[None])
            merged.merge(other)
    for some in (column, merged):
        assert some.mean == pytest.approx((values / 10).mean() * 10)
        assert some.std == pytest.approx((values / 1e200).std() * 1e200)
        assert float(some.abs.total / 3) == pytest.approx(np.abs(values / 10).max(axis=1).mean() * 10)
        assert float(some.l2.total / 3) == pytest.approx(np.linalg.norm(values / 1e300, axis=1).mean() * 1e300)


def test_moments_of_numbers_far_from_zero() -> None:
    """The difference of two large sums would have nothing left of a small deviation."""
    values = (1000 + 1e-3 * np.random.default_rng(0).normal(size=(5000, 16))).astype(np.float32)
    column = ColumnStats()
    for piece in np.array_split(values, 5):
        column.add(piece)
    assert column.std == pytest.approx(values.astype(np.float64).std(), rel=1e-6)


def test_integer_values_and_views() -> None:
    values = np.arange(-20, 20, dtype=np.int32).reshape(10, 4)
    column = ColumnStats()
    column.add(values)
    assert (column.smallest, column.largest, column.mean, column.denormal_elements) == (-20, 19, -0.5, 0)
    wide = np.random.default_rng(0).normal(size=(10, 8)).astype(np.float32)
    column = ColumnStats()
    column.add(wide[:, ::2])
    check_column(column, wide[:, ::2])


@pytest.mark.parametrize("memory", [1 << 30, 20_000])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint64"])
def test_repeated_keys_are_counted_in_bounded_memory(memory: int, dtype: str) -> None:
    limits = np.iinfo(dtype)
    keys = np.random.default_rng(0).integers(0, 4000, 5000).astype(dtype)
    keys[[0, 10, 20]] = limits.max
    keys[[1, 11]] = limits.min
    expected = len(keys) - len(np.unique(keys))
    assert count_repeated(iter(np.array_split(keys, 9)), len(keys), memory=memory) == expected
    assert count_repeated(iter([]), 0, memory=memory) == 0


def array_table(
    rng: np.random.Generator, part_rows: tuple[int, ...], *, freqs: bool = True, versions: bool = True
) -> tuple[ArrayTable, Chunk]:
    rows, dim = sum(part_rows), 8
    whole = Chunk(
        keys=rng.integers(-50, rows, rows),
        values=spread_values(rng, rows, dim, np.dtype(np.float32)),
        slots={"m": spread_values(rng, rows, 3, np.dtype(np.float16))},
        freqs=rng.zipf(1.5, rows).clip(0, 2**32 - 1).astype(np.uint32) if freqs else None,
        versions=rng.integers(1_700_000_000, 1_710_000_000, rows).astype(np.uint32) if versions else None,
    )
    ends = np.cumsum(part_rows)
    parts = [whole.take(slice(end - n, end)) for end, n in zip(ends, part_rows, strict=True)]
    schema = TableSchema(
        name="emb",
        dialect="test",
        key_dtype="int64",
        value_dtype="float32",
        dim=dim,
        part_rows=part_rows,
        slots=(SlotSchema("m", 3, "float16"),),
        freq_dtype="uint32" if freqs else None,
        version_dtype="uint32" if versions else None,
        version_unit="seconds",
    )
    return ArrayTable(schema, parts), whole


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("memory", [1 << 30, 5000])
def test_table_against_numpy(workers: int, memory: int) -> None:
    table, whole = array_table(np.random.default_rng(5), (1500, 0, 2500))
    calls: list[tuple[str, int, int]] = []
    stats = table_stats([table], workers=workers, memory=memory, progress=lambda *call: calls.append(call))["emb"]
    assert stats.rows == 4000 and calls[-1] == ("emb", 4000, 4000)
    assert stats.repeated_keys == 4000 - len(np.unique(whole.keys))
    assert whole.values is not None and whole.freqs is not None and whole.versions is not None
    check_column(stats.values, whole.values)
    check_column(stats.slots["m"], whole.slots["m"])
    savings = clip_savings(table.schema, stats)
    assert savings["freq"][-1]["rows"] == 4000
    for saving in savings["freq"]:
        assert saving["rows"] == np.count_nonzero(whole.freqs < saving["threshold"])
        assert saving["bytes"] == saving["rows"] * (8 + 8 * 4 + 3 * 2 + 4 + 4)
    for saving in savings["l2"]:
        cut = ~Clip("l2", saving["threshold"]).keep(whole.values)
        assert saving["rows"] == np.count_nonzero(cut)
    assert stats.versions is not None
    for low, high, rows in stats.versions.bars(stats.versions.readable_width(10)):
        assert rows == np.count_nonzero((whole.versions >= low) & (whole.versions < high))


def test_many_small_parts_are_counted_together() -> None:
    table, whole = array_table(np.random.default_rng(10), (5,) * 600)
    merged: list[TableStats] = []
    merge = TableStats.merge

    def counted(stats: TableStats, other: TableStats) -> None:
        merged.append(other)
        merge(stats, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableStats, "merge", counted)
        stats = table_stats([table], workers=2)["emb"]
    assert len(merged) == 2 and stats.rows == 3000  # the keys that come again, and the rows
    assert whole.values is not None
    check_column(stats.values, whole.values)


def test_statistics_of_a_table_come_before_all_are_read() -> None:
    tables = [array_table(np.random.default_rng(11), (3,))[0] for _ in range(1000)]
    read: set[str] = set()
    for number, table in enumerate(tables):
        table.schema = dataclasses.replace(table.schema, name=f"emb{number}")
    found = each_table_stats(tables, workers=2, progress=lambda name, *_: read.add(name))
    table, stats = next(found)
    assert (table.schema.name, stats.rows) == ("emb0", 3) and len(read) < 500
    assert [table.schema.name for table, _ in found] == [f"emb{number}" for number in range(1, 1000)]


def test_description_is_json_and_always_has_the_same_fields() -> None:
    rng = np.random.default_rng(6)
    full = array_table(rng, (300, 200))[0]
    bare = array_table(rng, (50,), freqs=False, versions=False)[0]
    empty = array_table(rng, (0,))[0]
    described = []
    for table in (full, bare, empty):
        stats = table_stats([table])["emb"]
        described.append(json.loads(json.dumps(describe_stats(table.schema, stats), allow_nan=False)))
    fields = (
        "name dialect key_dtype value_dtype dim rows bytes row_bytes repeated_keys"
        " values clip freqs versions parts slots"
    )
    column = (
        "min max mean std zero_rows nan_rows inf_rows denormal_rows nan_elements inf_elements denormal_elements abs l2"
    )
    for record in described:
        assert list(record) == fields.split()
        assert list(record["values"]) == column.split()
        assert list(record["values"]["l2"]) == ["rows", "min", "max", "mean", "median", "p90", "p99", "histogram"]
        assert list(record["slots"][0]) == ["name", "width", "dtype", *column.split()]
        assert list(record["clip"]) == ["abs", "l2", "freq"]
        assert list(record["parts"]) == ["count", "rows", "max_over_mean", "coefficient_of_variation"]
    assert list(described[0]["freqs"]) == (
        ["total", "min", "max", "mean", "top_1_percent_share", "top_10_percent_share", "zipf_exponent", "histogram"]
    )
    assert list(described[0]["versions"]) == [
        "unit",
        "unset",
        "oldest",
        "newest",
        "median_age",
        "p90_age",
        "width",
        "histogram",
    ]
    assert described[1]["freqs"] is None and described[1]["versions"] is None and described[1]["clip"]["freq"] == []
    assert described[2]["values"]["min"] is None and described[2]["values"]["l2"]["histogram"] == []


def test_empty_statistics_merge() -> None:
    table, _ = array_table(np.random.default_rng(7), (100,))
    stats = table_stats([table])["emb"]
    total = TableStats.empty(table.schema)
    total.merge(stats)
    total.merge(TableStats.empty(table.schema))
    assert describe_stats(table.schema, total) == describe_stats(table.schema, stats)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.chdir("/")  # Ray would prefer the sources here to the installed package
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_ray_gives_the_same(
    ray_cluster: None, save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=500)
    checkpoint = open_checkpoint(save_plain(tmp_path / "a", table_tensors(sample, parts=3)))
    tables = checkpoint.select([])
    here, there = table_stats(tables, workers=2), table_stats(tables, workers=2, engine="ray")
    assert here.keys() == there.keys()
    for table in tables:
        name = table.schema.name
        assert describe_stats(table.schema, here[name]) == describe_stats(table.schema, there[name])


def test_threads_within_a_part_give_the_same_each_time() -> None:
    table, whole = array_table(np.random.default_rng(8), (4000,))
    assert whole.values is not None
    tasks = [StatsTask(table, range(1), 1 << 20, threads) for threads in (1, 3, 3, 3)]
    table.chunk_rows = lambda columns: 100  # type: ignore[method-assign]
    alone, *threaded = [describe_stats(table.schema, count_shard(task)) for task in tasks]
    assert threaded[0] == threaded[1] == threaded[2]
    assert alone["clip"] == threaded[0]["clip"] and alone["freqs"] == threaded[0]["freqs"]
    check_column(count_shard(tasks[1]).values, whole.values)


def test_an_error_in_a_thread_ends_the_work() -> None:
    table, whole = array_table(np.random.default_rng(9), (4000,))
    table.chunk_rows = lambda columns: 100  # type: ignore[method-assign]
    table.arrays[0] = dataclasses.replace(whole, slots={"other": whole.slots["m"]})
    with pytest.raises(KeyError, match="other"):
        count_shard(StatsTask(table, range(1), 1 << 20, threads=3))
