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
