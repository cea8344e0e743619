"""`DynamicEmbeddingOptimizer`: rows move as those of a dense variable, and come to be when a gradient is applied."""

from __future__ import annotations

import inspect
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.framework import op_callbacks

import tfplugin
from tfplugin import dynamic_embedding as de
from tfplugin.dynamic_embedding.slot_arrays import slot_arrays

v1 = tf.compat.v1
TESTS = Path(__file__).parents[1] / "tfplugin"
V1 = runpy.run_path(str(TESTS / "test_optimizer_parity.py"))["OPTIMIZERS"]
KERAS = runpy.run_path(str(TESTS / "test_keras_optimizers.py"))["OPTIMIZERS"]
OURS = runpy.run_path(str(TESTS / "test_optimizer_classes.py"))["CLASSES"]
THREE_KINDS = {
    "v1": lambda: v1.train.AdamOptimizer(0.1),
    "Keras 3": lambda: tf.keras.optimizers.Adam(0.1),
    "tf_keras": lambda: tf_keras.optimizers.Adam(0.1),
    "legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
    "tfplugin": lambda: tfplugin.optimizers.Adam(0.1),
}

KEYS = np.array([0, -1, 3, 10**15, -7, 8])
INITIAL = np.random.default_rng(1).normal(size=(len(KEYS), 4))


