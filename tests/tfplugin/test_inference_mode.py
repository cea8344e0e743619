"""Inference inserts nothing, however it is asked for; training stamps what it writes."""

from __future__ import annotations

import threading
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


@pytest.fixture
def predict(table):
    """A function that looks up, and one that calls it from a condition."""

    @tf.function
    def inner(ids):
        return tf.nn.embedding_lookup(table, ids)

    @tf.function(reduce_retracing=True)
    def predict(ids):
        return tf.cond(tf.size(ids) > 0, lambda: inner(ids), lambda: tf.zeros([0, 2]))

    return predict


def test_functions_that_were_traced_before_take_the_mode_of_each_call(table, predict):
    np.testing.assert_array_equal(predict(tf.constant([1, 8], tf.int64)), [[1, 1], [7, 7]])
    with tfplugin.inference_mode():
        np.testing.assert_array_equal(predict(tf.constant([8, 9], tf.int64)), [[7, 7], [0, 0]])
    assert int(table.size()) == 2
    traces = predict.experimental_get_tracing_count()
    for _ in range(2):
        np.testing.assert_array_equal(predict(tf.constant([8, 9], tf.int64)), [[7, 7], [7, 7]])
        with tfplugin.inference_mode():
            np.testing.assert_array_equal(predict(tf.constant([9, 10], tf.int64)), [[7, 7], [0, 0]])
    assert int(table.size()) == 3
    assert predict.experimental_get_tracing_count() == traces == 2


def test_functions_that_were_traced_for_inference_first(table, predict):
    with tfplugin.inference_mode():
        predict(tf.constant([8], tf.int64))
    np.testing.assert_array_equal(predict(tf.constant([9], tf.int64)), [[7, 7]])
    assert int(table.size()) == 2


def test_a_function_may_have_the_mode_within(table):
    @tf.function
    def with_context(ids):
        with tfplugin.inference_mode():
            return tf.nn.embedding_lookup(table, ids)

    np.testing.assert_array_equal(with_context(tf.constant([1, 9], tf.int64)), [[1, 1], [0, 0]])
    assert int(table.size()) == 1


def test_one_thread_infers_while_others_train(table, predict):
    predict(tf.constant([2], tf.int64))
    inside, trained = threading.Event(), threading.Event()
    found = []

    def infer():
        with tfplugin.inference_mode():
            inside.set()
            assert trained.wait(60)
            found.append(predict(tf.constant([3, 4], tf.int64)).numpy())

    thread = threading.Thread(target=infer)
    thread.start()
    assert inside.wait(60)
    predict(tf.constant([3], tf.int64))
    trained.set()
    thread.join()
    np.testing.assert_array_equal(found, [[[7, 7], [0, 0]]])
    assert int(table.size()) == 3


def test_a_concrete_function_says_that_it_is_one_for_training(table, predict):
    spec = tf.TensorSpec([None], tf.int64)
    train = predict.get_concrete_function(spec)
    with tfplugin.inference_mode():
        with pytest.raises(RuntimeError, match=r"was traced for training.*call the tf.function that it is of"):
            train(tf.constant([9], tf.int64))
        infer = predict.get_concrete_function(spec)
        np.testing.assert_array_equal(infer(tf.constant([9], tf.int64)), [[0, 0]])
    np.testing.assert_array_equal(infer(tf.constant([9], tf.int64)), [[0, 0]])
    assert int(table.size()) == 1
    train(tf.constant([9], tf.int64))
    assert int(table.size()) == 2
    calls = tf.function(lambda ids: predict(ids) + 1.0).get_concrete_function(spec)  # what was traced before
    with tfplugin.inference_mode(), pytest.raises(RuntimeError, match="was traced for training"):
        calls(tf.constant([9], tf.int64))


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
        tf.compat.v1.train.AdagradOptimizer(0.1).apply_gradients(zip(tape.gradient(loss, parts), parts, strict=True))
    freqs, versions = table.stamps([[1, 2, 3]])
    assert freqs.numpy().tolist() == [[2, 1, 0]]
    assert started <= versions.numpy()[0, 0] <= int(time.time()) + 1
    assert versions.numpy()[0, 2] == 0
