"""One optimizer, given key-value variables and dense ones in separate calls, through its wrapper and directly."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin

OPTIMIZERS = {
    "Keras SGD": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "Keras Adagrad": lambda: tf.keras.optimizers.Adagrad(0.1),
    "tf_keras SGD": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
    "tf_keras Adagrad": lambda: tf_keras.optimizers.Adagrad(0.1),
    "legacy SGD": lambda: tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9),
}
STEPS = 4


def _losses(table, dense, wide):
    return tf.reduce_sum(tf.nn.embedding_lookup(table, [1, -2]) ** 2), tf.reduce_sum(dense**2) + tf.reduce_sum(wide**3)


@pytest.mark.parametrize("turns", ["tables first", "dense first", "dense steps before the wrapper"])
@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_separate_calls_keep_the_slots_of_all(make, make_optimizer, function, turns):
    # These optimizers do not look at the number of the step, which each call counts.
    def train(separate: bool):
        table = make(initializer=1.0, value_dtype=tf.float64)
        dense = tf.Variable(np.array([1.0, 2.0])), tf.Variable(np.array([[0.5]]))
        optimizer = make_optimizer()
        early = turns == "dense steps before the wrapper"
        if separate and early:
            with tf.GradientTape() as tape:
                loss = _losses(table, *dense)[1]
            optimizer.apply_gradients(zip(tape.gradient(loss, dense), dense, strict=True))
        wrapper = tfplugin.OptimizerWrapper(optimizer)
        if not separate and early:
            with tf.GradientTape() as tape:
                loss = _losses(table, *dense)[1]
            wrapper.apply_gradients(zip(tape.gradient(loss, dense), dense, strict=True))

        def step():
            with tf.GradientTape() as tape:
                loss = tf.add_n(_losses(table, *dense))
            of_table, *of_dense = tape.gradient(loss, [table, *dense])
            if not separate:
                wrapper.apply_gradients(zip([of_table, *of_dense], [table, *dense], strict=True))
                return
            calls = [
                lambda: wrapper.apply_gradients([(of_table, table)]),
                lambda: optimizer.apply_gradients(zip(of_dense, dense, strict=True)),
            ]
            for call in calls if turns == "tables first" else calls[::-1]:
                call()

        run = tf.function(step) if function else step
        for _ in range(STEPS):
            run()
        return [table.export()[1].numpy(), *(v.numpy() for v in dense)]

    for apart, together in zip(train(True), train(False), strict=True):
        np.testing.assert_allclose(apart, together, rtol=1e-12)


def test_variables_that_come_late_get_slots_of_their_own(make):
    optimizer = tf.keras.optimizers.SGD(1.0, momentum=0.5)
    wrapper = tfplugin.OptimizerWrapper(optimizer)
    early, late = tf.Variable(0.0), tf.Variable(0.0)
    table = make(initializer=0.0)
    ones = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([7], tf.int64))
    wrapper.apply_gradients([(ones, table), (tf.constant(1.0), early)])
    wrapper.apply_gradients([(ones, table), (tf.constant(1.0), late)])
    np.testing.assert_allclose([early.numpy(), late.numpy(), table.export()[1][0, 0].numpy()], [-1.0, -1.0, -2.5])


@pytest.mark.parametrize("first", ["table", "dense"])
@pytest.mark.parametrize("make_optimizer", list(OPTIMIZERS.values())[:4], ids=list(OPTIMIZERS)[:4])
def test_places_in_a_checkpoint_do_not_depend_on_tables(make, make_optimizer, first, tmp_path):
    # A program that restores builds its optimizer with the dense variables alone.
    ones = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([7], tf.int64))
    table, wide, one = make(initializer=0.0), tf.Variable(tf.zeros([2, 3])), tf.Variable(0.0)
    pairs = [(ones, table), (tf.ones([2, 3]), wide), (tf.constant(1.0), one)]
    optimizer = make_optimizer()
    tfplugin.OptimizerWrapper(optimizer).apply_gradients(pairs if first == "table" else [*pairs[1:], pairs[0]])
    deep = {"of": {"the": {"model": [wide, one]}}}  # farther from the root than the optimizer's list of them
    path = tf.train.Checkpoint(deep=deep, optimizer=optimizer).write(str(tmp_path / "model"))

    restored, wide, one = make_optimizer(), tf.Variable(tf.zeros([2, 3])), tf.Variable(0.0)
    restored.build([wide, one])
    deep = {"of": {"the": {"model": [wide, one]}}}
    tf.train.Checkpoint(deep=deep, optimizer=restored).read(path).assert_existing_objects_matched()
    own = [v.numpy().tolist() for v in restored.variables if tuple(v.shape) in ((2, 3), ())]
    assert own == [v.numpy().tolist() for v in optimizer.variables if tuple(v.shape) in ((2, 3), ())]


@pytest.mark.parametrize("restore", ["before the first step", "between table and dense"])
@pytest.mark.parametrize(
    "make_optimizer",
    [*list(OPTIMIZERS.values())[:4], lambda: tf.keras.optimizers.Adam(0.1), lambda: tf_keras.optimizers.Adam(0.1)],
    ids=[*list(OPTIMIZERS)[:4], "Keras Adam", "tf_keras Adam"],
)
def test_a_restored_optimizer_keeps_dense_slots_where_tables_come_first(make, make_optimizer, restore, tmp_path):
    ones = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([7], tf.int64))

    def program():
        table, wide, one = make(initializer=0.0), tf.Variable(tf.zeros([2, 3])), tf.Variable(0.0)
        optimizer = make_optimizer()
        wrapper = tfplugin.OptimizerWrapper(optimizer)

        def of_table():
            wrapper.apply_gradients([(ones, table)])

        def of_dense():
            optimizer.apply_gradients([(tf.ones([2, 3]), wide), (tf.constant(1.0), one)])

        # Farther from the root than the optimizer's list of them.
        deep = {"of": {"the": {"model": [wide, one]}}}
        return optimizer, of_table, of_dense, tf.train.Checkpoint(deep=deep, optimizer=optimizer)

    optimizer, of_table, of_dense, checkpoint = program()
    for step in (of_table, of_dense) * 2:
        step()
    path = checkpoint.write(str(tmp_path / "model"))

    restored, restored_table, restored_dense, checkpoint = program()
    if restore == "before the first step":
        status = checkpoint.read(path)
        restored_table()
    else:
        restored_table()
        status = checkpoint.read(path)
    restored_dense()
    status.assert_existing_objects_matched().assert_consumed()
    of_dense()
    for of_restored, of_first in zip(restored.variables[1:], optimizer.variables[1:], strict=True):  # not the step
        np.testing.assert_array_equal(of_restored.numpy(), of_first.numpy())
