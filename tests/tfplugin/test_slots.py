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
