"""Models that TensorFlow 1 saved, loaded by `tf.saved_model.load`: their tables are tables."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tfplugin

v1 = tf.compat.v1


def save(path: Path, partitioner: Any, scale: float) -> np.ndarray:
    """A model of a table and a dense variable: what it answers for 1, 2 and 99, which is no key."""
    with tf.Graph().as_default(), v1.Session() as session:
        ids = v1.placeholder(tf.int64, [None], "ids")
        table = tfplugin.get_kv_variable("emb", embedding_dim=4, partitioner=partitioner)
        weights = v1.get_variable("w", [4, 1], initializer=v1.constant_initializer(scale))
        trained = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) @ weights)
        step = v1.train.AdamOptimizer(0.1).minimize(trained)
        with tfplugin.inference_mode():
            served = tf.nn.embedding_lookup(table, ids) @ weights
        session.run(v1.global_variables_initializer())
        session.run(step, {ids: np.arange(20)})
        v1.saved_model.simple_save(session, str(path), {"ids": ids}, {"y": served})
        return np.asarray(session.run(served, {ids: [1, 2, 99]}))


def answer(model: Any) -> np.ndarray:
    return np.asarray(model.signatures["serving_default"](ids=tf.constant([1, 2, 99], tf.int64))["y"])


def test_a_model_answers_as_its_session_did(tmp_path: Path, partitioner: Any) -> None:
    expected = [save(tmp_path / str(scale), partitioner, scale) for scale in (1.0, 3.0)]
    # Two of the same names, side by side.
    models = [tf.saved_model.load(str(tmp_path / str(scale))) for scale in (1.0, 3.0)]
    for model, wanted in zip(models, expected, strict=True):
        assert answer(model).tobytes() == wanted.tobytes()
        assert not wanted[2].any() and wanted[:2].all()
        again = tf.saved_model.load(str(tmp_path / "1.0"))
        assert answer(again).tobytes() == expected[0].tobytes()


def test_its_tables_are_among_its_variables_and_go_with_it(tmp_path: Path, partitioner: Any) -> None:
    save(tmp_path / "model", partitioner, 1.0)
    model = tf.saved_model.load(str(tmp_path / "model"))
    tables = [variable for variable in model.variables if isinstance(variable, tfplugin.KvVariable)]
    assert sum(int(table.size()) for table in tables) == 20
    assert tables[0].contains(tf.constant([0], tf.int64)).numpy().all()
    gone = [weakref.ref(table) for table in tables]
    del model, tables
    gc.collect()
    assert not any(table() for table in gone)
