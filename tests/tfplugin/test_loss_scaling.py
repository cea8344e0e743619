"""Optimizers that scale the loss: steps as without, and a step whose gradients overflow changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin

v1 = tf.compat.v1
k3 = tf.keras.optimizers
INF = float("inf")

SCALED = {
    "Keras 3": (lambda: k3.LossScaleOptimizer(k3.SGD(0.5, momentum=0.5)), lambda: k3.SGD(0.5, momentum=0.5)),
    "tf_keras": (
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.Adam(0.5)),
        lambda: tf_keras.optimizers.Adam(0.5),
    ),
    "legacy": (
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.legacy.Adagrad(0.5)),
        lambda: tf_keras.optimizers.legacy.Adagrad(0.5),
    ),
    "v1": (
        lambda: v1.train.experimental.MixedPrecisionLossScaleOptimizer(v1.train.AdamOptimizer(0.5), "dynamic"),
        lambda: v1.train.AdamOptimizer(0.5),
    ),
}


@pytest.mark.parametrize("fused", ["auto", False])
@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("name", SCALED)
def test_steps_are_the_same_and_an_overflow_changes_nothing(make, rows_of, name, function, fused):
    make_scaled, make_plain = SCALED[name]
    scaled, plain = make(name="a", dim=1, initializer=1.0), make(name="b", dim=1, initializer=1.0)
    dense = tf.Variable([1.0])
    optimizer = tfplugin.OptimizerWrapper(make_scaled(), fused=fused)
    reference = tfplugin.OptimizerWrapper(make_plain())

    def step(keys, factor):
        optimizer.minimize(
            lambda: tf.reduce_sum(scaled.sparse_read(keys, training=False, missing="initial") * factor * dense),
            [scaled, dense],
        )

    def read(keys):
        # Lookups that do not insert: what a step inserts, the update has inserted.
        return scaled.sparse_read(keys, training=False, missing="initial")

    run = tf.function(step) if function else step
    run(tf.constant([1, 2, 2], tf.int64), tf.constant(2.0))
    gradient = tf.IndexedSlices(tf.fill([3, 1], 2.0), tf.constant([1, 2, 2], tf.int64))
    reference.apply_gradients([(gradient, plain)])
    np.testing.assert_allclose(rows_of(scaled, [1, 2]), rows_of(plain, [1, 2]), rtol=1e-6)

    before, weight = rows_of(scaled, [1, 2]), dense.numpy()
    freqs = scaled.stamps([1, 2])[0].numpy()
    run(tf.constant([1, 3], tf.int64), tf.constant(INF))
    np.testing.assert_array_equal(rows_of(scaled, [1, 2]), before)
    np.testing.assert_array_equal(dense.numpy(), weight)
    assert int(scaled.size()) == 2
    assert scaled.stamps([1, 2])[0].numpy().tolist() == freqs.tolist()
    run(tf.constant([1], tf.int64), tf.constant(2.0))
    assert rows_of(scaled, [1])[0, 0] != before[0, 0]
    assert read([1]).numpy()[0, 0] == rows_of(scaled, [1])[0, 0].astype(np.float32)


def test_a_graph_skips_an_overflow(session):
    table = v1.get_kv_variable("t", embedding_dim=1, initializer=1.0)
    factor = v1.placeholder(tf.float32, [])
    rows = tf.nn.embedding_lookup(table, tf.constant([1, 2, 2], tf.int64))
    count = v1.train.get_or_create_global_step()
    optimizer = v1.train.experimental.MixedPrecisionLossScaleOptimizer(v1.train.AdagradOptimizer(0.5), "dynamic")
    step = optimizer.minimize(tf.reduce_sum(rows * factor), global_step=count)
    session.run(v1.global_variables_initializer())
    session.run(step, {factor: 2.0})
    before = session.run(rows)
    assert (before < 1).all()
    session.run(step, {factor: INF})
    np.testing.assert_array_equal(session.run(rows), before)
    assert session.run(count) == 1
    session.run(step, {factor: 2.0})
    assert (session.run(rows) < before).all()
    assert session.run(count) == 2


def test_a_loss_scale_factor(make, rows_of):
    table = make(dim=1, initializer=1.0)
    optimizer = tfplugin.OptimizerWrapper(k3.SGD(1.0, loss_scale_factor=4.0))
    gradient = tf.IndexedSlices(tf.fill([2, 1], 1.0), tf.constant([1, 1], tf.int64))
    optimizer.apply_gradients([(gradient, table)])
    assert rows_of(table, [1]).tolist() == [[0.5]]
    assert optimizer.scale_loss(2.0) == 8.0


SCALERS = {
    "Keras 3": (lambda: k3.LossScaleOptimizer(k3.SGD(0.5)), "scale_loss"),
    "Keras 3, constant": (lambda: k3.SGD(0.5, loss_scale_factor=4.0), "scale_loss"),
    "tf_keras": (lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.5)), "get_scaled_loss"),
    "legacy": (
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.5)),
        "get_scaled_loss",
    ),
}


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("name", SCALERS)
def test_a_scaled_loss_does_not_reach_rows_that_its_gradient_updates(make, partitioner, rows_of, name, function):
    make_optimizer, scale = SCALERS[name]
    table, dense, optimizer = (
        make(name="user", dim=1, initializer=1.0, partitioner=partitioner),
        tf.Variable([1.0]),
        make_optimizer(),
    )
    parts = list(table) if partitioner else [table]
    table.sparse_read([1, 2])
    updates = tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(0.5))

    def step(scaled):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2]) * dense)
            target = getattr(optimizer, scale)(loss) if scaled else loss
        return tape.gradient(target, [dense, *parts])[0]

    run = tf.function(step) if function else step
    with pytest.raises(ValueError, match=r"'user.* a loss that \w+ has scaled.*undo\(\).*tfplugin.OptimizerWrapper"):
        run(True)
    assert (rows_of(table, [1, 2]) == 1.0).all() and not any(step.numpy() for step in updates.steps)
    assert run(False).numpy() == [2.0]
    assert (rows_of(table, [1, 2]) == 0.5).all()


@pytest.mark.parametrize("name", SCALERS)
def test_minimize_of_a_scaling_optimizer_does_not_update_rows_in_its_backward_pass(make, rows_of, name):
    table, dense = make(name="user", dim=1, initializer=1.0), tf.Variable([1.0])
    tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(0.5))
    optimizer = tfplugin.OptimizerWrapper(SCALERS[name][0]())

    def loss():
        return tf.reduce_sum(tf.nn.embedding_lookup(table, [1]) * dense)

    with tf.GradientTape() as tape:
        computed = loss()
    for minimize in (lambda: optimizer.minimize(loss), lambda: optimizer.minimize(computed, [dense, table], tape)):
        with pytest.raises(ValueError, match=r"'user:0'.* a loss that \w+ has scaled"):
            minimize()
    assert rows_of(table, [1]) == 1.0


def test_a_graph_that_scales_its_loss_does_not_update_rows_in_its_backward_pass(session):
    table, dense = v1.get_kv_variable("user", embedding_dim=1), v1.get_variable("dense", initializer=[1.0])
    updates = tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(0.5))
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1]) * dense)
    scaled = v1.train.experimental.MixedPrecisionLossScaleOptimizer(v1.train.AdagradOptimizer(0.5), "dynamic")
    with pytest.raises(ValueError, match=r"'user:0'.* a loss that MixedPrecisionLossScaleOptimizer has scaled"):
        scaled.minimize(loss, var_list=[table, dense])
    assert updates.steps and v1.train.AdagradOptimizer(0.5).minimize(loss, var_list=[table, dense]) is not None
