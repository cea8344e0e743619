"""Bounded tables: which rows go, against a dict; scores, admission, and many threads at once."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools._kvtable import Table

POLICIES = ["lru", "lfu", "custom"]
NO_ROW = 2**64 - 1


class Model:
    """A bounded table as a dict. ``rank`` is (score, order); times of day are numbers of batches."""

    def __init__(self, policy, capacity, initial=0.25, dim=2):
        self.policy, self.capacity, self.initial, self.dim = policy, capacity, initial, dim
        self.rows = {}
        self.rank = {}
        self.order = 0
        self.batch = 0
        self.evicted = 0

    def touch(self, key, counted):
        self.order += 1
        score, order = self.rank.get(key, (0, 0))
        if self.policy == "lru":
            self.rank[key] = (self.batch, self.order)
        elif self.policy == "lfu":
            self.rank[key] = (1 if order == 0 else score + counted, self.order)
        elif order == 0:
            self.rank[key] = (0, self.order)

    def settle(self, keys, counted=True):
        """Touches the rows of a batch that are there, and gives what is evicted: {key: value}, lowest first."""
        self.batch += 1
        for key in keys:
            if key in self.rows:
                self.touch(key, counted)
        own = set(keys)
        victims = sorted((k for k in self.rows if k not in own), key=self.rank.get)
        latest = list(dict.fromkeys(key for key in reversed(keys) if key in self.rows))
        return self.drop((victims + latest[::-1])[: max(0, len(self.rows) - self.capacity)])

    def settle_import(self):
        return self.drop(sorted(self.rows, key=self.rank.get)[: max(0, len(self.rows) - self.capacity)])

    def drop(self, victims):
        self.evicted += len(victims)
        return {key: self.take(key) for key in victims}

    def take(self, key):
        del self.rank[key]
        return self.rows.pop(key)

    def insert(self, key):
        self.rows.setdefault(key, np.full(self.dim, self.initial))

    def look_up(self, keys):
        for key in keys:
            self.insert(key)
        rows = [self.rows[key] for key in keys]
        return rows, self.settle(keys)

    def upsert(self, keys, values):
        self.rows.update(zip(keys, values, strict=True))
        return self.settle(keys)

    def accumulate(self, keys, deltas):
        for key, delta in zip(keys, deltas, strict=True):
            self.insert(key)
            self.rows[key] = self.rows[key] + delta
        return self.settle(keys)

    def apply(self, keys, gradients):
        for key, gradient in zip(keys, gradients, strict=True):
            self.insert(key)
            self.rows[key] = self.rows[key] - gradient
        return self.settle(keys, counted=False)

    def set_scores(self, keys, scores):
        for key, score in zip(keys, scores, strict=True):
            if key in self.rank:
                self.rank[key] = (score, self.rank[key][1])

    def assert_equals(self, table):
        exported = list(table.export(["value"], scores=True))
        keys = [key for chunk in exported for key in chunk[0].tolist()]
        assert len(keys) == len(set(keys))
        assert set(keys) == set(self.rows)
        assert len(table) == len(keys) <= self.capacity
        assert table.evicted_rows == self.evicted
        values = np.concatenate([np.empty((0, self.dim)), *(chunk[3][0].astype(np.float64) for chunk in exported)])
        for key, value in zip(keys, values, strict=True):
            np.testing.assert_array_equal(value, self.rows[key])
        scores = dict(zip(keys, (s for chunk in exported for s in chunk[4].tolist()), strict=True))
        assert table.scores(np.array(keys, table.key_dtype)).tolist() == list(scores.values())
        if self.policy == "lfu":
            assert {key: score >> 32 for key, score in scores.items()} == {k: r[0] for k, r in self.rank.items()}
        elif self.policy == "custom":
            assert scores == {k: r[0] for k, r in self.rank.items()}
        else:
            by_score = sorted(keys, key=lambda key: (scores[key], self.rank[key][1]))
            assert by_score == sorted(keys, key=self.rank.get)


def play(policy, capacity, seed, key_dtype="int64", value_dtype="float32", steps=60, pool=None, largest=24, **options):
    """Random operations on a table and on the model, compared after each."""
    rng = np.random.default_rng(seed)
    table = Table(
        key_dtype, value_dtype, 2, initializer=0.25, max_capacity=capacity, eviction=policy, threads=2, **options
    )
    model = Model(policy, capacity)
    if pool is None:
        info = np.iinfo(key_dtype)
        extremes = [info.min, info.min + 1, info.max - 1, info.max, *([-1, -7] if info.min < 0 else [])]
        pool = np.concatenate([np.arange(40).astype(key_dtype), np.array(extremes, key_dtype)])
    for _ in range(steps):
        batch = rng.choice(pool, rng.integers(0, largest))
        keys = batch.tolist()
        numbers = rng.integers(-8, 8, (len(keys), 2)).astype(table.value_dtype)
        what = rng.integers(0, 12)
        if what < 4:
            rows, gone = model.look_up(keys)
            positions = np.empty(len(keys), np.uint64)
            got, evicted, values = table.gather_or_insert_evicting(batch, positions=positions)
            np.testing.assert_array_equal(got, np.reshape(rows, (len(keys), 2)))
            assert evicted.tolist() == list(gone)
            np.testing.assert_array_equal(values, np.reshape(list(gone.values()), (len(gone), 2)))
            if what == 0 and len(keys):  # what was remembered may have gone: the update looks again
                table.apply("sgd", batch, numbers, {"learning_rate": 1.0}, positions=positions)
                model.apply(keys, numbers.astype(np.float64))
        elif what == 4:
            table.upsert(batch, numbers)
            model.upsert(keys, numbers.astype(np.float64))
        elif what == 5:
            table.accumulate(batch, numbers)
            model.accumulate(keys, numbers.astype(np.float64))
        elif what == 6:
            table.apply("sgd", batch, numbers, {"learning_rate": 1.0})
            model.apply(keys, numbers.astype(np.float64))
        elif what == 7:
            assert table.remove(batch) == len({key for key in keys if key in model.rows})
            for key in set(keys) & model.rows.keys():
                model.take(key)
        elif what == 8 and rng.integers(0, 4) == 0:
            table.clear()
            model.rows.clear()
            model.rank.clear()
        elif what == 9 and policy == "custom":
            scores = rng.integers(0, 5, len(keys)).astype(np.uint64)
            assert table.set_scores(batch, scores) == sum(key in model.rows for key in keys)
            model.set_scores(keys, scores.tolist())
        elif what == 10:
            table.gather(batch, "initial")  # touches nothing
            table.contains(batch)
            table.gather_columns(batch)
        elif what == 11:
            table.ensure_slots([("m", 2, "constant", 1.0)] if rng.integers(0, 2) else [])
        model.assert_equals(table)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [1, 2, 7, 20, 45, 1000])
def test_any_operations_leave_the_table_equal_to_a_dict(policy, capacity):
    for seed in range(8):
        play(policy, capacity, seed, shards=[1, 8][seed % 2])


@pytest.mark.parametrize("policy", POLICIES)
def test_every_key_and_value_type(policy, key_dtype, value_dtype):
    play(policy, 11, 5, key_dtype, value_dtype)


@given(
    policy=st.sampled_from(POLICIES),
    capacity=st.integers(1, 12),
    batches=st.lists(st.lists(st.integers(-8, 8), max_size=20), max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_any_batches_of_lookups(policy, capacity, batches):
    table = Table("int64", "float32", 2, initializer=0.25, max_capacity=capacity, eviction=policy, threads=1)
    model = Model(policy, capacity)
    for batch in batches:
        _, gone = model.look_up(batch)
        _, evicted, _ = table.gather_or_insert_evicting(np.array(batch, np.int64))
        assert evicted.tolist() == list(gone)
        model.assert_equals(table)


@pytest.mark.parametrize("policy", POLICIES)
def test_many_rows_so_that_the_heap_holds_only_the_lowest(policy):
    pool = np.random.default_rng(1).permutation(8000)
    play(policy, 3000, 2, pool=pool, steps=30, largest=1500)


@pytest.mark.parametrize("policy", POLICIES)
def test_below_capacity_nothing_is_evicted(policy):
    table = Table("int64", "float32", 1, max_capacity=5000, eviction=policy)
    for first in range(0, 5000, 500):
        table.gather_or_insert(np.arange(first, first + 500))
    assert len(table) == 5000
    assert table.evicted_rows == 0
    table.gather_or_insert(np.array([-1]))
    assert len(table) == 5000
    assert table.evicted_rows == 1


def test_lru_scores_are_the_time_of_day_and_grow_from_batch_to_batch():
    table = Table("int64", "float32", 1, max_capacity=100)
    before = time.time_ns() // 1000
    seen = []
    for key in range(50):
        table.gather_or_insert(np.array([key, key + 1]))
        first, second = table.scores(np.array([key, key + 1])).tolist()
        assert first == second
        seen.append(first)
    assert seen == sorted(set(seen))
    assert before <= seen[0] <= seen[-1] <= time.time_ns() // 1000 + 50


@pytest.mark.parametrize(
    ("write", "touches"),
    [
        (lambda t, k: t.gather(k), False),
        (lambda t, k: t.gather_columns(k), False),
        (lambda t, k: t.contains(k), False),
        (lambda t, k: t.gather_stamps(k), False),
        (lambda t, k: t.gather_or_insert(k), True),
        (lambda t, k: t.upsert(k, np.ones((len(k), 1), np.float32)), True),
        (lambda t, k: t.upsert_columns(k, {"value": np.ones((len(k), 1), np.float32)}), True),
        (lambda t, k: t.accumulate(k, np.ones((len(k), 1), np.float32)), True),
        (lambda t, k: t.apply("sgd", k, np.ones((len(k), 1), np.float32), {"learning_rate": 1.0}), True),
    ],
)
def test_what_touches_a_row(write, touches):
    table = Table("int64", "float32", 1, max_capacity=2)
    for key in (1, 2):
        table.gather_or_insert(np.array([key]))
    write(table, np.array([1]))
    table.gather_or_insert(np.array([3]))
    assert table.contains(np.array([1, 2, 3])).tolist() == [touches, not touches, True]


def test_lfu_scores_count_occurrences_and_updates_do_not_count():
    table = Table("int64", "float32", 1, max_capacity=9, eviction="lfu")
    before = int(time.time())
    table.gather_or_insert(np.array([1, 1, 2]))
    table.apply("sgd", np.array([1, 3, 3]), np.ones((3, 1), np.float32), {"learning_rate": 1.0})
    scores = table.scores(np.array([1, 2, 3, 4]))
    # A new key of a batch counts its occurrences, too.
    assert (scores >> np.uint64(32)).tolist() == [2, 1, 1, 0]
    assert before <= int(scores[0] & np.uint64(2**32 - 1)) <= time.time()


def test_lfu_counts_saturate():
    table = Table("int64", "float32", 1, max_capacity=2, eviction="lfu")
    most = np.array([(2**32 - 2) << 32], np.uint64)
    table.import_rows(np.array([1]), {0: np.ones((1, 1), np.float32)}, scores=most)
    table.gather_or_insert(np.array([1, 1, 1, 1]))
    assert int(table.scores(np.array([1]))[0]) >> 32 == 2**32 - 1


def test_only_custom_scores_can_be_set():
    for policy in ("lru", "lfu"):
        table = Table("int64", "float32", 1, max_capacity=2, eviction=policy)
        with pytest.raises(RuntimeError, match="custom eviction"):
            table.set_scores(np.array([1]), np.array([1], np.uint64))
    with pytest.raises(RuntimeError, match="not bounded"):
        Table("int64", "float32", 1).set_scores(np.array([1]), np.array([1], np.uint64))


@pytest.mark.parametrize("policy", ["epoch_lru", "epoch_lfu"])
def test_rows_of_an_earlier_epoch_go_first(policy):
    table = Table("int64", "float32", 1, max_capacity=3, eviction=policy)
    table.gather_or_insert(np.array([1, 1, 1, 2]))
    table.set_epoch(7)
    table.gather_or_insert(np.array([3]))
    assert (table.scores(np.array([1, 2, 3])) >> np.uint64(32)).tolist() == [0, 0, 7]
    first = table.gather_or_insert_evicting(np.array([4]))[1].tolist()
    assert first == ([1] if policy == "epoch_lru" else [2])  # touched in one batch; counted three times and once
    assert table.gather_or_insert_evicting(np.array([5]))[1].tolist() == ([2] if policy == "epoch_lru" else [1])


def test_only_tables_with_epochs_take_one():
    for policy in POLICIES:
        with pytest.raises(RuntimeError, match="epoch LFU eviction"):
            Table("int64", "float32", 1, max_capacity=2, eviction=policy).set_epoch(1)
    with pytest.raises(RuntimeError, match="not bounded"):
        Table("int64", "float32", 1).set_epoch(1)


def test_scores_of_64_bits():
    table = Table("int64", "float32", 1, max_capacity=3, eviction="custom")
    table.gather_or_insert(np.array([1, 2, 3]))
    table.set_scores(np.array([1, 2, 3]), np.array([2**64 - 1, 2**63, 2**63 - 1], np.uint64))
    assert table.gather_or_insert_evicting(np.array([4]))[1].tolist() == [3]
    assert table.gather_or_insert_evicting(np.array([5]))[1].tolist() == [4]
    table.set_scores(np.array([5]), np.array([2**63 + 1], np.uint64))
    assert table.gather_or_insert_evicting(np.array([6]))[1].tolist() == [2]


def test_evicted_values_are_those_the_row_had():
    table = Table("int64", "float32", 2, slots=[("m", 3, "constant", 1.0)], max_capacity=2)
    table.upsert(np.array([7, 8]), np.array([[1, 2], [3, 4]], np.float32))
    rows, keys, values = table.gather_or_insert_evicting(np.array([[9, 9], [10, 9]]))
    assert rows.shape == (2, 2, 2)
    assert keys.tolist() == [7, 8]
    assert values.tolist() == [[1, 2], [3, 4]]


def test_no_key_is_evicted_twice_and_none_is_lost():
    table = Table("int64", "float32", 1, max_capacity=1000)
    rng = np.random.default_rng(0)
    gone: set[int] = set()
    there: set[int] = set()
    for _ in range(50):
        batch = rng.integers(-(2**62), 2**62, 300)
        _, keys, _ = table.gather_or_insert_evicting(batch)
        there |= set(batch.tolist())
        assert len(set(keys.tolist())) == len(keys)
        assert set(keys.tolist()) <= there
        assert not set(keys.tolist()) & gone
        gone |= set(keys.tolist())
    assert len(there) == len(gone) + len(table)


# ---- Export and import ----


@pytest.mark.parametrize("policy", POLICIES)
def test_export_and_import_carry_the_scores(policy):
    table = Table("int64", "float32", 2, initializer=0.25, max_capacity=40, eviction=policy)
    for seed in range(20):
        table.gather_or_insert(np.random.default_rng(seed).integers(0, 60, 15))
    if policy == "custom":
        table.set_scores(np.arange(60), np.arange(60, dtype=np.uint64) * 77 % 50)
    smaller = Table("int64", "float32", 2, max_capacity=10, eviction=policy)
    scores = {}
    for keys, freqs, versions, columns, s in table.export(chunk=7, scores=True):
        smaller.import_rows(keys, columns, frequencies=freqs, versions=versions, scores=s)
        scores.update(zip(keys.tolist(), s.tolist(), strict=True))
    kept = next(smaller.export())[0]
    assert len(kept) == 10
    assert sorted(scores[int(key)] for key in kept) == sorted(scores.values())[-10:]
    assert smaller.scores(kept).tolist() == [scores[int(key)] for key in kept]
    # What is restored is older than what comes.
    if policy == "lru":
        smaller.gather_or_insert(np.array([-5]))
        assert int(smaller.scores(np.array([-5]))[0]) > max(scores.values())


def test_an_import_without_scores_starts_from_versions_and_frequencies():
    keys, rows = np.array([1, 2, 3]), {0: np.ones((3, 1), np.float32)}
    stamps = {
        "frequencies": np.array([5, 9, 1], np.uint32),
        "versions": np.array([300, 100, 200], np.uint32),
    }
    lru = Table("int64", "float32", 1, max_capacity=2)
    lru.import_rows(keys, rows, **stamps)
    assert lru.scores(keys).tolist() == [300_000_000, 0, 200_000_000]
    lfu = Table("int64", "float32", 1, max_capacity=2, eviction="lfu")
    lfu.import_rows(keys, rows, **stamps)
    assert lfu.scores(keys).tolist() == [5 << 32 | 300, 9 << 32 | 100, 0]
    custom = Table("int64", "float32", 1, max_capacity=2, eviction="custom")
    custom.import_rows(keys, rows, **stamps)
    assert custom.contains(keys).tolist() == [False, True, True]


def test_a_table_without_a_bound_has_scores_of_zero():
    table = Table("int64", "float32", 1)
    table.gather_or_insert(np.arange(5))
    assert (table.max_capacity, table.evicted_rows) == (0, 0)
    assert table.scores(np.arange(5)).tolist() == [0] * 5
    assert next(table.export(scores=True))[4].tolist() == [0] * 5


def test_bad_options():
    with pytest.raises(ValueError, match="max_capacity of -1"):
        Table("int64", "float32", 1, max_capacity=-1)
    with pytest.raises(ValueError, match="'fifo'"):
        Table("int64", "float32", 1, max_capacity=1, eviction="fifo")
    table = Table("int64", "float32", 1, max_capacity=5)
    for admission in (-0.1, 1.1, np.nan):
        with pytest.raises(ValueError, match="admission"):
            table.gather_or_insert(np.array([1]), admission=admission)
    with pytest.raises(ValueError, match=r"width|column"):
        table.upsert_columns(np.array([1]), {3: np.ones((1, 1), np.float32)})
    assert len(table) == 0
    with pytest.raises(TypeError, match="scores"):
        table.set_scores(np.array([1]), np.array([1]))


def test_memory_of_ranks_is_counted_and_given_back():
    free = Table("int64", "float32", 16)
    bounded = Table("int64", "float32", 16, max_capacity=200_000)
    for first in range(0, 400_000, 20_000):
        free.gather_or_insert(np.arange(first, first + 20_000) % 220_000)
        bounded.gather_or_insert(np.arange(first, first + 20_000))
    extra = bounded.memory()["overhead_per_row"] - free.memory()["overhead_per_row"]
    assert 10 < extra < 40
    bounded.clear()
    assert bounded.memory()["column_bytes"] == 0


# ---- Admission ----


@pytest.mark.parametrize("capacity", [0, 10_000])
def test_admission_is_a_function_of_seed_and_key(capacity):
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 20_000)
    batch = np.concatenate([keys, keys[::-1]])
    tables = [Table("int64", "float32", 2, initializer=0.5, max_capacity=capacity, threads=t) for t in (1, 3)]
    inserted = np.zeros(len(batch), bool)
    positions = np.zeros(len(batch), np.uint64)
    options = {"admission": 0.3, "seed": 7, "inserted": inserted, "positions": positions}
    rows = [t.gather_or_insert(batch, **options) for t in tables]
    np.testing.assert_array_equal(rows[0], rows[1])
    admitted = rows[0][:, 0] == 0.5
    assert (rows[0][~admitted] == 0).all()
    assert (inserted == admitted).all()
    assert ((positions == NO_ROW) == ~admitted).all()
    assert (admitted[:20_000] == admitted[20_000:][::-1]).all()
    assert 0.28 < admitted.mean() < 0.32
    assert len(tables[0]) == admitted[:20_000].sum()
    np.testing.assert_array_equal(tables[0].contains(keys), admitted[:20_000])
    # Another seed admits others; those that are there stay.
    again = tables[0].gather_or_insert(keys, admission=0.3, seed=8)[:, 0] == 0.5
    assert again[admitted[:20_000]].all()
    assert again.sum() > admitted[:20_000].sum()


def test_admission_of_zero_and_one():
    table = Table("int64", "float32", 1, initializer=0.5)
    assert table.gather_or_insert(np.arange(5000), admission=0.0).sum() == 0
    assert len(table) == 0
    assert table.gather_or_insert(np.arange(5000), admission=1.0).sum() == 2500
    assert (table.gather_or_insert(np.arange(5000), admission=0.0) == 0.5).all()


# ---- Threads ----


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_keep_rows_whole_and_the_table_within_its_capacity(policy):
    capacity, batch, dim = 2000, 500, 9
    table = Table("int64", "float32", dim, max_capacity=capacity, eviction=policy, threads=2)
    errors: list[BaseException] = []
    end = time.monotonic() + 2

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            while time.monotonic() < end:
                keys = rng.integers(0, 6000, batch)
                rows = np.repeat(rng.random((batch, 1), np.float32), dim, 1)
                what = rng.integers(0, 8)
                got = rows
                if what == 0:
                    got = table.gather(keys)
                elif what in (1, 2):
                    got, evicted, values = table.gather_or_insert_evicting(keys)
                    assert len(evicted) == len(set(evicted.tolist()))
                    assert (values == values[:, :1]).all()
                elif what == 3:
                    table.upsert(keys, rows)
                elif what == 4:
                    table.apply("sgd", keys, rows, {"learning_rate": 0.5})
                elif what == 5:
                    table.remove(keys[:100])
                elif what == 6 and policy == "custom":
                    table.set_scores(keys, rng.integers(0, 9, batch).astype(np.uint64))
                elif what == 7:
                    for chunk in table.export(scores=True, chunk=512):
                        assert (chunk[3][0] == chunk[3][0][:, :1]).all()
                assert (got == got[:, :1]).all()
                assert len(table) <= capacity + 4 * batch
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]
    assert len(table) <= capacity
    assert len(next(table.export(chunk=capacity + 1))[0]) == len(table)


def test_threads_evict_every_row_exactly_once():
    table = Table("int64", "float32", 1, max_capacity=1000)
    gone: list[list[int]] = [[] for _ in range(4)]

    def work(number):
        for first in range(50):
            keys = np.arange(200) + 200 * first + 1_000_000 * number
            gone[number] += table.gather_or_insert_evicting(keys)[1].tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    every = [key for keys in gone for key in keys]
    assert len(every) == len(set(every)) == table.evicted_rows == 4 * 50 * 200 - 1000
    assert not table.contains(np.array(every)).any()
