"""What tables tell of themselves, and what TensorBoard finds of it."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

v1 = tf.compat.v1


def partitioned(parts):
    return v1.fixed_size_partitioner(parts) if parts > 1 else None


@pytest.mark.parametrize("parts", [1, 3])
def test_lookups_births_and_hits_are_counted(parts):
    table = tfplugin.get_kv_variable("t", 4, partitioner=partitioned(parts))
    told = tfplugin.summary(table)
    assert (told.name, told.rows, told.lookups, told.births, told.hits) == ("t", 0, 0, 0, None)
    generator = np.random.default_rng(0)
    keys = generator.integers(-50, 50, (6, 40))
    for batch in keys:
        tf.nn.embedding_lookup(table, batch)
    table.sparse_read(np.arange(1000), training=False)  # inference does not count
    told = tfplugin.summary(table)
    distinct = len(np.unique(keys))
    assert (told.rows, told.lookups, told.births, told.held_back) == (distinct, keys.size, distinct, 0)
    assert told.hits == (keys.size - distinct) / keys.size
    assert told.bytes == told.row_bytes + told.index_bytes + told.column_bytes + told.slack_bytes
    assert told.row_bytes == distinct * 4 * 4


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_in_a_file_are_no_memory(parts, tmp_path):
    table = tfplugin.get_kv_variable("t", 16, partitioner=partitioned(parts), max_memory=300_000, spill=str(tmp_path))
    assert tfplugin.summary(table).file_bytes == 0
    tf.nn.embedding_lookup(table, np.arange(20_000))
    told = tfplugin.summary(table)
    memory = sum(np.asarray(part.memory()) for part in (table if parts > 1 else [table]))
    assert (told.rows, told.file_rows, told.file_bytes) == (20_000, memory[5], memory[6])
    assert told.bytes == told.row_bytes + told.index_bytes + told.column_bytes + told.slack_bytes
    assert told.row_bytes <= 300_000 and told.file_rows > 10_000 and told.file_rows * 64 <= told.file_bytes


def test_evictions_and_keys_below_a_threshold_are_counted():
    bounded = tfplugin.get_kv_variable("b", 2, max_capacity=10)
    for first in range(0, 50, 10):
        tf.nn.embedding_lookup(bounded, np.arange(first, first + 10))
    told = tfplugin.summary(bounded)
    assert (told.rows, told.births, told.evictions) == (10, 50, 40)
    assert told.expired == 0
    filtered = tfplugin.get_kv_variable("f", 2, enter_threshold=3)
    for _ in range(3):
        tf.nn.embedding_lookup(filtered, [7, 8])
    tf.nn.embedding_lookup(filtered, [9])
    told = tfplugin.summary(filtered)
    assert (told.rows, told.births, told.held_back, told.lookups) == (2, 2, 5, 7)


def test_padding_is_held_back():
    table = tfplugin.get_kv_variable("padded", embedding_dim=2, padding_key=0)
    tf.nn.embedding_lookup(table, [0, 5, 0, 5])
    told = tfplugin.summary(table)
    assert (told.rows, told.births, told.held_back, told.lookups, told.hits) == (1, 1, 2, 4, 0.25)


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_that_policies_let_go_are_counted_apart_from_evictions(parts):
    table = tfplugin.get_kv_variable("t", 2, max_capacity=10, partitioner=partitioned(parts))
    for first in (0, 7):
        tf.nn.embedding_lookup(table, np.arange(first, first + 7))
    assert int(table.evict(tfplugin.policies.KeepTop(6, by="version"))) == 4
    told = tfplugin.summary(table)
    assert (told.rows, told.births, told.evictions, told.expired) == (6, 14, 4, 4)
    assert (int(table.evicted_rows()), int(table.expired_rows())) == (4, 4)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16, tf.float64])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_survey_agrees_with_numpy(dtype, parts):
    table = tfplugin.get_kv_variable("t", 3, value_dtype=dtype, partitioner=partitioned(parts))
    generator = np.random.default_rng(1)
    keys = generator.choice(10**9, 5000, replace=False) - 10**8
    rows = tf.cast(generator.normal(size=(5000, 3)), dtype)
    table.upsert(keys, rows) if parts == 1 else [
        part.upsert(keys[keys % parts == i], tf.boolean_mask(rows, keys % parts == i)) for i, part in enumerate(table)
    ]
    bad = keys[:3]
    nan = tf.constant([[np.nan, 1, 1], [1, np.inf, 1], [1, 1, -np.inf]], dtype)
    for key, row in zip(bad, tf.unstack(nan), strict=True):
        list(table._kv_parts)[key % parts].upsert([key], [row])
    hot = keys[-4:]
    table.increase_counting(hot, [40, 10, 30, 20])
    told = tfplugin.telemetry.survey(table, hot=4)
    norms = np.linalg.norm(tf.cast(rows, tf.float64).numpy()[3:], axis=1)
    assert (told.rows, told.nan_rows) == (5000, 3)
    assert told.nan_keys.tolist() == sorted(bad.tolist()) or parts == 2
    assert set(told.nan_keys) == set(bad)
    assert told.hot_keys.tolist() == hot[[0, 2, 3, 1]].tolist()
    assert np.isclose(told.norm_sum, norms.sum()) and np.isclose(told.norm_squares, (norms**2).sum())
    assert np.isclose(told.norm_least, norms.min()) and np.isclose(told.norm_greatest, norms.max())
    limits = np.array([*tfplugin.telemetry.NORM_LIMITS, np.inf])
    assert told.norm_buckets.tolist() == np.bincount(np.searchsorted(limits, norms), minlength=len(limits)).tolist()


def test_a_survey_of_no_rows():
    told = tfplugin.survey(tfplugin.get_kv_variable("t", 3))
    assert (told.rows, told.norm_least, told.norm_greatest, told.nan_rows, len(told.hot_keys)) == (0, 0.0, 0.0, 0, 0)


def test_norms_of_gradients():
    table = tfplugin.get_kv_variable("t", 2)
    optimizer = tfplugin.OptimizerWrapper(tfplugin.optimizers.SGD(0.1))

    def step(values):
        values = tf.constant(values, tf.float32)
        optimizer.apply_gradients([(tf.IndexedSlices(values, tf.range(len(values), dtype=tf.int64)), table)])

    step([[1, 1]])
    assert tfplugin.gradient_norms(table) is None  # nobody watches
    tfplugin.watch_gradients(table)
    step([[3, 4], [0, 0]])
    step([[6, 8], [0, 1], [np.nan, 1]])
    told = tfplugin.gradient_norms(table)
    assert (told.steps, told.greatest_row, told.nonfinite_rows) == (2, 10.0, 1)
    assert np.isclose(told.mean, (5 + np.sqrt(101)) / 2) and np.isclose(told.greatest, np.sqrt(101))
    assert tfplugin.gradient_norms(table) is None
    tfplugin.watch_gradients(table, on=False)
    step([[1, 1]])
    assert tfplugin.gradient_norms(table) is None


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(TypeError, match="summary wants a key-value variable, got int"):
        tfplugin.summary(3)
    with pytest.raises(ValueError, match="hot and nan are numbers of keys, got -1 and 20"):
        tfplugin.survey(tfplugin.get_kv_variable("t", 2), hot=-1)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="summary of 'g', a variable of a graph: give the"):
        tfplugin.summary(tfplugin.get_kv_variable("g", 2))
    with pytest.raises(ValueError, match="every is a number of batches, got 0"):
        tfplugin.tensorboard_callback(tmp_path, every=0)
    with pytest.raises(ValueError, match="every_steps is 1 or more"):
        tfplugin.TensorBoardHook(tmp_path, tfplugin.get_kv_variable("t", 2), every_steps=0)
    with pytest.raises(ValueError, match="has no key-value variable"):
        tfplugin.TensorBoardHook(tmp_path, [])


def events(folder):
    """(tag, step) -> value of all events in a folder."""
    found = {}
    for path in map(str, pathlib.Path(folder).glob("events*")):
        for event in v1.train.summary_iterator(path):
            for value in event.summary.value:
                found[value.tag, event.step] = value
    return found


def test_keras_writes_to_tensorboard(tmp_path):
    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.table = tfplugin.get_kv_variable("users", 2, initializer=0.5)
            self.dense = tf.keras.layers.Dense(1)

        def call(self, ids):
            return self.dense(tf.nn.embedding_lookup(self.table, ids))

    model = Model()
    tfplugin.apply_in_backward(model.table, tfplugin.optimizers.SGD(0.1))
    model.compile("sgd", "mse")
    callback = tfplugin.tensorboard_callback(tmp_path, every=2, hot=2)
    model.fit(
        np.array([1, 1, 2, 3, 3, 3]),
        np.zeros(6),
        batch_size=1,
        epochs=1,
        shuffle=False,
        verbose=0,
        callbacks=[callback],
    )
    found = events(tmp_path)
    assert {step for _, step in found} == {2, 4, 6}
    assert found["users/rows", 4].simple_value == 3 and found["users/births", 2].simple_value == 1
    assert found["users/hits", 6].simple_value == 0.5
    assert found["users/gradient_norm_mean", 4].simple_value > 0
    assert found["users/row_norms", 6].histo.num == 3
    assert found["users/rows_not_finite", 6].simple_value == 0
    text = found["users/hot_keys", 6]
    assert text.metadata.plugin_data.plugin_name == "text"
    assert tf.make_ndarray(text.tensor)[0].decode().splitlines()[2:] == ["| 3 | 3 |", "| 1 | 2 |"]


def test_a_monitored_session_writes_to_tensorboard(tmp_path):
    with tf.Graph().as_default():
        table = tfplugin.get_kv_variable("ads", 2, initializer=1.0, partitioner=partitioned(2))
        steps = v1.train.get_or_create_global_step()
        keys = v1.placeholder(tf.int64, [None])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys))
        train = v1.train.GradientDescentOptimizer(0.5).minimize(loss, global_step=steps)
        hook = tfplugin.TensorBoardHook(tmp_path, table, every_steps=2, rows_every_steps=4)
        with v1.train.SingularMonitoredSession(hooks=[hook]) as session:
            for step in range(5):
                session.run(train, {keys: [step, 0]})
    found = events(tmp_path)
    assert {step for _, step in found} == {2, 4, 5}
    assert found["ads/rows", 4].simple_value == 4
    assert found["ads/gradient_norm_greatest_row", 2].simple_value == pytest.approx(np.sqrt(2))
    assert found["ads/row_norms", 4].histo.num == 4 and found["ads/row_norms", 5].histo.num == 5
