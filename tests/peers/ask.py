"""Ask models what was asked elsewhere, with the TensorFlow that runs this and nothing else.

    python ask.py REQUESTS ANSWERS

REQUESTS is a pickle of {folder of a model: [(signature, {input: array}), ...]}, ANSWERS one of
{folder: [{output: array}, ...]} in the same order. A model that has no objects is run in a session.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import tensorflow as tf


def of_objects(folder: str, requests: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """As `tf.saved_model.load` gives it."""
    model, answers = tf.saved_model.load(folder), []
    for signature, fed in requests:
        function = model.signatures[signature]
        specs = function.structured_input_signature[1]
        got = function(**{name: tf.constant(value, specs[name].dtype) for name, value in fed.items()})
        answers.append({name: tensor.numpy() for name, tensor in got.items()})
    return answers


def in_session(folder: str, requests: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """As TensorFlow Serving runs it."""
    answers = []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], folder)
        for name, fed in requests:
            signature = meta.signature_def[name]
            inputs = {signature.inputs[key].name: value for key, value in fed.items()}
            answers.append(session.run({key: info.name for key, info in signature.outputs.items()}, inputs))
    return answers


def main(requests: Path, answers: Path) -> None:
    """Both ways give the same, to the bit."""
    found = {}
    for folder, asked in pickle.loads(requests.read_bytes()).items():
        found[folder] = of_objects(folder, asked)
        again = in_session(folder, asked)
        for one, other in zip(found[folder], again, strict=True):
            assert all(str(one[name].tolist()) == str(other[name].tolist()) for name in one), folder
    answers.write_bytes(pickle.dumps(found))
    foreign = [name for name in sys.modules if name.startswith(("kvtools", "tfplugin", "tensorflow_recommenders"))]
    assert not foreign, foreign


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
