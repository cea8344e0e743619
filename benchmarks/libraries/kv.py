"""kvtools: `tf.get_kv_variable` and TensorFlow's own calls."""

from __future__ import annotations

import contextlib
from importlib.metadata import version
from typing import Any

import tensorflow as tf
from libraries import dense

import tfplugin

v1 = tf.compat.v1


class Library(dense.Library):
    """Key-value variables."""

    def versions(self) -> dict[str, str]:
        """Of the packages that are measured."""
        return {"kvtools": version("kvtools"), **super().versions()}

    def table(self, name: str, rows: int, dim: int, initializer: Any, parts: int = 1) -> Any:
        """An empty table; how many rows will come is not told."""
        partitioner = v1.fixed_size_partitioner(parts) if parts > 1 else None
        return tf.get_kv_variable(name, dim, initializer=initializer, partitioner=partitioner)

    def half_table(self, name: str, dim: int, initializer: Any, dtype: str) -> Any:
        """The same with rows of 16-bit numbers."""
        return tf.get_kv_variable(name, dim, value_dtype=tf.as_dtype(dtype), initializer=initializer)

    def float32_lookup(self, table: Any, ids: tf.Tensor) -> tf.Tensor:
        """Rows of 16-bit numbers as float32, and so is their gradient."""
        return table.sparse_read(ids, output_dtype=tf.float32)

    def stochastic(self, optimizer: v1.train.Optimizer) -> Any:
        """The optimizer, with updates of 16-bit rows rounded stochastically."""
        return tfplugin.OptimizerWrapper(optimizer, stochastic_rounding=True)

    def ids(self, ids: tf.Tensor, rows: int) -> tf.Tensor:
        """Any int64 is a key."""
        return ids

    def fill(self, table: Any, ids: tf.Tensor) -> tf.Operation | None:
        """A training lookup makes the rows."""
        rows = tf.nn.embedding_lookup(table, ids)
        return None if tf.executing_eagerly() else rows.op

    def lookup(self, table: Any, ids: tf.Tensor, training: bool) -> tf.Tensor:
        """A training lookup inserts what is missing, an inference lookup does not."""
        with contextlib.nullcontext() if training else tfplugin.inference_mode():
            return tf.nn.embedding_lookup(table, ids)

    def trainable_lookup(self, table: Any, ids: tf.Tensor, unique: bool) -> tf.Tensor:
        """One call, whether ids repeat or not."""
        return tf.nn.embedding_lookup(table, ids)

    # ---- Models of Keras ---------------------------------------------------------------------------------------------

    def keras_embedding(self, rows: int, dim: int) -> Any:
        """A layer without a vocabulary."""
        import tfplugin.keras

        return tfplugin.keras.Embedding(dim)

    def keras_loop(self, model: Any, optimizer: Any, loss: Any) -> Any:
        """A training step by hand: lookups update their rows in the backward pass, Keras's optimizer the rest."""
        updates = tfplugin.apply_in_backward(model.embedding.table, type(optimizer).from_config(optimizer.get_config()))

        @tf.function
        def step(inputs: Any, clicks: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                value = loss(clicks, model(inputs, training=True))
            weights = model.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
            return value

        step.updates = updates
        return step
