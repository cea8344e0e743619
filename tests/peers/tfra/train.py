"""Train in TFRA, save in every way that it has, and train on. Runs in TFRA's environment.

python train.py FOLDER
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


def main(folder: Path) -> None:
    """Two devices, three steps before the save and three after it."""
    states = {}
    for case, files in (("name_based", False), ("name_based_files", True)):
        with tf.Graph().as_default():
            model = GraphModel(de, 2, files)
            model.fill()
            model.train(range(3))
            (folder / case).mkdir()
            model.saver.save(model.session, str(folder / case / "model"), global_step=3)
            if not files:
                saved = [v.save_to_file_system(str(folder / "direct")) for v in model.tables().values()]
                model.session.run(saved)
            states[case] = model.state()
            model.train(range(3, 6))
            states[f"{case} and on"] = model.state()
    for case, files in (("object_based", False), ("object_based_files", True)):
        optimizers = {"user": tf_keras.optimizers.Adam(0.1), "item": tf_keras.optimizers.legacy.Adagrad(0.1)}
        # TFRA looks slots up by name, in a collection of the default graph, which the models before would have left.
        tf.compat.v1.reset_default_graph()
        model = EagerModel(de, 2, optimizers, files)
        model.fill()
        model.train(range(3))
        model.checkpoint.write(str(folder / case / "model"))
        states[case] = model.state()
        model.train(range(3, 6))
        states[f"{case} and on"] = model.state()
    states["types"] = {}
    for name, variable in typed(de, 2, fill=True).items():
        variable.save_to_file_system(str(folder / "types"))
        for what, array in zip(("keys", "values"), variable.export(), strict=True):
            states["types"][f"{name}|{what}"] = bits(array.numpy())
    cuda = np.array(tf.test.is_built_with_cuda())
    np.savez(folder / "states.npz", cuda=cuda, **{f"{c}|{k}": a for c, s in states.items() for k, a in s.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
