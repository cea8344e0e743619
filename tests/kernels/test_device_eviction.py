"""Bounded tables in device memory beside the CPU's, and rows that change their slots or their place.

The clocks are the system's, so scores of time differ; which rows go does not, for it hangs on the order of the batches.
"""

from typing import Any

import numpy as np
import pytest
from device_arrays import DEVICES, Pair, arrays_on, assert_same, device_table_module
from table_dtypes import KEY_DTYPES, VALUE_DTYPES

DeviceTable = device_table_module().DeviceTable

POLICIES = ["lru", "lfu", "custom", "epoch_lru", "epoch_lfu"]
UNIFORM = {"kind": "uniform", "low": -1.0, "high": 1.0, "seed": 3}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def bounded(device: str, policy: str, capacity: int, key_dtype: Any = "int64", value_dtype: Any = "float32") -> Pair:
    slots = [("m", 2, "constant", 0.25)]
    return Pair(device, key_dtype, value_dtype, 3, slots, initializer=UNIFORM, max_capacity=capacity, eviction=policy)


def without_time(policy: str, scores: np.ndarray) -> np.ndarray:
    """What of scores does not come from a clock."""
    shift = {"lru": 64, "lfu": 32, "epoch_lru": 32}.get(policy, 0)
    return np.zeros_like(scores) if shift == 64 else scores >> np.uint64(shift)


def check(pair: Pair, policy: str, keys: np.ndarray) -> None:
    pair.check()
    assert pair.table.evicted_rows == pair.cpu.evicted_rows
    (scores,) = pair.read(lambda out: pair.table.scores(pair.put(keys), out), out=(np.uint64, (len(keys),)))
    np.testing.assert_array_equal(without_time(policy, scores), without_time(policy, pair.cpu.scores(keys)))


