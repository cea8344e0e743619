"""What changed between two tables, against a plain dictionary of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools import table_from_arrays
from kvtools.array_table import ArrayTable as TableOfArrays
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.schema import ExtraSchema, SlotSchema, TableSchema, VersionUnit
from kvtools.diff import compare_checkpoints, compare_tables
from kvtools.errors import CorruptFileError, UnknownTableError, UsageError
from kvtools.migrate import write_tables


class ArrayTable(TableReader):
    """A table of plain arrays, cut into parts."""

    def __init__(
        self,
        keys: Any,
        values: Any,
        parts: int = 1,
        slots: dict[str, Any] | None = None,
        freqs: Any = None,
        versions: Any = None,
        extras: dict[str, Any] | None = None,
    ) -> None:
        self.columns = Chunk(np.asarray(keys), np.asarray(values), slots or {}, freqs, versions)
        self.extras = extras or {}
        self.ends = np.linspace(0, len(keys), parts + 1).astype(int)
        self.schema = TableSchema(
            "emb",
            "arrays",
            self.columns.keys.dtype.name,
            self.columns.values.dtype.name,
            self.columns.values.shape[1],
            tuple(np.diff(self.ends).tolist()),
            tuple(SlotSchema(name, rows.shape[1], rows.dtype.name) for name, rows in self.columns.slots.items()),
            None if freqs is None else freqs.dtype.name,
            None if versions is None else versions.dtype.name,
            extras=tuple(ExtraSchema(name, array.dtype.name, array.shape) for name, array in self.extras.items()),
        )

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        for start in range(self.ends[part], self.ends[part + 1], rows):
            stop = min(start + rows, self.ends[part + 1])
            yield dataclasses.replace(self.take(np.arange(start, stop), columns), part=part)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        chunk = self.columns.take(rows)
        return Chunk(
            chunk.keys,
            chunk.values if columns.values else None,
            chunk.slots if columns.slots else {},
            chunk.freqs if columns.freqs else None,
            chunk.versions if columns.versions else None,
        )

    def extra(self, name: str) -> Array:
        array: Array = self.extras[name]
        return array


def table(keys: Any, seed: int = 0, dim: int = 3, dtype: Any = np.float32, parts: int = 1) -> ArrayTable:
    rng = np.random.default_rng(seed)
    keys = np.asarray(keys, np.int64)
    rows = rng.normal(size=(len(keys), dim)).astype(dtype)
    return ArrayTable(keys, rows, parts, {"m": rows * 2}, np.arange(len(keys), dtype=np.uint32))


def shuffled(a: ArrayTable, seed: int = 1, parts: int = 1) -> ArrayTable:
    c = a.columns.take(np.random.default_rng(seed).permutation(len(a.columns)))
    return ArrayTable(c.keys, c.values, parts, dict(c.slots), c.freqs, c.versions)


KEYS = [0, -1, 5, 2**63 - 1, -(2**63), 7, 8]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_same_rows_in_any_order_and_number_of_parts(dtype: Any, parts: int) -> None:
    a = table(KEYS, dtype=dtype)
    for b in (a, table(KEYS, dtype=dtype, parts=parts), shuffled(a, parts=parts)):
        diff = compare_tables(a, b)
        assert diff.same and diff.unchanged == 7 and diff.rows_a == diff.rows_b == 7
        assert {name: column.changed for name, column in diff.columns.items()} == {"values": 0, "slot:m": 0, "freqs": 0}


@pytest.mark.parametrize("reorder", [False, True])
def test_numbers_of_a_change(reorder: bool) -> None:
    a = ArrayTable([4, 5, 6], np.array([[3, 4], [1, 1], [0, 0]], np.float32), slots={"v": np.ones((3, 1), np.float16)})
    b = ArrayTable([4, 5, 6], np.array([[3, 1], [1, 1], [0, 4]], np.float32), slots={"v": np.ones((3, 1), np.float16)})
    diff = compare_tables(a, shuffled(b, 3) if reorder else b, top=5)
    assert (diff.changed, diff.unchanged, diff.added, diff.removed) == (2, 1, 0, 0)
    assert (diff.max_change, diff.mean_change) == (4, 7 / 4)
    values = diff.columns["values"]
    assert (values.changed, values.l2_change, values.relative_change, values.non_finite) == (2, 5, 1, 0)
    assert diff.columns["slot:v"].changed == 0
    assert [(m.key, m.l2_change, m.l2_before, m.l2_after) for m in diff.movers] == [
        (6, 4, 0, 4),
        (4, 3, 5, 10**0.5),
    ]


def test_tables_without_rows() -> None:
    none, some = table([]), table([1, 2])
    assert compare_tables(none, none).same
    added = compare_tables(none, some, top=3)
    assert (added.added, added.added_keys, added.movers) == (2, (1, 2), ())
    removed = compare_tables(some, none)
    assert (removed.removed, removed.removed_keys, removed.unchanged) == (2, (1, 2), 0)


def test_nan_is_like_nan_and_minus_zero_is_not_zero() -> None:
    other_nan = np.array([0x7FC00001, 0xFFC00000], np.uint32).view(np.float32)
    a = ArrayTable([1, 2], np.stack([other_nan, np.zeros(2, np.float32)]))
    b = ArrayTable([1, 2], np.stack([np.full(2, np.nan, np.float32), np.zeros(2, np.float32)]))
    assert compare_tables(a, b).same
    c = ArrayTable([1, 2], np.stack([np.full(2, np.nan, np.float32), -np.zeros(2, np.float32)]))
    diff = compare_tables(a, c)
    assert (diff.changed, diff.max_change) == (1, 0)
    assert compare_tables(a, c, atol=1e-9).same


def test_numbers_that_became_nan_or_infinite_are_counted() -> None:
    a = ArrayTable([1, 2], np.array([[1, 2], [np.inf, 4]], np.float32))
    b = ArrayTable([1, 2], np.array([[np.nan, 3], [np.inf, 4]], np.float32))
    for options in ({}, {"rtol": 10.0}):
        diff = compare_tables(a, b, **options)
        assert (diff.changed, diff.max_change, diff.columns["values"].non_finite) == (1, 1, 1)
    c = ArrayTable([1, 2], np.array([[1, 2], [-np.inf, 4]], np.float32))
    assert compare_tables(a, c, rtol=10.0).changed == 1


def test_tolerance() -> None:
    a = ArrayTable([1, 2], np.array([[1.0], [100.0]], np.float32), freqs=np.array([10, 20]))
    b = ArrayTable([1, 2], np.array([[1.05], [105.0]], np.float32), freqs=np.array([10, 20]))
    assert compare_tables(a, b).changed == 2
    assert compare_tables(a, b, atol=0.1).changed == 1
    assert compare_tables(a, b, rtol=0.06).same
    counted = ArrayTable([1, 2], b.columns.values, freqs=np.array([10, 21]))
    assert compare_tables(a, counted, rtol=0.06).columns["freqs"].changed == 1
    with pytest.raises(UsageError):
        compare_tables(a, b, atol=float("nan"))


def test_types_that_hold_the_same_numbers() -> None:
    half = np.array([[1.5, -0.25], [3, 4]], ml_dtypes.bfloat16)
    a = ArrayTable(np.array([1, 2], np.int32), half, freqs=np.array([1, 2], np.uint32))
    b = ArrayTable(np.array([1, 2], np.int64), half.astype(np.float32), parts=2, freqs=np.array([1, 2], np.int64))
    diff = compare_tables(a, b)
    assert diff.same
    assert diff.schema == (
        "keys: int32 -> int64",
        "values: bfloat16 -> float32",
        "parts: 1 -> 2",
        "freqs: uint32 -> int64",
    )
    counters = ArrayTable(a.columns.keys, half, freqs=np.array([1, -1], np.int64))
    unsigned = ArrayTable(a.columns.keys, half, freqs=np.array([1, 2**64 - 1], np.uint64))
    assert compare_tables(counters, unsigned).columns["freqs"].changed == 1


@pytest.mark.parametrize("reorder", [False, True])
def test_signed_and_unsigned_keys_with_the_same_bits_are_different_keys(reorder: bool) -> None:
    a = ArrayTable(np.array([-1, 5], np.int64), np.ones((2, 1)))
    b = ArrayTable(np.array([2**64 - 1, 5], np.uint64)[:: -1 if reorder else 1], np.ones((2, 1)))
    diff = compare_tables(a, b)
    assert (diff.unchanged, diff.removed_keys, diff.added_keys) == (1, (-1,), (2**64 - 1,))


def test_columns_of_one_table_only() -> None:
    a = ArrayTable([1], np.ones((1, 2)), slots={"m": np.ones((1, 2)), "w": np.ones((1, 1))}, versions=np.array([3]))
    b = ArrayTable([1], np.ones((1, 2)), slots={"v": np.ones((1, 2)), "w": np.ones((1, 2))}, freqs=np.array([3]))
    diff = compare_tables(a, b)
    assert diff.same_rows and not diff.same
    assert diff.only_in_a == ("slot:m", "slot:w [1]", "versions")
    assert diff.only_in_b == ("slot:v", "slot:w [2]", "freqs")
    wide = compare_tables(a, ArrayTable([1], np.ones((1, 3))))
    assert "values [2]" in wide.only_in_a and wide.unchanged == 1


def test_arrays_beside_the_rows() -> None:
    def with_extra(extras: dict[str, Any]) -> ArrayTable:
        return ArrayTable([1], np.ones((1, 2)), extras=extras)

    initial = {"initial_values": np.eye(2)}
    assert compare_tables(with_extra(initial), with_extra({"initial_values": np.eye(2)})).same
    assert compare_tables(with_extra(initial), with_extra({"initial_values": np.ones((2, 2))})).extras == (
        "initial_values",
    )
    assert compare_tables(with_extra(initial), with_extra({})).extras == ("initial_values",)
    assert compare_tables(with_extra({"blacklist": np.empty(0)}), with_extra({})).same


def bounded(keys: Any, scores: dict[int, int], orders: dict[int, int], parts: int) -> ArrayTable:
    """A table with a capacity: `scores` and `orders` by key, in the rows' order, part after part."""
    keys = np.asarray(keys, np.int64)
    a = ArrayTable(keys, (keys % 7)[:, None] * np.ones((1, 2)), parts)
    extras = {
        f"{name}_{part}": np.array([by_key[int(key)] for key in keys[a.ends[part] : a.ends[part + 1]]], np.uint64)
        for name, by_key in (("eviction_scores", scores), ("eviction_orders", orders))
        for part in range(parts)
    }
    return ArrayTable(a.columns.keys, a.columns.values, parts, extras=extras)


