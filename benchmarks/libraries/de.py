"""kvtools: `tfplugin.dynamic_embedding`, by the calls that a user of TFRA makes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from libraries import kv

from tfplugin import dynamic_embedding as de


class Library(kv.Library):
    """Dynamic embeddings."""

    def table(self, name: str, rows: int, dim: int, initializer: Any, parts: int = 1) -> Any:
        """An empty table; how many rows will come is not told."""
        return de.get_variable(name, dim=dim, initializer=initializer, devices=["/CPU:0"] * parts)

    def fill(self, table: Any, ids: tf.Tensor) -> tf.Operation | None:
        """A lookup makes no rows here."""
        return table.upsert(ids, tf.fill([tf.size(ids), table.dim], 0.5))

    def lookup(self, table: Any, ids: tf.Tensor, training: bool) -> tf.Tensor:
        """No lookup inserts here, whether it is of training or not."""
        return table.lookup(ids)

    def trainable_lookup(self, table: Any, ids: tf.Tensor, unique: bool) -> tf.Tensor:
        """By `embedding_lookup`, or by `embedding_lookup_unique`."""
        look_up = de.embedding_lookup if unique else de.embedding_lookup_unique
        return look_up(table, ids, name="rows")

    def pooled(self, table: Any, sparse_ids: tf.SparseTensor) -> tuple[tf.Tensor, Any]:
        """Means of the rows of ids, and what to take the gradient by."""
        return de.embedding_lookup_sparse(
            table, sparse_ids, None, combiner="mean", name="pooled", return_trainable=True
        )

    def optimizer(self, optimizer: tf.compat.v1.train.Optimizer) -> Any:
        """The optimizer that updates dynamic embeddings, and other variables as before."""
        return de.DynamicEmbeddingOptimizer(optimizer)
