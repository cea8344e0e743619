"""Pairs of models, ours and dense, that can be made again from their configs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf
from keras_pairs import DIM, Pair, pair

import tfplugin


@functools.cache
def table_layer(keras: Any) -> Any:
    """A layer of a user's own that makes its table, for a Keras."""

    @keras.utils.register_keras_serializable("tests")
    class Rows(keras.layers.Layer):
        def __init__(self, dim: int = DIM, table: str = "user", parts: int = 1, **options: Any) -> None:
            self.of_table = {
                key: options.pop(key)
                for key in ("initializer", "max_capacity", "key_dtype", "value_dtype")
                if key in options
            }
            super().__init__(**options)
            self.dim, self.table_name, self.parts = dim, table, parts
            partitioner = tf.compat.v1.fixed_size_partitioner(parts) if parts > 1 else None
            self.table = tfplugin.get_kv_variable(table, embedding_dim=dim, partitioner=partitioner, **self.of_table)

        def call(self, ids: Any) -> Any:
            return tf.nn.embedding_lookup(self.table, tf.cast(ids, self.table.key_dtype))

        def compute_output_shape(self, shape: Any) -> Any:
            return (*shape, self.dim)

        def get_config(self) -> Any:
            own = {"dim": self.dim, "table": self.table_name, "parts": self.parts, **self.of_table}
            return {**super().get_config(), **own}

    return Rows


def rows(keras: Any, **options: Any) -> Any:
    """The layer called "embedding"."""
    return table_layer(keras)(name="embedding", **options)


def kept_pair(keras: Any, optimizer: str = "adam", compiled: Any = None, **options: Any) -> Pair:
    """A compiled pair. It trains eagerly, which is what takes the least time."""
    made = pair(keras, embedding=rows, **options)
    return made.compile(lambda: keras.optimizers.get(optimizer), "mse", run_eagerly=True, **(compiled or {}))


def again(old: Pair, ours: Any, dense: Any) -> Pair:
    """The pair of two models that were made of those of `old`."""
    layer = ours.get_layer("embedding")
    return Pair(ours, dense, layer.table, layer)


def of(table: Any, slot: str | None = None) -> dict[int, Any]:
    """The rows of a table by key."""
    keys, values = (np.asarray(column) for column in table.export(slot))
    return dict(zip(keys.tolist(), values.tolist(), strict=True))
