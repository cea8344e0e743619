"""Tables that need no initializer, and tables of integers: what other APIs build on."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfplugin.initializers import KvInitializer
from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw

v1 = tf.compat.v1
ROW = np.array([3, -4], np.int32)


def integers(name="n", **kwargs):
    rows = KvInitializer("rows", rows=lambda: tf.constant(ROW[None]), known_rows=ROW.tobytes())
    return KvVariable(name, 2, tf.int64, tf.int32, rows, trainable=False, **kwargs)


def test_a_table_that_starts_initialized_is_there_in_every_session():
    with tf.Graph().as_default():
        floats = KvVariable("f", 2, initializer=KvInitializer("constant", 1.5), starts_initialized=True)
        numbers = integers(starts_initialized=True)
        read = [v.sparse_read([7], training=False, missing="initial") for v in (floats, numbers)]
        written = floats.upsert([7], [[1.0, 2.0]])
        for _ in range(2):
            with v1.Session() as session:
                assert [rows.tolist() for rows in session.run(read)] == [[[1.5, 1.5]], [[3, -4]]]
                session.run(written)
                assert session.run(read[0]).tolist() == [[1, 2]]
                session.run(floats.initializer)
                assert session.run(floats.size()) == 0


def test_one_that_does_not_says_so():
    with tf.Graph().as_default(), v1.Session() as session:
        floats = KvVariable("f", 2)
        with pytest.raises(tf.errors.FailedPreconditionError, match="run its initializer"):
            session.run(floats.size())


@pytest.mark.parametrize("dtype", [tf.int8, tf.int32, tf.int64, tf.bool], ids=lambda d: d.name)
def test_integers_are_written_read_and_added(dtype):
    table = KvVariable("n", 3, tf.int32, dtype, KvInitializer("constant", 1.0), trainable=False)
    rows = tf.cast([[1, 0, 1], [0, 1, 1]], dtype)
    table.upsert([5, -5], rows)
    table.accumulate([5, 6], rows)
    got = tf.cast(table.sparse_read([5, -5, 6, 7], training=False, missing="initial"), tf.int32).numpy().tolist()
    # Of bools, the sum is "or".
    twice = 1 if dtype == tf.bool else 2
    assert got == [[twice, 0, twice], [0, 1, 1], [1, twice, twice], [1, 1, 1]]
    keys, exported = table.export()
    assert keys.shape == [3] and exported.dtype == dtype
    assert table.sparse_read([9], training=False).numpy().tolist() == [[0, 0, 0]]


def test_integers_wrap_around():
    table = KvVariable("n", 1, tf.int64, tf.int8, KvInitializer("constant", 0.0), trainable=False)
    table.accumulate([1, 1], tf.constant([[127], [2]], tf.int8))
    assert table.sparse_read([1], training=False).numpy().tolist() == [[-127]]


def test_integers_have_no_gradient_step():
    table = integers()
    with pytest.raises(tf.errors.InvalidArgumentError, match="holds int32, got gradients of float"):
        raw.kv_table_apply(
            table.handle,
            tf.constant([1], tf.int64),
            tf.zeros([0], tf.int64),
            tf.ones([1, 2]),
            [tf.constant([0.1], tf.float64)],
            [],
            optimizer="sgd",
            names=["learning_rate"],
            slots="[]",
            all_slots="[]",
            generation=1,
        )
