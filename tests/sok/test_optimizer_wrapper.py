"""`sok.OptimizerWrapper`: its own count of steps, and what it says of slots."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.framework import op_callbacks

import tfplugin.sok as sok
from tfplugin import optimizers

ADAMS = {
    "Keras 3": lambda: tf.keras.optimizers.Adam(0.1),
    "tf_keras": lambda: tf_keras.optimizers.Adam(0.1),
    "legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
    "v1": lambda: tf.compat.v1.train.AdamOptimizer(0.1),
    "tfplugin": lambda: optimizers.Adam(0.1),
}


@pytest.fixture(params=ADAMS.values(), ids=ADAMS)
def adam(request):
    return request.param


def step(optimizer, wrapper, dense, table):
    """One step of a model with a dense variable, updated directly, and a table, updated through the wrapper."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [7]) ** 3) + tf.reduce_sum(dense**3)
    of_dense, of_table = tape.gradient(loss, [dense, table])
    optimizer.apply_gradients([(of_dense, dense)])
    wrapper.apply_gradients([(of_table, table)])


def row_of(table):
    return table.sparse_read([7], training=False).numpy()


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
def test_an_optimizer_used_directly_too_counts_each_step_once(adam, traced):
    optimizer = adam()
    wrapper, dense, table = sok.OptimizerWrapper(optimizer), tf.Variable([[1.0]]), sok.DynamicVariable(1, "ones")
    reference, expected = tf_keras.optimizers.Adam(0.1), tf.Variable([[1.0]])
    run = tf.function(step, autograph=False) if traced and optimizer.__class__.__name__ != "AdamOptimizer" else step
    for _ in range(5):
        run(optimizer, wrapper, dense, table)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(expected**3)
        reference.apply_gradients([(tape.gradient(loss, expected), expected)])
    np.testing.assert_allclose(row_of(table), expected, 1e-5)
    np.testing.assert_allclose(dense, expected, 1e-5)


def test_both_counts_come_back_with_a_checkpoint(adam, tmp_path):
    def made():
        optimizer = adam()
        wrapper, dense, table = sok.OptimizerWrapper(optimizer), tf.Variable([[1.0]]), sok.DynamicVariable(1, "ones")
        return tf.train.Checkpoint(optimizer=optimizer, dense=dense, table=table), (optimizer, wrapper, dense, table)

    checkpoint, parts = made()
    for _ in range(3):
        step(*parts)
    step_of_wrapper_alone = [(tf.IndexedSlices(tf.constant([[0.5]]), tf.constant([7], tf.int64)), parts[3])]
    parts[1].apply_gradients(step_of_wrapper_alone)
    path = checkpoint.write(str(tmp_path / "model"))
    step(*parts)

    checkpoint, again = made()
    checkpoint.read(path)
    step(*again)
    np.testing.assert_allclose(row_of(again[3]), row_of(parts[3]), 1e-6)
    np.testing.assert_allclose(again[2], parts[2], 1e-6)


@pytest.mark.parametrize("kind", ["legacy", "v1", "tfplugin"])
def test_a_session_runs_both(kind):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        optimizer = ADAMS[kind]()
        wrapper, table = sok.OptimizerWrapper(optimizer), sok.DynamicVariable(1, "ones")
        dense = tf.compat.v1.get_variable("dense", initializer=[[1.0]], use_resource=True)
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [7]) ** 3) + tf.reduce_sum(dense**3)
        of_dense, of_table = tf.gradients(loss, [dense, table])
        train = tf.group(wrapper.apply_gradients([(of_table, table)]), optimizer.apply_gradients([(of_dense, dense)]))
        row = table.sparse_read([7], training=False)
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(3):
            session.run(train)
        np.testing.assert_allclose(*session.run([row, dense]), 1e-5)


