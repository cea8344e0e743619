"""Save tables and slots' tables with a ``tf.compat.v1.train.Saver`` of them, or restore them. Runs here and in TFRA.

python saver_of_tables.py save|restore CHECKPOINT OUT.npz
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1


def main(de: Any, what: str, checkpoint: str, out: str) -> None:
    """A variable on two devices under Adam, in a variable scope."""
    v1.enable_resource_variables()
    with tf.Graph().as_default(), v1.Session() as session:
        with v1.variable_scope("tower"):
            variable = de.get_variable("user", dim=3, devices=["/CPU:0"] * 2, initializer=0.25)
        dense = v1.get_variable("dense", [3])
        ids = tf.constant([1, 2, -3, 2**40], tf.int64)
        rows, trainable = de.embedding_lookup(variable, ids, name="rows", return_trainable=True)
        optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
        step = optimizer.minimize(tf.reduce_sum(rows * dense), var_list=[trainable])
        slots = variable.get_slot_variables(optimizer)
        tables = [*variable.tables, *(table for slot in slots for table in slot.tables)]
        exports = {name: v.export() for name, v in zip(["values", "m", "v"], [variable, *slots], strict=True)}
        saver = v1.train.Saver([*v1.global_variables(), *tables])
        session.run(v1.global_variables_initializer())
        if what == "save":
            for _ in range(3):
                session.run(step)
            saver.save(session, checkpoint)
        else:
            saver.restore(session, checkpoint)
        found = {name: session.run(export) for name, export in exports.items()}
        found["dense"] = ([], session.run(dense))
    np.savez(out, **{f"{name}|{i}": part for name, parts in found.items() for i, part in enumerate(parts)})


if __name__ == "__main__":
    from tensorflow_recommenders_addons import dynamic_embedding

    main(dynamic_embedding, *sys.argv[1:])
