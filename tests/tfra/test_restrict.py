"""Restrict policies against a dictionary: what they note, and what `restrict` removes."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from tfplugin import dynamic_embedding as de

v1 = tf.compat.v1


class Training:
    """A variable with a policy, trained on batches of ids in a mode."""

    def __init__(self, mode, name, devices, policy, optimizer=None):
        self.mode = mode
        self.table = de.get_variable(name, dim=2, devices=devices, restrict_policy=policy, initializer=1.0)
        self.status = self.table.restrict_policy.status
        if mode.name == "graph":
            self._ids = v1.placeholder(tf.int64, [None])
            rows = de.embedding_lookup(self.table, self._ids, name="x")
            self.optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
            self._step = self.optimizer.minimize(tf.reduce_sum(rows))
            mode.session.run(v1.global_variables_initializer())
        else:
            self.optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1))
            shadow = self.table.get_trainable_by_name("x")

            def step(ids):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(de.embedding_lookup(self.table, ids, name="x"))
                self.optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])

            signature = [tf.TensorSpec([None], tf.int64)]
            self._step = tf.function(step, input_signature=signature) if mode.name == "function" else step

    def train(self, ids):
        if self.mode.name == "graph":
            self.mode.session.run(self._step, {self._ids: ids})
        else:
            self._step(tf.constant(ids, tf.int64))

    def restrict(self, *args, **kwargs):
        self.mode(lambda: self.table.restrict(*args, **kwargs))

    def keys(self, variable=None):
        return sorted(self.mode(lambda: (variable or self.table).export()[0]).tolist())


def held(training, variable):
    keys, rows = training.mode(lambda: variable.export())
    return dict(zip(keys.tolist(), rows[:, 0].tolist(), strict=True))


def test_frequency_counts_updates_of_each_key_once(mode, name, devices):
    training = Training(mode, name, devices, de.FrequencyRestrictPolicy)
    for batch in ([1, 2, 2, 2], [2, 3], [2]):
        training.train(batch)
    assert held(training, training.status) == {1: 1, 2: 3, 3: 1}
    # Lookups and writes are no updates.
    training.mode(lambda k: training.table.lookup(k), np.array([1, 9]))
    training.mode(lambda k, r: training.table.upsert(k, r), np.array([1]), np.ones((1, 2), np.float32))
    assert held(training, training.status) == {1: 1, 2: 3, 3: 1}
    assert training.status.value_dtype == tf.int32 and training.status.dim == 1 and not training.status.trainable


def test_frequency_keeps_those_updated_most(mode, name, devices):
    training = Training(mode, name, devices, de.FrequencyRestrictPolicy)
    counts = {}
    rng = np.random.default_rng(0)
    for _ in range(6):
        batch = rng.integers(0, 12, 9)
        training.train(batch)
        for key in set(batch.tolist()):
            counts[key] = counts.get(key, 0) + 1
    assert held(training, training.status) == counts
    training.restrict(6)
    kept = training.keys()
    assert kept == training.keys(training.status)
    share = 6 // len(devices)
    for i in range(len(devices)):
        here = {key: count for key, count in counts.items() if key % len(devices) == i}
        stayed = sorted(here[key] for key in kept if key in here)
        assert stayed == sorted(here.values())[-share:]
    slots = training.table.get_slot_variables(training.optimizer)
    assert [training.keys(slot) for slot in slots] == [kept, kept]


def test_timestamp_keeps_those_updated_last(mode, name, devices, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(tf, "timestamp", lambda: tf.numpy_function(lambda: now[0], [], tf.float64))
    training = Training(mode, name, devices, de.TimestampRestrictPolicy)
    for batch in ([0, 1, 2, 3, 4, 5], [3, 4, 5], [0, 4]):
        training.train(batch)
        now[0] += 10
    assert held(training, training.status) == {0: 1020, 1: 1000, 2: 1000, 3: 1010, 4: 1020, 5: 1010}
    training.restrict(3)
    kept = training.keys()
    # One on each of three devices is the latest of {0, 3}, {1, 4}, {2, 5}.
    assert kept == training.keys(training.status) and {0, 4} < set(kept) and len(kept) == 3


def test_the_timestamp_is_the_unix_time(name):
    table = de.Variable(dim=1, name=name, restrict_policy=de.TimestampRestrictPolicy)
    before = int(time.time())
    table.restrict_policy.apply_update(tf.constant([1], tf.int64))
    assert table.restrict_policy.tstp_var is table.restrict_policy.status
    assert before <= int(table.restrict_policy.status.lookup([1]).numpy()[0, 0]) <= time.time()


def test_nothing_happens_up_to_the_trigger(mode, name, devices):
    training = Training(mode, name, devices, de.FrequencyRestrictPolicy)
    training.train(np.arange(9))
    training.restrict(3, trigger=9)
    assert len(training.keys()) == 9
    training.restrict(3, trigger=8)
    assert len(training.keys()) == 3
    training.restrict(3)
    assert len(training.keys()) == 3


def test_a_key_that_was_never_trained_goes_first(name):
    table = de.Variable(dim=1, name=name, restrict_policy=de.FrequencyRestrictPolicy)
    table.upsert([1, 2, 3], [[1.0], [2.0], [3.0]])
    table.restrict_policy.apply_update(tf.constant([1, 3], tf.int64))
    assert table.restrict_policy.freq_var is table.restrict_policy.status
    table.restrict(2)
    assert sorted(table.export()[0].numpy().tolist()) == [1, 3]


def test_a_removed_row_starts_anew(mode, name, devices):
    training = Training(mode, name, devices, de.FrequencyRestrictPolicy)
    training.train([3, 3, 3, 6])
    training.train([3])
    training.restrict(0, trigger=0)
    assert training.keys() == [] and training.keys(training.status) == []
    training.train([6])
    assert held(training, training.status) == {6: 1}
    np.testing.assert_allclose(held(training, training.table)[6], 0.9, atol=0.06)


@pytest.mark.parametrize("wrong", [3, de.FrequencyRestrictPolicy, "frequency", int])
def test_a_policy_is_a_subclass(name, wrong):
    if wrong is de.FrequencyRestrictPolicy:
        wrong = wrong(de.Variable(name=name))
    with pytest.raises(TypeError, match="must be a subclass of RestrictPolicy"):
        de.Variable(name=name, restrict_policy=wrong)


@pytest.mark.parametrize("policy", [de.FrequencyRestrictPolicy, de.TimestampRestrictPolicy])
def test_restrict_wants_numbers(name, policy):
    table = de.Variable(name=name, restrict_policy=policy)
    for bad in (2.0, "2", True, tf.constant(2)):
        with pytest.raises(TypeError, match="num_reserved must be an int"):
            table.restrict(bad)
        with pytest.raises(TypeError, match="trigger must be an int"):
            table.restrict(2, trigger=bad)
    with pytest.raises(ValueError, match="0 or more"):
        table.restrict(-1)


def test_fewer_rows_than_tables_are_refused_and_none_goes(name):
    table = de.Variable(dim=1, name=name, devices=["/CPU:0"] * 3, restrict_policy=de.FrequencyRestrictPolicy)
    table.upsert(tf.range(6, dtype=tf.int64), tf.ones([6, 1]))
    table.restrict_policy.apply_update(tf.range(6, dtype=tf.int64))
    for few in (1, 2):
        with pytest.raises(ValueError, match=rf"num_reserved={few} is less than its 3 tables.*Keep 3 or more"):
            table.restrict(few)
    assert table.size().numpy() == 6
    table.restrict(3)
    assert table.size().numpy() == 3
    table.restrict(0)
    assert table.size().numpy() == 0


def test_without_a_policy_restrict_does_nothing(name, caplog):
    table = de.Variable(dim=1, name=name)
    table.upsert([1], [[1.0]])
    assert table.restrict(0) is None and table.size().numpy() == 1
    assert "no restrict_policy" in caplog.text


def test_a_policy_of_one_s_own(mode, name, devices):
    """Written as the page says: tables, removal by hand, slots one by one."""

    class KeepEven(de.RestrictPolicy):
        def __init__(self, var):
            super().__init__(var)
            self.seen = de.Variable(
                key_dtype=var.key_dtype, value_dtype=tf.int64, name=f"{var.name}_seen", devices=var.devices
            )

        @property
        def status(self):
            return self.seen

        def apply_update(self, ids):
            return self.seen.upsert(ids, tf.reshape(ids, [-1, 1]))

        def apply_restriction(self, num_reserved, **kwargs):
            removed = []
            for i, table in enumerate(self.var.tables):
                keys, _ = table.export()
                odd = tf.boolean_mask(keys, tf.equal(keys % 2, 1))
                removed += [table.remove(odd), self.seen.tables[i].remove(odd)]
                removed += [slot.tables[i].remove(odd) for slot in self.params_in_slots]
            return tf.group(*[op for op in removed if op is not None])

    training = Training(mode, name, devices, KeepEven)
    training.train([1, 2, 3, 4, 4])
    assert held(training, training.status) == {1: 1, 2: 2, 3: 3, 4: 4}
    training.restrict(2)
    assert training.keys() == training.keys(training.status) == [2, 4]
    assert [slot.slot_name for slot in training.table.restrict_policy.params_in_slots] == ["m", "v"]


def test_the_base_policy_says_what_it_lacks(name):
    policy = de.RestrictPolicy(de.Variable(name=name))
    assert policy.status is None
    with pytest.raises(NotImplementedError, match="apply_update"):
        policy.apply_update(tf.constant([1]))
    with pytest.raises(NotImplementedError, match="apply_restriction"):
        policy.apply_restriction(1)
