"""Optimizer slots lie in the rows: they come with an optimizer's first step and go when the optimizer does."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

ROWS, DIM = 1_000_000, 4
train = tf.compat.v1.train


def _step(optimizer, table, keys):
    optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([len(keys), DIM]), tf.constant(keys)), table)])


def test_a_million_rows_change_their_optimizer(make, rows_of):
    table = make(dim=DIM, initializer=0.5)
    keys = np.arange(ROWS)
    table.upsert(keys, np.repeat(keys[:, None] % 1000, DIM, 1).astype(np.float32))
    assert table.memory().numpy()[:2].tolist() == [ROWS, ROWS * DIM * 4]
    assert table.slots().numpy() == b"[]"

    adam = train.AdamOptimizer(0.0)
    _step(adam, table, keys[:10])
    assert [slot["name"] for slot in json.loads(table.slots().numpy())] == ["Adam.m", "Adam.v"]
    assert table.memory().numpy()[:2].tolist() == [ROWS, 3 * ROWS * DIM * 4]
    slot_keys, moments = table.export("Adam.m")
    touched = np.asarray(slot_keys) < 10
    np.testing.assert_allclose(np.asarray(moments)[touched], 0.1, rtol=1e-6)
    assert not np.asarray(moments)[~touched].any()

    del adam
    gc.collect()
    ftrl = train.FtrlOptimizer(0.1, initial_accumulator_value=0.25)
    _step(ftrl, table, [ROWS + 5])
    assert [slot["name"] for slot in json.loads(table.slots().numpy())] == ["Ftrl.accum", "Ftrl.linear"]
    assert table.memory().numpy()[:2].tolist() == [ROWS + 1, 3 * (ROWS + 1) * DIM * 4]
    slot_keys, accumulators = table.export("Ftrl.accum")
    old = np.asarray(slot_keys) < ROWS
    np.testing.assert_array_equal(np.asarray(accumulators)[old], 0.25)
    np.testing.assert_array_equal(np.asarray(accumulators)[~old], 1.25)
    held, rows = table.export()
    held, rows = np.asarray(held), np.asarray(rows)
    np.testing.assert_array_equal(rows[held < ROWS], np.repeat(held[held < ROWS, None] % 1000, DIM, 1))


def test_slots_of_live_optimizers_stay(make):
    table = make(dim=DIM)
    first, second = train.MomentumOptimizer(0.1, 0.9), train.AdagradOptimizer(0.1)
    _step(first, table, [1])
    _step(second, table, [2])
    _step(first, table, [1])
    assert [slot["name"] for slot in json.loads(table.slots().numpy())] == ["Momentum.momentum", "Adagrad.accumulator"]


def test_an_optimizer_object_that_is_let_go_lets_its_slots_go_without_the_collector(make):
    table = make(dim=DIM)
    gc.disable()
    try:
        _step(train.AdamOptimizer(0.1), table, [1])
        _step(train.GradientDescentOptimizer(0.1), table, [1])
    finally:
        gc.enable()
    assert table.slots().numpy() == b"[]"


def test_new_rows_have_initial_slots_and_removed_rows_start_anew(make, rows_of):
    table = make(dim=DIM)
    optimizer = train.AdagradOptimizer(0.1, initial_accumulator_value=0.5)
    _step(optimizer, table, [1])
    tf.nn.embedding_lookup(table, [2])
    table.upsert([3], np.ones([1, DIM]))
    assert rows_of(table, [1, 2, 3], "Adagrad.accumulator")[:, 0].tolist() == [1.5, 0.5, 0.5]
    table.remove([1])
    _step(optimizer, table, [1])
    assert rows_of(table, [1], "Adagrad.accumulator")[0, 0] == 1.5


def test_a_slot_that_is_not_there_is_named(make):
    table = make(dim=DIM)
    optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adagrad())
    _step(optimizer, table, [1])
    with pytest.raises(tf.errors.NotFoundError, match=r"'v' has no slot 'Adam.m' yet; it has \[Adagrad.accumulator\]"):
        table.export("Adam.m")


@pytest.mark.parametrize("partitioner", [None, tf.compat.v1.fixed_size_partitioner(2)], ids=["whole", "parts"])
def test_slots_that_are_reset_start_anew_and_nothing_else_does(partitioner):
    table = tf.get_kv_variable("reset", embedding_dim=DIM, partitioner=partitioner)
    fresh = tf.get_kv_variable("fresh", embedding_dim=DIM)
    parts = list(table) if partitioner else [table]
    optimizer = tfplugin.OptimizerWrapper(train.AdagradOptimizer(0.1))

    @tf.function
    def step(variables, keys):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.nn.embedding_lookup(v, keys) ** 2) for v in variables])
        mine = [part for v in variables for part in (parts if v is table else [v])]
        optimizer.apply_gradients(zip(tape.gradient(loss, mine), mine, strict=True))

    for _ in range(3):
        step([table], [1, 2, 3])
    fresh.upsert([1, 2, 3], table.sparse_read([1, 2, 3]))
    stamps = table.stamps([1, 2, 3])
    table.reset_slots()
    assert [part.slots().numpy() for part in parts] == [b"[]"] * len(parts)
    assert (table.stamps([1, 2, 3])[0] == stamps[0]).numpy().all()
    step([table, fresh], [1, 2])
    np.testing.assert_array_equal(table.sparse_read([1, 2, 3]), fresh.sparse_read([1, 2, 3]))
    assert table.export("Adagrad.accumulator")[1].shape == [3, DIM]


def test_a_graph_resets_slots_as_often_as_it_is_run():
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        table = tf.get_kv_variable("reset", embedding_dim=1, initializer=0.0)
        dense = v1.get_variable("dense", initializer=[0.0], use_resource=True)
        reset = table.reset_slots()  # before there are any, too
        optimizer = train.AdagradOptimizer(0.1)
        step = optimizer.minimize(tf.reduce_sum(tf.nn.embedding_lookup(table, [1])) + tf.reduce_sum(dense))
        anew = v1.variables_initializer(optimizer.variables())
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            session.run([reset, anew])
            for _ in range(2):
                session.run(step)
            np.testing.assert_allclose(session.run(table.sparse_read([1]))[0], session.run(dense), rtol=1e-6)


def test_marks_of_rows_outlive_a_reset_of_slots():
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        table = tf.get_kv_variable("marked", embedding_dim=2, initializer=0.001)
        optimizer = tfplugin.optimizers.GroupAdagrad(0.3, l21_regularization_strength=10.0)
        step, reset = optimizer.minimize(tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2]))), table.reset_slots()
        session.run(v1.global_variables_initializer())
        session.run(step)
        session.run(reset)
        assert session.run(table.zeroed([1, 2])).all()
