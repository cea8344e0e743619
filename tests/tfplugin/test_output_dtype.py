"""Lookups of 16-bit rows as float32 beside a cast of the rows, and steps by float32 gradients beside float32 tables."""

from __future__ import annotations

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from tfplugin import optimizers as own
from tfplugin.policies import CountAdmission, ExpireAfterSteps

v1 = tf.compat.v1
INT64 = np.iinfo(np.int64)
KEYS = np.array([3, -1, 3, INT64.max, INT64.min, 0, 7, -1, 2**40])
DTYPES = pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
NORMAL = tf.keras.initializers.RandomNormal()
HALF = {tf.float16: np.float16, tf.bfloat16: ml_dtypes.bfloat16}


def parts_of(variable):
    return list(variable) if isinstance(variable, tfplugin.PartitionedKvVariable) else [variable]


def gradients_of(variable, loss):
    """Of the rows of `loss`, a function of nothing."""
    with tf.GradientTape() as tape:
        value = loss()
    return tape.gradient(value, parts_of(variable))


@DTYPES
@pytest.mark.parametrize("dim", [1, 3, 16, 64])
def test_rows_are_those_of_a_cast(make, partitioner, dtype, dim):
    wide, narrow = (
        make(name=name, dim=dim, value_dtype=dtype, initializer=NORMAL, partitioner=partitioner) for name in "ab"
    )
    # Equal initial values: they are a function of the initializer's seed and the key.
    narrow.upsert([100], wide.sparse_read([100]))
    for ids in (KEYS, KEYS[:0], KEYS[:6].reshape(2, 3), np.arange(-3000, 3000) * 77, [5]):
        for training, missing in ((False, "zeros"), (False, "initial"), (True, "zeros")):
            got = wide.sparse_read(ids, training=training, missing=missing, output_dtype=tf.float32)
            expected = tf.cast(wide.sparse_read(ids, training=False, missing=missing), tf.float32)
            assert got.dtype == tf.float32 and got.shape == (*np.shape(ids), dim)
            np.testing.assert_array_equal(got, expected)
        assert np.size(ids) == 0 or np.any(got)
    assert int(wide.size()) == len(set(KEYS.tolist()) | set((np.arange(-3000, 3000) * 77).tolist()) | {100, 5})
    # All of them are there now.
    expected = tf.cast(wide.gather(KEYS[::-1]), tf.float32)
    np.testing.assert_array_equal(wide.gather(KEYS[::-1], output_dtype="float32"), expected)


@pytest.mark.parametrize("key_dtype", [tf.int32, tf.uint64], ids=lambda d: d.name)
def test_key_dtypes(make, partitioner, key_dtype):
    table = make(dim=3, key_dtype=key_dtype, value_dtype=tf.float16, initializer=NORMAL, partitioner=partitioner)
    keys = tf.constant([1, 2**31 - 1, 1] if key_dtype == tf.int32 else [1, 2**64 - 1, 1], key_dtype)
    got = table.sparse_read(keys, output_dtype=tf.float32)
    np.testing.assert_array_equal(got, tf.cast(table.sparse_read(keys), tf.float32))


@DTYPES
@pytest.mark.parametrize(
    "options",
    [
        {"max_capacity": 4},
        {"admission": CountAdmission(2, below="zeros")},
        {"admission": CountAdmission(2, below="initial")},
        {"expiry": ExpireAfterSteps(5)},
    ],
    ids=["bounded", "admitted", "admitted-initial", "expiring"],
)
def test_tables_with_policies(make, partitioner, dtype, options):
    made = [
        make(name="same", dim=5, value_dtype=dtype, initializer=NORMAL, partitioner=partitioner, **options)
        for _ in range(2)
    ]
    for ids in ([1, 2, 1], [3, -4, 2], [2, 9, 3]):
        got = made[0].sparse_read(ids, training=True, output_dtype=tf.float32)
        np.testing.assert_array_equal(got, tf.cast(made[1].sparse_read(ids, training=True), tf.float32))
    assert int(made[0].size()) == int(made[1].size())


def test_keys_admitted_with_a_probability(make, partitioner):
    table = make(value_dtype=tf.float16, initializer=1.5, partitioner=partitioner)
    ids = np.arange(4000)
    gradient = gradients_of(table, lambda: table.sparse_read(ids, admission=0.25, output_dtype=tf.float32))
    there = table.contains(ids).numpy()
    assert 700 < there.sum() < 1300
    rows = table.sparse_read(ids, admission=0.0, output_dtype=tf.float32)
    np.testing.assert_array_equal(rows, np.where(there, 1.5, 0.0)[:, None] * np.ones(4))
    assert sorted(key for one in gradient for key in one.indices.numpy()) == ids[there].tolist()


