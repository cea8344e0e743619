"""Load folders of table files, and object-based checkpoints, with TFRA. Runs in TFRA's environment.

python load_files.py FOLDER CHECKPOINT KEYS.npy OUT.npz
"""

from __future__ import annotations

import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

CPU = "/CPU:0"


def main(folder: str, checkpoint: str, keys: np.ndarray, out: str) -> None:
    """The files into as many devices as they were written for, and into another number; a checkpoint into its own."""
    result: dict[str, np.ndarray] = {}

    def note(case: str, variable) -> None:
        result[f"{case}|keys"], result[f"{case}|values"] = (tensor.numpy() for tensor in variable.export())
        values, exists = variable.lookup(tf.constant(keys), return_exists=True)
        result[f"{case}|looked_up"], result[f"{case}|exists"] = values.numpy(), exists.numpy()

    same = de.get_variable("ads/emb", dim=4, devices=[CPU] * 2, initializer=9.0)
    same.load_from_file_system(folder)
    note("same", same)
    slot = de.Variable(name="ads/emb/Adam/m", dim=4, devices=[CPU] * 2, initializer=9.0)
    slot.load_from_file_system(folder)
    note("slot", slot)
    for devices in (1, 3):
        other = de.Variable(name="ads/emb", dim=4, devices=[CPU] * devices, initializer=9.0)
        other.load_from_file_system_with_restore_function(folder)
        note(f"devices_{devices}", other)
    module = tf.Module()
    module.variable = de.Variable(name="legacy/emb", dim=4, devices=[CPU] * 4, initializer=9.0)
    tf.train.Checkpoint(module=module).read(checkpoint).expect_partial()
    note("object", module.variable)
    np.savez(out, **result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], np.load(sys.argv[3]), sys.argv[4])
