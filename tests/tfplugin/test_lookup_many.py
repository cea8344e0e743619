"""`lookup_many` gives what the lookups one by one give, in as few ops as there are kinds of tables."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

V1 = tf.compat.v1
THREE = V1.fixed_size_partitioner(3)


def _parts(variable):
    return list(variable) if isinstance(variable, tfplugin.PartitionedKvVariable) else [variable]


def _ids(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 5, 12)
    return tf.RaggedTensor.from_row_lengths(random.integers(-9, 9, lengths.sum()), lengths)


@pytest.fixture
def tables(make):
    specs = [(1, None), (16, THREE), (7, None), (4, THREE), (4, None)]
    return [make(dim=d, partitioner=p, name=f"t{i}") for i, (d, p) in enumerate(specs)]


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_as_the_lookups_one_by_one(tables, function):
    combiners = [None, "sum", "mean", None, "sqrtn"]
    ids = [tf.constant([[3, -3], [3, 0]], tf.int64), _ids(1).to_sparse(), _ids(2), _ids(3), _ids(4)]
    weights = [None, ids[1].with_values(tf.cast(ids[1].values, tf.float32) + 20.0), None, None, None]
    flat = [part for table in tables for part in _parts(table)]

    def run(lookup):
        with tf.GradientTape() as tape:
            rows = lookup()
            loss = tf.add_n([tf.reduce_sum(tf.sin(r.flat_values if hasattr(r, "flat_values") else r)) for r in rows])
        gradients = tape.gradient(loss, flat)
        return rows, [(g.indices, g.values) for g in gradients]

    def many():
        return tfplugin.lookup_many(tables, ids, weights=weights, combiners=combiners)

    def one_by_one():
        return [
            tf.nn.embedding_lookup(t, i) if c is None else tf.nn.embedding_lookup_sparse(t, i, w, combiner=c)
            for t, i, w, c in zip(tables, ids, weights, combiners, strict=True)
        ]

    (rows, gradients), (expected, expected_gradients) = (
        (tf.function(lambda lookup=lookup: run(lookup)) if function else lambda lookup=lookup: run(lookup))()
        for lookup in (many, one_by_one)
    )
    assert isinstance(rows[3], tf.RaggedTensor)
    for a, b in zip(
        tf.nest.flatten([rows, gradients], expand_composites=True),
        tf.nest.flatten([expected, expected_gradients], expand_composites=True),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_tables_of_a_kind_share_an_op(tables, make):
    wide = make(dim=4, value_dtype=tf.float64, name="wide")

    @tf.function
    def lookup():
        plain = tfplugin.lookup_many([*tables, wide], [tf.constant([1, 2], tf.int64)] * 6)
        pooled = tfplugin.lookup_many(tables, [_ids(i) for i in range(5)], combiners="mean")
        return plain, pooled

    types = [op.type for op in lookup.get_concrete_function().graph.get_operations() if op.type.startswith("KvTable")]
    assert sorted(types) == ["KvTableGatherMany", "KvTableGatherMany", "KvTablePool"]


def test_one_table_several_times(make):
    variable = make(dim=2, initializer=1.0)
    with tf.GradientTape() as tape:
        rows = tfplugin.lookup_many([variable, variable], [[1, 2], [2]])
        loss = tf.reduce_sum(rows[0]) + 10 * tf.reduce_sum(rows[1])
    gradient = tape.gradient(loss, variable)
    summed = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, 3)
    np.testing.assert_array_equal(summed, [[0, 0], [1, 1], [11, 11]])
    assert int(variable.size()) == 2


def test_training_is_said_for_all(tables):
    ids = [tf.constant([5], tf.int64)] * 5
    tfplugin.lookup_many(tables, ids, training=False)
    tfplugin.lookup_many(tables, [_ids(0)] * 5, combiners="sum", training=False)
    with tfplugin.inference_mode():
        tfplugin.lookup_many(tables, ids)
    assert [int(t.size()) for t in tables] == [0] * 5
    tfplugin.lookup_many(tables, ids)
    assert [int(t.size()) for t in tables] == [1] * 5


def test_graph_mode_trains_all(session):
    tables = [
        V1.get_kv_variable("a", 2, initializer=1.0, partitioner=THREE),
        V1.get_kv_variable("b", 3, initializer=1.0),
        V1.get_kv_variable("c", 2, initializer=1.0, regularizer=tf.reduce_sum),
    ]
    ids = tf.constant([1, 1, -2], tf.int64)
    rows = tfplugin.lookup_many(tables, [ids] * 3)
    step = V1.train.GradientDescentOptimizer(0.25).minimize(tf.add_n([tf.reduce_sum(r) for r in rows]))
    session.run(V1.global_variables_initializer())
    session.run(step)
    for table in tables:
        np.testing.assert_array_equal(session.run(table.sparse_read([1, -2], training=False))[:, 0], [0.5, 0.75])
    assert len(V1.get_collection(V1.GraphKeys.REGULARIZATION_LOSSES)) == 1


def test_nothing_to_look_up():
    assert tfplugin.lookup_many([], []) == []


def test_an_optimizer_steps_over_all(tables):
    optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))
    flat = [part for table in tables for part in _parts(table)]
    before = [r.numpy() for r in tfplugin.lookup_many(tables, [[1, 2]] * 5)]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(r) for r in tfplugin.lookup_many(tables, [[1, 2]] * 5)])
    optimizer.apply_gradients(zip(tape.gradient(loss, flat), flat, strict=True))
    for rows, old in zip(tfplugin.lookup_many(tables, [[1, 2]] * 5), before, strict=True):
        np.testing.assert_allclose(rows, old - 0.5, rtol=1e-6)


def test_bad_arguments(tables):
    two = tables[:2]
    ids = [tf.constant([1], tf.int64)] * 2
    with pytest.raises(ValueError, match="2 variables and 1 ids"):
        tfplugin.lookup_many(two, ids[:1])
    with pytest.raises(ValueError, match="2 variables and 3 combiners"):
        tfplugin.lookup_many(two, ids, combiners=["sum"] * 3)
    with pytest.raises(ValueError, match="combiner must be None or one of"):
        tfplugin.lookup_many(two, ids, combiners="max")
    with pytest.raises(ValueError, match="weights for 't0:0', which has no combiner"):
        tfplugin.lookup_many(two, ids, weights=[ids[0], None])
    with pytest.raises(TypeError, match="must be a SparseTensor or a RaggedTensor, got EagerTensor"):
        tfplugin.lookup_many(two, ids, combiners="sum")
    with pytest.raises(TypeError, match="takes ids as a dense tensor here"):
        tfplugin.lookup_many(two, [tf.sparse.from_dense([[1]])] * 2)
    with pytest.raises(TypeError, match="variables must be key-value variables, got ResourceVariable"):
        tfplugin.lookup_many([tf.Variable([[1.0]])], [[0]])
    with pytest.raises(TypeError, match="has int64 keys, got ids of string"):
        tfplugin.lookup_many(two, [ids[0], tf.constant(["a"])])