@pytest.mark.parametrize("memory", [1 << 10, 1 << 30], ids=["spilling", "in memory"])
@pytest.mark.parametrize("parts", [1, 3])
def test_eviction_scores_and_orders_are_compared_by_key(parts: int, memory: int) -> None:
    rng = np.random.default_rng(3)
    keys = rng.permutation(2000) - 1000
    scores = {int(key): int(score) for key, score in zip(keys, rng.integers(0, 2**63, len(keys)), strict=True)}
    orders = {int(key): number + 1 for number, key in enumerate(keys)}
    a = bounded(keys, scores, orders, parts)

    def compared(keys: Any, scores: dict[int, int], orders: dict[int, int], parts: int = parts) -> Any:
        return compare_tables(a, bounded(keys, scores, orders, parts), memory=memory)

    # The same by key, in any order of rows.
    assert compared(keys, scores, orders).same and compared(rng.permutation(keys), scores, orders).same
    # Two keys that traded scores: the same numbers in the same places, where these rows trade places, too.
    x, y = int(keys[3]), int(keys[-5])
    traded = {**scores, x: scores[y], y: scores[x]}
    swapped = keys.copy()
    swapped[[3, -5]] = y, x
    for where in (keys, swapped):
        diff = compared(where, traded, orders)
        assert (diff.changed, diff.unchanged, diff.extras, diff.same) == (2, len(keys) - 2, (), False)
        assert diff.columns["eviction_scores"].changed == 2 and diff.columns["eviction_orders"].changed == 0
        assert diff.columns["eviction_scores"].max_change == abs(float(scores[x]) - float(scores[y]))
    assert compared(keys, scores, {**orders, x: 5000}).columns["eviction_orders"].changed == 1
    # Keys of one side alone are no change of a row.
    diff = compared(keys[:-1], scores, orders)
    assert (diff.removed, diff.changed) == (1, 0)
    # Orders are of a part: with another number of parts they are not compared, and scores are.
    assert compared(keys, scores, dict.fromkeys(orders, 1), parts + 1).same
    assert compared(keys, traded, orders, parts + 1).changed == 2


