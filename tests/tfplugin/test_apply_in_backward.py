"""`apply_in_backward`: the gradient of a lookup is the step."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin

v1 = tf.compat.v1
k3, legacy = tf.keras.optimizers, tf_keras.optimizers.legacy
ours = tfplugin.optimizers
KEYS = np.array([5, -3, 5, 8, 0])
FACTORS = np.random.default_rng(0).normal(size=(len(KEYS), 4))

OPTIMIZERS = {
    "ours": lambda: ours.Adam(0.1),
    "our Nadam": lambda: ours.Nadam(0.1),
    "our schedule": lambda: ours.SGD(k3.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "v1": lambda: v1.train.AdamOptimizer(0.1),
    "Keras": lambda: k3.AdamW(0.1),
    "Keras schedule": lambda: k3.SGD(k3.schedules.ExponentialDecay(0.1, 1, 0.5), momentum=0.5),
    "Keras Nadam": lambda: k3.Nadam(0.1),
    "tf_keras": lambda: tf_keras.optimizers.Adam(0.1),
    "legacy": lambda: legacy.Adam(0.1),
    "wrapped": lambda: tfplugin.OptimizerWrapper(k3.Adam(0.1), skip_nonfinite=True),
}


def _loss(table):
    return tf.reduce_sum(tf.sin(tf.nn.embedding_lookup(table, KEYS)) * FACTORS)


def _parts(table):
    return list(table) if isinstance(table, tfplugin.PartitionedKvVariable) else [table]


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_move_as_by_the_optimizer_after_the_pass(make, rows_of, partitioner, name, function):
    usual, at_once = (
        make(name=n, value_dtype=tf.float64, initializer=0.5, partitioner=partitioner) for n in ("a", "b")
    )
    after = tfplugin.OptimizerWrapper(OPTIMIZERS[name]())
    updates = tfplugin.apply_in_backward(at_once, OPTIMIZERS[name]())

    def step():
        with tf.GradientTape(persistent=True) as tape:
            losses = _loss(usual), _loss(at_once)
        gradients = tape.gradient(losses[1], _parts(at_once))
        after.apply_gradients(zip(tape.gradient(losses[0], _parts(usual)), _parts(usual), strict=True))
        return [gradient.values for gradient in gradients]

    run = tf.function(step) if function else step
    for _ in range(4):
        assert all(values.shape == (0, 4) for values in run())
    # TensorFlow's Adam multiplies powers of its betas up in float32.
    np.testing.assert_allclose(rows_of(at_once, KEYS), rows_of(usual, KEYS), rtol=1e-4 if name == "v1" else 1e-7)
    assert [int(count) for count in updates.steps] == [4] * len(_parts(at_once))
    freqs, _ = _parts(at_once)[0].stamps([8] if partitioner is None else [0])
    assert freqs.numpy().tolist() == [4]


def test_optimizers_leave_the_variable_alone(make, rows_of):
    for optimizer in (ours.Adam(0.1), v1.train.AdamOptimizer(0.1), tfplugin.OptimizerWrapper(k3.Adam(0.1))):
        table, dense = make(name="t", initializer=1.0), tf.Variable(tf.ones([4]))
        tfplugin.apply_in_backward(table, ours.SGD(0.5))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1]) * dense)
        variables = [table, dense]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        assert rows_of(table, [1]).tolist() == [[0.5] * 4]
        assert table.slots().numpy() == b"[]"
        np.testing.assert_allclose(dense.numpy(), 0.9, rtol=1e-5)
        assert tfplugin.explain(optimizer).to_dict()["t:0"] == "in the backward pass: sgd"


@pytest.mark.parametrize("make_optimizer", [lambda: ours.Adam(0.1), lambda: v1.train.AdamOptimizer(0.1)])
def test_a_graphs_train_op_runs_the_update(session, partitioner, make_optimizer):
    table = v1.get_kv_variable("t", embedding_dim=4, partitioner=partitioner, initializer=1.0)
    dense = v1.get_variable("w", initializer=tf.ones([4]), use_resource=True)
    updates = tfplugin.apply_in_backward(table, ours.SGD(0.5))
    rows = tf.nn.embedding_lookup(table, tf.constant([1, 2, 2], tf.int64))
    step = make_optimizer().minimize(tf.reduce_sum(rows), var_list=[*_parts(table), dense])
    both = make_optimizer().minimize(tf.reduce_sum(rows * dense), var_list=[*_parts(table), dense])
    session.run(v1.global_variables_initializer())
    session.run(step)
    np.testing.assert_array_equal(session.run(table.sparse_read([1, 2]))[:, 0], [0.5, 0.0])
    session.run(both)
    np.testing.assert_array_equal(session.run(table.sparse_read([1, 2]))[:, 0], [0.0, -1.0])
    assert session.run(updates.steps) == [2] * len(_parts(table))


def test_pooled_lookups_and_lookups_of_many_tables(make, rows_of, partitioner):
    pooled, many = (make(name=n, dim=1, initializer=1.0, partitioner=partitioner) for n in ("a", "b"))
    for table in (pooled, many):
        tfplugin.apply_in_backward(table, ours.SGD(0.5))
    ids = tf.ragged.constant([[1, 2], [2]], dtype=tf.int64)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup_sparse(pooled, ids, None, combiner="sum"))
        loss += tf.reduce_sum(tfplugin.lookup_many([many], [tf.constant([1, 2, 2], tf.int64)])[0])
    gradients = tape.gradient(loss, [*_parts(pooled), *_parts(many)])
    assert all(g.values.shape == (0, 1) for g in gradients)
    for table in (pooled, many):
        assert rows_of(table, [1, 2])[:, 0].tolist() == [0.5, 0.0]


def test_two_lookups_in_a_pass_are_two_steps(make, rows_of):
    table = make(dim=1, initializer=1.0)
    updates = tfplugin.apply_in_backward(table, ours.Adagrad(1.0, initial_accumulator_value=0.0))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1])) + tf.reduce_sum(tf.nn.embedding_lookup(table, [1]))
    tape.gradient(loss, table)
    assert [int(count) for count in updates.steps] == [2]
    assert rows_of(table, [1], "Adagrad.accumulator").tolist() == [[2.0]]


def test_a_loop_that_knows_nothing_of_the_table(make, rows_of):
    """Keras's own: it asks for the gradients of its layers, in a function."""
    table = make(dim=2, initializer=1.0)
    updates = tfplugin.apply_in_backward(table, ours.SGD(0.5))

    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.head = tf.keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, ids):
            return self.head(tf.nn.embedding_lookup(table, ids))

    model = Model()
    model.compile(k3.SGD(0.1), "mse")
    model.fit(np.array([1, 2, 3, 1]), np.ones((4, 1)), batch_size=2, verbose=0)
    assert [int(count) for count in updates.steps] == [2]
    assert (rows_of(table, [1, 2, 3]) < 1).all()