def test_a_table_that_spills(make, tmp_path):
    table = make(dim=64, value_dtype=tf.bfloat16, initializer=NORMAL, max_memory=1 << 20, spill=tmp_path)
    for first in (0, 20_000, 0):
        ids = np.arange(first, first + 20_000)
        got = table.sparse_read(ids, training=True, output_dtype=tf.float32)
        np.testing.assert_array_equal(got, tf.cast(table.sparse_read(ids, training=False), tf.float32))


# ---- Gradients ----


@DTYPES
@pytest.mark.parametrize("dim", [1, 3, 16, 64])
def test_a_step_is_that_of_float32_rounded_once(make, rows_of, partitioner, dtype, dim):
    """Beside NumPy: w - rate * the sum of the gradients, of which nothing is rounded to 16 bits before."""
    table = make(dim=dim, value_dtype=dtype, initializer=NORMAL, partitioner=partitioner)
    ids = np.concatenate([KEYS, np.random.default_rng(1).integers(-50, 50, 500)])
    factors = np.random.default_rng(2).standard_normal((len(ids), dim)).astype(np.float32)
    before = table.sparse_read(ids, output_dtype=tf.float32).numpy()
    gradients = gradients_of(table, lambda: table.sparse_read(ids, output_dtype=tf.float32) * factors)
    assert all(gradient.values.dtype == tf.float32 for gradient in gradients)
    v1.train.GradientDescentOptimizer(0.5).apply_gradients(zip(gradients, parts_of(table), strict=True))
    _, first, which = np.unique(ids, return_index=True, return_inverse=True)
    summed = np.zeros((len(first), dim), np.float32)
    np.add.at(summed, which, factors)
    expected = (before[first] - np.float32(0.5) * summed).astype(HALF[dtype]).astype(np.float64)
    np.testing.assert_array_equal(rows_of(table, ids[first]), expected)


@DTYPES
@pytest.mark.parametrize(
    "optimizer",
    [lambda: own.Adam(0.01), lambda: own.Adagrad(0.01, 0.125), lambda: own.Lion(0.01)],
    ids=["Adam", "Adagrad", "Lion"],
)
def test_the_first_step_is_that_of_a_float32_table_rounded_once(make, rows_of, dtype, optimizer):
    ids = np.random.default_rng(3).integers(-50, 50, 500)
    factors = np.random.default_rng(4).standard_normal((len(ids), 16)).astype(np.float32)
    half = make(name="half", dim=16, value_dtype=dtype, initializer=NORMAL)
    rows = half.sparse_read(ids, output_dtype=tf.float32)
    single = make(name="single", dim=16)
    single.upsert(ids, rows)
    for table, more in ((half, {"output_dtype": tf.float32}), (single, {})):
        gradients = gradients_of(table, lambda table=table, more=more: table.sparse_read(ids, **more) * factors)
        optimizer().apply_gradients(zip(gradients, [table], strict=True))
    np.testing.assert_array_equal(rows_of(half, ids), rows_of(single, ids).astype(HALF[dtype]).astype(np.float64))


def test_what_16_bits_cannot_hold_reaches_the_sum(make, rows_of):
    """A gradient beyond float16's largest number, another one below its smallest; and one that is not finite."""
    table = make(dim=1, value_dtype=tf.float16, initializer=0.0)
    factors = tf.constant([[1e6], [-1e6], [1e-9], [np.inf]])
    gradient = gradients_of(table, lambda: table.sparse_read([1, 1, 2, 3], output_dtype=tf.float32) * factors)
    own.SGD(2.0**20, skip_nonfinite=True).apply_gradients([(gradient[0], table)])
    np.testing.assert_array_equal(rows_of(table, [1, 3]), [[0], [0]])
    np.testing.assert_allclose(rows_of(table, [2]), [[-1e-9 * 2**20]], rtol=1e-3)
    assert int(table.skipped_updates()) == 1


def test_stochastic_rounding_keeps_the_mean(make, rows_of):
    table = make(dim=1024, value_dtype=tf.bfloat16, initializer=1.0)
    optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(1.0), stochastic_rounding=True)
    for _ in range(20):
        gradient = gradients_of(table, lambda: table.sparse_read([1], output_dtype=tf.float32) * 2.0**-12)
        optimizer.apply_gradients(zip(gradient, [table], strict=True))
    np.testing.assert_allclose(rows_of(table, [1]).mean(), 1 - 20 * 2.0**-12, atol=4e-4)


def step(table, optimizer, ids):
    gradients = gradients_of(table, lambda: tf.sin(table.sparse_read(ids, output_dtype=tf.float32)))
    optimizer.apply_gradients(zip(gradients, parts_of(table), strict=True))


