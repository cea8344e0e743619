"""One rank of `test_rank_counts.py`: restores what other numbers of ranks have saved, and saves for others.

    save_and_restore.py FOLDER WHAT...

WHAT is ``save``, or the number of ranks that have saved what is restored. Each rank writes the rows and slots that it
then holds to FOLDER: after saving or restoring, and after training one step more.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras

import tfplugin.sok as sok
from tfplugin.sok.optimizer_slots import slots_of

INT64 = np.array([-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1, *range(-7, 8), 2**40, -(2**40)], np.int64)
UINT64 = np.array([0, 1, 2, 3, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1], np.uint64)
ROWS = 11
OPTIMIZERS = {"keras": tf.keras.optimizers.Adam, "legacy": tf_keras.optimizers.legacy.Adam}


class Model:
    """A table of each kind, an optimizer, and something that is not spread out."""

    def __init__(self, maker: str) -> None:
        rows = np.random.default_rng(1).normal(size=[ROWS, 3])
        self.tables = {
            "distributed": sok.Variable(rows, dtype=tf.float32, name="distributed"),
            "localized": sok.Variable(rows, dtype=tf.float32, name="localized", mode=f"localized:{sok.size() - 1}"),
            "int64": sok.DynamicVariable(3, "random", name="int64"),
            "uint64": sok.DynamicVariable(2, "0.5", "hybrid", key_type=tf.uint64, name="uint64"),
            "one_rank": sok.DynamicVariable(2, "ones", name="one_rank", mode=f"localized:{sok.size() - 1}"),
        }
        self.optimizer = sok.OptimizerWrapper(OPTIMIZERS[maker](0.05))
        self.bias = tf.Variable([0.0, 0.0])
        self.checkpoint = sok.Checkpoint(bias=self.bias, optimizer=self.optimizer, **self.tables)

    def keys(self, name: str) -> np.ndarray:
        """All that are trained."""
        return {"int64": INT64, "uint64": UINT64, "one_rank": INT64}.get(name, np.arange(ROWS))

    def train(self, step: int) -> None:
        """Trains with this rank's share of a batch: with other numbers of ranks the batch is the same."""
        variables, losses = list(self.tables.values()), []
        with tf.GradientTape() as tape:
            for name, table in self.tables.items():
                keys = np.random.default_rng(step).permutation(self.keys(name))[sok.rank() :: sok.size()]
                weights = tf.constant([[np.sin(float(key % 97) + step)] for key in keys.tolist()], tf.float32)
                ids = tf.RaggedTensor.from_row_lengths(tf.constant(keys), tf.ones([len(keys)], tf.int64))
                losses.append(tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum") * weights))
            loss = tf.add_n(losses)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def state(self, slots: bool = True) -> dict[str, dict[int, list[Any]]]:
        """By table and key, or number of the row in the whole: the row of this rank, and those of its slots."""
        found = {}
        for name, table in self.tables.items():
            of_table = slots_of(self.optimizer, table) if slots else {}
            if isinstance(table, sok.DynamicVariable):
                tensor, values = sok.export(table)
                columns, keys = [values, *(of_table[slot].read(tensor) for slot in sorted(of_table))], tensor.numpy()
            else:
                columns, keys = [table, *(of_table[slot] for slot in sorted(of_table))], table.global_rows()
            listed = [np.array(tf.convert_to_tensor(column)) for column in columns]
            found[name] = {key: [column[n] for column in listed] for n, key in enumerate(keys.tolist())}
        return found

    def tell(self, folder: Path, what: str, slots: bool = True) -> None:
        """Writes this rank's state, for the test."""
        path = folder / f"{what}-{sok.rank()}.pickle"
        path.write_bytes(pickle.dumps((self.state(slots), self.bias.numpy().tolist())))


def save(folder: Path, maker: str) -> None:
    model = Model(maker)
    for step in range(2):
        model.train(step)
    model.bias.assign([1.5, float(sok.rank())])
    saved = folder / f"{maker}-saved-by-{sok.size()}"
    sok.dump(saved / "dump", list(model.tables.values()), model.optimizer)
    model.checkpoint.write(str(saved / "model"))
    model.tell(saved, "state")
    model.train(2)
    model.tell(saved, "next")


def restore(folder: Path, maker: str, saved_by: str) -> None:
    saved = folder / f"{maker}-saved-by-{saved_by}"
    model = Model(maker)
    sok.load(saved / "dump", list(model.tables.values()), model.optimizer)
    model.tell(saved, f"loaded-by-{sok.size()}")

    model = Model(maker)
    sok.assign(model.tables["int64"], [12345], [[1.0, 2.0, 3.0]])  # not in the checkpoint: restoring takes it away
    status = model.checkpoint.read(str(saved / "model"))
    model.tell(saved, f"restored-by-{sok.size()}", slots=False)
    model.train(2)
    status.assert_existing_objects_matched()
    model.tell(saved, f"next-by-{sok.size()}")


def main() -> None:
    hvd.init()
    sok.init()
    folder, *asked = sys.argv[1:]
    for what in asked:
        for maker in OPTIMIZERS:
            save(Path(folder), maker) if what == "save" else restore(Path(folder), maker, what)


if __name__ == "__main__":
    main()