def test_scores_of_one_table_alone_are_a_column_of_it() -> None:
    a = bounded([3, 4], {3: 1, 4: 2}, {3: 1, 4: 2}, 2)
    without = ArrayTable([3, 4], a.columns.values, 2)
    diff = compare_tables(a, without)
    assert diff.only_in_a == ("eviction_scores", "eviction_orders") and diff.same_rows and not diff.same
    assert compare_tables(without, a).only_in_b == diff.only_in_a


def test_movers_are_the_furthest_of_all_parts() -> None:
    a = ArrayTable(np.arange(100), np.zeros((100, 1)), parts=3)
    b = ArrayTable(np.arange(100), (np.arange(100) * 7 % 100)[:, None] * 1.0, parts=3)
    movers = compare_tables(a, b, top=4).movers
    assert [(m.key, m.l2_change) for m in movers] == [(57, 99), (14, 98), (71, 97), (28, 96)]


def test_progress_ends_at_the_rows_of_a() -> None:
    a = table(KEYS, parts=2)
    for b in (a, shuffled(a)):
        rows: list[int] = []
        compare_tables(a, b, progress=lambda _, done, total, rows=rows: rows.append(total - done))
        assert rows[-1] == 0


ROWS = st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, -1, 2**63 - 1]), st.sampled_from([0, 1, 2])), max_size=12)


