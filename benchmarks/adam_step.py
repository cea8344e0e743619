"""The step that the benchmarks of spilled and of expiring tables time."""

from __future__ import annotations

import tensorflow as tf

import tfplugin


def adam_step(table: tfplugin.KvVariable) -> tf.types.experimental.GenericFunction:
    """Trains the rows of ids, [any] of int64, by Adam on the sum of their squares."""
    optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.001))

    @tf.function(reduce_retracing=True)
    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    return step
