"""A model in a graph of its own, for tests of checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin import dynamic_embedding as de

v1 = tf.compat.v1
KEYS = np.array([0, -1, 7, -(2**63), 2**63 - 1, 5, 12])
ROWS = np.random.default_rng(0).normal(size=(len(KEYS), 2)).astype(np.float32)
NAME = "scope/emb"


def by_key(exported: Any) -> dict[int, bytes]:
    """Rows as bytes, by key."""
    keys, rows = (np.asarray(x) for x in exported)
    assert len(set(keys.tolist())) == len(keys)
    return {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}


def halves(keys: tf.Tensor, n: int) -> tf.Tensor:
    """A partitioner that is not the default one."""
    return tf.cast(tf.math.floormod(keys // 2, n), tf.int32)


PARTITIONERS: dict[str, dict[str, Any]] = {"modulo": {}, "own": {"partitioner": halves}}


class Graph:
    """A table on some devices, trained by Adam beside a dense variable, and restricted by frequency."""

    def __init__(self, devices: int, **kwargs: Any) -> None:
        self.table = de.Variable(
            dim=2, name=NAME, devices=["/CPU:0"] * devices, restrict_policy=de.FrequencyRestrictPolicy, **kwargs
        )
        self.dense = v1.get_variable("dense", [2], use_resource=True)
        rows = de.embedding_lookup(self.table, tf.constant(KEYS[:4]), name="x")
        self.optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
        self.step = self.optimizer.minimize(tf.reduce_sum(rows * self.dense))
        self.saver = v1.train.Saver()
        self.session = v1.Session()
        self.session.run(v1.global_variables_initializer())

    def slots(self) -> dict[str, dict[int, bytes]]:
        """Slots by name."""
        found = self.table.get_slot_variables(self.optimizer)
        return {slot.name: by_key(self.session.run(slot.export())) for slot in found}

    def state(self) -> tuple[Any, ...]:
        """Rows, slots, status and the dense variable."""
        run = self.session.run
        status = by_key(run(self.table.restrict_policy.status.export()))
        return by_key(run(self.table.export())), self.slots(), status, run(self.dense).tolist()
