"""What the benchmarks of chains train: a table with Adam's slots, and two dense layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import tfplugin

BATCH = 4096


class TrainedTable:
    """A table `user` of so many rows, with their slots, and a step of training.

    Attributes:
      table: the table.
      step: trains on ids, [BATCH] of int64.
      checkpoint: of everything that is trained.
      random: for the ids.
    """

    def __init__(self, rows: int, dim: int) -> None:
        self.rows = rows
        self.table = tf.get_kv_variable("user", embedding_dim=dim, capacity_hint=rows)
        self._layers = tf.keras.Sequential([tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(1)])
        self._layers.build((None, dim))
        self._optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.001))
        self.checkpoint: Any = tf.train.Checkpoint(table=self.table, layers=self._layers, optimizer=self._optimizer)
        self.random = np.random.default_rng(0)
        self.step = tf.function(self._step, input_signature=[tf.TensorSpec([BATCH], tf.int64)])
        for start in range(0, rows, 1 << 18):
            self.table.sparse_read(tf.range(start, min(rows, start + (1 << 18)), dtype=tf.int64))
        self.step(tf.range(BATCH, dtype=tf.int64))

    def _step(self, ids: Any) -> None:
        variables = [self.table, *self._layers.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self._layers(tf.nn.embedding_lookup(self.table, ids)) - 1.0) ** 2)
        self._optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