OPTIMIZERS = {
    "v1": lambda: v1.train.AdamOptimizer(0.01),
    "v1, its own ops": lambda: tfplugin.OptimizerWrapper(v1.train.MomentumOptimizer(0.01, 0.5), fused=False),
    "own": lambda: own.Adam(0.01),
    "keras": lambda: tfplugin.OptimizerWrapper(keras.optimizers.Adam(0.01)),
    "keras, its own ops": lambda: tfplugin.OptimizerWrapper(keras.optimizers.SGD(0.01, momentum=0.5), fused=False),
    "keras, clipped": lambda: tfplugin.OptimizerWrapper(keras.optimizers.Adam(0.01, clipnorm=0.1)),
    "keras, clipped together": lambda: tfplugin.OptimizerWrapper(keras.optimizers.Adam(0.01, global_clipnorm=0.1)),
    "keras, clipped, its own ops": lambda: tfplugin.OptimizerWrapper(
        keras.optimizers.SGD(0.1, clipvalue=0.1), fused=False
    ),
    "keras, gathered": lambda: tfplugin.OptimizerWrapper(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)),
    "keras, averaged": lambda: tfplugin.OptimizerWrapper(keras.optimizers.Adam(0.01, use_ema=True)),
    "keras, scaled": lambda: tfplugin.OptimizerWrapper(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=1.0)
    ),
}


@DTYPES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(make, rows_of, partitioner, dtype, name):
    """Beside a table of float32, to the rounding of 16 bits."""
    ids = tf.constant([1, 2, 1, -5], tf.int64)
    tables = [
        make(name=of.name, value_dtype=of, initializer=NORMAL, partitioner=partitioner) for of in (dtype, tf.float32)
    ]
    tables[1].upsert(ids, tables[0].sparse_read(ids, output_dtype=tf.float32))
    for table in tables:
        optimizer = OPTIMIZERS[name]()
        run = tf.function(lambda table=table, optimizer=optimizer: step(table, optimizer, ids))
        for _ in range(4):
            run()
    tolerance = {tf.float16: 4e-3, tf.bfloat16: 3e-2}[dtype]
    moved, expected = (tf.cast(table.sparse_read(ids, training=False), tf.float32) for table in tables)
    np.testing.assert_allclose(moved, expected, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("way", ["eager", "function", "session"])
def test_lookups_of_both_dtypes_are_joined(make, partitioner, dtype, way):
    """TensorFlow joins the gradients of several lookups of a variable."""
    ids = [[4, -1], [4, 9]]
    sparse = tf.sparse.from_dense([[9], [4]])

    def of(table):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table.sparse_read(ids, output_dtype=tf.float32)) * (1 / 3)
            loss += tf.cast(tf.reduce_sum(table.sparse_read(ids)), tf.float32)
            loss += tf.cast(tf.reduce_sum(tf.nn.embedding_lookup_sparse(table, sparse, None)), tf.float32)
        return tape.gradient(loss, parts_of(table))

    if way == "session":
        with tf.Graph().as_default(), v1.Session() as session:
            sparse = tf.sparse.from_dense([[9], [4]])
            table = v1.get_kv_variable("t", embedding_dim=2, value_dtype=dtype, partitioner=partitioner)
            gradients = of(table)
            train = v1.train.AdamOptimizer().apply_gradients(zip(gradients, parts_of(table), strict=True))
            session.run(v1.global_variables_initializer())
            gradients, _ = session.run([gradients, train])
    else:
        table = make(dim=2, value_dtype=dtype, partitioner=partitioner)
        gradients = (tf.function(of) if way == "function" else of)(table)
        own.Adam().apply_gradients(zip(gradients, parts_of(table), strict=True))
    summed = dict.fromkeys([4, -1, 9], 0.0)
    for gradient in gradients:
        assert np.asarray(gradient.values).dtype == np.float32
        for key, row in zip(np.asarray(gradient.indices), np.asarray(gradient.values), strict=True):
            summed[int(key)] += row[0]
    third = np.float32(1 / 3)
    np.testing.assert_allclose([summed[4], summed[-1], summed[9]], [2 * third + 3, third + 1, third + 2], rtol=1e-6)


def test_lookups_in_the_dtype_of_the_variable_alone_have_gradients_of_it(make, partitioner):
    table = make(value_dtype=tf.float16, partitioner=partitioner)
    for more in ({}, {"output_dtype": tf.float16}):
        gradients = gradients_of(table, lambda more=more: table.sparse_read(KEYS, **more))
        assert {gradient.values.dtype for gradient in gradients} == {tf.float16}


