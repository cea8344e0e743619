"""Any sequence of operations leaves the table equal to a dict."""

import tempfile

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtools._kvtable import Table

DIM = 2
KEYS = st.one_of(
    st.integers(-30, 30),
    st.sampled_from([-(2**63), 2**63 - 1, -1, 0, 2**32, -(2**32), 2**31]),
)
BATCH = st.lists(KEYS, max_size=40).map(lambda keys: np.array(keys, np.int64))
SLOTS = st.lists(
    st.sampled_from([("a", 1, "constant", 0.5), ("b", DIM, "copy_value", 0.0), ("c", 3, "constant", -1.0)]),
    unique=True,
    max_size=3,
)


class TableAgainstDict(RuleBasedStateMachine):
    @initialize(shards=st.sampled_from([1, 2, 8, 64]), hint=st.sampled_from([0, 0, 1000]), spilled=st.booleans())
    def make(self, shards, hint, spilled):
        # Memory for 16 rows with all slots, and the others in a file.
        self.told = {"shards": 1, "max_memory": 850, "spill": tempfile.gettempdir()} if spilled else {"shards": shards}
        self.table = Table("int64", "float32", DIM, initializer=0.25, capacity_hint=hint, threads=2, **self.told)
        self.rows = {}  # key -> [value, *slots]
        self.stamps = {}  # key -> [frequency, version]
        self.slots = []
        self.step = 0

    def numbers(self, n, width=DIM):
        self.step += 1
        return (np.arange(n * width, dtype=np.float32).reshape(n, width) + 1) * self.step

    def initial_slots(self, value):
        return [value.copy() if s[2] == "copy_value" else np.full(s[1], s[3], np.float32) for s in self.slots]

    def insert(self, key, value):
        self.rows[key] = [value.copy(), *self.initial_slots(value)]
        self.stamps[key] = [0, 0]

    def stamp(self, key, frequency, version):
        self.stamps[key] = [self.stamps[key][0] + frequency, version]

    @rule(keys=BATCH)
    def gather_or_insert(self, keys):
        inserted = np.zeros(len(keys), bool)
        got = self.table.gather_or_insert(keys, frequency=1, version=self.step, inserted=inserted)
        new = {int(key) for key in keys} - self.rows.keys()
        for i, key in enumerate(keys.tolist()):
            if key not in self.rows:
                self.insert(key, np.full(DIM, 0.25, np.float32))
            if key in new:
                self.stamp(key, 1, self.step)
            assert inserted[i] == (key in new)
            np.testing.assert_array_equal(got[i], self.rows[key][0])

    @rule(keys=BATCH)
    def upsert(self, keys):
        values = self.numbers(len(keys))
        self.table.upsert(keys, values, frequency=2, version=self.step)
        for key, value in zip(keys.tolist(), values, strict=True):
            if key in self.rows:
                self.rows[key][0] = value.copy()
            else:
                self.insert(key, value)
            self.stamp(key, 2, self.step)

    @rule(keys=BATCH, data=st.data())
    def upsert_slot(self, keys, data):
        if not self.slots:
            return
        column = data.draw(st.integers(1, len(self.slots)))
        numbers = self.numbers(len(keys), self.slots[column - 1][1])
        self.table.upsert_columns(keys, {column: numbers}, version=self.step)
        for key, number in zip(keys.tolist(), numbers, strict=True):
            if key not in self.rows:
                self.insert(key, np.full(DIM, 0.25, np.float32))
            self.rows[key][column] = number.copy()
            self.stamp(key, 0, self.step)

    @rule(keys=BATCH, from_zeros=st.booleans())
    def accumulate(self, keys, from_zeros):
        deltas = self.numbers(len(keys))
        self.table.accumulate(keys, deltas, from_zeros=from_zeros, version=self.step)
        for key, delta in zip(keys.tolist(), deltas, strict=True):
            if key not in self.rows:
                self.insert(key, np.full(DIM, 0.0 if from_zeros else 0.25, np.float32))
            self.rows[key][0] = self.rows[key][0] + delta
            self.stamp(key, 0, self.step)

    @rule(keys=BATCH)
    def remove(self, keys):
        there = {int(key) for key in keys} & self.rows.keys()
        assert self.table.remove(keys) == len(there)
        for key in there:
            del self.rows[key], self.stamps[key]

    @rule()
    def clear(self):
        self.table.clear()
        self.rows.clear()
        self.stamps.clear()

    @rule(rows=st.integers(0, 5000))
    def reserve(self, rows):
        self.table.reserve(rows)

    @rule(slots=SLOTS)
    def ensure_slots(self, slots):
        self.table.ensure_slots(slots)
        old = {slot[:2]: i + 1 for i, slot in enumerate(self.slots)}
        self.slots = slots
        for row in self.rows.values():
            fresh = self.initial_slots(row[0])
            row[1:] = [row[old[s[:2]]] if s[:2] in old else fresh[i] for i, s in enumerate(slots)]

    @rule(chunk=st.integers(1, 50))
    def export_and_import(self, chunk):
        other = Table("int64", "float32", DIM, initializer=0.25, slots=self.slots, **self.told)
        for keys, freqs, versions, columns in self.table.export(chunk=chunk):
            other.import_rows(keys, columns, frequencies=freqs, versions=versions)
        self.table = other

    @invariant()
    def equal(self):
        assert len(self.table) == len(self.rows) == self.table.memory()["rows"]
        keys = np.array([*self.rows, 12345, -54321], np.int64)
        there = np.zeros(len(keys), bool)
        columns = self.table.gather_columns(keys, found=there)
        assert there.tolist() == [True] * len(self.rows) + [False, False]
        for i, key in enumerate(self.rows):
            for got, expected in zip(columns, self.rows[key], strict=True):
                np.testing.assert_array_equal(got[i], expected)
        freqs, versions = self.table.gather_stamps(keys)
        stamps = [*self.stamps.values(), [0, 0], [0, 0]]
        assert np.stack([freqs, versions], 1).tolist() == stamps


TestTableAgainstDict = TableAgainstDict.TestCase
TestTableAgainstDict.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