@settings(deadline=None)
@given(rows_a=ROWS, rows_b=ROWS, parts=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_repeated_keys_are_matched_one_by_one(
    rows_a: list[tuple[int, int]], rows_b: list[tuple[int, int]], parts: tuple[int, int]
) -> None:
    def build(rows: list[tuple[int, int]], parts: int) -> tuple[ArrayTable, dict[int, list[int]]]:
        by_key: dict[int, list[int]] = {}
        for key, value in rows:
            by_key.setdefault(key, []).append(value)
        values = np.array([value for _, value in rows], np.float32).reshape(-1, 1)
        return ArrayTable(np.array([key for key, _ in rows], np.int64), values, parts), by_key

    (a, of_a), (b, of_b) = build(rows_a, parts[0]), build(rows_b, parts[1])
    changed = unchanged = 0
    for key, before in of_a.items():
        for x, y in zip(before, of_b.get(key, []), strict=False):
            changed += x != y
            unchanged += x == y
    diff = compare_tables(a, b)
    assert (diff.changed, diff.unchanged) == (changed, unchanged)
    assert diff.removed == len(rows_a) - changed - unchanged
    assert diff.added == len(rows_b) - changed - unchanged
    assert diff.columns["values"].changed == changed


def test_little_memory_gives_the_same_answer() -> None:
    rng = np.random.default_rng(5)
    a = ArrayTable(rng.permutation(20_000), rng.normal(size=(20_000, 4)).astype(np.float32), parts=3)
    keys = rng.permutation(25_000)[:20_000]
    b = ArrayTable(keys, rng.normal(size=(20_000, 4)).astype(np.float32), parts=2)
    small = compare_tables(a, b, memory=1 << 16, top=3)
    plenty = compare_tables(a, b, top=3)
    assert (small.added, small.removed, small.changed) == (plenty.added, plenty.removed, plenty.changed)
    assert small.movers == plenty.movers and small.added_keys == plenty.added_keys
    assert small.mean_change == pytest.approx(plenty.mean_change)
    assert small.added == len(set(keys.tolist()) - set(range(20_000))) > 0


def save(save_plain: Any, prefix: Path, **tensors: Any) -> Checkpoint:
    return open_checkpoint(save_plain(prefix, tensors))


def test_dense_variables(save_plain: Any, tmp_path: Path) -> None:
    ones = np.ones((3, 2), np.float32)
    a = save(save_plain, tmp_path / "a", w=ones, gone=ones, n=np.arange(3), s="x", t="x", shape=ones)
    b = save(save_plain, tmp_path / "b", w=ones * 3, new=ones, n=np.arange(3), s="y", t="x", shape=ones[:2])
    diff = compare_checkpoints(a, b)
    assert not diff.same
    assert (diff.variables_only_in_a, diff.variables_only_in_b) == (("gone",), ("new",))
    changed = {variable.name: variable for variable in diff.variables if not variable.same}
    assert sorted(changed) == ["s", "shape", "w"]
    assert changed["w"].changed == 6 and changed["w"].numbers is not None and changed["w"].numbers.max_change == 2
    assert changed["s"].numbers is None and changed["shape"].shape_b == (2, 2)
    assert compare_checkpoints(a, a).same and not compare_checkpoints(a, b, rtol=10).same


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_variables_are_compared_in_both_parts(dtype: Any, save_plain: Any, tmp_path: Path) -> None:
    numbers = np.array([1 + 2j, -3j, complex(np.nan, 1), 4], dtype)
    later = numbers + np.array([0, 2j, 0, 0.5 + 0.25j], dtype)
    a, b = save(save_plain, tmp_path / "a", c=numbers), save(save_plain, tmp_path / "b", c=later)
    (found,) = compare_checkpoints(a, b).variables
    assert found.changed == 2 and found.numbers is not None
    assert (found.numbers.max_change, found.numbers.non_finite) == (2, 0)
    assert found.numbers.l2_change == pytest.approx(np.linalg.norm([2, 0.5, 0.25]))
    assert [compare_checkpoints(a, b, atol=atol).variables[0].changed for atol in (0.1, 1, 2)] == [2, 1, 0]
    assert compare_checkpoints(a, a).same and compare_checkpoints(a, a, atol=1).same


def test_complex_and_other_numbers_are_compared_by_value(save_plain: Any, tmp_path: Path) -> None:
    c = save(save_plain, tmp_path / "c", c=np.array([1.5, 2], np.complex64))
    for dtype in (np.complex128, np.float32, np.float64):
        assert compare_checkpoints(c, save(save_plain, tmp_path / "d", c=np.array([1.5, 2], dtype))).same
        other = save(save_plain, tmp_path / "d", c=np.array([1.5, 3], dtype))
        assert [one.changed for one in compare_checkpoints(c, other).variables] == [1]


def test_tables_of_other_names(save_plain: Any, make_sample: Any, table_tensors: Any, tmp_path: Path) -> None:
    a = save(save_plain, tmp_path / "a", **table_tensors(make_sample("x=1")), **table_tensors(make_sample("gone")))
    b = save(save_plain, tmp_path / "b", **table_tensors(make_sample("y=2"), parts=3), w=np.ones(1))
    diff = compare_checkpoints(a, b)
    assert diff.tables == () and (diff.tables_only_in_a, diff.tables_only_in_b) == (("gone", "x=1"), ("y=2",))
    renamed = compare_checkpoints(a, b, tables=["x=1=y=2"])
    assert renamed.same and [(t.name_a, t.name_b, t.unchanged) for t in renamed.tables] == [("x=1", "y=2", 50)]
    assert compare_checkpoints(a, a, tables=["x=1"]).same
    with pytest.raises(UnknownTableError):
        compare_checkpoints(a, b, tables=["x=1"])


def test_damaged_rows_are_no_difference(sample_path: Path) -> None:
    whole = open_checkpoint(Path(__file__).parent.parent / "data" / "sample")
    data = next(sample_path.glob("*.data-*"))
    data.write_bytes(data.read_bytes()[:40] + b"\xff" + data.read_bytes()[41:])
    with pytest.raises(CorruptFileError):
        compare_checkpoints(whole, open_checkpoint(sample_path))


def test_lists_of_keys_are_compared_by_key(tmp_path: Path) -> None:
    """Parts own keys, so another number of parts has them in another order."""
    waiting, counts = np.arange(10, 40), np.arange(30, dtype=np.uint32)

    def table(counts: np.ndarray) -> ArrayTable:
        extras = {"filtered_keys": waiting, "filtered_freqs": counts}
        return ArrayTable(np.arange(9), np.ones((9, 2), np.float32), extras=extras)

    def reader(path: Path, source: TableReader, parts: int) -> TableReader:
        assert write_tables([source], path, "tfplugin", parts=parts).lossless
        return open_checkpoint(path).table("emb")

    three = reader(tmp_path / "3", table(counts), 3)
    seven = reader(tmp_path / "7", three, 7)
    assert seven.extra("filtered_keys").tolist() != three.extra("filtered_keys").tolist()
    assert compare_tables(three, seven).same and compare_tables(three, reader(tmp_path / "b", seven, 3)).same
    counts = counts.copy()
    counts[4] += 1
    assert compare_tables(three, reader(tmp_path / "c", table(counts), 7)).extras == ("filtered_freqs",)


def test_versions_that_count_other_things_differ() -> None:
    def counting(unit: VersionUnit) -> TableReader:
        return table_from_arrays("emb", KEYS, np.ones((7, 2)), versions=np.full(7, 20_000), version_unit=unit)

    found = compare_tables(counting("steps"), counting("days"))
    assert not found.same and found.same_rows
    assert found.extras == ("versions count: steps -> days",) and found.schema == ()
    assert compare_tables(counting("days"), counting("days")).same
    unsaid = compare_tables(counting("unknown"), counting("days"))
    assert unsaid.same and unsaid.schema == ("versions count: unknown -> days",)


@pytest.mark.parametrize("to", ["deeprec", "tfplus"])
def test_counters_that_a_dialect_has_always_are_no_difference_of_tables_without_rows(tmp_path: Path, to: str) -> None:
    more: dict[str, Any] = {"freqs": np.arange(0), "versions": np.arange(0), "version_unit": "seconds"}
    for number, counters in enumerate(({}, more if to == "deeprec" else {"freqs": more["freqs"]})):
        table = table_from_arrays("emb", np.arange(0), np.ones((0, 2), np.float32), **counters)
        write_tables([table], tmp_path / f"{number}", to)
        found = compare_tables(table, open_checkpoint(tmp_path / f"{number}").table("emb"))
        assert found.same and not found.only_in_b
    counted = table_from_arrays("emb", KEYS, np.ones((7, 2)), freqs=np.ones(7, np.int64))
    assert compare_tables(counted, table_from_arrays("emb", KEYS, np.ones((7, 2)))).only_in_a == ("freqs",)


def test_what_training_makes_of_tables_is_told(tmp_path: Path) -> None:
    def written(name: str, start: float, **policies: object) -> Checkpoint:
        metadata = {"initializer": {"kind": "constant", "a": start}}
        if policies:
            metadata["policies"] = policies
        table = TableOfArrays("emb", np.arange(4), np.ones((4, 2), np.float32), metadata=metadata)
        write_tables([table], str(tmp_path / name), "tfplugin")
        return open_checkpoint(tmp_path / name)

    count = {"kind": "count", "enter_threshold": 3, "below": "initial"}
    one, same = written("one", 0.5, padding_key=0), written("same", 0.5, padding_key=0)
    (table,) = compare_checkpoints(one, same).tables
    assert table.schema == ()
    found = compare_checkpoints(one, written("two", 0.25, admission=count))
    assert found.same, "their rows are the same"
    assert set(found.tables[0].schema) == {
        'initializer: {"a": 0.5, "kind": "constant"} -> {"a": 0.25, "kind": "constant"}',
        "padding_key: 0 -> none",
        'admission: none -> {"below": "initial", "enter_threshold": 3, "kind": "count"}',
    }
    write_tables([*one.tables.values()], str(tmp_path / "a.npz"), "npz")
    lines = compare_checkpoints(one, open_checkpoint(tmp_path / "a.npz")).tables[0].schema
    assert not any(line.startswith(("initializer", "padding_key")) for line in lines), "it keeps both, or records none"