@DTYPES
def test_in_a_session(session, partitioner, dtype):
    table = v1.get_kv_variable("t", embedding_dim=3, value_dtype=dtype, initializer=1.0, partitioner=partitioner)
    ids = v1.placeholder(tf.int64, [None])
    rows = table.sparse_read(ids, output_dtype=tf.float32)
    assert rows.shape.as_list() == [None, 3]
    train = own.SGD(0.25).minimize(tf.reduce_sum(rows * 0.5))
    session.run(v1.global_variables_initializer())
    np.testing.assert_array_equal(session.run(rows, {ids: KEYS}), np.ones([len(KEYS), 3]))
    session.run(train, {ids: KEYS})
    expected = [[1 - 0.125 * np.count_nonzero(key == KEYS)] * 3 for key in KEYS]
    np.testing.assert_array_equal(session.run(rows, {ids: KEYS}), expected)


@DTYPES
def test_an_update_in_the_backward_pass(make, partitioner, dtype):
    table = make(dim=2, value_dtype=dtype, initializer=1.0, partitioner=partitioner)
    tfplugin.apply_in_backward(table, own.SGD(0.5))
    gradients_of(table, lambda: table.sparse_read([1, -2, 1], output_dtype=tf.float32) * 0.25)
    rows = table.sparse_read([1, -2], output_dtype=tf.float32)
    np.testing.assert_array_equal(rows, [[0.75, 0.75], [0.875, 0.875]])


def test_gradients_of_gradients(make, partitioner):
    table = make(dim=2, value_dtype=tf.bfloat16, initializer=3.0, partitioner=partitioner)
    with tf.GradientTape() as outer:
        inner = gradients_of(table, lambda: table.sparse_read([1], output_dtype=tf.float32) ** 3)
        norm = tf.add_n([tf.reduce_sum(gradient.values) for gradient in inner])
    found = [gradient.values for gradient in outer.gradient(norm, parts_of(table))]
    np.testing.assert_array_equal(tf.concat(found, 0), [[18, 18]])


@DTYPES
def test_many_tables(make, partitioner, dtype):
    tables = [
        make(name=name, dim=dim, value_dtype=of, initializer=NORMAL, partitioner=partitioner)
        for name, dim, of in (("a", 3, dtype), ("b", 5, dtype), ("c", 2, tf.float32))
    ]
    ids = [[1, 2, 1], tf.ragged.constant([[4], [5, -6]], dtype=tf.int64), [7]]
    rows = tfplugin.lookup_many(tables, ids, output_dtype=tf.float32)
    narrow = tfplugin.lookup_many(tables, ids)
    assert [one.dtype for one in rows] == [tf.float32] * 3
    assert [one.dtype for one in narrow] == [dtype, dtype, tf.float32]
    for one, other in zip(rows, narrow, strict=True):
        one, other = (x.flat_values if isinstance(x, tf.RaggedTensor) else x for x in (one, other))
        np.testing.assert_array_equal(one, tf.cast(other, tf.float32))
    with pytest.raises(ValueError, match=f"pooled rows of 'a(:0)?' come as {dtype.name}"):
        tfplugin.lookup_many(tables[:1], [tf.ragged.constant([[1]])], combiners="sum", output_dtype=tf.float32)


# ---- What it cannot do ----


@pytest.mark.parametrize(
    ("held", "wanted"),
    [(tf.float16, tf.bfloat16), (tf.bfloat16, tf.float64), (tf.float32, tf.float16), (tf.float64, tf.float32)],
    ids=lambda dtype: dtype.name,
)
def test_other_dtypes_are_refused(make, partitioner, held, wanted):
    table = make(name="odd", value_dtype=held, partitioner=partitioner)
    with pytest.raises(ValueError, match=f"'odd' of {held.name} with output_dtype={wanted.name}: .*tf.cast the rows"):
        table.sparse_read([1], output_dtype=wanted)
    assert table.sparse_read([1], output_dtype=held).dtype == held


def test_float32_rows_and_gradients_are_those_of_16_bits_only(make):
    table = make(name="odd", value_dtype=tf.float64)
    with pytest.raises(tf.errors.InvalidArgumentError, match="'odd' has rows of double"):
        tfplugin.ops.raw.kv_table_gather(table.handle, tf.constant([1], tf.int64), dtype=tf.float32, dim=4)
    gradient = tf.IndexedSlices(tf.fill([1, 4], 0.5), tf.constant([1], tf.int64))
    v1.train.GradientDescentOptimizer(1.0).apply_gradients([(gradient, table)])  # which casts
    np.testing.assert_array_equal(table.sparse_read([1]).shape, [1, 4])
