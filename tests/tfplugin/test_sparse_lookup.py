"""Pooled lookups give what TensorFlow's give on a dense table; empty rows and negative ids are treated as promised."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from tfplugin import dynamic_embedding as de

DENSE = np.random.default_rng(5).normal(size=(6, 4)).astype(np.float32)
IDS = tf.SparseTensor(
    [[0, 0], [0, 2], [1, 0], [3, 0], [3, 1], [3, 2]], tf.constant([1, 3, 0, 5, 5, 2], tf.int64), [4, 3]
)
WEIGHTS = tf.SparseTensor(IDS.indices, [0.5, 2.0, 1.5, 1.0, 3.0, 0.25], IDS.dense_shape)
RAGGED_IDS = tf.RaggedTensor.from_value_rowids(IDS.values, IDS.indices[:, 0], 4)
RAGGED_WEIGHTS = tf.RaggedTensor.from_value_rowids(WEIGHTS.values, IDS.indices[:, 0], 4)
COMBINERS = ("sum", "mean", "sqrtn", None)


@pytest.fixture
def table(make, partitioner):
    variable = make(name="pooled", partitioner=partitioner)
    variable.upsert(np.arange(6), DENSE)
    return variable


def _nn_sparse(namespace):
    return namespace.embedding_lookup_sparse, namespace.safe_embedding_lookup_sparse


@pytest.mark.parametrize("namespace", [tf.nn, tf.compat.v1.nn], ids=["nn", "v1"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_pooled_lookups_equal_those_of_a_dense_table(table, namespace, weighted):
    dense = tf.constant(DENSE)
    weights = WEIGHTS if weighted else None
    for combiner, max_norm, lookup in itertools.product(COMBINERS, (None, 1.0), _nn_sparse(namespace)):
        kwargs = {"combiner": combiner, "max_norm": max_norm}
        np.testing.assert_allclose(
            lookup(table, IDS, weights, **kwargs), lookup(dense, IDS, weights, **kwargs), rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("namespace", [tf.nn, tf.compat.v1.nn], ids=["nn", "v1"])
def test_ragged_ids_equal_sparse_ids(table, namespace):
    for combiner, weighted, lookup in itertools.product(COMBINERS, (False, True), _nn_sparse(namespace)):
        np.testing.assert_allclose(
            lookup(table, RAGGED_IDS, RAGGED_WEIGHTS if weighted else None, combiner=combiner),
            lookup(table, IDS, WEIGHTS if weighted else None, combiner=combiner),
            rtol=1e-6,
        )


def test_arguments_by_position(table):
    mean = tf.nn.embedding_lookup_sparse(table, IDS, WEIGHTS, combiner="mean", max_norm=1.0)
    for value in (
        tf.nn.embedding_lookup_sparse(table, IDS, WEIGHTS, "mean", 1.0, "named"),
        tf.compat.v1.nn.embedding_lookup_sparse(table, IDS, WEIGHTS, "div", "named", "mean", 1.0),
        tf.nn.safe_embedding_lookup_sparse(table, IDS, WEIGHTS, "mean", None, 1.0, "named"),
        tf.compat.v1.nn.safe_embedding_lookup_sparse(table, IDS, WEIGHTS, "mean", None, "named", "div", 1.0),
        tf.nn.safe_embedding_lookup_sparse(
            embedding_weights=table, sparse_ids=IDS, sparse_weights=WEIGHTS, max_norm=1.0
        ),
    ):
        np.testing.assert_allclose(value, mean, rtol=1e-6)


def test_a_list_of_parts(table):
    parts = list(table) if hasattr(table, "as_list") else [table]
    expected = tf.nn.embedding_lookup_sparse(table, IDS, None)
    for lookup in (*_nn_sparse(tf.nn), *_nn_sparse(tf.compat.v1.nn)):
        np.testing.assert_array_equal(lookup(parts, IDS, None), expected)
        np.testing.assert_array_equal(lookup(parts, RAGGED_IDS, None), expected)


@pytest.mark.parametrize("safe", [tf.nn.safe_embedding_lookup_sparse, tf.compat.v1.nn.safe_embedding_lookup_sparse])
def test_safe_lookup_of_empty_rows_meets_no_key(make, partitioner, safe):
    variable = make(partitioner=partitioner, initializer=1.0)
    empty = tf.SparseTensor(np.zeros([0, 2], np.int64), tf.zeros([0], tf.int64), [3, 2])
    with tf.GradientTape() as tape:
        rows = safe(variable, empty, None)
    np.testing.assert_array_equal(rows, np.zeros([3, 4]))
    assert int(variable.size()) == 0
    for gradient in tape.gradient(rows, list(variable) if hasattr(variable, "as_list") else [variable]):
        assert gradient.indices.shape == (0,)


@pytest.mark.parametrize("safe", [tf.nn.safe_embedding_lookup_sparse, tf.compat.v1.nn.safe_embedding_lookup_sparse])
def test_safe_lookup_fills_empty_rows_with_default_id(table, safe):
    for weights in (None, WEIGHTS):
        rows = safe(table, IDS, weights, default_id=4).numpy()
        np.testing.assert_array_equal(rows[2], DENSE[4])
        np.testing.assert_allclose(rows[[0, 1, 3]], safe(table, IDS, weights).numpy()[[0, 1, 3]], rtol=1e-6)


def test_safe_lookup_takes_negative_ids_for_keys(make, partitioner):
    variable = make(partitioner=partitioner)
    variable.upsert([-5, -1], [[1.0] * 4, [2.0] * 4])
    ids = tf.SparseTensor([[0, 0], [0, 1]], tf.constant([-5, -1], tf.int64), [2, 2])
    rows = tf.nn.safe_embedding_lookup_sparse(variable, ids, combiner="sum")
    np.testing.assert_array_equal(rows, [[3.0] * 4, [0.0] * 4])
    assert int(variable.size()) == 2


def test_safe_lookup_leaves_out_weights_that_are_not_positive(table):
    weights = tf.SparseTensor(IDS.indices, [0.0, 2.0, -1.0, 1.0, 3.0, 0.0], IDS.dense_shape)
    dense = tf.constant(DENSE)
    for combiner in ("sum", "mean", "sqrtn"):
        np.testing.assert_allclose(
            tf.nn.safe_embedding_lookup_sparse(table, IDS, weights, combiner=combiner),
            tf.nn.safe_embedding_lookup_sparse(dense, IDS, weights, combiner=combiner),
            rtol=1e-6,
        )


def test_safe_lookup_pools_the_last_of_three_dimensions(table):
    indices = [[0, 0, 0], [0, 0, 1], [1, 2, 0]]
    ids = tf.SparseTensor(indices, tf.constant([1, 3, 5], tf.int64), [2, 3, 2])
    weights = tf.SparseTensor(indices, [1.0, 2.0, 3.0], [2, 3, 2])
    for weights_ in (None, weights):
        rows = tf.nn.safe_embedding_lookup_sparse(table, ids, weights_, combiner="sum")
        expected = tf.nn.safe_embedding_lookup_sparse(tf.constant(DENSE), ids, weights_, combiner="sum")
        assert rows.shape == (2, 3, 4)
        np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_gradients_of_pooled_lookups_equal_those_of_a_dense_table(table):
    dense = tf.Variable(DENSE)
    parts = list(table) if hasattr(table, "as_list") else [table]
    for combiner, weights, max_norm in itertools.product(("sum", "mean", "sqrtn"), (None, WEIGHTS), (None, 1.0)):
        with tf.GradientTape() as tape:
            pooled = tf.nn.embedding_lookup_sparse(table, IDS, weights, combiner, max_norm)
            reference = tf.nn.embedding_lookup_sparse(dense, IDS, weights, combiner, max_norm)
            loss = tf.reduce_sum(pooled**2) + tf.reduce_sum(reference**2)
        *got, expected = tape.gradient(loss, [*parts, dense])
        summed = sum(np.asarray(tf.math.unsorted_segment_sum(g.values, g.indices, 6)) for g in got)
        np.testing.assert_allclose(summed, tf.convert_to_tensor(expected), rtol=1e-5, atol=1e-6)


def test_pooled_lookups_in_graph_mode_and_functions(session, partitioner):
    table = tf.compat.v1.get_kv_variable("t", embedding_dim=4, partitioner=partitioner)
    ids = tf.compat.v1.sparse_placeholder(tf.int64, [None, None])
    values = [
        tf.compat.v1.nn.embedding_lookup_sparse(table, ids, None, combiner="mean"),
        tf.compat.v1.nn.safe_embedding_lookup_sparse(table, ids),
        tf.nn.safe_embedding_lookup_sparse(tf.constant(DENSE), ids),
    ]
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(table.upsert(np.arange(6), DENSE))
    feed = {ids: tf.compat.v1.SparseTensorValue([[0, 0], [0, 1], [2, 0]], [1, 2, 3], [3, 2])}
    plain, safe, expected = session.run(values, feed)
    np.testing.assert_allclose(plain, expected, rtol=1e-6)
    np.testing.assert_allclose(safe, expected, rtol=1e-6)


def test_pooled_lookups_in_a_function(table):
    @tf.function(
        input_signature=[tf.SparseTensorSpec([None, None], tf.int64), tf.RaggedTensorSpec([None, None], tf.int64)]
    )
    def traced(sparse, ragged):
        return tf.nn.embedding_lookup_sparse(table, sparse, None), tf.nn.safe_embedding_lookup_sparse(table, ragged)

    expected = tf.nn.embedding_lookup_sparse(table, IDS, None)
    for value in traced(IDS, RAGGED_IDS):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("key_dtype", [tf.int32, tf.uint64], ids=lambda d: d.name)
def test_other_key_dtypes(make, partitioner, key_dtype):
    variable = make(name="keyed", key_dtype=key_dtype, partitioner=partitioner, initializer=1.0)
    ids = tf.SparseTensor([[0, 0], [1, 0]], tf.constant([1, 2], key_dtype), [3, 1])
    for lookup in (*_nn_sparse(tf.nn), *_nn_sparse(tf.compat.v1.nn)):
        np.testing.assert_array_equal(lookup(variable, ids, None)[:, 0], [1, 1, 0])
    np.testing.assert_array_equal(tf.nn.safe_embedding_lookup_sparse(variable, ids, default_id=9)[:, 0], [1, 1, 1])
    assert int(variable.size()) == 3


MOVED = tf.SparseTensor([[0, 0], [1, 0], [1, 1], [3, 0], [3, 1], [3, 2]], WEIGHTS.values, WEIGHTS.dense_shape)
MOVED_RAGGED = tf.RaggedTensor.from_value_rowids(WEIGHTS.values, [0, 1, 1, 3, 3, 3], 4)


@pytest.mark.parametrize(
    ("ids", "weights", "what"),
    [(IDS, MOVED, "indices"), (RAGGED_IDS, MOVED_RAGGED, "row splits")],
    ids=["sparse", "ragged"],
)
def test_weights_lie_where_the_ids_do(table, ids, weights, what):
    told = rf"sp_weights must lie where the ids do: their {what} are not those of sp_ids"
    for lookup in (*_nn_sparse(tf.nn), *_nn_sparse(tf.compat.v1.nn)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=told):
            lookup(table, ids, weights)
        with pytest.raises(tf.errors.InvalidArgumentError, match=told):
            tf.function(functools.partial(lookup, table), autograph=False)(ids, weights)
    with pytest.raises(tf.errors.InvalidArgumentError, match=told):
        tfplugin.lookup_many([table], [ids], weights=[weights], combiners="sum")
    dynamic = de.Variable(name=f"places_{what[:3]}", dim=4)
    with pytest.raises(tf.errors.InvalidArgumentError, match=told):
        de.embedding_lookup_sparse(dynamic, ids, weights, name="l")


def test_places_that_are_the_same_tensor_are_not_compared(table):
    def ops(ids, weights):
        lookup = tf.function(lambda: tf.nn.embedding_lookup_sparse(table, ids, weights))
        return {op.type for op in lookup.get_concrete_function().graph.get_operations()}

    assert "KvSamePlaces" not in ops(IDS, WEIGHTS) | ops(RAGGED_IDS, RAGGED_IDS.with_flat_values(WEIGHTS.values))
    equal = tf.SparseTensor(tf.identity(IDS.indices), WEIGHTS.values, IDS.dense_shape)
    assert "KvSamePlaces" in ops(IDS, equal)
    found = tf.nn.embedding_lookup_sparse(table, IDS, equal)
    np.testing.assert_array_equal(found, tf.nn.embedding_lookup_sparse(table, IDS, WEIGHTS))


def test_weights_whose_places_are_compared_have_their_gradient(table):
    def gradient(of_ids, of_weights, values):
        with tf.GradientTape() as tape:
            tape.watch(values)
            ids = tf.SparseTensor(of_ids, IDS.values, IDS.dense_shape)
            weights = tf.SparseTensor(of_weights, values, IDS.dense_shape)
            total = tf.reduce_sum(tf.nn.embedding_lookup_sparse(table, ids, weights, combiner="mean") ** 2)
        return tape.gradient(total, values)

    expected = gradient(IDS.indices, IDS.indices, WEIGHTS.values)
    compared = tf.function(gradient)(IDS.indices, tf.identity(IDS.indices), WEIGHTS.values)
    np.testing.assert_allclose(compared, expected, rtol=1e-6)
    assert np.any(expected)


def test_bad_arguments(table):
    with pytest.raises(ValueError, match="combiner must be one of"):
        tf.nn.embedding_lookup_sparse(table, IDS, None, combiner="max")
    with pytest.raises(TypeError, match="sp_ids must be a SparseTensor or a RaggedTensor"):
        tf.nn.embedding_lookup_sparse(table, tf.constant([1]), None)
    with pytest.raises(TypeError, match="sp_weights must be of the type of sp_ids"):
        tf.nn.embedding_lookup_sparse(table, IDS, tf.constant([1.0]))
