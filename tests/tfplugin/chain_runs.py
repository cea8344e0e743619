"""Random training that is saved in a chain, killed and restored, against the full checkpoints of the same moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from chain_reference import dense_in, folded, tables_in

import tfplugin
from kvtools.chain import newest_chain

v1 = tf.compat.v1


class Trained:
    """A table in parts, a bounded one and a dense variable, trained by Adam."""

    def __init__(self, parts: int) -> None:
        partitioner = v1.fixed_size_partitioner(parts) if parts > 1 else None
        self.user = tf.get_kv_variable("user", embedding_dim=4, partitioner=partitioner)
        self.item = tf.get_kv_variable("item", embedding_dim=3, max_capacity=24, key_dtype=tf.int32)
        self.dense = tf.Variable(tf.ones([4, 3]))
        self.optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
        self.checkpoint = tf.train.Checkpoint(
            user=self.user, item=self.item, dense=self.dense, optimizer=self.optimizer
        )

    def step(self, random: np.random.Generator) -> None:
        users = random.integers(0, 60, 12)
        items = random.integers(0, 90, 12).astype(np.int32)
        tables = [*(self.user if isinstance(self.user, tfplugin.PartitionedKvVariable) else [self.user]), self.item]
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(self.user, users) @ self.dense + tf.nn.embedding_lookup(self.item, items)
            loss = tf.reduce_mean((rows - 1.0) ** 2)
        variables = [*tables, self.dense]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def change(self, random: np.random.Generator) -> None:
        """Steps, removals, rows that come and go between two saves, rows written as they are."""
        for _ in range(random.integers(0, 4)):
            what = random.integers(5)
            keys = random.integers(0, 60, random.integers(1, 9))
            if what == 0:
                self.user.remove(keys)
            elif what == 1:
                self.item.remove(keys.astype(np.int32))
            elif what == 2:
                self.user.upsert(keys + 1000, random.standard_normal([len(keys), 4]).astype(np.float32))
                self.user.remove(keys[: len(keys) // 2] + 1000)
            else:
                self.step(random)


def random_run(seed: int, folder: Path) -> None:
    """One run of some lives, each of which restores what the one before saved, into another number of parts."""
    random = np.random.default_rng(seed)
    chain, reference = folder / "chain", None
    for life in range(random.integers(2, 4)):
        trained = Trained(int(random.integers(1, 5)))
        manager = tfplugin.CheckpointManager(
            trained.checkpoint, chain, max_to_keep=int(random.integers(1, 4)), full_every=3600.0, delta_every=0.0
        )
        restored = manager.restore_or_initialize()
        assert (restored is None) == (reference is None)
        if reference is not None:
            check_same(trained, restored, reference, folder / f"again-{life}")
        for n in range(random.integers(1, 6)):
            trained.change(random)
            if random.integers(4) == 0:
                manager._last_full = -float("inf")  # one is due
            path = manager.save()
            reference = trained.checkpoint.write(str(folder / f"reference-{life}-{n}"))
            members = [str(member.prefix) for member in newest_chain(chain)]
            assert path == members[-1]
            wanted = {table: rows for table, (rows, _) in tables_in(reference).items()}
            assert folded(members) == wanted
        if random.integers(2):
            trained.change(random)  # what nobody saved is lost with the process


def check_same(trained: Trained, restored: Any, reference: str, again: Path) -> None:
    """What has been restored is what a full checkpoint of that moment has."""
    written = trained.checkpoint.write(str(again))
    wanted = {table: rows for table, (rows, _) in tables_in(reference).items()}
    assert {table: rows for table, (rows, _) in tables_in(written).items()} == wanted
    assert dense_in(restored) == dense_in(reference)
