"""What works on dense variables only says what to use for a table."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.framework import convert_to_constants

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


def test_positions_and_averages_name_the_way_out(make, partitioner):
    table = make()
    for take in (lambda: table[5], lambda: table[1:3], lambda: list(table), lambda: table[tf.constant([1])]):
        with pytest.raises(TypeError, match=r"'v:0' has no positions to take rows by: .*embedding_lookup"):
            take()
    for one in (table, make(partitioner=partitioner)):
        with pytest.raises(AttributeError, match=r"ExponentialMovingAverage, .*: leave key-value variables out of its"):
            tf.train.ExponentialMovingAverage(0.9).apply([one])


def test_arithmetic_of_a_variable_names_the_way_out(make, partitioner):
    table = make(partitioner=partitioner)
    for compute in (lambda: table**2, lambda: 0.9 * table, lambda: -table, lambda: abs(table)):
        with pytest.raises(TypeError, match=r"has no dense value to compute with: .* is the regularizer of"):
            compute()
    with pytest.raises(AttributeError, match="has no 'path': that is of Keras 3's own variables"):
        _ = table.path


@pytest.mark.parametrize("make_array", [np.asarray, np.array, lambda table: np.array(table, np.float32), np.sum])
def test_an_array_of_a_variable_names_the_way_out(make, partitioner, make_array):
    table = make(partitioner=partitioner)
    with pytest.raises(TypeError, match=r"'v(:0)?' has no dense value to make an array of: .*export\(\).*sparse_read"):
        make_array(table)
    with pytest.raises(TypeError, match=r"'v(:0)?' has no dense value: .*embedding_lookup.*export\(\)"):
        tf.convert_to_tensor(table)


def test_a_function_takes_variables_as_they_are(make, partitioner):
    traced = []

    @tf.function
    def rows(table):
        traced.append(table.dim)
        return tf.nn.embedding_lookup(table, [1])

    tables = [make(name=f"v{i}", partitioner=partitioner, initializer=float(i)) for i in range(2)]
    assert [float(rows(table)[0, 0]) for table in [*tables, *tables]] == [0.0, 1.0, 0.0, 1.0]
    assert len(traced) == 2


def test_the_length_of_a_variable_names_its_size(make):
    table = make()
    with pytest.raises(TypeError, match=r"'v:0' has no fixed length: size\(\) says how many rows it has"):
        len(table)
    assert table and make(name="w", partitioner=v1.fixed_size_partitioner(2))


def test_a_session_that_is_to_fetch_or_feed_a_variable_names_the_way_out(make, partitioner):
    with tf.Graph().as_default(), v1.Session() as session:
        table, dense = make(partitioner=partitioner), v1.get_variable("dense", [2])
        session.run(v1.global_variables_initializer())
        told = r"'v(/part_0)?(:0)?' has no dense value for a session to fetch or to be fed: .*export\(\).*run these"
        for run in (
            lambda: session.run(table),
            lambda: session.run({"all": v1.global_variables()}),
            lambda: session.run(dense, {table: np.zeros([3, 4])}),
        ):
            with pytest.raises(TypeError, match=told):
                run()
        assert session.run(table.size()) == 0


def test_a_jacobian_by_a_variable_names_the_way_out(make, partitioner):
    table = make(partitioner=partitioner)
    with tf.GradientTape(persistent=True) as tape:
        rows = tf.nn.embedding_lookup(table, [1, 2])
        tape.watch(rows)
        squares = rows**2
    for jacobian in (tape.jacobian, tape.batch_jacobian):
        with pytest.raises(TypeError, match=r"'v(:0)?' has no Jacobian: .*tape\.watch\(rows\)"):
            jacobian(squares, table)
    with pytest.raises(TypeError, match="has no Jacobian"):
        tape.jacobian(squares, [rows, table])
    assert tape.jacobian(squares, rows).shape == (2, 4, 2, 4)


def test_pickle_of_a_variable_names_the_way_out(make):
    table = make()
    with pytest.raises(TypeError, match=r"'v:0' cannot be pickled\. Pickle the model or layer"):
        pickle.dumps(table)
    assert copy.copy(table).name == table.name


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
def test_a_keras_loop_without_the_wrapper_is_one_with_it(make, partitioner, make_optimizer, built):
    trained = []
    for name, wrap in (("plain", lambda optimizer: optimizer), ("wrapped", tfplugin.OptimizerWrapper)):
        table, dense = make(name=name, partitioner=partitioner, initializer=0.5), tf.Variable(tf.ones([4]))
        parts = list(table) if partitioner else [table]
        optimizer = wrap(make_optimizer())
        if built:
            optimizer.apply_gradients([(tf.ones([4]), dense)])
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2, 1]) * dense)
            variables = [dense, *parts]
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        trained.append((dense.numpy(), tf.nn.embedding_lookup(table, [1, 2]).numpy()))
    np.testing.assert_array_equal(trained[0][0], trained[1][0])
    np.testing.assert_array_equal(trained[0][1], trained[1][1])
    assert (trained[0][1] != 0.5).all()


def test_a_keras_graph_without_the_wrapper():
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.get_kv_variable("in_graph", embedding_dim=4, initializer=0.5)
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2, 1]))
        step = tf_keras.optimizers.legacy.SGD(0.25).apply_gradients([(v1.gradients(loss, table)[0], table)])
        session.run(v1.global_variables_initializer())
        session.run(step)
        rows = session.run(tf.nn.embedding_lookup(table, [1, 2]))
        assert rows.tolist() == [[0.0] * 4, [0.25] * 4]


def test_the_width_of_rows(make):
    assert tfplugin.get_kv_variable("a", embedding_dim=[8]).dim == 8
    assert tfplugin.get_kv_variable("a", tf.TensorShape([8])).dim == 8
    assert tfplugin.get_kv_variable("a", initializer=tf.ones([3])).dim == 3
    assert tfplugin.get_kv_variable("a", initializer=tf.ones([7, 3])).dim == 3
    assert tfplugin.get_kv_variable("a", initializer=tf.ones([7, 3]).numpy()).dim == 3
    for wrong in ([8, 8], [], [0], "8x"):
        with pytest.raises(ValueError, match="embedding_dim must be 1 or more, a whole number; got"):
            tfplugin.get_kv_variable("a", embedding_dim=wrong)
    for unknown in (tf.constant(1.0), 1.0, None):
        with pytest.raises(ValueError, match="embedding_dim is needed"):
            tfplugin.get_kv_variable("a", initializer=unknown)
    with tf.Graph().as_default():
        assert v1.get_kv_variable("b", initializer=v1.placeholder_with_default(tf.ones([5, 2]), [5, 2])).dim == 2


def test_a_variable_in_parts_in_a_list_for_minimize_names_the_way_out():
    with tf.Graph().as_default():
        table = tf.get_kv_variable("e", 4, partitioner=tf.compat.v1.fixed_size_partitioner(2))
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1]))
        optimizer = tf.compat.v1.train.AdamOptimizer()
        with pytest.raises(AttributeError, match=r"'e' has no 'op'.* give the parts, \[\*variable\]"):
            optimizer.minimize(loss, var_list=[table])
        optimizer.minimize(loss, var_list=[*table])


def test_a_variable_cannot_be_frozen(make, partitioner):
    refused = r"cannot be frozen into a constant: .*tfplugin\.export_saved_model"
    table = make(partitioner=partitioner)
    function = tf.function(lambda ids: tf.nn.embedding_lookup(table, ids))
    with pytest.raises(ValueError, match=refused):
        convert_to_constants.convert_variables_to_constants_v2(
            function.get_concrete_function(tf.TensorSpec([None], tf.int64))
        )
    with tf.Graph().as_default() as graph, v1.Session() as session:
        rows = tf.nn.embedding_lookup(make(partitioner=partitioner), [1, 2])
        outputs = rows.op.name, (v1.get_variable("dense", [2]) + 1.0).op.name
        session.run(v1.global_variables_initializer())
        with pytest.raises(ValueError, match=refused):
            v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), outputs[:1])
        frozen = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), outputs[1:])
        assert "Const" in {node.op for node in frozen.node}