def test_undo_gives_the_gradient_back(make, rows_of):
    table = make(dim=1, initializer=1.0)
    updates = tfplugin.apply_in_backward(table, ours.SGD(0.5))
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1]))
    updates.undo()
    gradient = tape.gradient(loss, table)
    assert gradient.values.numpy().tolist() == [[1.0]]
    assert rows_of(table, [1]).tolist() == [[1.0]]
    ours.SGD(0.5).apply_gradients([(gradient, table)])
    assert rows_of(table, [1]).tolist() == [[0.5]]
    tfplugin.apply_in_backward(table, ours.SGD(0.5))


def test_it_lasts_as_long_as_the_variable(make, rows_of):
    table = make(dim=1, initializer=1.0)
    tfplugin.apply_in_backward(table, ours.SGD(0.5))
    gc.collect()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1]))
    tape.gradient(loss, table)
    assert rows_of(table, [1]).tolist() == [[0.5]]


def test_counts_go_through_a_checkpoint(make, tmp_path):
    table = make(dim=1)
    updates = tfplugin.apply_in_backward(table, ours.Adam(0.5))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1]))
    tape.gradient(loss, table)
    path = tf.train.Checkpoint(table=table, updates=updates).save(str(tmp_path / "c"))
    table = make(dim=1)
    updates = tfplugin.apply_in_backward(table, ours.Adam(0.5))
    tf.train.Checkpoint(table=table, updates=updates).restore(path)
    assert [int(count) for count in updates.steps] == [1]


def test_what_cannot_be_applied_in_the_pass(make):
    table = make(name="t")
    for optimizer, message in (
        (k3.Adafactor(), "'t:0': no fused kernel for Adafactor"),
        (k3.Adam(clipnorm=1.0), "Adam has clipnorm"),
        (k3.Adam(loss_scale_factor=128.0), "Adam has loss_scale_factor"),
        (tfplugin.OptimizerWrapper(k3.Adam(), fused=False), "leave fused=False out"),
        (k3.LossScaleOptimizer(k3.Adam()), "loss-scaling"),
        (tfplugin.OptimizerWrapper(k3.LossScaleOptimizer(k3.Adam())), "loss-scaling"),
        (legacy.Nadam(), "schedules of tf_keras.optimizers.legacy"),
        ("adam", "str is not an optimizer"),
    ):
        with pytest.raises(ValueError, match=message):
            tfplugin.apply_in_backward(table, optimizer)
    with pytest.raises(ValueError, match="has a constraint"):
        tfplugin.apply_in_backward(make(name="c", constraint=lambda rows: rows), ours.SGD())
    with pytest.raises(TypeError, match="wants a key-value variable, got ResourceVariable"):
        tfplugin.apply_in_backward(tf.Variable(1.0), ours.SGD())
    tfplugin.apply_in_backward(table, ours.SGD())
    with pytest.raises(ValueError, match="undo"):
        tfplugin.apply_in_backward(table, ours.SGD())
