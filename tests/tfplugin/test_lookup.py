"""`tf.nn.embedding_lookup`, `tf.gather` and `sparse_read`: ids of every kind give the rows of their keys."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

INT64 = np.iinfo(np.int64)
KEYS = [7, -1, 0, INT64.min, INT64.max, 10**15, 3]

LOOKUPS = {
    "nn": lambda v, ids: tf.nn.embedding_lookup(v, ids),
    "nn by keyword": lambda v, ids: tf.nn.embedding_lookup(params=v, ids=ids),
    "nn, max_norm third": lambda v, ids: tf.nn.embedding_lookup(v, ids, None, "named"),
    "v1": lambda v, ids: tf.compat.v1.nn.embedding_lookup(v, ids),
    "v1, strategy third": lambda v, ids: tf.compat.v1.nn.embedding_lookup(v, ids, "div", "named", True, None),
    "v1 by keyword": lambda v, ids: tf.compat.v1.nn.embedding_lookup(params=v, ids=ids, partition_strategy="mod"),
    "gather": lambda v, ids: tf.gather(v, ids),
    "gather by keyword": lambda v, ids: tf.gather(params=v, indices=ids, axis=0),
    "v1.gather": lambda v, ids: tf.compat.v1.gather(v, ids),
    "sparse_read": lambda v, ids: v.sparse_read(ids),
}


@pytest.fixture
def filled(make, partitioner):
    variable = make(name="filled", partitioner=partitioner)
    values = np.arange(len(KEYS) * 4, dtype=np.float32).reshape(-1, 4) + 1
    variable.upsert(KEYS, values)
    return variable, values


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_ids_of_any_rank_give_their_rows(filled, lookup):
    variable, values = filled
    for shape in ((), (0,), (5,), (2, 3), (2, 0, 3), (2, 2, 2)):
        positions = np.random.default_rng(0).integers(0, len(KEYS), shape)
        rows = lookup(variable, tf.constant(np.array(KEYS)[positions], tf.int64))
        assert rows.shape == (*shape, 4)
        np.testing.assert_array_equal(rows, values[positions])


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_lookups_in_a_function_with_shapes_unknown_when_traced(filled, lookup):
    variable, values = filled

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64)])
    def traced(ids):
        return lookup(variable, ids)

    for positions in (np.array(2), np.array([1, 1]), np.array([[0], [4]]), np.zeros([0], int)):
        np.testing.assert_array_equal(traced(np.array(KEYS)[positions]), values[positions])


def test_lists_and_tuples_of_parts_are_the_whole(filled):
    variable, values = filled
    parts = list(variable) if isinstance(variable, tfplugin.PartitionedKvVariable) else [variable]
    for params in (parts, tuple(parts), [variable]):
        np.testing.assert_array_equal(tf.nn.embedding_lookup(params, KEYS), values)
        np.testing.assert_array_equal(tf.compat.v1.nn.embedding_lookup(params, KEYS), values)


def test_parts_out_of_order_are_refused(make):
    variable = make(partitioner=tf.compat.v1.fixed_size_partitioner(3))
    with pytest.raises(ValueError, match="all parts of one partitioned variable in order"):
        tf.nn.embedding_lookup(list(variable)[::-1], [1])


def test_ragged_ids_give_ragged_rows(filled):
    variable, values = filled
    ids = tf.RaggedTensor.from_row_lengths(tf.constant(KEYS[:3], tf.int64), [2, 0, 1])
    for lookup in LOOKUPS.values():
        if lookup is LOOKUPS["sparse_read"]:
            continue
        rows = lookup(variable, ids)
        np.testing.assert_array_equal(rows.values, values[:3])
        np.testing.assert_array_equal(rows.row_lengths(), [2, 0, 1])


def test_ids_as_python_and_numpy_integers_and_variables(filled):
    variable, values = filled
    small = [7, -1, 0]
    kinds = (small, tuple(small), np.array(small), np.array(small, np.int32), tf.constant(small), tf.Variable(small))
    for ids in kinds:
        np.testing.assert_array_equal(tf.nn.embedding_lookup(variable, ids), values[:3])
    np.testing.assert_array_equal(tf.nn.embedding_lookup(variable, 7), values[0])
    np.testing.assert_array_equal(tf.nn.embedding_lookup(variable, np.int64(-1)), values[1])


@pytest.mark.parametrize(
    ("key_dtype", "keys"),
    [
        (tf.int32, [0, -1, 2**31 - 1, -(2**31)]),
        (tf.uint64, [0, 1, 2**63, 2**64 - 1]),
        (int, [0, -1, INT64.max, INT64.min]),
    ],
    ids=["int32", "uint64", "int"],
)
def test_every_key_of_a_dtype_is_legal(make, partitioner, key_dtype, keys):
    variable = make(dim=2, name="keyed", key_dtype=key_dtype, partitioner=partitioner)
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    variable.upsert(tf.constant(keys, variable.key_dtype), values)
    ids = tf.constant([*keys[::-1], keys[0]], variable.key_dtype)
    np.testing.assert_array_equal(tf.nn.embedding_lookup(variable, ids), np.concatenate([values[::-1], values[:1]]))
    assert int(variable.size()) == 4


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64], ids=lambda d: d.name)
def test_value_dtypes(make, partitioner, dtype):
    variable = make(name="typed", value_dtype=dtype, partitioner=partitioner, initializer=0.5)
    variable.upsert([1, -4], tf.constant([[1] * 4, [2] * 4], dtype))
    rows = tf.nn.embedding_lookup(variable, [1, -4, 9])
    assert rows.dtype == dtype
    np.testing.assert_array_equal(tf.cast(rows, tf.float32)[:, 0], [1, 2, 0.5])
    sparse = tf.sparse.from_dense([[1, -4], [9, 0]])
    pooled = tf.nn.embedding_lookup_sparse(variable, sparse, None, combiner="sum")
    assert pooled.dtype == dtype
    np.testing.assert_array_equal(tf.cast(pooled, tf.float32)[:, 0], [3, 0.5])


def test_max_norm_clips_each_row(filled):
    variable, values = filled
    expected = tf.clip_by_norm(tf.constant(values), 5.0, axes=[1])
    for rows in (
        tf.nn.embedding_lookup(variable, KEYS, 5.0),
        tf.nn.embedding_lookup(variable, KEYS, max_norm=5.0),
        tf.compat.v1.nn.embedding_lookup(variable, KEYS, max_norm=5.0),
    ):
        np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_a_key_starts_from_the_same_row_whatever_the_parts_and_the_order(make):
    keys = np.random.default_rng(1).integers(INT64.min, INT64.max, 200)
    initializers = (None, tf.compat.v1.truncated_normal_initializer(seed=3), tf.initializers.GlorotUniform(seed=3))
    for initializer in initializers:
        expected = make(name="same", initializer=initializer).sparse_read(keys).numpy()
        assert len(np.unique(expected, axis=0)) > 150
        for parts in (1, 2, 5):
            variable = make(
                name="same",
                initializer=initializer,
                partitioner=tf.compat.v1.fixed_size_partitioner(parts),
            )
            np.testing.assert_array_equal(variable.sparse_read(keys[::-1])[::-1], expected)


def test_parts_hold_the_keys_that_are_theirs(make):
    variable = make(partitioner=tf.compat.v1.fixed_size_partitioner(3))
    tf.nn.embedding_lookup(variable, np.arange(-6, 6))
    for i, part in enumerate(variable):
        assert sorted(part.export()[0].numpy().tolist()) == [key for key in range(-6, 6) if key % 3 == i]


def test_lookups_in_graph_mode(session, partitioner):
    variable = tf.compat.v1.get_kv_variable("v", embedding_dim=2, partitioner=partitioner, initializer=1.5)
    ids = tf.compat.v1.placeholder(tf.int64, [None, None])
    rows = [
        tf.compat.v1.nn.embedding_lookup(variable, ids),
        tf.nn.embedding_lookup(variable, ids),
        variable.gather(ids),
    ]
    assert rows[0].shape.as_list() == [None, None, 2]
    session.run(tf.compat.v1.global_variables_initializer())
    for value in session.run(rows, {ids: [[1, -1], [5, 1]]}):
        np.testing.assert_array_equal(value, np.full([2, 2, 2], 1.5))
    assert session.run(variable.size()) == 3


def test_axis_and_batch_dims_of_gather_are_refused(make):
    variable = make()
    for kwargs in ({"axis": 1}, {"batch_dims": 1}):
        with pytest.raises(ValueError, match="rows are keyed"):
            tf.gather(variable, [1], **kwargs)
