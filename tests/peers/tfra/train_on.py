"""Load what was saved elsewhere into TFRA, and train on. Runs in TFRA's environment.

python train_on.py FOLDER

FOLDER has what test_tfra_dynamic_embedding.py saved; states.npz, with what was loaded and what came of it, goes there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf
import tf_keras
from model import EagerModel, GraphModel, bits, typed
from tensorflow_recommenders_addons import dynamic_embedding as de

v1 = tf.compat.v1
DEVICES = 2
states: dict[str, dict[str, np.ndarray]] = {}


def train_on(case: str, model: GraphModel | EagerModel) -> None:
    """Notes what was loaded, and what three more steps make of it."""
    states[case] = model.state()
    model.train(range(6, 9))
    states[f"{case} and on"] = model.state()


def load_tables(model: GraphModel | EagerModel, folder: Path, columns: dict[str, str]) -> list:
    """The files of all tables. `columns` has what files begin with, of tables for which TFRA has other names."""
    loaded = []
    for (table, column), variable in model.tables().items():
        base = columns.get(f"{table}|{column}")
        names = [f"{base}_mht_{i + 1}of{DEVICES}_rank0_size1" for i in range(DEVICES)]
        loaded.append(variable.load_from_file_system(str(folder), file_name_list=names if base else None))
    return loaded


def graph(folder: Path) -> None:
    """A Saver restores what kvtools has rewritten; files are loaded beside the dense variables of a checkpoint."""
    with tf.Graph().as_default():
        model = GraphModel(de, DEVICES)
        model.saver.restore(model.session, str(folder / "name_based" / "model"))
        train_on("name_based", model)
    status = {"tower/ad|status": "status_tower_ad_frequency", "user|status": "status_user_timestamp"}
    for case, tables in (("name_based_files", "TFRADynamicEmbedding-6"), ("direct", "tables")):
        with tf.Graph().as_default():
            model = GraphModel(de, DEVICES)
            v1.train.Saver(v1.global_variables()).restore(model.session, str(folder / case / "model-6"))
            model.session.run(load_tables(model, folder / case / tables, status))
            train_on(case, model)


def eager(folder: Path) -> None:
    """A Checkpoint restores what a FileSystemSaver saved; files of slots and status are loaded by hand."""
    others = {
        "user|m": "tower_user_Adam_m",
        "user|v": "tower_user_Adam_v",
        "item|accumulator": "tower_item_Adagrad_accumulator",
        "user|status": "status_tower_user_frequency",
    }
    for case, tables in (("object_based_files", "TFRADynamicEmbedding"), ("object_based", "tables")):
        # TFRA looks slots up by name, in a collection of the default graph, which the models before would have left.
        v1.reset_default_graph()
        optimizers = {"user": tf_keras.optimizers.Adam(0.1), "item": tf_keras.optimizers.legacy.Adagrad(0.1)}
        model = EagerModel(de, DEVICES, optimizers, case == "object_based_files")
        model.train(range(1))  # the legacy optimizer has no slots before
        for variable in model.tables().values():
            variable.clear()
        model.checkpoint.read(str(folder / case / "model")).expect_partial()
        if case == "object_based_files":
            states[f"{case}, read"] = model.state()
        load_tables(model, folder / case / tables, others)
        train_on(case, model)


def types(folder: Path) -> None:
    """Files of all types."""
    states["types"] = {}
    for name, variable in typed(de, DEVICES, fill=False).items():
        variable.load_from_file_system(str(folder / "types"))
        for what, array in zip(("keys", "values"), variable.export(), strict=True):
            states["types"][f"{name}|{what}"] = bits(array.numpy())


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for load in (graph, eager, types):
        load(folder)
    np.savez(folder / "states.npz", **{f"{c}|{k}": a for c, s in states.items() for k, a in s.items()})
