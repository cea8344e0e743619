"""Trains, saves in a chain all the time, and says what it has: for a test that kills it.

    python train_and_be_killed.py

reads lines with a folder and a seed, and does it for each in a fork of its own: TensorFlow is imported once.
The row of key 0 counts the steps, in every column and slot alike, so that a restored moment can be told from its rows.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

import tfplugin

KEYS = 3000


class Counted:
    """A table of which each step writes some rows with its number, removes some, and counts in a dense variable.

    A spilled one has memory for a quarter of its rows.
    """

    def __init__(self, parts: int, spilled: bool = False) -> None:
        partitioner = tf.compat.v1.fixed_size_partitioner(parts) if parts > 1 else None
        memory = {"max_memory": KEYS // 4 * 52, "spill": tempfile.gettempdir()} if spilled else {}
        self.table = tf.get_kv_variable("table", embedding_dim=8, partitioner=partitioner, **memory)
        self.step = tf.Variable(0, dtype=tf.int64)
        self.checkpoint = tf.train.Checkpoint(table=self.table, step=self.step)

    def train(self) -> None:
        step = int(self.step.assign_add(1))
        keys, gone = written_by(step)
        self.table.upsert(keys, np.full([len(keys), 8], step, np.float32))
        self.table.remove(gone)


def written_by(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys that a step writes, and those that it removes."""
    random = np.random.default_rng(step)
    keys = random.permutation(KEYS)
    return keys[:200], keys[200:230]


def after(step: int) -> dict[int, float]:
    """What the table holds after so many steps: the step that wrote each row last."""
    held: dict[int, float] = {}
    for one in range(1, step + 1):
        keys, gone = written_by(one)
        held |= dict.fromkeys(keys.tolist(), float(one))
        for key in gone.tolist():
            held.pop(key, None)
    return held


def main(folder: Path, seed: int) -> None:
    counted = Counted(1 + seed % 3, spilled=seed % 2 == 1)
    manager = tfplugin.CheckpointManager(
        counted.checkpoint, folder, max_to_keep=2, full_every=0.15, delta_every=0.0, step_counter=counted.step
    )
    manager.restore_or_initialize()
    print("restored", int(counted.step), flush=True)
    while True:
        counted.train()
        manager.save_if_due()


def serve() -> None:
    """Starts a fork for each line, and waits for its end."""
    for line in sys.stdin:
        folder, seed = line.split()
        pid = os.fork()
        if pid == 0:
            main(Path(folder), int(seed))
        print("started", pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    serve()
