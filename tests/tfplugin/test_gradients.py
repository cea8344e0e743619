"""Gradients of lookups are slices of the keys looked up, by every way TensorFlow has of asking for them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

import tfplugin
import tfplugin.sok
from tfplugin.ops import raw

v1 = tf.compat.v1
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


def test_every_op_has_a_gradient_or_is_known_to_have_none():
    """Whoever differentiates another one gets a bare LookupError."""
    ops = {name for name in vars(raw) if name.startswith("Kv")}
    assert len(ops) > 50
    assert ops <= set(tf_ops.gradient_registry.list())


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_variable_that_nothing_leads_to_has_zeros_of_no_rows(make, partitioner, in_graph):
    with tf.Graph().as_default() if in_graph else contextlib.nullcontext():
        table = make(partitioner=partitioner, initializer=0.5)
        parts = list(table) if partitioner else [table]
        dense, other = v1.get_variable("dense", [4]), v1.get_variable("other", [3])
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, [1, 2])
            loss = tf.reduce_sum(dense)
        sources = [*parts, dense, other]
        if in_graph:
            gradients = v1.gradients(loss, sources, unconnected_gradients="zero")
        else:
            gradients = tape.gradient(loss, sources, unconnected_gradients="zero")
        for gradient in gradients[:-2]:
            assert gradient.values.shape == (0, 4) and gradient.indices.dtype == tf.int64
        step = v1.train.GradientDescentOptimizer(1.0).apply_gradients(zip(gradients, sources, strict=True))
        if in_graph:
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                session.run(step)
                rows, of_other = session.run([rows, gradients[-1]])
        else:
            rows, of_other = rows.numpy(), gradients[-1].numpy()
        assert (rows == 0.5).all() and of_other.tolist() == [0, 0, 0]


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_gradients_of_several_lookups_add_up(make, in_graph):
    with tf.Graph().as_default() if in_graph else contextlib.nullcontext():
        table = make(initializer=0.5)
        gradients = []
        for ids in ([1, 2], [2, 2, 3]):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
            gradients.append(tape.gradient(loss, table))
        step = v1.train.GradientDescentOptimizer(0.25).apply_gradients([(tf.add_n(gradients), table)])
        rows = table.sparse_read([1, 2, 3], training=False)[:, 0]
        if in_graph:
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                session.run(step)
                rows = session.run(rows)
        assert list(rows) == [0.25, -0.25, 0.25]
        with pytest.raises(
            ValueError, match=r"a table has no number of rows.*tf\.IndexedSlices\(0\.5 \* slices\.values"
        ):
            tf.stack(gradients)
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2]))
        assert tf.add_n([slices, slices]).shape == (3, 2)  # of a dense variable, as ever


def test_a_tape_watches_the_tables_that_it_is_told_to(make, partitioner):
    table, other, dense = make(dim=2, partitioner=partitioner), make(name="w", dim=2), tf.Variable(2.0)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([dense, table])
        loss = dense * (_loss(table, IDS) + _loss(other, IDS))
    of_dense, *of_parts = tape.gradient(loss, [dense, *_parts(table), other])
    assert of_dense is not None and of_parts.pop() is None
    assert _by_key(of_parts) == {key: [2 * one for one in row] for key, row in EXPECTED.items()}


def test_a_module_lists_the_tables_that_it_trains(make, partitioner):
    inner = tf.Module()
    inner.frozen, inner.tables = make(name="f", trainable=False), [make(name="u", partitioner=partitioner)]
    module = tf.Module()
    module.dense, module.table, module.inner = tf.Variable(1.0), make(name="v", initializer=0.5), inner
    module.again = module.table
    wanted = [module.dense, module.table, *_parts(inner.tables[0])]
    variables = module.trainable_variables
    assert [id(one) for one in variables] == [id(one) for one in wanted]
    assert len(module.variables) == 1

    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(tf.nn.embedding_lookup(one, IDS)) for one in (module.table, inner.tables[0]))
    v1.train.GradientDescentOptimizer(0.25).apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    assert module.table.sparse_read([4, 9])[:, 0].numpy().tolist() == [0.0, 0.25]


@pytest.mark.parametrize("combiner", ["sum", None])
def test_forward_mode_goes_past_tables(make, partitioner, combiner):
    table, dense = make(dim=2, partitioner=partitioner), tf.Variable([1.0, 2.0, 3.0])
    table.upsert([4, -1, 9], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def pooled():
        if combiner is None:
            return tf.nn.embedding_lookup(table, [4, -1, 9]) * dense[:, None] ** 2
        where = [[0, 0], [0, 1], [1, 0]]
        ids, weights = (tf.SparseTensor(where, values, [2, 2]) for values in (tf.constant([4, -1, 9], tf.int64), dense))
        return tf.nn.embedding_lookup_sparse(table, ids, weights, combiner=combiner)

    with tf.GradientTape() as tape:
        of_rows = pooled()
    jacobian = tape.jacobian(of_rows, dense)
    tangent = tf.constant([1.0, -2.0, 0.5])
    within = tf.function(lambda: _tangent_of(pooled, dense, tangent))
    for found in (_tangent_of(pooled, dense, tangent), within()):
        np.testing.assert_allclose(found, tf.tensordot(jacobian, tangent, 1), rtol=1e-5, atol=1e-6)


def _tangent_of(compute, variable, tangent):
    with tf.autodiff.ForwardAccumulator(variable, tangent) as accumulator:
        return accumulator.jvp(compute())


def test_forward_mode_names_the_way_out(make, partitioner):
    table, dense = make(partitioner=partitioner), tf.Variable(2.0)
    with pytest.raises(TypeError, match=r"'v(:0)?' has no tangent: .*Look its rows up before"):
        tf.autodiff.ForwardAccumulator([dense, table], [1.0, 1.0])
    looks_up = tf.function(lambda: dense * tf.nn.embedding_lookup(table, [1, 2]))
    with pytest.raises(TypeError, match=r"looks a key-value variable up, .*ForwardAccumulator.* in the function"):
        _tangent_of(looks_up, dense, 1.0)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(dense * tf.nn.embedding_lookup(table, [1, 2]))
        slices = tape.gradient(loss, _parts(table)[0])
    with pytest.raises(TypeError, match=r"IndexedSlices, which no tape differentiates: give its \.values"):
        outer.gradient(slices, dense)
