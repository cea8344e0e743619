"""Rows that a group penalty has zeroed: they read as zeros, are counted, survive a save, and exports leave them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from kvtools.clip import Clip
from kvtools.dialects.detect import open_checkpoint
from kvtools.export import export_saved_model

ours = tfplugin.optimizers
KEYS = np.arange(-20, 20)
USEFUL = KEYS % 4 == 0


def _train(table, optimizer, steps=60):
    """Useful keys are pulled to 1, the gradients of others are noise."""
    rng = np.random.default_rng(0)
    parts = list(table) if isinstance(table, tfplugin.PartitionedKvVariable) else [table]
    for _ in range(steps):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, KEYS)
            noise = tf.constant(rng.normal(size=(len(KEYS), 4)) * 0.002, tf.float32)
            loss = tf.reduce_sum(tf.where(USEFUL[:, None], 0.5 * (rows - 1.0) ** 2, rows * noise))
        optimizer.apply_gradients(zip(tape.gradient(loss, parts), parts, strict=True))


@pytest.fixture
def optimizer():
    return ours.GroupAdagrad(0.3, l21_regularization_strength=0.1)


def test_rows_without_use_become_zero(make, partitioner, optimizer):
    table = make(name="t", partitioner=partitioner)
    _train(table, optimizer)
    zeroed = table.zeroed(KEYS).numpy()
    np.testing.assert_array_equal(zeroed, ~USEFUL)
    assert int(table.zeroed_rows()) == (~USEFUL).sum()
    rows = table.sparse_read(KEYS, training=False).numpy()
    assert not rows[zeroed].any()
    assert (np.abs(rows[USEFUL] - 1) < 0.3).all()
    assert not table.zeroed([404]).numpy().any()


def test_a_zeroed_row_comes_back_when_its_gradient_says_so(make, optimizer):
    table = make(name="t")
    _train(table, optimizer)
    key = KEYS[~USEFUL][0]
    for _ in range(20):
        gradient = tf.IndexedSlices(tf.fill([1, 4], -1.0), tf.constant([key]))
        optimizer.apply_gradients([(gradient, table)])
    assert not bool(table.zeroed([key])[0])
    assert (table.sparse_read([key]).numpy() > 0).all()


def test_dense_rows_become_zero_as_well():
    dense = tf.Variable(tf.ones([3, 4]) * 0.1)
    optimizer = ours.GroupAdam(0.01, l21_regularization_strength=1.0)
    for _ in range(50):
        optimizer.apply_gradients([(tf.constant([[0.0] * 4, [-1.0] * 4, [0.0] * 4]), dense)])
    assert (dense.numpy() != 0).any(1).tolist() == [False, True, False]


def test_marks_survive_a_checkpoint_and_exports_leave_the_rows_out(make, optimizer, tmp_path):
    table = make(name="t")
    _train(table, optimizer)
    path = tf.train.Checkpoint(table=table).save(str(tmp_path / "c"))
    restored = make(name="t")
    tf.train.Checkpoint(table=restored).restore(path)
    np.testing.assert_array_equal(restored.zeroed(KEYS).numpy(), ~USEFUL)
    assert int(restored.zeroed_rows()) == (~USEFUL).sum()
    (export,) = export_saved_model(open_checkpoint(Path(path)), tmp_path / "served", clip=Clip("abs", 1e-20))
    assert (export.rows, export.cut) == (USEFUL.sum(), (~USEFUL).sum())
