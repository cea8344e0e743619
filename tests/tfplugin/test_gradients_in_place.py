"""The parts of a variable take their gradients from where they are in that of the whole, and learn what one does."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
from tfplugin import row_handles
from tfplugin.ops import raw

v1 = tf.compat.v1
KEYS = [
    [5, 5, -3, 12, 5, 0, 7],
    [],
    [10, 0, -5],  # all of one part of five
    [-1, 2, 2**31 - 1, -(2**31), 12, -1, 5],
]
OPTIMIZERS = {
    "v1 Adam": lambda: v1.train.AdamOptimizer(0.1),
    "v1 Adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "own GroupAdam": lambda: tfplugin.optimizers.GroupAdam(0.1),
    "Keras Adam": lambda: tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.1), skip_nonfinite=True),
    "Keras SGD, decay": lambda: tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(0.1, weight_decay=0.1)),
    "tf_keras Ftrl": lambda: tfplugin.OptimizerWrapper(tf_keras.optimizers.Ftrl(0.1)),
    "legacy Adam": lambda: tfplugin.OptimizerWrapper(tf_keras.optimizers.legacy.Adam(0.1)),
}


def _variable(parts, name="v", dim=3, **kwargs):
    return tfplugin.get_kv_variable(name, dim, partitioner=parts and v1.fixed_size_partitioner(parts), **kwargs)


def _parts(variable):
    return list(variable) if isinstance(variable, tfplugin.PartitionedKvVariable) else [variable]


def _behind_updates(graph, update="KvTableApply"):
    """The types of the operations that the updates of `graph` wait for."""
    seen, stack = set(), [op for op in graph.get_operations() if op.type == update]
    assert stack
    while stack:
        op = stack.pop()
        if op not in seen:
            seen.add(op)
            stack += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return {op.type for op in seen}


def _columns(variable):
    """Keys, and each one's row with its slots, sorted by key."""
    exported = [part.export() for part in _parts(variable)]
    names = sorted(_parts(variable)[0].slot_names())
    assert names == sorted(_parts(variable)[-1].slot_names())
    keys = np.concatenate([keys.numpy() for keys, _ in exported])
    columns = [np.concatenate([tf.cast(rows, tf.float64).numpy() for _, rows in exported])]
    for name in names:
        columns.append(np.concatenate([tf.cast(part.export(name)[1], tf.float64).numpy() for part in _parts(variable)]))
    order = np.argsort(keys)
    return keys[order], [column[order] for column in columns]


def _same(one, five):
    for expected, got in zip(_columns(one), _columns(five), strict=True):
        np.testing.assert_array_equal(got, expected)


def _train(variable, optimizer, batches, *, through=lambda gradients: gradients, **lookup):
    """A step in a function for each batch; the function's graph."""

    @tf.function(input_signature=[tf.TensorSpec([None], variable.key_dtype)])
    def step(ids):
        with tf.GradientTape() as tape:
            rows = variable.sparse_read(ids, **lookup)
            weights = tf.cast(tf.range(1, tf.size(rows) + 1), rows.dtype)
            loss = tf.reduce_sum(tf.reshape(weights, tf.shape(rows)) * rows**2)
        gradients = through(tape.gradient(loss, _parts(variable)))
        optimizer.apply_gradients(zip(gradients, _parts(variable), strict=True))

    for ids in batches:
        step(tf.constant(ids, variable.key_dtype))
    return step.get_concrete_function().graph


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_parts_learn_what_one_does_from_gradients_where_they_are(name):
    one, five = _variable(None), _variable(5)
    _train(one, OPTIMIZERS[name](), KEYS)
    types = _behind_updates(_train(five, OPTIMIZERS[name](), KEYS))
    assert "KvTableSplitKeys" in types and "KvTableSplitGradients" not in types
    _same(one, five)


@pytest.mark.parametrize("key_dtype", [tf.int64, tf.int32, tf.uint64], ids=lambda d: d.name)
@pytest.mark.parametrize(
    ("dtype", "looked_up_as"),
    [(tf.float16, None), (tf.bfloat16, None), (tf.float64, None), (tf.float16, tf.float32), (tf.bfloat16, tf.float32)],
)
def test_keys_and_rows_of_all_types(key_dtype, dtype, looked_up_as):
    batches = [[abs(key) for key in keys] for keys in KEYS[:3]]
    made = [_variable(parts, key_dtype=key_dtype, value_dtype=dtype, initializer=0.5) for parts in (None, 5)]
    for variable in made:
        graph = _train(variable, tfplugin.optimizers.Adam(0.1), batches, output_dtype=looked_up_as)
    assert "KvTableSplitGradients" not in _behind_updates(graph)
    _same(*made)


def test_a_large_batch_with_many_duplicates():
    batches = np.random.default_rng(1).integers(-300, 300, [2, 40_000])
    made = [_variable(parts, dim=16) for parts in (None, 5)]
    for variable in made:
        _train(variable, tfplugin.optimizers.Adam(0.1), batches)
    _same(*made)


class Halving(tf.keras.optimizers.Optimizer):
    def update_step(self, gradient, variable, learning_rate):
        variable.assign(variable - 0.5 * gradient)


