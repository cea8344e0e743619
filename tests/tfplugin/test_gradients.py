"""Gradients of lookups are slices of the keys looked up, by every way TensorFlow has of asking for them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

IDS = np.array([[4, -1], [4, 9]])


def _parts(variable):
    return list(variable) if isinstance(variable, tfplugin.PartitionedKvVariable) else [variable]


def _by_key(gradients):
    """The gradient of each key, equal keys summed."""
    out: dict[int, np.ndarray] = {}
    for gradient in gradients:
        for key, row in zip(np.asarray(gradient.indices), np.asarray(gradient.values), strict=True):
            out[int(key)] = out.get(int(key), 0) + row
    return {key: row.tolist() for key, row in out.items()}


def _loss(variable, ids):
    return tf.reduce_sum(tf.nn.embedding_lookup(variable, ids) * [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])


EXPECTED = {4: [6, 8], -1: [3, 4], 9: [7, 8]}


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_tape(make, partitioner, function):
    variable = make(dim=2, partitioner=partitioner)
    parts = _parts(variable)

    def gradients():
        with tf.GradientTape() as tape:
            loss = _loss(variable, IDS)
        return tape.gradient(loss, parts)

    got = (tf.function(gradients) if function else gradients)()
    assert all(isinstance(gradient, tf.IndexedSlices) for gradient in got)
    assert _by_key(got) == EXPECTED


def test_a_tape_around_a_function_gets_gradients_from_every_call_of_it(make, partitioner):
    variable = make(dim=2, partitioner=partitioner)
    pooled = tf.sparse.from_dense(IDS)
    single = tf.function(lambda: _loss(variable, IDS))
    several = tf.function(lambda: tf.reduce_sum(tf.nn.embedding_lookup_sparse(variable, pooled, None, combiner="sum")))
    for function, expected in ((single, EXPECTED), (several, {4: [2, 2], -1: [1, 1], 9: [1, 1]})):
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = function()
            assert _by_key(tape.gradient(loss, _parts(variable))) == expected


def test_tape_watches_trainable_variables_only(make):
    variable, frozen = make(name="a"), make(name="b", trainable=False)
    with tf.GradientTape() as tape:
        rows = tf.nn.embedding_lookup(variable, IDS) + tf.nn.embedding_lookup(frozen, IDS)
    assert [watched is variable for watched in tape.watched_variables()] == [True]
    assert tape.gradient(rows, frozen) is None


def test_lookups_of_one_variable_add_up(make, partitioner):
    variable = make(dim=2, partitioner=partitioner)
    with tf.GradientTape() as tape:
        pooled = tf.nn.embedding_lookup_sparse(variable, tf.sparse.from_dense(tf.constant([[9], [4]])), None)
        loss = _loss(variable, IDS) + tf.reduce_sum(pooled)
    assert _by_key(tape.gradient(loss, _parts(variable))) == {4: [7, 9], -1: [3, 4], 9: [8, 9]}


@pytest.mark.parametrize("gradients", [tf.gradients, tf.compat.v1.gradients], ids=["tf", "v1"])
def test_symbolic_gradients(session, partitioner, gradients):
    variable = tf.compat.v1.get_kv_variable("v", embedding_dim=2, partitioner=partitioner)
    got = gradients(_loss(variable, tf.constant(IDS)), _parts(variable))
    session.run(tf.compat.v1.global_variables_initializer())
    assert _by_key(session.run(got)) == EXPECTED


def test_a_gradient_through_a_tape_inside_a_tape(make):
    variable = make(dim=2, initializer=3.0)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, [1]) ** 3)
        norm = tf.reduce_sum(inner.gradient(loss, variable).values)
    assert _by_key([outer.gradient(norm, variable)]) == {1: [18, 18]}


def test_the_gradient_of_no_ids_is_empty(make, partitioner):
    variable = make(dim=2, partitioner=partitioner)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, tf.zeros([0], tf.int64)))
    gradients = tape.gradient(loss, _parts(variable))
    assert _by_key(gradients) == {}
    tf.compat.v1.train.AdamOptimizer().apply_gradients(zip(gradients, _parts(variable), strict=True))
    assert int(variable.size()) == 0
