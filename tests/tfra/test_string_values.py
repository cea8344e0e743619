"""Variables with string values against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfplugin import dynamic_embedding as de

v1 = tf.compat.v1
KEYS = np.array([1, -2, 2**62, 7])
ROWS = np.array([["a", ""], ["ключ", "b"], ["", ""], ["-", "-"]])


def by_key(exported):
    keys, rows = (np.asarray(x) for x in exported)
    return {int(key): [text.decode() for text in row] for key, row in zip(keys, rows, strict=True)}


EXPECTED = dict(zip(KEYS.tolist(), ROWS.tolist(), strict=True))


def test_reads_and_writes_follow_a_dictionary(mode, name, devices):
    v = de.Variable(tf.int64, tf.string, dim=2, name=name, devices=devices, initializer="none")
    mode(lambda k, r: v.upsert(k, r), KEYS, ROWS)
    found, exists = mode(lambda k: v.lookup(k, return_exists=True), np.array([[7, 8], [2**62, 1]]))
    assert found.tolist() == [[[b"-", b"-"], [b"none", b"none"]], [[b"", b""], [b"a", b""]]]
    assert exists.tolist() == [[True, False], [True, True]]
    assert by_key(mode(lambda: v.export())) == EXPECTED
    mode(lambda k: v.remove(k), np.array([7, 9]))
    assert int(mode(lambda: v.size())) == 3
    mode(lambda: v.clear())
    assert int(mode(lambda: v.size())) == 0


def test_strings_are_not_trained_or_added(name):
    v = de.Variable(tf.int64, tf.string, dim=1, name=name)
    assert v.lookup([1]).numpy().tolist() == [[b""]]
    with pytest.raises(TypeError, match="read them with its lookup method"):
        de.embedding_lookup(v, tf.constant([1], tf.int64), name="x")
    with pytest.raises(TypeError, match="string values"):
        v.accum([1], [["a"]], [["b"]], [True])
    with pytest.raises(TypeError, match="string values, got float32"):
        v.upsert([1], tf.constant([[1.0]]))
    with pytest.raises(TypeError, match="int32 keys with string values"):
        de.Variable(tf.int32, tf.string, name=name)


def test_checkpoints_keep_strings(tmp_path, devices):
    v, w = (de.Variable(tf.int64, tf.string, dim=2, name="s", devices=devices) for _ in range(2))
    v.upsert(KEYS, ROWS)
    tf.train.Checkpoint(v=w).restore(tf.train.Checkpoint(v=v).save(str(tmp_path / "c")))
    assert by_key(w.export()) == EXPECTED
    path = str(tmp_path / "m")
    for var_list in (lambda v: None, lambda v: [v]):
        with tf.Graph().as_default(), v1.Session() as session:
            v = de.Variable(tf.int64, tf.string, dim=2, name="s", devices=devices)
            session.run(v.upsert(KEYS, ROWS))
            v1.train.Saver(var_list(v)).save(session, path)
        with tf.Graph().as_default(), v1.Session() as session:
            v = de.Variable(tf.int64, tf.string, dim=2, name="s", devices=devices)
            v1.train.Saver(var_list(v)).restore(session, path)
            assert by_key(session.run(v.export())) == EXPECTED
