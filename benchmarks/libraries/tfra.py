"""TensorFlow Recommenders Addons: `tfra.dynamic_embedding`. Imported in the environment of `peers/tfra.py` only."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import tensorflow as tf
from libraries import dense
from tensorflow_recommenders_addons import dynamic_embedding as de

v1 = tf.compat.v1
v1.enable_resource_variables()


class Library(dense.Library):
    """Dynamic embeddings."""

    def versions(self) -> dict[str, str]:
        """Of the packages that are measured."""
        return {"tensorflow-recommenders-addons": version("tensorflow-recommenders-addons"), **super().versions()}

    def table(self, name: str, rows: int, dim: int, initializer: Any, parts: int = 1) -> Any:
        """An empty table with room for `rows`: told, because its growth copies every row."""
        assert parts == 1
        return de.get_variable(name, dim=dim, initializer=initializer, init_size=rows)

    def ids(self, ids: tf.Tensor, rows: int) -> tf.Tensor:
        """Any int64 is a key."""
        return ids

    def fill(self, table: Any, ids: tf.Tensor) -> tf.Operation | None:
        """A lookup makes no rows here."""
        return table.upsert(ids, tf.fill([tf.size(ids), table.dim], 0.5))

    def lookup(self, table: Any, ids: tf.Tensor, training: bool) -> tf.Tensor:
        """The table's own lookup, without the variable that `embedding_lookup` would copy the rows to."""
        return table.lookup(ids)

    def trainable_lookup(self, table: Any, ids: tf.Tensor, unique: bool) -> tf.Tensor:
        """By `embedding_lookup`, which takes each id once, or `embedding_lookup_unique`."""
        look_up = de.embedding_lookup if unique else de.embedding_lookup_unique
        return look_up(table, ids, name="rows")

    def pooled(self, table: Any, sparse_ids: tf.SparseTensor) -> tuple[tf.Tensor, Any]:
        """Means of the rows of ids, and what to take the gradient by."""
        return de.embedding_lookup_sparse(
            table, sparse_ids, None, combiner="mean", name="pooled", return_trainable=True
        )

    def optimizer(self, optimizer: v1.train.Optimizer) -> Any:
        """The optimizer that updates dynamic embeddings, and other variables as before."""
        return de.DynamicEmbeddingOptimizer(optimizer)

    # ---- Models of Keras ---------------------------------------------------------------------------------------------

    def keras_embedding(self, rows: int, dim: int) -> Any:
        """A layer without a vocabulary; room for its rows is told, because its growth copies every row."""
        return de.keras.layers.Embedding(dim, init_capacity=rows, name="features")

    def keras_optimizer(self, optimizer: Any) -> Any:
        """The optimizer that updates dynamic embeddings, and other variables as before."""
        return de.DynamicEmbeddingOptimizer(optimizer)
