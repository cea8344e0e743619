"""Rows that go by age, norm, frequency and rank, on the CPU and in device memory, against a dict."""

from typing import Any

import numpy as np
import pytest
from device_arrays import device_table_module
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools._kvtable import Table

DIM = 2
INITIAL = 0.5
SECOND = 1_000_000


class Tables:
    """A table on the CPU or on a device's threads, with one set of calls. Values are (n, 2) float32."""

    def __init__(self, where: str, **options: Any) -> None:
        self.device = where == "threads"
        made = {"initializer": INITIAL, "slots": [("m", 1, "constant", 7.0)], **options}
        if self.device:
            self.table = device_table_module().DeviceTable("int64", "float32", DIM, device="threads", **made)
        else:
            self.table = Table("int64", "float32", DIM, threads=2, shards=4, **made)

    def __len__(self) -> int:
        return len(self.table)

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        if not self.device:
            return self.table.gather_or_insert(keys, frequency=1)
        out = np.empty((len(keys), DIM), np.float32)
        self.table.gather_or_insert(keys, out, frequency=1)
        return out

    def read(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Values (zeros where missing), slots, which are there, frequencies, versions."""
        n = len(keys)
        if not self.device:
            found = np.empty(n, bool)
            slots = self.table.gather_columns(keys, ["m"], found=found)[0]
            np.testing.assert_array_equal(found, self.table.contains(keys))
            return (self.table.gather(keys), slots, found, *self.table.gather_stamps(keys))
        values, slots = np.empty((n, DIM), np.float32), np.empty((n, 1), np.float32)
        found, freqs, versions = np.empty(n, bool), np.empty(n, np.uint32), np.empty(n, np.uint32)
        self.table.gather(keys, values, found=found)
        self.table.gather_columns(keys, {"m": slots})
        self.table.gather_stamps(keys, freqs, versions)
        return values, slots, found, freqs, versions

    def upsert(self, keys: np.ndarray, values: np.ndarray, version: int = 0) -> None:
        self.table.upsert(keys, values, frequency=1, version=version)

    def apply(self, keys: np.ndarray, gradients: np.ndarray) -> None:
        self.table.apply("sgd", keys, gradients, {"learning_rate": 1.0})

    def set_slots(self, keys: np.ndarray, slots: np.ndarray) -> None:
        self.table.upsert_columns(keys, {"m": slots})


@pytest.fixture(params=["cpu", "threads"])
def where(request: pytest.FixtureRequest) -> str:
    return request.param


def keys_of(*keys: int) -> np.ndarray:
    return np.array(keys, np.int64)


def rows_of(*numbers: float) -> np.ndarray:
    return np.repeat(np.array(numbers, np.float32)[:, None], DIM, 1)


class Model:
    """What the table is to be: key -> [value, slot, frequency, version]."""

    def __init__(self, max_age: int, unit: str) -> None:
        self.rows: dict[int, list[float]] = {}
        self.max_age, self.unit, self.now = max_age, unit, 1000 if unit == "seconds" else 0

    def age(self, key: int) -> int:
        return max(0, self.now - int(self.rows[key][3]))

    def drop(self) -> None:
        self.rows = {key: row for key, row in self.rows.items() if not self.max_age or self.age(key) < self.max_age}

    def write(self, key: int, value: float, version: int) -> None:
        row = self.rows.setdefault(key, [INITIAL, 7.0, 0, 0])
        row[0], row[2], row[3] = value, row[2] + 1, version

    def evict(self, policy: str, number: float, by: str = "frequency") -> None:
        self.drop()
        squares = {key: DIM * row[0] ** 2 for key, row in self.rows.items()}
        if policy == "keep_top":
            order = {
                "frequency": lambda key: (self.rows[key][2], self.rows[key][3]),
                "version": lambda key: (self.rows[key][3], self.rows[key][2]),
                "norm": lambda key: (squares[key],),
            }[by]
            kept = sorted(self.rows, key=lambda key: (*order(key), key % 2**64))[-int(number) :]
        elif policy == "below_norm":
            kept = [key for key in self.rows if squares[key] >= number**2]
        elif policy == "below_frequency":
            kept = [key for key in self.rows if self.rows[key][2] >= number]
        else:
            kept = [key for key in self.rows if self.age(key) < number]
        self.rows = {key: self.rows[key] for key in kept}


KEYS = st.lists(st.integers(-6, 12), min_size=1, max_size=8)
NUMBERS = st.integers(-3, 3)
COMMON = [
    st.tuples(st.just("lookup"), KEYS),
    st.tuples(st.just("upsert"), KEYS, NUMBERS),
    st.tuples(st.just("apply"), KEYS, NUMBERS),
    st.tuples(st.just("remove"), KEYS),
    st.tuples(st.just("evict"), st.just("below_norm"), st.sampled_from([0.1, 2.0, 2.0 * 2**0.5, 4.0])),
    st.tuples(st.just("evict"), st.just("below_frequency"), st.integers(1, 4)),
    st.tuples(
        st.just("evict"),
        st.just("keep_top"),
        st.integers(1, 12),
        st.sampled_from(["frequency", "version", "norm"]),
    ),
]


def run(where: str, unit: str, max_age: int, steps: list[tuple]) -> None:
    clock = np.array([1000 * SECOND], np.uint64)
    table = Tables(where, max_age=max_age, age_unit=unit, clock=clock)
    model = Model(max_age, unit)
    for what, *told in steps:
        model.drop()
        if what == "lookup":
            keys = keys_of(*told[0])
            for key in told[0]:  # only a new row is stamped, once for each occurrence
                new = key not in model.rows
                if new:
                    model.write(key, INITIAL, model.now)
                    model.rows[key][2] = told[0].count(key)
            expected = rows_of(*(model.rows[key][0] for key in told[0]))
            np.testing.assert_array_equal(table.lookup(keys), expected)
        elif what == "upsert":
            table.upsert(keys_of(*told[0]), rows_of(*(told[1] + i for i in range(len(told[0])))))
            for i, key in enumerate(told[0]):
                model.write(key, told[1] + i, model.now)
        elif what == "apply":
            table.apply(keys_of(*told[0]), rows_of(*[-told[1]] * len(told[0])))
            ends = 1 if unit == "steps" and max_age else 0
            for key in set(told[0]):
                value = model.rows.get(key, [INITIAL])[0] + told[1] * told[0].count(key)
                model.write(key, value, model.now + ends)
            model.now += ends
        elif what == "remove":
            table.table.remove(keys_of(*told[0]))
            for key in told[0]:
                model.rows.pop(key, None)
        elif what == "tick":
            model.now += told[0]
            clock[0] += told[0] * SECOND
            if unit == "steps":
                table.table.set_step(model.now)
        elif what == "clock goes back":  # time stands still for the table
            clock[0] -= min(int(clock[0]), told[0] * SECOND)
            assert table.table.now == model.now
        else:
            policy, number, *by = told
            before = table.read(ALL)[2].sum()
            gone = table.table.evict(policy, number, **({"by": by[0]} if by else {}))
            model.evict(policy, number, *by)
            assert gone >= before - len(model.rows)  # and rows that had expired and were not collected
        model.drop()
        check(table, model)
    if max_age:
        table.table.evict(f"after_{unit}", max_age)
    assert len(table) == len(model.rows)


ALL = np.arange(-8, 14)


def check(table: Tables, model: Model) -> None:
    values, slots, found, freqs, versions = table.read(ALL)
    for i, key in enumerate(ALL.tolist()):
        assert found[i] == (key in model.rows), key
        value, slot, freq, version = model.rows.get(key, [0.0, 7.0, 0, 0])
        assert (values[i] == value).all() and slots[i, 0] == slot
        assert freqs[i] == freq
        if model.max_age:
            assert versions[i] == version


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.lists(st.one_of(*COMMON, st.tuples(st.just("tick"), st.integers(0, 3))), max_size=25))
def test_ages_in_steps_are_those_of_a_dict(max_age: int, steps: list[tuple]) -> None:
    run("cpu", "steps", max_age, steps)
    run("threads", "steps", max_age, steps)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(
        st.one_of(
            *COMMON,
            st.tuples(st.just("tick"), st.integers(0, 3)),
            st.tuples(st.just("clock goes back"), st.integers(1, 2000)),
        ),
        max_size=25,
    ),
)
def test_ages_in_seconds_are_those_of_a_dict_and_a_clock_that_goes_back_changes_none(
    max_age: int, steps: list[tuple]
) -> None:
    run("cpu", "seconds", max_age, steps)
    run("threads", "seconds", max_age, steps)


def test_a_row_is_there_until_its_age_is_the_bound_and_not_after(where: str) -> None:
    clock = np.array([1000 * SECOND + 999_999], np.uint64)
    table = Tables(where, max_age=10, age_unit="seconds", clock=clock)
    table.upsert(keys_of(1), rows_of(3.0))
    table.set_slots(keys_of(1), np.full((1, 1), 9.0, np.float32))
    clock[0] = 1010 * SECOND - 1  # 9 whole seconds later
    values, slots, found, freqs, versions = table.read(keys_of(1))
    assert (values[0, 0], slots[0, 0], found[0], freqs[0], versions[0]) == (3.0, 9.0, True, 1, 1000)
    clock[0] += 1
    values, slots, found, freqs, versions = table.read(keys_of(1))
    assert (values[0, 0], slots[0, 0], found[0], freqs[0], versions[0]) == (0.0, 7.0, False, 0, 0)
    # What comes back is a new row: value, slot and stamps.
    np.testing.assert_array_equal(table.lookup(keys_of(1)), rows_of(INITIAL))
    values, slots, found, freqs, versions = table.read(keys_of(1))
    assert (values[0, 0], slots[0, 0], found[0], freqs[0], versions[0]) == (INITIAL, 7.0, True, 1, 1010)
    assert len(table) == 1 and (table.table.expired_rows, table.table.evicted_rows) == (1, 0)


def test_a_row_that_was_looked_up_is_trained_in_the_same_step(where: str) -> None:
    table = Tables(where, max_age=2, age_unit="steps")
    table.lookup(keys_of(1, 2))
    table.apply(keys_of(1), rows_of(-1.0))  # step 1
    table.apply(keys_of(3), rows_of(-1.0))  # step 2
    assert table.read(keys_of(1, 2, 3))[2].tolist() == [True, False, True]
    table.lookup(keys_of(1))
    table.apply(keys_of(1), rows_of(-1.0))  # step 3, at which the row that step 1 wrote would have gone
    assert table.read(keys_of(1))[0].tolist() == [[INITIAL + 2.0] * 2]
    assert table.table.now == 3


def test_rows_from_the_future_age_from_now_on(where: str) -> None:
    clock = np.array([1000 * SECOND], np.uint64)
    table = Tables(where, max_age=10, age_unit="seconds", clock=clock)
    versions = np.array([5000, 995, 990], np.uint32)
    table.table.import_rows(keys_of(1, 2, 3), {"value": rows_of(1.0, 2.0, 3.0)}, versions=versions)
    table.table.import_rows(keys_of(4), {"value": rows_of(4.0)})  # without a stamp
    keys = keys_of(1, 2, 3, 4)
    assert table.read(keys)[2].tolist() == [True, True, False, True]
    clock[0] += 5 * SECOND
    assert table.read(keys)[2].tolist() == [True, False, False, True]
    clock[0] += 5 * SECOND
    assert not table.read(keys)[2].any()


def test_a_clock_that_goes_back_makes_no_row_immortal(where: str) -> None:
    clock = np.array([9000 * SECOND], np.uint64)
    table = Tables(where, max_age=10, age_unit="seconds", clock=clock)
    table.upsert(keys_of(1), rows_of(1.0))
    clock[0] = 1000 * SECOND
    assert table.read(keys_of(1))[2].all()
    clock[0] += 9 * SECOND
    assert table.read(keys_of(1))[2].all()
    clock[0] += 1 * SECOND
    assert not table.read(keys_of(1))[2].any()


def test_a_sweep_comes_to_all_rows_slice_by_slice(where: str) -> None:
    clock = np.array([1000 * SECOND], np.uint64)
    table = Tables(where, max_age=100, age_unit="seconds", clock=clock)
    keys = np.arange(3000)
    table.upsert(keys, rows_of(*range(3000)))
    clock[0] += 50 * SECOND
    table.upsert(keys[::2].copy(), rows_of(*range(0, 3000, 2)))
    clock[0] += 50 * SECOND
    table.table.begin_sweep([("after_seconds", 100), ("below_norm", 1000 * 2**0.5), ("keep_top", 100, "norm")])
    assert len(table) == 3000
    for _ in range(2000):
        table.table.sweep(100)
    assert len(table) == 100
    assert table.read(keys)[2].nonzero()[0].tolist() == [*range(2800, 3000, 2)]


def test_a_bounded_table_ranks_a_row_anew_that_had_expired() -> None:
    clock = np.array([1000 * SECOND], np.uint64)
    table = Tables("cpu", max_age=10, age_unit="seconds", clock=clock, max_capacity=3, eviction="lfu")
    for _ in range(9):
        table.lookup(keys_of(1))
    clock[0] += 10 * SECOND
    table.lookup(keys_of(1, 2, 2, 3, 3))
    assert table.table.scores(keys_of(1))[0] >> np.uint64(32) == 1
    table.lookup(keys_of(4, 4))
    assert table.read(keys_of(1, 2, 3, 4))[2].tolist() == [False, True, True, True]
    assert table.table.evict("below_frequency", 2) == 0
    assert table.table.evict("keep_top", 1) == 2
    table.lookup(keys_of(5, 6))  # the two that went left their ranks behind with them
    assert len(table) == 3 and (table.table.expired_rows, table.table.evicted_rows) == (3, 1)


@pytest.mark.parametrize("policy", ["lru", "lfu", "custom", "epoch_lru", "epoch_lfu"])
def test_bounded_tables_on_both_sides_expire_the_same(policy: str) -> None:
    clock = np.array([1000 * SECOND], np.uint64)
    rng = np.random.default_rng(3)
    options = {"max_age": 6, "age_unit": "seconds", "clock": clock, "max_capacity": 20, "eviction": policy}
    cpu, device = Tables("cpu", **options), Tables("threads", **options)
    for step in range(60):
        keys = rng.integers(0, 60, 10)
        if step % 3 == 0:
            np.testing.assert_array_equal(cpu.lookup(keys), device.lookup(keys))
        elif step % 3 == 1:
            cpu.apply(keys, rows_of(*keys))
            device.apply(keys, rows_of(*keys))
        else:
            clock[0] += int(rng.integers(0, 4)) * SECOND
        told = ("below_norm", 20.0) if step % 2 else ("after_seconds", 6)
        cpu.table.evict(*told), device.table.evict(*told)
        cpu.table.evict("after_seconds", 6), device.table.evict("after_seconds", 6)
        assert len(cpu) == len(device)
        for a, b in zip(cpu.read(np.arange(60)), device.read(np.arange(60)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_memory_of_rows_that_went_is_used_again(where: str) -> None:
    table = Tables(where)
    used = []
    for cycle in range(12):
        keys = np.arange(cycle * 20_000, (cycle + 1) * 20_000)
        table.upsert(keys, np.ones((20_000, DIM), np.float32), version=cycle)
        assert table.table.evict("keep_top", 10_000, by="version") == (10_000 if cycle == 0 else 20_000)
        memory = table.table.memory()
        used.append(sum(memory[part] for part in ("row_bytes", "slack_bytes", "index_bytes", "column_bytes")))
    assert max(used[4:]) <= 1.01 * used[3]  # shards fill unevenly at first


def test_rows_by_norm_of_every_value_type() -> None:
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        for width in (1, 7, 8, 21):
            table = Table("int32", dtype, width, threads=1)
            rows = np.zeros((3, width), table.value_dtype)
            rows[1, -1] = rows[2, 0] = 1
            table.upsert(np.array([1, 2, 3], np.int32), rows)
            assert table.evict("below_norm", 1.0) == 1
            assert table.evict("keep_top", 1, by="norm") == 1  # of equal norms the higher key
            assert table.contains(np.array([1, 2, 3], np.int32)).tolist() == [False, False, True]


def test_a_norm_that_is_no_number_is_below_none_and_ranks_above_all(where: str) -> None:
    table = Tables(where)
    table.upsert(keys_of(1, 2, 3), rows_of(np.nan, np.inf, 5.0))
    assert table.table.evict("below_norm", 1e30) == 1
    assert table.table.evict("keep_top", 1, by="norm") == 1
    assert table.read(keys_of(1, 2, 3))[2].tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("policy", "number", "said"),
    [
        ("after_seconds", 0, "an age in seconds of 0; expected 1 or more"),
        ("after_seconds", -3, "an age in seconds of -3; expected 1 or more"),
        ("below_frequency", 2**32, "a frequency of 4294967296; expected 4294967295 at most"),
        ("below_norm", -1.0, "the norm -1.000000, below which rows go; expected a number above 0"),
        ("below_norm", float("nan"), "expected a number above 0"),
        ("keep_top", 0, "the rows that are kept of 0; expected 1 or more"),
        ("by_luck", 1, "expected 'after_steps', 'after_seconds'"),
    ],
)
def test_policies_that_cannot_be_are_refused(where: str, policy: str, number: float, said: str) -> None:
    table = Tables(where)
    table.upsert(keys_of(1), rows_of(1.0))
    with pytest.raises(ValueError, match=said):
        table.table.evict(policy, number)
    assert len(table) == 1


def test_policies_that_contradict_each_other_are_refused(where: str) -> None:
    table = Tables(where)
    with pytest.raises(ValueError, match="a row has one stamp, of one unit"):
        table.table.begin_sweep([("after_steps", 3), ("after_seconds", 3)])
    with pytest.raises(ValueError, match="Two policies by a norm"):
        table.table.begin_sweep([("below_norm", 1.0), ("below_norm", 2.0)])
    with pytest.raises(RuntimeError, match="counts the ages of rows in seconds, not in steps"):
        table.table.evict("after_steps", 3)
    by_steps = Tables(where, max_age=3, age_unit="steps")
    with pytest.raises(RuntimeError, match="in steps, not in seconds"):
        by_steps.table.evict("after_seconds", 3)
    by_steps.table.set_step(5)
    with pytest.raises(ValueError, match="Step 4 is before step 5"):
        by_steps.table.set_step(4)
    with pytest.raises(RuntimeError, match="counts no steps"):
        table.table.set_step(4)
    with pytest.raises(ValueError, match="max_age is -1"):
        Tables(where, max_age=-1)
