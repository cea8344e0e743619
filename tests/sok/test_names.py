"""What else SparseOperationKit 2 and 1 have by name."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin.sok as sok
from tfplugin import ranks
from tfplugin.sok import tf_keras as sok_tf_keras


def test_versions():
    assert sok.tf_version == [int(number) for number in tf.version.VERSION.split("-")[0].split(".")]
    assert sok.__version__.count(".") == 2


def test_kinds_of_static_variables_are_classes():
    assert isinstance(sok.Variable([[1.0]]), sok.DistributedVariable)
    assert isinstance(sok.Variable([[1.0]], mode="localized:0"), sok.LocalizedVariable)
    assert not issubclass(sok.DistributedVariable, sok.LocalizedVariable)


def test_one_process_needs_no_horovod(monkeypatch):
    sok.init("single")
    assert (sok.rank(), sok.size()) == (0, 1)
    monkeypatch.setattr(ranks, "launched_ranks", lambda: 3)
    with pytest.raises(ValueError, match="this is one of 3 that horovodrun started"):
        sok.init("single")
    with pytest.raises(ValueError, match="'horovod' or 'single', got 'mpi'"):
        sok.init("mpi")


def test_init_of_sok_1():
    assert sok.Init(global_batch_size=8).numpy() == b"OK"
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope(), pytest.raises(RuntimeError, match="horovodrun"):
        sok.Init(global_batch_size=8)


def test_rows_may_be_static_for_a_while():
    table = sok.DynamicVariable(2, "ones")
    assert not table.is_static()
    table.to_static([3, -4])
    assert table.is_static() and table.read_value().shape == (2, 2)
    table.assign_add([[1.0, 1.0], [2.0, 2.0]])
    assert table.sparse_read([3]).numpy().tolist() == [[1, 1]]
    with pytest.raises(RuntimeError, match="static already"):
        table.to_static([5])
    table.to_dynamic()
    assert table.sparse_read([3, -4]).numpy().tolist() == [[2, 2], [3, 3]] and not table.is_static()
    with pytest.raises(RuntimeError, match=r"assign\(\) of .* to_static\(keys\) first"):
        table.assign([[1.0, 1.0]])


@pytest.mark.parametrize("keras", [tf.keras, tf_keras, tf_keras.optimizers.legacy], ids=["3", "tf_keras", "legacy"])
def test_an_optimizer_scope_stands_for_the_wrapper(keras):
    kind = getattr(keras, "optimizers", keras).Adam
    rows, optimizer = [], None
    for scoped in (True, False):
        table, static, dense = (
            sok.DynamicVariable(1, "ones"),
            sok.Variable([[1.0]], dtype=tf.float32),
            tf.Variable([[1.0]]),
        )
        optimizer, other = kind(0.1), kind(0.1)
        wrapper = sok.OptimizerWrapper(kind(0.1))
        stock = kind.apply_gradients
        for _ in range(2):
            with tf.GradientTape() as tape:
                found = tf.nn.embedding_lookup(table, [7])
                loss = tf.reduce_sum(found**2) + tf.reduce_sum(static**2) + tf.reduce_sum(dense**2)
            variables = [table, static, dense]
            ours, others = sok.split_embedding_variable_from_others(variables)
            assert ours[1] is static and others[0] is dense
            gradients = tape.gradient(loss, variables)
            if scoped:
                with sok.OptimizerScope(ours):
                    optimizer.apply_gradients(zip(gradients[:2], ours, strict=True))
                    other.apply_gradients([(gradients[2], dense)])
            else:
                wrapper.apply_gradients(zip(gradients[:2], ours, strict=True))
                other.apply_gradients([(gradients[2], dense)])
        assert kind.apply_gradients == stock
        rows.append([table.sparse_read([7]).numpy(), static.numpy(), dense.numpy()])
    np.testing.assert_array_equal(*rows)
    assert (rows[0][0] < 1).all()
    for wrong in (sok.OptimizerScope, sok.split_embedding_variable_from_others):
        with pytest.raises((RuntimeError, ValueError), match="wants a list or tuple"):
            wrong(sok.Variable([[1.0]]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.keras.optimizers.LossScaleOptimizer(tf.keras.optimizers.SGD(0.25)),
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.25)),
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.25)),
    ],
    ids=["3", "tf_keras", "legacy"],
)
def test_an_optimizer_scope_takes_optimizers_that_scale_the_loss(make):
    table, optimizer = sok.DynamicVariable(1, "ones"), make()
    old = hasattr(optimizer, "get_scaled_loss")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [7]) ** 2)
        scaled = optimizer.get_scaled_loss(loss) if old else optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, [table])
    with sok.OptimizerScope([table]):
        given = optimizer.get_unscaled_gradients(gradients) if old else gradients
        optimizer.apply_gradients(zip(given, [table], strict=True))
    assert table.sparse_read([7]).numpy().tolist() == [[0.5]]


@pytest.mark.parametrize("make", [sok.DistributedEmbedding, sok_tf_keras.DistributedEmbedding], ids=["3", "tf_keras"])
@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize("combiner", ["Mean", "sum"])
def test_distributed_embedding_combines_the_keys_of_each_slot(make, use_hashtable, combiner):
    layer = make(combiner, 8, 3, slot_num=2, max_nnz=2, use_hashtable=use_hashtable)
    keys = tf.ragged.constant([[1, 2], [3], [], [2, 2]], dtype=tf.int64)
    got = layer(keys)
    assert got.shape == (2, 2, 3)
    rows = sok.all2all_dense_embedding(layer.embedding_variable, tf.range(8, dtype=tf.int64))
    reduced = {"Mean": tf.reduce_mean, "sum": tf.reduce_sum}[combiner]
    expected = [reduced(tf.gather(rows, ids), 0) if len(ids) else tf.zeros([3]) for ids in keys]
    np.testing.assert_allclose(got, tf.reshape(expected, [2, 2, 3]), 1e-6)
    np.testing.assert_allclose(layer(keys.to_sparse()), got)
    assert any(v is layer.embedding_variable for v in layer.trainable_variables)
    again = type(layer).from_config(layer.get_config())
    assert (again.combiner, again.max_nnz, again.use_hashtable) == (combiner.lower(), 2, use_hashtable)
    with pytest.raises(tf.errors.InvalidArgumentError, match="2"):
        layer(tf.ragged.constant([[1, 2, 3], []], dtype=tf.int64))
    with pytest.raises(TypeError, match="SparseTensor or RaggedTensor"):
        layer(tf.zeros([2, 2], tf.int64))
    with pytest.raises(ValueError, match="combiner must be one of"):
        make("max", 8, 3, 2, 2)


@pytest.mark.parametrize("module", [sok, sok_tf_keras], ids=["3", "tf_keras"])
@pytest.mark.parametrize("use_hashtable", [True, False])
def test_layers_give_what_their_policy_computes_in(module, use_hashtable):
    about = {"use_hashtable": use_hashtable, "dtype": "mixed_float16"}
    ids = tf.constant([[[1, 2]]], tf.int64)
    pooled = module.DistributedEmbedding("sum", 8, 3, slot_num=1, max_nnz=2, **about)
    rows = module.All2AllDenseEmbedding(8, 3, slot_num=1, nnz_per_slot=2, **about)
    for layer, given in ((pooled, tf.RaggedTensor.from_tensor(ids[0])), (rows, ids)):
        assert layer(given).dtype == tf.float16 and layer.embedding_variable.dtype == tf.float32


def test_values_are_loaded_by_row_number():
    saver, table = sok.Saver(), sok.DynamicVariable(2, "zeros")
    saver.load_embedding_values(table, [tf.ones([2, 2]), tf.fill([1, 2], 2.0)])
    keys, rows = sok.export(table)
    assert dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True)) == {0: [1, 1], 1: [1, 1], 2: [2, 2]}
    static = sok.Variable(np.zeros([3, 2], np.float32))
    saver.load_embedding_values(static, tf.ones([2, 2]))
    assert static.numpy().tolist() == [[1, 1], [1, 1], [0, 0]]
    with pytest.raises(ValueError, match="has 3 rows, the tensors 4"):
        saver.load_embedding_values(static, tf.ones([4, 2]))
    with pytest.raises(ValueError, match=r"wants tensors \[rows, 2\], got \(1, 3\)"):
        saver.load_embedding_values(table, tf.ones([1, 3]))


def test_an_incremental_dump_takes_a_session():
    before = datetime.datetime(2020, 1, 1)
    with tf.Graph().as_default():
        table = sok.DynamicVariable(1, "ones")
        row = tf.nn.embedding_lookup(table, [7])
        session = tf.compat.v1.Session()
        session.run(table.initializer)
        session.run(row)
        keys, rows = sok.incremental_model_dump(table, before, session)
        assert keys[0].tolist() == [7] and rows[0].tolist() == [[1]]
        with session.as_default():
            assert sok.incremental_model_dump(table, before)[0][0].tolist() == [7]
        with pytest.raises(ValueError, match="give sess="):
            sok.incremental_model_dump(table, before)
        session.close()
