"""What works on dense variables only says what to use for a table."""

from __future__ import annotations

import pytest
import tensorflow as tf
import tf_keras

import tfplugin

v1 = tf.compat.v1


@pytest.mark.parametrize("what", ["update", "add", "sub", "mul", "div", "min", "max"])
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_scatter_functions_of_dense_variables(make, partitioner, what, eager):
    with tf.init_scope() if eager else tf.Graph().as_default():
        table = make(partitioner=partitioner)
        with pytest.raises(TypeError, match=r"tf.compat.v1.scatter_update.*upsert\(keys, rows\)"):
            getattr(v1, f"scatter_{what}")(table, [1], tf.ones([1, 4]))
        with pytest.raises(AttributeError, match=r"has no 'scatter_nd_update': to replace rows use upsert"):
            _ = table.scatter_nd_update


def test_methods_of_dense_variables(make):
    table = make()
    with pytest.raises(AttributeError, match=r"has no 'numpy'.*export\(\)"):
        table.numpy()
    with pytest.raises(AttributeError, match=r"'v:0' has no 'assign'.*upsert"):
        v1.assign(table, 1.0)
    with pytest.raises(AttributeError, match=r"^'KvVariable' object has no attribute 'nonsense'$"):
        _ = table.nonsense
    assert not hasattr(table, "value")


@pytest.mark.parametrize(
    "make_optimizer",
    [
        tf.keras.optimizers.Adam,
        tf.keras.optimizers.SGD,
        tf_keras.optimizers.Adam,
        tf_keras.optimizers.SGD,
        tf_keras.optimizers.legacy.Adam,
        tf_keras.optimizers.legacy.SGD,
    ],
    ids=["keras Adam", "keras SGD", "tf_keras Adam", "tf_keras SGD", "legacy Adam", "legacy SGD"],
)
@pytest.mark.parametrize("built", [False, True], ids=["new", "built"])
def test_a_keras_loop_without_the_wrapper(make, partitioner, make_optimizer, built):
    table, dense, optimizer = make(partitioner=partitioner), tf.Variable(tf.ones([4])), make_optimizer()
    parts = list(table) if partitioner else [table]
    if built:
        optimizer.apply_gradients([(tf.ones([4]), dense)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2]) * dense)
    gradients = tape.gradient(loss, [dense, *parts])
    with pytest.raises((TypeError, AttributeError), match=r"Wrap this one.*tfplugin.OptimizerWrapper\(optimizer\)"):
        optimizer.apply_gradients(zip(gradients, [dense, *parts], strict=True))


def test_a_legacy_step_without_the_wrapper_changes_no_dense_variable(make):
    table, dense = make(), tf.Variable(tf.ones([4]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2]) * dense)
    with pytest.raises(TypeError, match=r"'v:0'.*Wrap this one"):
        tf_keras.optimizers.legacy.SGD().apply_gradients(
            zip(tape.gradient(loss, [dense, table]), [dense, table], strict=True)
        )
    assert (dense.numpy() == 1).all()


def test_a_keras_graph_without_the_wrapper(make):
    with tf.Graph().as_default():
        table = make(name="in_graph")
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2]))
        with pytest.raises(TypeError, match=r"'in_graph.*Wrap this one.*tfplugin.OptimizerWrapper\(optimizer\)"):
            tf_keras.optimizers.legacy.SGD().apply_gradients([(v1.gradients(loss, table)[0], table)])


def test_the_width_of_rows(make):
    assert tfplugin.get_kv_variable("a", embedding_dim=[8]).dim == 8
    assert tfplugin.get_kv_variable("a", tf.TensorShape([8])).dim == 8
    assert tfplugin.get_kv_variable("a", initializer=tf.ones([3])).dim == 3
    assert tfplugin.get_kv_variable("a", initializer=tf.ones([7, 3])).dim == 3
    assert tfplugin.get_kv_variable("a", initializer=tf.ones([7, 3]).numpy()).dim == 3
    for wrong in ([8, 8], [], [0], "8x"):
        with pytest.raises(ValueError, match="embedding_dim must be 1 or more, got"):
            tfplugin.get_kv_variable("a", embedding_dim=wrong)
    for unknown in (tf.constant(1.0), 1.0, None):
        with pytest.raises(ValueError, match="embedding_dim is needed"):
            tfplugin.get_kv_variable("a", initializer=unknown)
    with tf.Graph().as_default():
        assert v1.get_kv_variable("b", initializer=v1.placeholder_with_default(tf.ones([5, 2]), [5, 2])).dim == 2