def test_who_changes_or_runs_on_the_gradients_of_parts_gets_them():
    def clipped(gradients):
        return tf.clip_by_global_norm(gradients, 1.0)[0]

    def reordered(gradients):
        return [tf.IndexedSlices(g.values, tf.identity(g.indices)) for g in gradients]

    for through in (clipped, reordered):
        one, five = _variable(None), _variable(5)
        _train(one, tfplugin.optimizers.SGD(0.1), KEYS, through=through)
        types = _behind_updates(_train(five, tfplugin.optimizers.SGD(0.1), KEYS, through=through))
        assert "KvTableSplitGradients" in types and "KvTableSplitKeys" not in types
        for expected, got in zip(_columns(one), _columns(five), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6)
    one, five = _variable(None), _variable(5)
    for variable in (one, five):
        graph = _train(variable, tfplugin.OptimizerWrapper(Halving(1.0)), KEYS)
    assert "KvTableSplitGradients" in _behind_updates(graph, "KvTableWriteRows")
    _same(one, five)


def test_a_gradient_that_is_asked_for_beside_the_update():
    five = _variable(5)
    optimizer = tfplugin.optimizers.SGD(0.1)
    ids = tf.constant([5, 1, 5, -4], tf.int64)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(five.sparse_read(ids) * tf.reshape(tf.range(12.0), [4, 3]))
        gradients = tape.gradient(loss, list(five))
        optimizer.apply_gradients(zip(gradients, five, strict=True))
        return gradients

    before = five.sparse_read([5]).numpy()
    gradients = step()
    np.testing.assert_array_equal(gradients[0].values, [[0, 1, 2], [6, 7, 8]])
    np.testing.assert_array_equal(gradients[1].values, [[3, 4, 5], [9, 10, 11]])
    np.testing.assert_allclose(five.sparse_read([5]), before - 0.1 * np.array([6, 8, 10]), rtol=1e-6)


@pytest.mark.parametrize("gate", [v1.train.Optimizer.GATE_NONE, v1.train.Optimizer.GATE_OP])
def test_a_graph_takes_them_too(session, gate):
    variable = _variable(5)
    rows = tf.nn.embedding_lookup(variable, v1.placeholder_with_default(tf.constant(KEYS[0], tf.int64), [None]))
    step = v1.train.AdamOptimizer(0.1).minimize(tf.reduce_sum(rows**2), gate_gradients=gate)
    assert "KvTableSplitGradients" not in _behind_updates(session.graph)
    session.run(v1.global_variables_initializer())
    before = session.run(rows)
    session.run(step)
    moved = session.run(rows) - before
    np.testing.assert_allclose(np.abs(moved), 0.1, rtol=1e-3)


def test_a_graph_that_waits_for_all_gradients_does(session):
    variable = _variable(5)
    rows = tf.nn.embedding_lookup(variable, tf.constant(KEYS[0], tf.int64))
    dense = v1.get_variable("dense", [3])
    loss = tf.reduce_sum(rows * dense)
    v1.train.AdamOptimizer(0.1).minimize(loss, gate_gradients=v1.train.Optimizer.GATE_GRAPH)
    assert "KvTableSplitGradients" in _behind_updates(session.graph)


def test_updates_in_the_backward_pass_take_them():
    made = [_variable(parts, name=f"v{parts}", initializer=0.5) for parts in (None, 5)]
    for variable in made:
        tfplugin.apply_in_backward(variable, tfplugin.optimizers.Adagrad(0.1))

        @tf.function
        def step(ids, variable=variable):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable.sparse_read(ids) ** 2)
            tape.gradient(loss, _parts(variable))

        for ids in KEYS:
            step(tf.constant(ids, tf.int64))
    types = _behind_updates(step.get_concrete_function(tf.TensorSpec([None], tf.int64)).graph)
    assert "KvTableSplitGradients" not in types
    _same(*made)


def test_norms_are_of_the_gradients_of_the_part():
    variable = _variable(2, dim=2, name="watched")
    for part in variable:
        tfplugin.watch_gradients(part)
    gradient = tf.constant([[3.0, 4.0], [6.0, 8.0], [0.0, 1.0]])
    optimizer = tfplugin.optimizers.SGD(0.1)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            rows = variable.sparse_read([2, 1, 4])
        optimizer.apply_gradients(zip(tape.gradient(rows, list(variable), gradient), variable, strict=True))

    step()
    told = [tfplugin.gradient_norms(part) for part in variable]
    assert [norms.greatest_row for norms in told] == [5.0, 10.0]
    np.testing.assert_allclose([norms.mean for norms in told], [np.sqrt(26), 10])


def test_eager_gradients_are_as_they_were():
    five = _variable(5)
    with tf.GradientTape() as tape:
        rows = five.sparse_read(KEYS[0])
    for gradient in tape.gradient(rows, list(five)):
        assert row_handles.recall_whole(gradient.values, gradient.indices) is None


def _apply(places, gradients, keys=(1, 2)):
    table = _variable(None)
    places = [tf.constant(one, tf.uint32) for one in places]
    raw.kv_table_apply(
        table.handle,
        tf.constant(keys, tf.int64),
        tf.zeros([0], tf.int64),
        gradients,
        [tf.constant(0.5, tf.float64)],
        places,
        optimizer="sgd",
        names=["learning_rate"],
        slots="[]",
        all_slots="[]",
        generation=1,
    )
    return table


def test_places_that_are_not_there_are_refused():
    gradients = tf.ones([2, 5, 3])  # of any shape: rows are counted
    _apply([[9, 0]], gradients)
    for places, keys in (([[10, 0]], (1, 2)), ([[2**32 - 1, 0]], (1, 2)), ([[1]], (1, 2)), ([[]], (1, 2))):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"got 2 keys and {len(places[0])} places"):
            _apply(places, gradients, keys)
    with pytest.raises(tf.errors.InvalidArgumentError, match="wants gradients of shape"):
        _apply([[0, 1]], tf.ones([5, 4]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="got 2 inputs of places"):
        _apply([[0, 1], [0, 1]], gradients)
    _apply([[]], tf.ones([0, 3]), ())
