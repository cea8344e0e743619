"""Bad input is refused by an error that names the variable, what it got and wanted, and what to do."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

train = tf.compat.v1.train


@pytest.fixture
def table(make, partitioner):
    return make(name="emb", partitioner=partitioner)


@pytest.mark.parametrize(
    "ids",
    [[1.5], np.array([1.0]), tf.constant([1.0]), ["a"], tf.constant(["a"]), tf.constant([1], tf.uint64), None],
    ids=repr,
)
def test_ids_that_are_not_keys(table, ids):
    calls = (
        lambda: tf.nn.embedding_lookup(table, ids),
        lambda: table.contains(ids),
        lambda: table.remove(ids),
        lambda: table.upsert(ids, [[0.0] * 4]),
    )
    for call in calls:
        with pytest.raises(TypeError, match=r"'emb.*int64 keys"):
            call()
    assert int(table.size()) == 0


def test_strings_are_told_to_hash(table):
    said = r"hash them as layers of strings do: tfplugin\.string_keys\(strings\)\."
    for strings in (tf.constant(["a"]), np.array(["a"]), ["a"], [["a"], ["b"]], "a"):
        with pytest.raises(TypeError, match=said):
            tf.nn.embedding_lookup(table, strings)
    with pytest.raises(TypeError, match=said):
        table.upsert(["a"], [[0.0] * 4])


def test_wide_ids_into_narrow_keys(make):
    table = make(name="emb", key_dtype=tf.int32)
    with pytest.raises(TypeError, match=r"'emb' has int32 keys, got ids of int64: cast .* rows of others; .*=tf.int64"):
        tf.nn.embedding_lookup(table, tf.constant([1], tf.int64))
    with pytest.raises(TypeError, match="'emb' has int32 keys"):
        tf.nn.embedding_lookup(table, [2**40])


def test_numbers_that_the_keys_do_not_have(make):
    """TensorFlow wraps them in a graph, where they would be the keys of others, and some end in a SystemError."""
    for dtype, ids in (
        (tf.int64, [2**63]),
        (tf.int64, [-1, 2**64 - 1]),
        (tf.uint64, [-1]),
        (tf.uint64, [np.int64(-1)]),
        (tf.uint64, [[7, 2**64]]),
        (tf.int32, [-1, 2**63]),
    ):
        table = make(name="emb", key_dtype=dtype)
        message = f"'emb' has {dtype.name} keys: .* is out of the range of {dtype.name}"
        with pytest.raises(TypeError, match=message):
            tf.nn.embedding_lookup(table, ids)
        with tf.Graph().as_default(), pytest.raises(TypeError, match=message):
            tf.nn.embedding_lookup(table, ids)
        assert int(table.size()) == 0
    table = make(name="emb", key_dtype=tf.uint64)
    tf.function(lambda: tf.nn.embedding_lookup(table, [[7, 2**64 - 1]]))()
    assert sorted(table.export()[0].numpy().tolist()) == [7, 2**64 - 1]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16])
def test_no_cast_is_advised_for_floats(table, dtype):
    with pytest.raises(TypeError, match=r"got ids of \w*float\d+: floats have lost .*keras\.Input\(.*int64") as raised:
        tf.nn.embedding_lookup(table, tf.constant([1], dtype))
    assert "tf.cast" not in str(raised.value)


def test_sparse_ids_where_dense_ones_belong(table):
    with pytest.raises(TypeError, match="embedding_lookup_sparse"):
        tf.nn.embedding_lookup(table, tf.sparse.from_dense([[1]]))


@pytest.mark.parametrize("shape", [(2, 3), (3, 4), (4, 2), (2, 2, 4), (8,)])
def test_rows_that_do_not_fit_their_keys(table, shape):
    for write in (table.upsert, table.accumulate):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"emb.*wants|emb.*rows of shape"):
            write([1, 2], np.zeros(shape, np.float32))
    assert int(table.size()) == 0


@pytest.mark.parametrize(
    ("make_optimizer"),
    [lambda: train.AdamOptimizer(), lambda: tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam())],
    ids=["v1", "wrapper"],
)
def test_gradients_that_are_not_slices_of_rows(make, make_optimizer):
    table = make(name="emb")
    wide = tf.IndexedSlices(tf.ones([1, 5]), tf.constant([1], tf.int64))
    with pytest.raises(ValueError, match=r"'emb:0' has rows of shape \(5,\), expected \(4,\)"):
        make_optimizer().apply_gradients([(wide, table)])
    with pytest.raises(TypeError, match="'emb:0' must be IndexedSlices"):
        make_optimizer().apply_gradients([(tf.ones([1, 4]), table)])
    assert int(table.size()) == 0


def test_an_error_in_a_step_leaves_the_optimizer_fit_for_the_next(make):
    table = make(name="emb")
    good = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([1], tf.int64))
    wide = tf.IndexedSlices(tf.ones([1, 5]), tf.constant([1], tf.int64))
    for optimizer in (train.AdamOptimizer(), tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam())):
        optimizer.apply_gradients([(good, table)])
        with pytest.raises(ValueError, match="expected"):
            optimizer.apply_gradients([(wide, table)])
        optimizer.apply_gradients([(good, table)])


def test_bad_variables():
    get = tfplugin.get_kv_variable
    for kwargs, error, message in (
        ({"embedding_dim": 0}, ValueError, "embedding_dim must be 1 or more"),
        ({"embedding_dim": 2.5}, ValueError, "embedding_dim must be 1 or more, a whole number; got 2.5"),
        ({"embedding_dim": 4, "partitioner": 3}, TypeError, "partitioner must be one of TensorFlow.*got 3"),
        ({"embedding_dim": True}, ValueError, "embedding_dim must be 1 or more"),
        ({}, ValueError, "embedding_dim is needed"),
        ({"embedding_dim": 4, "key_dtype": tf.float32}, TypeError, "key_dtype must be one of"),
        ({"embedding_dim": 4, "key_dtype": "nothing"}, TypeError, "is not a dtype"),
        ({"embedding_dim": 4, "value_dtype": tf.int32}, TypeError, "value_dtype must be one of"),
        ({"embedding_dim": 4, "partitioner": lambda **_: [0, 1]}, ValueError, "the partitioner gave"),
    ):
        with pytest.raises(error, match=f"'bad'.*{message}|{message}"):
            get("bad", **kwargs)


def test_a_table_is_not_a_tensor(table):
    for use in (lambda: tf.add(table, 1.0), lambda: tf.reduce_sum(table), lambda: tf.convert_to_tensor(table)):
        with pytest.raises(TypeError, match="has no dense value"):
            use()


@pytest.mark.parametrize("strategy", ["Mirrored", "MultiWorkerMirrored", "CentralStorage"])
def test_strategies_that_keep_copies_of_a_variable(make, partitioner, strategy):
    made = {
        "Mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
        "MultiWorkerMirrored": tf.distribute.MultiWorkerMirroredStrategy,
        "CentralStorage": lambda: tf.distribute.experimental.CentralStorageStrategy(["CPU:0"]),
    }[strategy]()
    with (
        made.scope(),
        pytest.raises(ValueError, match=f"'emb.* cannot be made under {strategy}Strategy,.*OneDevice.*Horovod"),
    ):
        make(name="emb", partitioner=partitioner)


def _step(table, wrap, ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
    parts = table.as_list() if isinstance(table, tfplugin.PartitionedKvVariable) else [table]
    wrap(tf.keras.optimizers.SGD(0.1)).apply_gradients(zip(tape.gradient(loss, parts), parts, strict=True))


def test_updates_in_the_backward_pass_under_a_strategy_that_keeps_copies(table):
    tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(0.1))
    strategy, ids = tf.distribute.MirroredStrategy(["CPU:0"]), tf.constant([1, 2], tf.int64)
    parts = table.as_list() if isinstance(table, tfplugin.PartitionedKvVariable) else [table]

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
        return [gradient.values for gradient in tape.gradient(loss, parts)]

    with pytest.raises(ValueError, match=r"'emb.* cannot be updated under Mirrored.*OneDeviceStrategy.*Horovod"):
        strategy.run(tf.function(step))
    before = tf.nn.embedding_lookup(table, ids).numpy()
    tf.distribute.OneDeviceStrategy("CPU:0").run(tf.function(step))
    np.testing.assert_allclose(table.sparse_read(ids, training=False), before - 0.1, rtol=1e-6)


@pytest.mark.parametrize(
    "write",
    [
        lambda table, keys, rows: table.upsert(keys, rows),
        lambda table, keys, rows: table.accumulate(keys, rows),
        lambda table, keys, rows: table.scatter_update(tf.IndexedSlices(rows, keys)),
        lambda table, keys, rows: table.scatter_sub(tf.IndexedSlices(rows, keys)),
        lambda table, keys, rows: table.scatter_mul(tf.IndexedSlices(rows, keys)),
    ],
    ids=["upsert", "accumulate", "scatter_update", "scatter_sub", "scatter_mul"],
)
def test_a_write_in_a_step_of_a_strategy_that_keeps_copies(table, write):
    strategy, ids, rows = tf.distribute.MirroredStrategy(["CPU:0"]), tf.constant([1, 2], tf.int64), tf.ones([2, 4])
    before = tf.nn.embedding_lookup(table, ids).numpy()
    for step in (write, tf.function(write)):
        with pytest.raises(ValueError, match=r"'emb.* cannot be written under Mirrored.*OneDeviceStrategy.*Horovod"):
            strategy.run(step, args=(table, ids, rows))
    np.testing.assert_array_equal(table.sparse_read(ids, training=False), before)
    with strategy.scope():  # once, whatever the number of replicas
        table.upsert(ids, rows)
    assert (table.sparse_read(ids, training=False).numpy() == 1.0).all()


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, tfplugin.OptimizerWrapper], ids=["keras", "wrapper"])
def test_a_step_under_a_strategy_that_keeps_copies(table, wrap):
    strategy, ids = tf.distribute.MirroredStrategy(["CPU:0"]), tf.constant([1, 2], tf.int64)
    in_function = tf.function(lambda ids: strategy.run(_step, args=(table, wrap, ids)))
    for step in (lambda ids: strategy.run(_step, args=(table, wrap, ids)), in_function):
        with pytest.raises(ValueError, match=r"'emb.* cannot be updated under Mirrored.*OneDeviceStrategy.*Horovod"):
            step(ids)
    _step(table, wrap, ids)
    assert np.any(table.sparse_read(ids, training=False) != 0.0)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("what", [tf.recompute_grad, tf.custom_gradient])
def test_lookups_in_functions_with_a_gradient_of_their_own(table, what, in_function):
    look = lambda ids: tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)  # noqa: E731
    inner = look if what is tf.recompute_grad else lambda ids: (look(ids), lambda up, variables=None: (None, [up]))
    outer = what(inner)
    ids = tf.constant([1, 2], tf.int64)
    with pytest.raises(TypeError, match=r"'emb.*recompute_grad or tf.custom_gradient.*Look its rows up before"):
        (tf.function(outer) if in_function else outer)(ids)

    # What it says to do.
    parts = table.as_list() if isinstance(table, tfplugin.PartitionedKvVariable) else [table]
    given_rows = tf.recompute_grad(lambda rows: tf.reduce_sum(rows**2))
    with tf.GradientTape() as tape:
        rows = tf.nn.embedding_lookup(table, ids)
        loss = given_rows(rows)
    slices = [one for one in tape.gradient(loss, parts) if one is not None]
    found = tf.concat([one.values for one in slices], 0)
    np.testing.assert_allclose(np.sort(found, 0), np.sort(2 * rows.numpy(), 0), rtol=1e-6)


def test_a_strategy_of_one_device_is_none(make):
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        assert make().sparse_read([1]).shape == (1, 4)