@pytest.mark.parametrize("kind", [tf.keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy])
def test_slots_have_one_name_whichever_keras_it_is(kind):
    optimizer = sok.OptimizerWrapper(kind.SGD(1.0, momentum=0.5))
    table, static = sok.DynamicVariable(1, "ones", name="t"), sok.Variable([[1.0]], dtype=tf.float32)
    with pytest.raises(KeyError, match="nothing before its first step"):
        optimizer.get_slot(static, "momentum")
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [7])) + tf.reduce_sum(static)
        optimizer.apply_gradients(zip(tape.gradient(loss, [table, static]), [table, static], strict=True))
    slot = optimizer.get_slot(table, "momentum")
    keys, rows = sok.export(slot)
    assert keys.numpy().tolist() == [7] and rows.numpy().tolist() == [[-1.5]]
    assert optimizer.get_slot(static, "momentum").numpy().tolist() == [[-1.5]]
    sok.assign(slot, keys, rows * 0)
    assert sok.export(slot)[1].numpy().tolist() == [[0]]
    assert row_of(table).tolist() == [[-1.5]]
    with pytest.raises(KeyError, match="no slot 'velocity' for 't:0': it keeps 'momentum'"):
        optimizer.get_slot(table, "velocity")


def test_an_exported_slot_has_no_rows_of_keys_that_have_gone():
    optimizer, table = sok.OptimizerWrapper(tf_keras.optimizers.Adagrad(1.0, 0.25)), sok.DynamicVariable(1, "ones")
    optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([2, 1]), tf.constant([7, 8], tf.int64)), table)])
    slot = optimizer.get_slot(table, "accumulator")
    ops = []

    def remove_after(op, *of_op):
        ops.append(op)
        if len(ops) == 1:
            table.remove([8])  # as another thread might, between two ops

    op_callbacks.add_op_callback(remove_after)
    try:
        keys, rows = sok.export(slot)
    finally:
        op_callbacks.remove_op_callback(remove_after)
    assert ops and table.export()[0].numpy().tolist() == [7]
    assert all(row == [1.25] for row in rows.numpy().tolist())  # each row that is there has had a gradient
    assert len(keys) == len(rows) and 7 in keys.numpy()


def test_a_slot_that_was_taken_before_a_restore_is_the_restored_one(adam, tmp_path):
    table = sok.DynamicVariable(1, "ones", name="t")

    def made(steps):
        optimizer = sok.OptimizerWrapper(adam())
        for _ in range(steps):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [7]) ** 2)
            optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table], strict=True))
        return optimizer, optimizer.get_slot(table, "m")

    first, m = made(3)
    expected = sok.export(m)[1].numpy()
    path = tf.train.Checkpoint(table=table, optimizer=first).save(str(tmp_path / "c"))
    second, m = made(1)  # `first` is still there
    tf.train.Checkpoint(table=table, optimizer=second).restore(path)
    assert sok.export(m)[1].numpy() == expected == sok.export(second.get_slot(table, "m"))[1].numpy()
    sok.assign(m, [7], [[0.25]])
    assert sok.export(second.get_slot(table, "m"))[1].numpy() == 0.25
    assert len(table.slot_names()) == 2


def test_a_step_in_a_function_is_read_by_autograph_without_a_warning(caplog):
    table, optimizer = sok.DynamicVariable(1, "ones"), sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, tf.ragged.constant([[7]], tf.int64)))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    logger = logging.getLogger("tensorflow")
    logger.addHandler(caplog.handler)
    try:
        step()
    finally:
        logger.removeHandler(caplog.handler)
    assert "AutoGraph" not in caplog.text
    assert row_of(table) < 1.0


def test_a_strategy_that_has_workers_of_its_own_is_an_error():
    table, dense = sok.Variable(np.ones([4, 2]), dtype=tf.float32), tf.Variable(tf.ones([2]))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, tf.ragged.constant([[1]], tf.int64)) * dense)
        optimizer.apply_gradients(zip(tape.gradient(loss, [table, dense]), [table, dense], strict=True))

    with strategy.scope(), pytest.raises(ValueError, match=r"sok.Variable 't' cannot be made under MirroredStrategy"):
        sok.Variable(np.ones([4, 2]), name="t")
    with pytest.raises(ValueError, match=r"OptimizerWrapper cannot take a step under MirroredStrategy: .* ranks"):
        strategy.run(tf.function(step))
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        sok.Variable(np.ones([4, 2]), name="t")
    tf.distribute.OneDeviceStrategy("CPU:0").run(tf.function(step))
    assert table[1, 0] < 1