def batches(steps=8):
    """Positions of ids with duplicates, and the factor of each row in the loss. Every row is in each batch."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        ids = rng.permutation(np.concatenate([np.arange(len(KEYS)), rng.integers(0, len(KEYS), 4)]))
        yield ids, rng.normal(size=(len(ids), 4))


def close(got, expected, tolerance=1e-6):
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("make_optimizer", V1.values(), ids=V1)
def test_v1_optimizers_in_a_graph_follow_the_dense_twin(session, name, devices, make_optimizer):
    positions, factors = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float64, [None, 4])
    dense = v1.get_variable("dense", initializer=INITIAL, use_resource=True)
    table = de.get_variable(name, value_dtype=tf.float64, dim=4, devices=devices)
    rows, trainable = de.embedding_lookup(table, tf.gather(KEYS, positions), name="x", return_trainable=True)
    assert isinstance(trainable, de.TrainableWrapper)
    optimizer = make_optimizer()
    stock = optimizer.minimize(tf.reduce_sum(tf.sin(tf.gather(dense, positions)) * factors), var_list=[dense])
    wrapped = de.DynamicEmbeddingOptimizer(make_optimizer())
    step = wrapped.minimize(tf.reduce_sum(tf.sin(rows) * factors), var_list=[trainable])
    session.run(v1.global_variables_initializer())
    session.run(table.upsert(KEYS, INITIAL))
    for ids, factor in batches():
        session.run([stock, step], {positions: ids, factors: factor})
    expected = session.run(dense)
    assert np.abs(expected - INITIAL).max() > 1e-3
    close(session.run(table.lookup(KEYS)), expected, 1e-9)
    assert isinstance(wrapped, type(optimizer)) and type(wrapped).__name__ == type(optimizer).__name__


@pytest.mark.parametrize("make_optimizer", KERAS.values(), ids=KERAS)
def test_keras_optimizers_follow_the_dense_twin(name, devices, make_optimizer):
    dense, other = tf.Variable(INITIAL), tf.Variable(np.array([1.0, 2.0]))
    twin = tf.Variable(np.array([1.0, 2.0]))
    table = de.Variable(value_dtype=tf.float64, dim=4, devices=devices, name=name)
    table.upsert(KEYS, INITIAL)
    stock, wrapped = make_optimizer(), de.DynamicEmbeddingOptimizer(make_optimizer())
    shadow = table.get_trainable_by_name("x")

    @tf.function
    def step(ids, factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(tf.gather(dense, ids)) * factor) + tf.reduce_sum(twin**2)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, [dense, twin])]
        stock.apply_gradients(zip(gradients, [dense, twin], strict=True))
        with tf.GradientTape() as tape:
            rows = de.embedding_lookup(table, tf.gather(KEYS, ids), name="x")
            loss = tf.reduce_sum(tf.sin(rows) * factor) + tf.reduce_sum(other**2)
        variables = [shadow, other]
        wrapped.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for ids, factor in batches():
        step(tf.constant(ids), tf.constant(factor))
    assert np.abs(dense.numpy() - INITIAL).max() > 1e-3
    close(table.lookup(KEYS).numpy(), dense.numpy())
    close(other.numpy(), twin.numpy())
    assert int(wrapped.iterations) == 8
    assert isinstance(wrapped, type(stock)) and type(wrapped).__name__ == type(stock).__name__


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_the_optimizers_of_tfplugin_follow_the_dense_twin(name, devices, cls):
    dense = tf.Variable(INITIAL)
    table = de.Variable(value_dtype=tf.float64, dim=4, devices=devices, name=name)
    table.upsert(KEYS, INITIAL)
    # The twin, too, is to have the group lasso, not the plain optimizer.
    asked = {"regularize_dense": True} if "regularize_dense" in inspect.signature(cls).parameters else {}
    stock, wrapped = cls(**asked), de.DynamicEmbeddingOptimizer(cls())
    shadow = table.get_trainable_by_name("x")
    for ids, factor in batches():
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(tf.sin(tf.gather(dense, ids)) * factor)
            loss += tf.reduce_sum(tf.sin(de.embedding_lookup(table, tf.gather(KEYS, ids), name="x")) * factor)
        stock.apply_gradients([(tape.gradient(loss, dense), dense)])
        wrapped.apply_gradients([(tape.gradient(loss, shadow), shadow)])
    assert np.abs(dense.numpy() - INITIAL).max() > 1e-6
    close(table.lookup(KEYS).numpy(), dense.numpy(), 1e-9)


def test_clipnorm_is_of_gradients_that_have_been_scaled_back(name, devices):
    optimizer = tf.keras.optimizers.SGD(1.0, clipnorm=0.5, loss_scale_factor=64.0)
    wrapped = de.DynamicEmbeddingOptimizer(optimizer)
    table = de.Variable(dim=2, devices=devices, name=name, initializer=0.0)
    wrapped.minimize(
        lambda: tf.reduce_sum(de.embedding_lookup(table, tf.constant([4, 5, 6, 7], tf.int64), name="x")),
        var_list=[table.get_eager_trainable_by_name("x")],
    )
    np.testing.assert_allclose(np.linalg.norm(table.export()[1]), 0.5, rtol=1e-6)


@pytest.mark.parametrize("make_optimizer", THREE_KINDS.values(), ids=THREE_KINDS)
@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_minimize_trains_what_a_named_lookup_reads(name, devices, make_optimizer, function):
    table = de.get_variable(name, dim=2, devices=devices, initializer=1.0)
    optimizer = de.DynamicEmbeddingOptimizer(make_optimizer())
    # Before there was any lookup of that name.
    shadow = table.get_eager_trainable_by_name("x")

    def loss(ids):
        return tf.reduce_sum(de.embedding_lookup(table, ids, name="x") ** 2)

    run = tf.function(loss) if function else loss
    for _ in range(2):
        optimizer.minimize(lambda: run(tf.constant([1, 2, 2], tf.int64)), var_list=[shadow])
    assert sorted(table.export()[0].numpy().tolist()) == [1, 2]
    # Adam's step is as long whatever the gradient.
    np.testing.assert_allclose(table.lookup([1, 2]).numpy(), np.full((2, 2), 0.8), atol=2e-3)


@pytest.mark.parametrize("make_optimizer", THREE_KINDS.values(), ids=THREE_KINDS)
def test_keys_are_inserted_when_the_gradient_is_applied_zero_gradients_too(name, devices, make_optimizer):
    table = de.Variable(dim=2, devices=devices, name=name, initializer=0.5)
    optimizer = de.DynamicEmbeddingOptimizer(make_optimizer())
    with tf.GradientTape() as tape:
        rows, shadow = de.embedding_lookup(table, tf.constant([4, 5, 6], tf.int64), name="x", return_trainable=True)
        loss = tf.reduce_sum(rows * [[1.0], [0.0], [1.0]])
    gradient = tape.gradient(loss, shadow)
    assert table.size().numpy() == 0
    optimizer.apply_gradients([(gradient, shadow)])
    assert sorted(table.export()[0].numpy().tolist()) == [4, 5, 6]
    np.testing.assert_allclose(table.lookup([4, 5, 6]).numpy()[:, 0], [0.4, 0.5, 0.4], atol=1e-5)


def test_a_graph_trains_all_trainables_without_a_list(session, name, devices):
    table = de.get_variable(name, dim=2, devices=devices, initializer=1.0)
    frozen = de.get_variable(f"{name}_frozen", dim=2, devices=devices, initializer=1.0, trainable=False)
    ids = tf.constant([[1, 2], [2, 3]], tf.int64)
    rows = de.embedding_lookup(table, ids) + de.embedding_lookup(frozen, ids)
    assert [v.params for v in v1.trainable_variables()] == [table]
    optimizer = de.DynamicEmbeddingOptimizer(v1.train.GradientDescentOptimizer(0.1))
    global_step = v1.train.get_or_create_global_step()
    step = optimizer.minimize(tf.reduce_sum(rows), global_step=global_step)
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
    session.run(step)
    session.run(step)
    got = dict(zip(*[x.tolist() for x in session.run(table.export())], strict=True))
    assert {k: np.round(v, 5).tolist() for k, v in got.items()} == {1: [0.8, 0.8], 2: [0.6, 0.6], 3: [0.8, 0.8]}
    assert session.run([frozen.size(), global_step]) == [0, 2]
    assert session.run(v1.report_uninitialized_variables()).tolist() == []


def test_lookups_of_one_variable_are_one_update(name, devices):
    """The gradients of a key are summed, whichever lookups they come from, and momentum moves once."""
    table = de.Variable(value_dtype=tf.float64, dim=4, devices=devices, name=name)
    dense = tf.Variable(INITIAL)
    table.upsert(KEYS, INITIAL)
    stock, wrapped = tf.keras.optimizers.Adam(0.1), de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1))
    shadows = [table.get_trainable_by_name(n) for n in ("a", "b")]
    for ids, factor in batches(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(tf.gather(dense, ids)) * factor) + tf.reduce_sum(dense[1:4] ** 2)
        stock.apply_gradients([(tf.convert_to_tensor(tape.gradient(loss, dense)), dense)])

        def loss_of(ids=ids, factor=factor):
            first = de.embedding_lookup(table, tf.gather(KEYS, ids), name="a")
            second = de.embedding_lookup(table, tf.constant(KEYS[1:4]), name="b")
            return tf.reduce_sum(tf.sin(first) * factor) + tf.reduce_sum(second**2)

        wrapped.minimize(loss_of, var_list=shadows)
    close(table.lookup(KEYS).numpy(), dense.numpy())


def test_each_lookup_has_a_gradient_of_its_own(name):
    table = de.Variable(dim=1, name=name)
    with tf.GradientTape() as tape:
        a, of_a = de.embedding_lookup(table, tf.constant([1], tf.int64), name="a", return_trainable=True)
        b, of_b = de.embedding_lookup(table, tf.constant([1, 2], tf.int64), name="b", return_trainable=True)
        loss = tf.reduce_sum(2 * a) + tf.reduce_sum(3 * b)
    gradients = tape.gradient(loss, [of_a, of_b])
    assert [tf.convert_to_tensor(g.values).numpy().tolist() for g in gradients] == [[[2]], [[3], [3]]]
    assert [g.indices.numpy().tolist() for g in gradients] == [[1], [1, 2]]


def test_a_dense_gradient_has_a_row_for_each_id(name, devices):
    table = de.Variable(dim=2, devices=devices, name=name)
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.SGD(1.0))
    _, shadow = de.embedding_lookup(table, tf.constant([1, 2], tf.int64), name="x", return_trainable=True)
    optimizer.apply_gradients([(tf.constant([[1.0, 2.0], [3.0, 4.0]]), shadow)])
    assert table.lookup([1, 2]).numpy().tolist() == [[-1, -2], [-3, -4]]


@pytest.mark.parametrize("make_optimizer", THREE_KINDS.values(), ids=THREE_KINDS)
def test_slots_are_variables_of_their_own(name, devices, make_optimizer):
    table = de.Variable(dim=2, devices=devices, name=name)
    optimizer = de.DynamicEmbeddingOptimizer(make_optimizer())
    assert table.get_slot_variables(optimizer) == []
    shadow = table.get_trainable_by_name("x")

    def loss():
        return tf.reduce_sum(de.embedding_lookup(table, tf.constant([1, 2, 3], tf.int64), name="x") * 2)

    optimizer.minimize(loss, var_list=[shadow])
    m, v = table.get_slot_variables(optimizer)
    assert (m.name, v.name) == (f"{name}/Adam/m", f"{name}/Adam/v")
    keys, rows = m.export()
    assert sorted(keys.numpy().tolist()) == [1, 2, 3]
    np.testing.assert_allclose(rows.numpy(), 0.2, rtol=1e-5)
    np.testing.assert_allclose(v.lookup([3, 1, 9]).numpy(), [[0.004] * 2, [0.004] * 2, [0, 0]], rtol=1e-4)
    assert m.lookup([1, 9], return_exists=True)[1].numpy().tolist() == [True, False]
    m.upsert([1, 2], [[5.0, 6.0], [7.0, 8.0]])
    assert m.lookup([2, 1]).numpy().tolist() == [[7, 8], [5, 6]]
    assert v.lookup([1]).numpy()[0, 0] > 0 and m.size().numpy() == 3
    assert len(m.tables) == len(devices) and m.dim == 2 and m.value_dtype == tf.float32
    table.remove([1])
    assert m.size().numpy() == 2
    if hasattr(optimizer, "get_slot"):
        assert optimizer.get_slot(shadow, "m").name == m.name


def test_slots_in_a_graph(session, name, devices):
    table = de.get_variable(name, dim=2, devices=devices)
    rows = de.embedding_lookup(table, tf.constant([1, 2], tf.int64))
    optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdagradOptimizer(0.1, initial_accumulator_value=0.5))
    step = optimizer.minimize(tf.reduce_sum(rows))
    (accumulator,) = table.get_slot_variables(optimizer)
    session.run(v1.global_variables_initializer())
    session.run(step)
    found, missing = session.run(accumulator.lookup(tf.constant([2, 7], tf.int64)))
    assert found.tolist() == [1.5, 1.5] and missing.tolist() == [0.5, 0.5]


def test_get_slot_variables_wants_an_optimizer(name):
    with pytest.raises(TypeError, match="optimizer"):
        de.Variable(name=name).get_slot_variables("adam")


@pytest.mark.parametrize("wrong", [None, "adam", tf.keras.optimizers.Adam])
def test_only_optimizers_are_wrapped(wrong):
    with pytest.raises(TypeError, match="optimizer"):
        de.DynamicEmbeddingOptimizer(wrong)


@pytest.mark.parametrize("make_optimizer", THREE_KINDS.values(), ids=THREE_KINDS)
def test_a_loss_without_the_lookup_says_so(name, make_optimizer):
    table = de.Variable(dim=1, name=name)
    w = tf.Variable(1.0)
    optimizer = de.DynamicEmbeddingOptimizer(make_optimizer())
    with pytest.raises(ValueError, match=r"No gradients provided for any variable.*x"):
        optimizer.minimize(lambda: w * 2.0, var_list=[table.get_trainable_by_name("x")])


@pytest.mark.parametrize("kind", ["eager Adam of v1", "graph Adam of v1", "Adam of Keras 3"])
def test_a_step_in_which_no_table_has_a_gradient_moves_the_rest(name, kind):
    def loss_of(table, w):
        return w * 2.0, de.embedding_lookup(table, tf.constant([1], tf.int64), name="x", return_trainable=True)[1]

    if kind.startswith("graph"):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            table, w = de.Variable(dim=1, name=name), tf.compat.v1.get_variable("w", [], use_resource=True)
            loss, trainable = loss_of(table, w)
            optimizer = de.DynamicEmbeddingOptimizer(tf.compat.v1.train.AdamOptimizer(0.5))
            step = optimizer.minimize(loss, var_list=[trainable, w])
            session.run(tf.compat.v1.global_variables_initializer())
            before = session.run(w)
            session.run(step)
            assert abs(session.run(w) - before + 0.5) < 1e-5 and session.run(table.size()) == 0
        return
    make = tf.compat.v1.train.AdamOptimizer if "v1" in kind else tf.keras.optimizers.Adam
    table, w = de.Variable(dim=1, name=name), tf.Variable(1.0)
    shadow = table.get_trainable_by_name("x")
    de.DynamicEmbeddingOptimizer(make(0.5)).minimize(lambda: loss_of(table, w)[0], var_list=[shadow, w])
    assert abs(float(w) - 0.5) < 1e-5 and int(table.size()) == 0


def test_wrapping_twice_is_wrapping_once(name):
    optimizer = tf.keras.optimizers.SGD(1.0)
    assert de.DynamicEmbeddingOptimizer(de.DynamicEmbeddingOptimizer(optimizer)) is optimizer
    assert isinstance(tf.keras.optimizers.SGD, type) and "apply_gradients" not in vars(tf.keras.optimizers.SGD)


def test_the_update_is_one_fused_op(name, devices):
    table = de.Variable(dim=2, devices=devices, name=name)
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1))
    shadow = table.get_trainable_by_name("x")

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.embedding_lookup(table, ids, name="x"))
        optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])

    graph = step.get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
    ops = [op.type for op in graph.get_operations() if op.type.startswith("KvTable")]
    single = {"KvTableGather": 1, "KvTableApply": 1}
    several = {"KvTableGatherMany": 1, "KvTableTrainable": 1, "KvTableSplitGradients": 1, "KvTableApply": 3}
    assert {op: ops.count(op) for op in ops} == (single if len(devices) == 1 else several)
    assert set(tfplugin.explain(optimizer, table.parts).to_dict().values()) == {"fused: adam"}


def test_an_own_update_runs_on_the_rows(name, devices):
    class Halving(tf.keras.optimizers.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            variable.assign(variable * 0.5)

    table = de.Variable(dim=2, devices=devices, name=name, initializer=4.0)
    optimizer = de.DynamicEmbeddingOptimizer(Halving(1.0))
    optimizer.minimize(
        lambda: tf.reduce_sum(de.embedding_lookup(table, tf.constant([1, 1, 2], tf.int64), name="x")),
        var_list=[table.get_trainable_by_name("x")],
    )
    assert table.lookup([1, 2, 3]).numpy().tolist() == [[2, 2], [2, 2], [4, 4]]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize("key_dtype", [tf.int64, tf.int32], ids=lambda d: d.name)
def test_dtypes_are_trained(name, devices, dtype, key_dtype):
    table = de.Variable(key_dtype, dtype, dim=2, devices=devices, name=name, initializer=1.0)
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.SGD(0.5))
    optimizer.minimize(
        lambda: tf.reduce_sum(de.embedding_lookup(table, tf.constant([1, -2], key_dtype), name="x")),
        var_list=[table.get_trainable_by_name("x")],
    )
    assert tf.cast(table.lookup(tf.constant([1, -2], key_dtype)), tf.float32).numpy().tolist() == [[0.5, 0.5]] * 2


def test_an_own_partitioner_s_rows_are_trained_where_they_are(name):
    table = de.Variable(
        value_dtype=tf.float64,
        dim=4,
        devices=["/CPU:0"] * 3,
        name=name,
        partitioner=lambda keys, n: tf.cast((keys + 1) % n, tf.int32),
    )
    dense = tf.Variable(INITIAL)
    table.upsert(KEYS, INITIAL)
    stock, wrapped = tf.keras.optimizers.Adam(0.1), de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1))
    for ids, factor in batches(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(tf.gather(dense, ids)) * factor)
        stock.apply_gradients([(tf.convert_to_tensor(tape.gradient(loss, dense)), dense)])
        wrapped.minimize(
            lambda ids=ids, factor=factor: tf.reduce_sum(
                tf.sin(de.embedding_lookup(table, tf.gather(KEYS, ids), name="x")) * factor
            ),
            var_list=[table.get_trainable_by_name("x")],
        )
    close(table.lookup(KEYS).numpy(), dense.numpy())
    assert table.size().numpy() == len(KEYS)


@pytest.mark.parametrize("make_model", [tf.keras.Sequential, tf_keras.Sequential], ids=["Keras 3", "tf_keras"])
def test_keras_builds_an_optimizer_for_a_model_that_has_a_trainable(name, make_model):
    table = de.Variable(dim=1, name=name)
    kind = tf.keras if make_model is tf.keras.Sequential else tf_keras
    optimizer = de.DynamicEmbeddingOptimizer(kind.optimizers.Adam(0.1))
    weight = tf.Variable([1.0])
    optimizer.build([table.get_trainable_by_name("x"), weight])
    optimizer.minimize(
        lambda: tf.reduce_sum(weight * de.embedding_lookup(table, tf.constant([1], tf.int64), name="x")) + weight[0],
        var_list=[table.get_trainable_by_name("x"), weight],
    )
    np.testing.assert_allclose([weight.numpy()[0], table.lookup([1]).numpy()[0, 0]], [0.9, -0.1], rtol=1e-4)


def test_a_tf_keras_layer_with_a_shadow_trains_in_fit(name):
    class Lookup(tf_keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = de.Variable(dim=2, name=name)
            self.shadow = de.shadow_ops.ShadowVariable(self.table, name="x")

        def call(self, ids):
            return de.shadow_ops.embedding_lookup(self.shadow, ids)

    layer = Lookup()
    model = tf_keras.Sequential([layer, tf_keras.layers.Flatten(), tf_keras.layers.Dense(1)])
    model.compile(de.DynamicEmbeddingOptimizer(tf_keras.optimizers.Adam(0.1)), "mse")
    model.fit(np.array([[1, 2], [3, 2]]), np.ones((2, 1)), epochs=2, verbose=0)
    assert sorted(layer.table.export()[0].numpy().tolist()) == [1, 2, 3]
    assert np.abs(layer.table.lookup([1, 2, 3]).numpy()).min() > 0.05
    assert [v.params for v in layer.trainable_variables] == [layer.table]


def test_an_optimizer_that_is_gone_is_forgotten(name):
    table = de.Variable(dim=1, name=name)
    for _ in range(2):
        optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1))
        optimizer.minimize(
            lambda: tf.reduce_sum(de.embedding_lookup(table, tf.constant([1], tf.int64), name="x")),
            var_list=[table.get_trainable_by_name("x")],
        )
        del optimizer
    assert table.parts[0].slot_names() == {"Adam.m", "Adam.v"}


class Ranks:
    """Stands for ``horovod.tensorflow`` with two ranks that have the same gradients."""

    Sum = "sum"

    def __init__(self):
        self.reduced = 0

    def is_initialized(self):
        return True

    def size(self):
        return 2

    def allreduce(self, gradient, op):
        assert op == self.Sum
        self.reduced += 1
        return gradient * 2


@pytest.mark.parametrize("make_optimizer", [lambda: v1.train.GradientDescentOptimizer(1.0), tf.keras.optimizers.SGD])
def test_synchronous_sums_dense_gradients_over_the_ranks(name, monkeypatch, make_optimizer):
    ranks = Ranks()
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", ranks)
    table, dense = de.Variable(dim=1, name=name), tf.Variable(0.0)
    optimizer = de.DynamicEmbeddingOptimizer(make_optimizer(), synchronous=True)
    if hasattr(optimizer, "learning_rate"):
        optimizer.learning_rate = 1.0
    with tf.GradientTape() as tape:
        rows, shadow = de.embedding_lookup(table, tf.constant([1], tf.int64), name="x", return_trainable=True)
        loss = tf.reduce_sum(rows) + dense
    gradients = tape.gradient(loss, [shadow, dense])
    optimizer.apply_gradients(zip(gradients, [shadow, dense], strict=True))
    assert (ranks.reduced, dense.numpy(), table.lookup([1]).numpy().tolist()) == (1, -2, [[-1]])


def test_synchronous_without_horovod_says_so(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    table = de.Variable(dim=1, name=name)
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.SGD(1.0), synchronous=True)
    with pytest.raises(ValueError, match="needs Horovod"):
        optimizer.minimize(
            lambda: tf.reduce_sum(de.embedding_lookup(table, tf.constant([1], tf.int64), name="x")),
            var_list=[table.get_trainable_by_name("x")],
        )


def test_slots_as_arrays_have_no_rows_of_keys_that_have_gone(name):
    table = de.Variable(dim=1, name=name, initializer=1.0)
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras.optimizers.Adagrad(1.0, 0.25))
    _, shadow = de.embedding_lookup(table, tf.constant([1, 2], tf.int64), name="x", return_trainable=True)
    optimizer.apply_gradients([(tf.constant([[1.0], [1.0]]), shadow)])
    gone = []

    def remove_after(op, *of_op):
        if not gone and ("KvTableKeys" in str(op) or "KvTableExport" in str(op)):
            gone.append(2)
            table.remove(tf.constant(gone, tf.int64))  # as another thread might, once the keys are known

    op_callbacks.add_op_callback(remove_after)
    try:
        columns = slot_arrays(table)
    finally:
        op_callbacks.remove_op_callback(remove_after)
    assert table.export()[0].numpy().tolist() == [1] == columns.pop("keys").tolist()
    assert [slot.tolist() for slot in columns.values()] == [[[1.25]]]
