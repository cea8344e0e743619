"""Slots that a checkpoint brings belong to the optimizer that is restored with them, whatever else is alive."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
import tfplugin.keras
import tfplugin.tf_keras
from tfplugin import sok

train = tf.compat.v1.train
KEYS = [3, 5, 8]

OPTIMIZERS = {
    "v1": lambda: train.AdamOptimizer(0.1),
    "tfplugin": lambda: tfplugin.optimizers.Adam(0.1),
    "keras": lambda: tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)),
    "tf_keras": lambda: tfplugin.OptimizerWrapper(tf_keras.optimizers.Adam(0.1)),
    "legacy": lambda: tfplugin.OptimizerWrapper(tf_keras.optimizers.legacy.Adam(0.1)),
    "generic": lambda: tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.1), fused=False),
}


def _step(optimizer, table, gradient):
    parts = list(table) if isinstance(table, tfplugin.PartitionedKvVariable) else [table]
    optimizer.apply_gradients(
        [
            (tf.IndexedSlices(tf.fill([len(keys), 4], gradient), tf.constant(keys, tf.int64)), part)
            for i, part in enumerate(parts)
            if (keys := [key for key in KEYS if key % len(parts) == i])
        ]
    )


def _train(optimizer, table, gradients=(1.0, -3.0, 0.5)):
    for gradient in gradients:
        _step(optimizer, table, gradient)


def _checkpoint(table, optimizer):
    return tf.train.Checkpoint(table=table, optimizer=optimizer)


def _expected(make, rows_of, make_optimizer, partitioner=None):
    """Rows after seven steps in one go."""
    table, optimizer = make(initializer=1.0, name="expected", partitioner=partitioner), make_optimizer()
    _train(optimizer, table)
    _train(optimizer, table, (2.0, 2.0, -1.0, 0.1))
    return rows_of(table, KEYS)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_second_optimizer_goes_on_where_the_checkpoint_stopped(make, rows_of, tmp_path, make_optimizer, caplog):
    table, first = make(initializer=1.0), make_optimizer()
    _train(first, table)
    path = _checkpoint(table, first).save(str(tmp_path / "a"))
    _train(first, table, (7.0, 7.0))

    second = make_optimizer()  # `first` is still there
    with caplog.at_level(logging.WARNING, "tfplugin"):
        _checkpoint(table, second).restore(path)
        _train(second, table, (2.0, 2.0))
        path = _checkpoint(table, second).save(str(tmp_path / "b"))
        assert not caplog.records
    _step(second, table, -1.0)
    _step(second, table, 0.1)
    expected = _expected(make, rows_of, make_optimizer)
    np.testing.assert_array_equal(rows_of(table, KEYS), expected)

    # What it saved is its own, too.
    table, third = make(initializer=9.0, name="v"), make_optimizer()
    _checkpoint(table, third).restore(path)
    _train(third, table, (-1.0, 0.1))
    np.testing.assert_array_equal(rows_of(table, KEYS), expected)
    # And who has lost its slots starts anew beside it.
    _train(first, table, (1.0,))
    _train(third, table, (1.0,))


@pytest.mark.parametrize("name", ["v1", "keras"])
def test_a_second_optimizer_that_has_taken_steps_before_it_is_restored(make, rows_of, tmp_path, partitioner, name):
    make_optimizer = OPTIMIZERS[name]
    table, first = make(initializer=1.0, partitioner=partitioner), make_optimizer()
    _train(first, table)
    path = _checkpoint(table, first).save(str(tmp_path / "a"))
    second = make_optimizer()
    _train(second, table)
    _checkpoint(table, second).restore(path)
    _train(second, table, (2.0, 2.0, -1.0, 0.1))
    np.testing.assert_array_equal(rows_of(table, KEYS), _expected(make, rows_of, make_optimizer, partitioner))


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_second_of_two_optimizers_is_saved_with_its_own_slots(make, rows_of, tmp_path, make_optimizer):
    table, first, second = make(initializer=1.0), make_optimizer(), make_optimizer()
    _train(first, table, (7.0, 7.0))
    _train(second, table)
    path = _checkpoint(table, second).save(str(tmp_path / "a"))
    _train(second, table, (2.0, 2.0))

    restored, alone = make(initializer=9.0, name="v"), make_optimizer()
    _checkpoint(restored, alone).restore(path)
    _train(alone, restored, (2.0, 2.0))
    np.testing.assert_array_equal(rows_of(restored, KEYS), rows_of(table, KEYS))


@pytest.mark.parametrize("again", [False, True], ids=["new", "the same"])
@pytest.mark.parametrize("turns", [(0, 1, 0, 1), (1, 1, 0, 0)], ids=str)
def test_two_optimizers_that_are_restored_together_keep_what_they_had(make, rows_of, tmp_path, again, turns):
    def made():
        table = make(initializer=1.0)
        return tf.train.Checkpoint(table=table, first=train.AdamOptimizer(0.1), second=train.AdamOptimizer(0.1))

    checkpoint = made()
    _train(checkpoint.first, checkpoint.table, (7.0, 7.0))
    _train(checkpoint.second, checkpoint.table)
    path = checkpoint.save(str(tmp_path / "a"))

    def go_on(checkpoint):
        for turn in turns:
            _step((checkpoint.first, checkpoint.second)[turn], checkpoint.table, 2.0)
        return rows_of(checkpoint.table, KEYS)

    expected = go_on(checkpoint)
    restored = checkpoint if again else made()
    restored.restore(path)
    np.testing.assert_array_equal(go_on(restored), expected)
    assert restored.table.slot_names() == {"Adam.m", "Adam.v", "Adam_1.m", "Adam_1.v"}


def test_slots_that_nobody_has_go_with_the_first_step_of_another_kind(make, tmp_path):
    table = make()
    adam = train.AdamOptimizer(0.1)
    _train(adam, table)
    path = _checkpoint(table, adam).save(str(tmp_path / "a"))
    restored, adagrad = make(), train.AdagradOptimizer(0.1)
    _checkpoint(restored, adagrad).restore(path).expect_partial()
    assert restored.slot_names() == {"Adam.m", "Adam.v"}
    _step(adagrad, restored, 1.0)
    assert restored.slot_names() == {"Adagrad.accumulator"}


def test_a_table_restored_alone_leaves_its_slots_with_the_first(make, rows_of, tmp_path):
    table, first = make(initializer=1.0), train.AdamOptimizer(0.1)
    _train(first, table)
    path = tf.train.Checkpoint(table=table).save(str(tmp_path / "a"))
    _step(first, table, 2.0)
    moments = rows_of(table, KEYS, "Adam.m")
    tf.train.Checkpoint(table=table).restore(path)
    _step(train.AdamOptimizer(0.1), table, 5.0)
    _step(first, table, 2.0)
    np.testing.assert_array_equal(rows_of(table, KEYS, "Adam.m"), moments)


def test_functions_that_were_traced_with_other_slots_are_named(make, tmp_path, caplog):
    table, first, second = make(initializer=1.0), train.AdamOptimizer(0.1), train.AdamOptimizer(0.1)
    _train(first, table)
    path = _checkpoint(table, first).save(str(tmp_path / "a"))
    step = tf.function(lambda: _step(second, table, 1.0))
    step()
    _checkpoint(table, second).restore(path)
    assert "functions were traced with the slots of Adam_1, and the restored rows have those of Adam" in caplog.text


def test_updates_in_the_backward_pass_take_their_slots_back(make, rows_of, tmp_path):
    def backward(table):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, KEYS) ** 2)
        tape.gradient(loss, table)

    table, first = make(initializer=1.0), tfplugin.optimizers.Adam(0.1)
    updates = tfplugin.apply_in_backward(table, first)
    backward(table)
    path = tf.train.Checkpoint(table=table, updates=updates).save(str(tmp_path / "a"))
    backward(table)
    expected = rows_of(table, KEYS)
    updates.undo()
    again = tfplugin.apply_in_backward(table, tfplugin.optimizers.Adam(0.1))
    tf.train.Checkpoint(table=table, updates=again).restore(path)
    backward(table)
    np.testing.assert_array_equal(rows_of(table, KEYS), expected)
    assert first is not None


NADAMS = {
    "fused": lambda: tfplugin.OptimizerWrapper(tf.keras.optimizers.Nadam(0.05)),
    "generic": lambda: tfplugin.OptimizerWrapper(tf.keras.optimizers.Nadam(0.05), fused=False),
    "sok": lambda: sok.OptimizerWrapper(tf.keras.optimizers.Nadam(0.05)),
}


def _train_both(optimizer, variables, steps):
    """Steps of `optimizer` on a table, on a dense variable, or on both."""
    for _ in range(steps):
        with tf.GradientTape() as tape:
            values = [
                tf.nn.embedding_lookup(v, KEYS) if isinstance(v, tfplugin.KvVariable) else v for v in variables.values()
            ]
            loss = tf.add_n([tf.reduce_sum((2 * value - 1) ** 2) for value in values])
        gradients = tape.gradient(loss, list(variables.values()))
        optimizer.apply_gradients(zip(gradients, variables.values(), strict=True))


@pytest.mark.parametrize("make_optimizer", NADAMS.values(), ids=NADAMS)
@pytest.mark.parametrize("trained", [["dense"], ["table"], ["dense", "table"]], ids="+".join)
def test_nadam_of_keras_3_goes_on_as_if_it_had_not_stopped(make, rows_of, tmp_path, trained, make_optimizer):
    def fresh(name):
        every = {"dense": tf.Variable(tf.ones([2, 2])), "table": make(initializer=1.0, name=name)}
        variables, optimizer = {k: every[k] for k in trained}, make_optimizer()
        return variables, optimizer, tf.train.Checkpoint(optimizer=optimizer, **variables)

    variables, optimizer, checkpoint = fresh("v")
    _train_both(optimizer, variables, 5)
    path = checkpoint.save(str(tmp_path / "a"))
    _train_both(optimizer, variables, 5)

    restored, optimizer, checkpoint = fresh("v")
    status = checkpoint.restore(path)
    _train_both(optimizer, restored, 5)
    status.assert_consumed()
    for name, v in restored.items():
        got, expected = (rows_of(x, KEYS) if name == "table" else x.numpy() for x in (v, variables[name]))
        np.testing.assert_array_equal(got, expected)


def test_nadam_of_keras_3_is_in_checkpoints_as_without_the_wrapper(make, tmp_path):
    names = []
    for i, wrap in enumerate((lambda o: o, tfplugin.OptimizerWrapper)):
        dense, optimizer = {"dense": tf.Variable(tf.ones([2, 2]))}, tf.keras.optimizers.Nadam(0.05)
        _train_both(wrap(optimizer), dense, 1)
        path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / str(i)))
        names.append([name for name, _ in tf.train.list_variables(path)])
    assert names[0] == names[1]


def test_a_variable_that_comes_late_leaves_what_nadam_of_keras_3_has_multiplied(make):
    optimizer = tf.keras.optimizers.Nadam(0.05)
    wrapper = tfplugin.OptimizerWrapper(optimizer)
    _train_both(wrapper, {"dense": tf.Variable(tf.ones([2, 2]))}, 3)
    product = float(optimizer._u_product)
    table = make(initializer=1.0)
    _train_both(wrapper, {"table": table}, 1)
    assert float(optimizer._u_product) == pytest.approx(product * 0.9 * (1 - 0.5 * 0.96**4), rel=1e-5)


# ---- Slots of optimizers that are gone -------------------------------------------------------------------------------


def _first_step_anew(make, rows_of, make_optimizer, start):
    """What the first step of a new optimizer makes of rows that are `start`."""
    table = make(initializer=9.0, name="anew")
    table.upsert(KEYS, start)
    _step(make_optimizer(), table, -1.0)
    return rows_of(table, KEYS)


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_new_optimizer_starts_fresh_whenever_the_old_one_was_collected(
    make, rows_of, make_optimizer, collected, caplog
):
    table, old = make(initializer=1.0), make_optimizer()
    _train(old, table)
    before, slots = rows_of(table, KEYS), table.slot_names()
    old.cycle = old  # as in models of Keras: it goes when garbage is collected
    del old
    if collected:
        gc.collect()
    new = make_optimizer()
    with caplog.at_level(logging.WARNING, "tfplugin"):
        _step(new, table, -1.0)
    np.testing.assert_array_equal(rows_of(table, KEYS), _first_step_anew(make, rows_of, make_optimizer, before))
    assert table.slot_names() == slots  # those of the old one are gone
    assert [record.getMessage() for record in caplog.records if "takes the place of one that is gone" in record.message]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_slots_that_another_optimizer_has_passed_over_are_nobodys(make, rows_of, tmp_path, make_optimizer):
    table, adam = make(initializer=1.0), make_optimizer()
    _train(adam, table)
    path = _checkpoint(table, adam).save(str(tmp_path / "a"))
    restored, sgd = make(initializer=1.0, name="w"), tfplugin.optimizers.SGD(0.1)
    _checkpoint(restored, sgd).restore(path)
    _step(sgd, restored, 1.0)
    before, new = rows_of(restored, KEYS), make_optimizer()
    _step(new, restored, -1.0)
    np.testing.assert_array_equal(rows_of(restored, KEYS), _first_step_anew(make, rows_of, make_optimizer, before))


@pytest.mark.parametrize("keras", [tf.keras, tf_keras], ids=["keras3", "tf_keras"])
@pytest.mark.parametrize("how", ["recompiled", "collected", "loaded"])
def test_compiling_a_new_optimizer_starts_rows_fresh_as_dense_weights(tmp_path, keras, how):
    layers = tfplugin.tf_keras if keras is tf_keras else tfplugin.keras
    ids = keras.Input((), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1, name="dense")(layers.Embedding(2, name="item")(ids)))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    batch = np.array(KEYS)
    for _ in range(30):
        model.train_on_batch(batch, np.full(len(KEYS), -5.0, np.float32))
    if how == "loaded":
        model.save(str(tmp_path / "model.keras"))
        model = keras.models.load_model(str(tmp_path / "model.keras"))
    for rate in (0.001, 0.002, 0.003):
        model.compile(keras.optimizers.Adam(rate), "mse")
        if how == "collected":
            gc.collect()
        table, dense = model.get_layer("item").table, model.get_layer("dense")
        rows, kernel = table.sparse_read(batch, training=False).numpy(), dense.get_weights()[0]
        model.train_on_batch(batch, np.full(len(KEYS), 5.0, np.float32))
        moved = np.abs(table.sparse_read(batch, training=False).numpy() - rows)
        np.testing.assert_allclose(moved, rate, rtol=1e-3)
        np.testing.assert_allclose(np.abs(dense.get_weights()[0] - kernel), rate, rtol=1e-3)
        model.train_on_batch(batch, np.full(len(KEYS), 5.0, np.float32))
    assert len(table.slot_names()) == 2
