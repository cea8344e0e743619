"""Parts on one device are looked up in one op, and give what a table in one piece gives; so do their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from tfplugin import row_handles
from tfplugin.ops import raw

EXTREMES = {
    tf.int64: [0, -1, 1, 2**63 - 1, -(2**63), -7, 5],
    tf.int32: [0, -1, 1, 2**31 - 1, -(2**31), -7, 5],
    tf.uint64: [0, 1, 2**63, 2**64 - 1, 2**63 - 1, 7, 5],
}


def _parts(make, parts, **kwargs):
    return make(partitioner=parts and tf.compat.v1.fixed_size_partitioner(parts), **kwargs)


def _ops(function):
    return {op.type for op in function.get_concrete_function().graph.get_operations()}


@pytest.mark.parametrize("parts", [1, 3, 5, 64])
@pytest.mark.parametrize("key_dtype", EXTREMES, ids=lambda d: d.name)
def test_each_key_comes_from_the_part_that_owns_it(make, parts, key_dtype):
    numbers = EXTREMES[key_dtype]
    keys = tf.constant(numbers, key_dtype)
    variable = _parts(make, parts, dim=2, key_dtype=key_dtype)
    values = np.arange(2 * len(numbers), dtype=np.float32).reshape(-1, 2)
    variable.upsert(keys, values)
    np.testing.assert_array_equal(variable.sparse_read(keys[::-1], training=False), values[::-1])
    for i, part in enumerate(variable):
        assert sorted(part.export()[0].numpy().tolist()) == sorted(n for n in numbers if n % parts == i)
    owners = raw.kv_table_partition(keys, parts=parts)
    assert owners.numpy().tolist() == [n % parts for n in numbers]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64], ids=lambda d: d.name)
@pytest.mark.parametrize("dim", [1, 7, 16, 64, 129])
def test_five_parts_read_as_one_and_insert_alike(make, dim, dtype):
    keys = np.random.default_rng(dim).integers(-4000, 4000, [3, 5000])
    one, five = (_parts(make, parts, dim=dim, value_dtype=dtype, name="same") for parts in (None, 5))
    for training in (False, True, True):
        expected, got = (v.sparse_read(keys, training=training) for v in (one, five))
        np.testing.assert_array_equal(tf.cast(got, tf.float32), tf.cast(expected, tf.float32))
        assert int(one.size()) == int(five.size()) == (len(np.unique(keys)) if training else 0)
    unseen = five.sparse_read([9999, -9999], training=False, missing="initial")
    np.testing.assert_array_equal(tf.cast(unseen, tf.float32), tf.cast(one.sparse_read([9999, -9999]), tf.float32))
    assert int(five.size()) == len(np.unique(keys))


def test_a_lookup_of_parts_is_one_op(make):
    variable = _parts(make, 3)
    ids = tf.constant([[1, -1], [5, 9]], tf.int64)

    @tf.function
    def lookup():
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(variable, ids)
        gradients = tape.gradient(rows, list(variable))
        return [rows, *(g.indices for g in gradients), *(g.values for g in gradients)]

    types = _ops(lookup)
    assert {"KvTableGatherMany", "KvTableSplitGradients"} <= types
    assert not types & {"DynamicPartition", "DynamicStitch", "ParallelDynamicStitch", "KvTableGather"}


def test_parts_know_how_many_of_them_are_on_their_device(make):
    assert [part.parts_beside for part in _parts(make, 5)] == [5] * 5
    v1 = tf.compat.v1
    partitioner = v1.fixed_size_partitioner(5)
    with tf.Graph().as_default():
        alone = tfplugin.get_kv_variable("alone", 2)
        beside = tfplugin.get_kv_variable("beside", 2, partitioner=partitioner)
        with v1.device(v1.train.replica_device_setter(ps_tasks=3)):
            spread = tfplugin.get_kv_variable("spread", 2, partitioner=partitioner)
    told = [[p.handle.op.get_attr("parts_beside") for p in variable._kv_parts] for variable in (alone, beside, spread)]
    assert told[:2] == [[1], [5] * 5]
    on = [part.handle.device for part in spread]
    assert told[2] == [on.count(device) for device in on] and sorted(told[2]) == [1, 2, 2, 2, 2]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_ids_of_any_shape(make, shape):
    variable = _parts(make, 3, dim=5)
    ids = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    with tf.GradientTape() as tape:
        rows = variable.sparse_read(tf.constant(ids, tf.int64))
    assert rows.shape == (*shape, 5)
    gradients = tape.gradient(rows, list(variable))
    assert sorted(np.concatenate([g.indices for g in gradients]).tolist()) == sorted(ids.ravel().tolist())


@pytest.mark.parametrize("parts", [1, 3, 5])
@pytest.mark.parametrize("dim", [1, 7, 16, 129])
def test_gradients_go_to_the_part_in_the_order_of_the_batch(make, parts, dim):
    variable = _parts(make, parts, dim=dim)
    random = np.random.default_rng(parts)
    keys = random.integers(-50, 50, 20_000)
    upstream = random.normal(size=(20_000, dim)).astype(np.float32)
    with tf.GradientTape() as tape:
        rows = variable.sparse_read(keys)
    gradients = tape.gradient(rows, list(variable), upstream)
    for i, gradient in enumerate(gradients):
        own = keys % parts == i
        np.testing.assert_array_equal(gradient.indices, keys[own])
        np.testing.assert_array_equal(gradient.values, upstream[own])


def test_a_second_derivative_through_parts(make):
    variable = _parts(make, 3, dim=2, initializer=3.0)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, [1, 2, 5]) ** 3)
        norm = tf.add_n([tf.reduce_sum(g.values) for g in inner.gradient(loss, list(variable))])
    for gradient in outer.gradient(norm, list(variable)):
        np.testing.assert_array_equal(gradient.values, np.full(gradient.values.shape, 18.0))


# ---- Positions ----


def _lookup_gradients(variable, ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, ids) ** 2)
    return tape.gradient(loss, list(variable) if isinstance(variable, tfplugin.PartitionedKvVariable) else [variable])


def _found(part, keys):
    _, where = raw.kv_table_gather(part.handle, keys, dtype=part.dtype, dim=part.dim, mode="zeros", remember=True)
    return where.numpy().tolist()


def test_gradients_carry_the_positions_of_their_rows(make, partitioner):
    variable = make(dim=2, partitioner=partitioner)
    gradients = _lookup_gradients(variable, [[4, -1], [4, 9]])
    clipped, _ = tf.clip_by_global_norm(gradients, 1.0)
    parts = list(variable) if partitioner else [variable]
    for part, gradient, after in zip(parts, gradients, clipped, strict=True):
        where = row_handles.recall(gradient.indices)
        assert where.numpy().tolist() == _found(part, gradient.indices)
        assert row_handles.recall(after.indices) is where


def test_two_tables_looked_up_by_the_same_ids_keep_their_positions_apart(make):
    first, second = make(name="a"), make(name="b")
    first.sparse_read(tf.range(100, dtype=tf.int64))
    ids = tf.constant([3, 200], tf.int64)
    with tf.GradientTape() as tape:
        rows = first.sparse_read(ids) + second.sparse_read(ids)
    for variable, gradient in zip((first, second), tape.gradient(rows, [first, second]), strict=True):
        assert row_handles.recall(gradient.indices).numpy().tolist() == _found(variable, ids)


def test_positions_are_of_the_graph_that_asks(make):
    variable = make()
    kept = []

    @tf.function
    def step():
        gradient = _lookup_gradients(variable, tf.constant([1, 2], tf.int64))[0]
        kept.append(gradient.indices)
        assert row_handles.recall(gradient.indices).graph is tf.compat.v1.get_default_graph()
        return row_handles.recall(gradient.indices)

    assert step().numpy().tolist() == _found(variable, tf.constant([1, 2], tf.int64))
    indices = tf.constant([1], tf.int64)
    assert row_handles.recall(indices) is None
    row_handles.remember(indices, kept[0])
    assert row_handles.recall(indices) is None


def test_a_table_looked_up_several_times_in_a_graph_keeps_the_positions_of_all(make):
    variable = make(dim=2)
    pooled = tf.ragged.constant([[1, 5], [9]], tf.int64)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable.sparse_read(tf.constant([1, 2, 1], tf.int64)) ** 2)
            loss += tf.reduce_sum(variable.sparse_read(tf.constant([[7, 2]], tf.int64)) ** 2)
            loss += tf.reduce_sum(tf.nn.embedding_lookup_sparse(variable, pooled, None, combiner="sum") ** 2)
        indices = tape.gradient(loss, variable).indices
        return indices, row_handles.recall(indices)

    indices, where = step()
    known = where.numpy() >= 0
    assert sorted(indices.numpy()[known].tolist()) == [1, 1, 2, 2, 7] and len(known) == 8
    assert where.numpy()[known].tolist() == _found(variable, tf.boolean_mask(indices, known))


def test_lookups_that_no_update_follows_remember_nothing(make):
    frozen, trained = make(name="a", trainable=False), make(name="b")

    @tf.function
    def lookup():
        return frozen.sparse_read([1]), trained.sparse_read([1], training=False)

    graph = lookup.get_concrete_function().graph
    assert [op.get_attr("remember") for op in graph.get_operations() if op.type == "KvTableGather"] == [False, False]


def test_an_op_with_parts_that_do_not_fit_is_refused(make):
    narrow, wide = make(dim=2, name="narrow"), make(dim=3, name="wide")
    keys = tf.constant([1], tf.int64)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"variable 'wide' is int64 -> float\[3\], wanted"):
        raw.kv_table_gather_many([narrow.handle, wide.handle], [keys], dtype=tf.float32, parts=[2], dims=[2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected 1 tables and 2 handles"):
        raw.kv_table_gather_many([narrow.handle, wide.handle], [keys], dtype=tf.float32, parts=[1], dims=[2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="gradients of 1 keys are of shape"):
        empty = tf.zeros([0], tf.int64)
        raw.kv_table_split_gradients([keys], [tf.zeros([2, 2])], [empty], H=2, parts=[2], dims=[2])
