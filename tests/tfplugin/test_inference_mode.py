"""Inference inserts nothing, however it is asked for; training stamps what it writes."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

import tfplugin


@pytest.fixture
def table(make, partitioner):
    variable = make(dim=2, partitioner=partitioner, initializer=7.0)
    variable.upsert([1], [[1.0, 1.0]])
    return variable


def test_missing_keys_are_zeros_and_stay_missing(table):
    with tfplugin.inference_mode():
        rows = tf.nn.embedding_lookup(table, [1, 2])
        pooled = tf.nn.safe_embedding_lookup_sparse(table, tf.sparse.from_dense([[1, 2]]), combiner="sum")
    np.testing.assert_array_equal(rows, [[1, 1], [0, 0]])
    np.testing.assert_array_equal(pooled, [[1, 1]])
    assert int(table.size()) == 1


def test_initial_values_without_inserting(table):
    rows = table.sparse_read([1, 2], training=False, missing="initial")
    np.testing.assert_array_equal(rows, [[1, 1], [7, 7]])
    assert int(table.size()) == 1
    with pytest.raises(ValueError, match="missing must be 'zeros' or 'initial'"):
        table.sparse_read([1], missing="nan")


def test_the_argument_wins_over_the_context(table):
    with tfplugin.inference_mode():
        np.testing.assert_array_equal(table.sparse_read([3], training=True), [[7, 7]])
    assert int(table.size()) == 2
    np.testing.assert_array_equal(table.sparse_read([4], training=False), [[0, 0]])
    assert int(table.size()) == 2


def test_contexts_nest_and_end_with_an_error(table):
    with tfplugin.inference_mode():
        with pytest.raises(RuntimeError), tfplugin.inference_mode():
            raise RuntimeError
        tf.nn.embedding_lookup(table, [2])
    assert int(table.size()) == 1
    tf.nn.embedding_lookup(table, [2])
    assert int(table.size()) == 2


def test_a_function_keeps_the_mode_it_was_traced_in(table):
    @tf.function
    def predict(ids):
        return tf.nn.embedding_lookup(table, ids)

    with tfplugin.inference_mode():
        predict(tf.constant([8], tf.int64))
    np.testing.assert_array_equal(predict(tf.constant([9], tf.int64)), [[0, 0]])

    @tf.function
    def with_context(ids):
        with tfplugin.inference_mode():
            return tf.nn.embedding_lookup(table, ids)

    np.testing.assert_array_equal(with_context(tf.constant([1, 9], tf.int64)), [[1, 1], [0, 0]])
    assert int(table.size()) == 1


def test_a_graph_keeps_the_mode_it_was_built_in(session):
    table = tf.compat.v1.get_kv_variable("t", embedding_dim=2, initializer=7.0)
    with tfplugin.inference_mode():
        rows = tf.nn.embedding_lookup(table, tf.constant([1], tf.int64))
    session.run(tf.compat.v1.global_variables_initializer())
    np.testing.assert_array_equal(session.run(rows), [[0, 0]])
    assert session.run(table.size()) == 0


def test_stamps_count_updates_and_tell_the_time_of_the_last_write(make, partitioner):
    table = make(dim=2, partitioner=partitioner)
    started = int(time.time())
    tf.nn.embedding_lookup(table, [1, 2])
    parts = list(table) if isinstance(table, tfplugin.PartitionedKvVariable) else [table]
    for keys in ([1], [1, 2, 1]):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys))
        tf.compat.v1.train.AdagradOptimizer(0.1).apply_gradients(
            zip(tape.gradient(loss, parts), parts, strict=True)
        )
    freqs, versions = table.stamps([[1, 2, 3]])
    assert freqs.numpy().tolist() == [[2, 1, 0]]
    assert started <= versions.numpy()[0, 0] <= int(time.time()) + 1
    assert versions.numpy()[0, 2] == 0