def room(pair: Pair, n: int) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Arrays for n evicted rows."""
    return {
        "evicted_keys": (pair.key_dtype, (n,)),
        "evicted_values": (pair.value_dtype, (n, pair.dim)),
        "evicted_scores": (np.uint64, (n,)),
        "evicted_count": (np.uint64, (1,)),
    }


def looks_up(pair: Pair, keys: np.ndarray, step: int, rng: np.random.Generator) -> None:
    told = {"frequency": 1, "version": step, "admission": 1.0 if step % 2 else 0.5, "seed": step}
    new = np.zeros(len(keys), bool)
    expected, *gone = pair.cpu.gather_or_insert_evicting(keys, inserted=new, **told)
    there = pair.put(keys)
    out, inserted, evicted, values, scores, count = pair.read(
        lambda **into: pair.table.gather_or_insert(there, **into, **told),
        out=(pair.value_dtype, (len(keys), pair.dim)),
        inserted=(bool, (len(keys),)),
        **room(pair, len(keys)),
    )
    assert_same(out, expected, pair.device)
    np.testing.assert_array_equal(inserted, new)
    (n,) = count
    assert n == len(gone[0])
    np.testing.assert_array_equal(evicted[:n], gone[0])
    assert_same(values[:n], gone[1], pair.device)
    assert (np.diff(scores[: n if n < pair.cpu.max_capacity else 0].astype(object)) >= 0).all()


def inserts_and_evicts(pair: Pair, keys: np.ndarray, step: int, rng: np.random.Generator) -> None:
    rows = rng.integers(-8, 8, (len(keys), pair.dim)).astype(pair.value_dtype)
    scores = rng.integers(0, 50, len(keys), np.uint64)
    before = pair.cpu.evicted_rows
    pair.cpu.upsert(keys, rows, frequency=1, version=step)
    given = {"scores": pair.put(scores)} if pair.cpu.eviction == "custom" else {}
    if given:
        pair.cpu.set_scores(keys, scores)
    there, values = pair.put(keys), pair.put(rows)
    evicted, *_, count = pair.read(
        lambda **into: pair.table.insert_and_evict(there, values, frequency=1, version=step, **given, **into),
        **room(pair, len(keys)),
    )
    assert count == pair.cpu.evicted_rows - before
    assert not pair.cpu.contains(evicted[: count[0]]).any()


def updates(pair: Pair, keys: np.ndarray, step: int, rng: np.random.Generator) -> None:
    gradients = rng.integers(-8, 8, (len(keys), pair.dim)).astype(pair.value_dtype)
    pair.cpu.apply("sgd", keys, gradients, {"learning_rate": 1.0}, version=step)
    pair.table.apply("sgd", pair.put(keys), pair.put(gradients), {"learning_rate": 1.0}, version=step)


def imports(pair: Pair, keys: np.ndarray, step: int, rng: np.random.Generator) -> None:
    columns = {name: rng.integers(-8, 8, (len(keys), w)).astype(pair.value_dtype) for name, w in pair.widths.items()}
    stamps = {name: rng.integers(0, 9, len(keys), np.uint32) for name in ("frequencies", "versions")}
    if step % 2:
        stamps["scores"] = rng.integers(0, 50, len(keys), np.uint64)
    pair.cpu.import_rows(keys, columns, **stamps)
    on_device = {name: pair.put(rows) for name, rows in columns.items()}
    pair.table.import_rows(pair.put(keys), on_device, **{name: pair.put(given) for name, given in stamps.items()})


def removes(pair: Pair, keys: np.ndarray, step: int, rng: np.random.Generator) -> None:
    there = pair.put(keys[:9])
    (removed,) = pair.read(lambda out: pair.table.remove(there, out), out=(np.uint64, (1,)))
    assert removed == pair.cpu.remove(keys[:9])


def sets_what_scores_come_from(pair: Pair, keys: np.ndarray, step: int, rng: np.random.Generator) -> None:
    if pair.cpu.eviction == "custom":
        scores = rng.integers(0, 50, len(keys), np.uint64)
        pair.cpu.set_scores(keys, scores)
        pair.table.set_scores(pair.put(keys), pair.put(scores))
    elif pair.cpu.eviction.startswith("epoch"):
        pair.cpu.set_epoch(step)
        pair.table.set_epoch(step)


STEPS = [looks_up, inserts_and_evicts, updates, imports, removes, sets_what_scores_come_from, looks_up]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [50, 180])
def test_the_same_batches_evict_the_same_rows(device, policy, capacity, key_dtype, make_keys):
    value_dtype = VALUE_DTYPES[(POLICIES.index(policy) + KEY_DTYPES.index(key_dtype)) % len(VALUE_DTYPES)]
    pair = bounded(device, policy, capacity, key_dtype, value_dtype)
    assert (pair.table.max_capacity, pair.table.eviction) == (capacity, policy)
    pool = pair.remember(make_keys(400))
    rng = np.random.default_rng(capacity)
    for step in range(21):
        STEPS[step % len(STEPS)](pair, rng.choice(pool, rng.integers(0, capacity)), step, rng)
        check(pair, policy, pool)
    assert len(pair.table) <= capacity < pair.table.evicted_rows


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_with_more_keys_than_the_capacity_keeps_its_latest(device, policy):
    pair = bounded(device, policy, 20)
    rng = np.random.default_rng(0)
    for step in (1, 3):
        keys = pair.remember(rng.choice(1000, 90))
        looks_up(pair, keys, step, rng)
        check(pair, policy, keys)
        assert len(pair.table) == 20


def test_evicted_rows_beyond_the_room_are_counted_and_lost(device):
    pair = bounded(device, "custom", 10)
    old, new = np.arange(10), np.arange(10, 20)
    rows = pair.put(np.zeros((10, 3), np.float32))
    scores = pair.put((100 - old).astype(np.uint64))
    pair.table.insert_and_evict(pair.put(old), rows, scores)
    keys, count = pair.read(
        lambda **into: pair.table.insert_and_evict(pair.put(new), rows, **into),
        evicted_keys=(np.int64, (4,)),
        evicted_count=(np.uint64, (1,)),
    )
    assert keys.tolist() == [9, 8, 7, 6]
    assert count == pair.table.evicted_rows == 10
    pair.table.insert_and_evict(pair.put(old), rows)  # nobody asks
    assert pair.table.evicted_rows == 20


def test_what_a_table_cannot_do_is_an_error_that_says_so():
    lru = DeviceTable("int64", "float32", 2, device="threads", max_capacity=4)
    unbounded = DeviceTable("int64", "float32", 2, device="threads")
    keys, rows, numbers = np.arange(3), np.zeros((3, 2), np.float32), np.zeros(3, np.uint64)
    for table in (lru, unbounded):
        with pytest.raises(RuntimeError, match="custom eviction"):
            table.set_scores(keys, numbers)
        with pytest.raises(RuntimeError, match="custom eviction"):
            table.insert_and_evict(keys, rows, numbers)
        with pytest.raises(RuntimeError, match="epoch LFU eviction"):
            table.set_epoch(1)
    with pytest.raises(ValueError, match=r"evicted_values has shape \(3, 2\); expected \(2, 2\)"):
        lru.insert_and_evict(keys, rows, evicted_keys=np.zeros(2, np.int64), evicted_values=rows)
    with pytest.raises(TypeError, match="evicted_count has dtype int64; expected uint64"):
        lru.insert_and_evict(keys, rows, evicted_count=np.zeros(1, np.int64))
    with pytest.raises(TypeError, match="scores has dtype float32; expected uint64"):
        lru.import_rows(keys, {"value": rows}, scores=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="eviction is 'fifo'"):
        DeviceTable("int64", "float32", 2, device="threads", max_capacity=4, eviction="fifo")
    with pytest.raises(ValueError, match="max_capacity of -1"):
        DeviceTable("int64", "float32", 2, device="threads", max_capacity=-1)
    assert len(lru) == len(unbounded) == 0


@pytest.mark.parametrize("capacity", [0, 300], ids=["any number of rows", "bounded"])
def test_slots_change_as_they_do_on_the_cpu(device, capacity, value_dtype):
    pair = bounded(device, "lru", capacity, "int64", value_dtype)
    pool = pair.remember(np.arange(-200, 200))
    rng = np.random.default_rng(0)
    layouts: list[list[tuple[Any, ...]]] = [
        [("m", 2, "constant", 0.25), ("v", 3, "copy_value", 0.0)],
        [("v", 3, "copy_value", 0.0), ("wide", 9, "constant", 1.5), ("m", 2, "constant", 0.25)],
        [("wide", 4, "constant", 0.5)],
        [],
    ]
    for step, slots in enumerate(layouts):
        keys = rng.choice(pool, 250)
        imports(pair, keys, 0, rng)
        generation = pair.table.generation
        assert pair.table.ensure_slots(slots) == pair.table.generation > generation
        pair.cpu.ensure_slots(slots)
        assert pair.table.slots == pair.cpu.slots == slots
        assert pair.table.ensure_slots(slots) == pair.table.generation  # as they are
        pair.widths = {"value": 3} | {name: width for name, width, *_ in slots}
        check(pair, "lru", pool)
        looks_up(pair, rng.choice(pool, 100), step, rng)
        check(pair, "lru", pool)
    with pytest.raises(ValueError, match="no column 'm'; it has 'value'"):
        pair.table.upsert_columns(pair.put(pool), {"m": pair.arrays.zeros((400, 2), value_dtype)})


def test_an_export_begun_before_the_slots_changed_goes_on(device):
    pair = Pair(device, "int64", "float32", 3, [("m", 2)])
    keys = np.arange(100)
    pair.table.upsert(pair.put(keys), pair.put(np.arange(300, dtype=np.float32).reshape(100, 3)))
    exporter = pair.table.export()
    out, values = pair.arrays.zeros(40, np.int64), pair.arrays.zeros((40, 3), np.float32)
    got: list[int] = []
    while (n := exporter.next(out, {"value": values})) > 0:
        part = pair.arrays.get(out, np.int64)[:n]
        np.testing.assert_array_equal(pair.arrays.get(values, np.float32)[:n, 0], 3 * part)
        got += part.tolist()
        pair.table.ensure_slots([("wide", 7 + len(got))])
    assert sorted(got) == keys.tolist()


def test_initial_values_change_for_rows_not_yet_there(device, value_dtype):
    pair = bounded(device, "lru", 0, "int64", value_dtype)
    rng = np.random.default_rng(0)
    rows = {"kind": "rows", "rows": rng.normal(size=(5, 3)).astype(value_dtype)}
    for step, initializer in enumerate([0.5, None, {"kind": "normal", "stddev": 2.0, "seed": 9}, rows, UNIFORM]):
        pair.cpu.initializer = initializer or 0.0
        pair.table.set_initializer(initializer)
        assert str(pair.table.initializer) == str(pair.cpu.initializer)
        looks_up(pair, pair.remember(np.arange(step * 50, step * 50 + 80)), 1, rng)
        pair.check()
    with pytest.raises(ValueError, match="Bad initializer: normal"):
        pair.table.set_initializer({"kind": "normal", "stddev": -1.0})
    assert str(pair.table.initializer) == str(pair.cpu.initializer)


RANGES: list[dict[str, Any]] = [
    {"frequency": (2, 5)},
    {"version": (None, 3), "frequency": (1, None)},
    {"score": (10, 30)},
    {"score": (25, None), "version": (2, 7)},
    {"key": (-20, -5)},
    {"key": (0, 1), "key_mask": 3, "frequency": (3, None)},
    {"version": (5, 4)},  # none
]


@pytest.mark.parametrize("ranges", RANGES, ids=str)
def test_rows_are_meant_by_ranges(device, key_dtype, ranges):
    pair = bounded(device, "custom", 300, key_dtype)
    rng = np.random.default_rng(0)
    keys = pair.remember(np.arange(-100 if key_dtype.kind == "i" else 0, 150).astype(key_dtype))
    if key_dtype.kind == "u":
        ranges = {what: (2, 40) if what == "key" and -20 in bounds else bounds for what, bounds in ranges.items()}
    imports(pair, keys, 1, rng)
    frequencies, versions = pair.cpu.gather_stamps(keys)
    numbers = {"frequency": frequencies, "version": versions, "score": pair.cpu.scores(keys)}
    numbers["key"] = keys.astype(np.uint64) & np.uint64(ranges.get("key_mask", 2**64 - 1))
    meant = np.ones(len(keys), bool)
    for what, bounds in ranges.items():
        if what != "key_mask":
            least, most = (None if bound is None else bound % 2**64 for bound in bounds)
            meant &= numbers[what] >= (0 if least is None else least)
            meant &= numbers[what] <= (2**64 - 1 if most is None else most)
    assert meant.any() == (ranges != {"version": (5, 4)})
    exporter, got = pair.table.export(**ranges), []
    out, scores = pair.arrays.zeros(37, key_dtype), pair.arrays.zeros(37, np.uint64)
    while (n := exporter.next(out, scores=scores)) > 0:
        part = pair.arrays.get(out, key_dtype)[:n].copy()
        np.testing.assert_array_equal(pair.arrays.get(scores, np.uint64)[:n], pair.cpu.scores(part))
        got.append(part)
    np.testing.assert_array_equal(np.sort(np.concatenate([keys[:0], *got])), np.sort(keys[meant]))
    (removed,) = pair.read(lambda out: pair.table.remove_if(**ranges, removed=out), out=(np.uint64, (1,)))
    assert removed == pair.cpu.remove(keys[meant]) == meant.sum()
    check(pair, "custom", keys)


@pytest.mark.parametrize("wrong", [(1, 2, 3), 4, [1, 2], ("1", 2), (-1, 2), (0, 2**32)], ids=str)
def test_a_range_that_is_none_is_refused(wrong):
    table = DeviceTable("int64", "float32", 2, device="threads")
    with pytest.raises(ValueError, match=r"version is .*; expected \(least, most\), .* 0 to 4294967295"):
        table.export(version=wrong)
    with pytest.raises(ValueError, match="version is "):
        table.remove_if(version=wrong)


def test_hot_rows_come_to_device_memory(device):
    arrays, n = arrays_on(device), 100_000
    table = DeviceTable("int64", "float32", 8, device=device, max_hbm=2 << 20, move_hot_rows=0)
    keys = np.arange(n)
    rows = np.repeat(keys.astype(np.float32)[:, None], 8, 1)
    there, out = arrays.put(keys), arrays.zeros(n, bool)
    table.upsert(there, arrays.put(rows), version=1)
    table.in_device_memory(there, out)
    before = arrays.get(out, bool).copy()
    assert 0 < before.sum() <= (2 << 20) / 32
    assert table.memory()["host_bytes"] >= 32 * (~before).sum()
    hot = keys[~before][:700]
    table.upsert(arrays.put(hot), arrays.put(rows[hot]), version=2)
    flags = arrays.zeros(700, bool)
    table.in_device_memory(arrays.put(hot), flags)
    assert not arrays.get(flags, bool).any()
    table.move_hot_rows(500)
    table.in_device_memory(arrays.put(hot), flags)
    assert arrays.get(flags, bool).sum() == 500
    table.move_hot_rows(n)
    table.in_device_memory(arrays.put(hot), flags)
    assert arrays.get(flags, bool).all()
    values = arrays.zeros((n, 8), np.float32)
    table.gather(there, values)
    np.testing.assert_array_equal(arrays.get(values, np.float32), rows)


def test_rows_that_are_not_there_are_not_in_device_memory(device):
    arrays = arrays_on(device)
    table = DeviceTable("int64", "float32", 2, device=device)
    table.upsert(arrays.put(np.arange(5)), arrays.zeros((5, 2), np.float32))
    out = arrays.zeros(8, bool)
    table.in_device_memory(arrays.put(np.arange(8)), out)
    assert arrays.get(out, bool).tolist() == [True] * 5 + [False] * 3


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 500])
def test_splits_are_where_row_ids_begin(device, n, rank):
    arrays, bags = arrays_on(device), 40
    rng = np.random.default_rng(n)
    ids = np.sort(rng.integers(0, bags, n))
    given = ids if rank == 0 else np.concatenate([ids[:, None], rng.integers(0, 9, (n, rank - 1))], 1)
    table = DeviceTable("int64", "float32", 2, device=device)
    splits = arrays.zeros(bags + 1, np.int64)
    table.make_splits(arrays.put(given), splits)
    table.check_bags()
    np.testing.assert_array_equal(arrays.get(splits, np.int64), np.searchsorted(ids, np.arange(bags + 1)))


def test_bags_that_are_none_are_told_once(device):
    arrays = arrays_on(device)
    table = DeviceTable("int64", "float32", 2, device=device)
    keys, out = arrays.put(np.arange(6)), arrays.zeros((2, 2), np.float32)
    spread = arrays.zeros((6, 2), np.float32)
    for splits in ([0, 7, 6], [0, 2, 5], [1, 2, 6], [0, -1, 6], [0, 4, 9]):
        table.gather_pooled(keys, arrays.put(np.array(splits)), out)
        with pytest.raises(ValueError, match=r"[Ss]plits"):
            table.check_bags()
        table.check_bags()
        table.spread_gradient(arrays.put(np.array(splits)), out, spread)
        with pytest.raises(ValueError, match=r"[Ss]plits"):
            table.check_bags()
    for ids in ([0, 2], [-1, 0], [1, 0]):
        table.make_splits(arrays.put(np.array(ids)), arrays.zeros(3, np.int64))
        with pytest.raises(ValueError, match="row ids"):
            table.check_bags()
    with pytest.raises(TypeError, match="row_ids has dtype int32; expected int64"):
        table.make_splits(arrays.put(np.zeros(2, np.int32)), arrays.zeros(3, np.int64))
    with pytest.raises(ValueError, match=r"out must be an array of bags \+ 1 numbers"):
        table.make_splits(arrays.put(np.zeros(2, np.int64)), arrays.zeros(0, np.int64))
