"""Rows that a group penalty has zeroed: they read as zeros, are counted, survive a save, and exports leave them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from kvtools.clip import Clip, Criteria
from kvtools.clip_policy import Policy
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


#: class -> what its dense variables get
PLAIN = {
    ours.GroupAdam: ours.Adam,
    ours.GroupAMSGrad: ours.AMSGrad,
    ours.GroupAdaBelief: ours.AdaBelief,
    ours.GroupLamb: ours.Lamb,
    ours.GroupAdagrad: ours.Adagrad,
    ours.GroupMomentum: lambda rate: ours.SGD(rate, 0.9),
    ours.GroupFtrl: lambda rate: ours.Ftrl(rate, l1_regularization_strength=0.01, l2_regularization_strength=0.01),
}


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "slices"])
@pytest.mark.parametrize("cls", PLAIN, ids=lambda cls: cls.__name__)
def test_dense_variables_get_the_plain_optimizer(make, cls, sparse):
    lambdas = {f"{name}_regularization_strength": 0.01 for name in ("l1", "l2")}
    optimizer = cls(0.1, l21_regularization_strength=1e3, **lambdas)
    table = make(dim=4, initializer=1.0)
    moved, reference = (
        [tf.Variable(tf.reshape(tf.range(8.0), [2, 4]) / 8 + 0.1), tf.Variable(tf.ones([4]))] for _ in range(2)
    )
    for t in range(3):
        kernel, bias = tf.constant([[0.5, -0.1, 0.0, t], [1.0, 0.2, 0.3, 0.4]]), tf.constant([0.1, -t, 0.0, 1.0])
        kernel = tf.IndexedSlices(kernel[:1], tf.constant([1])) if sparse else kernel
        rows = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([7], tf.int64))
        optimizer.apply_gradients([(kernel, moved[0]), (bias, moved[1]), (rows, table)])
        if t == 0:
            plain = PLAIN[cls](0.1)
        plain.apply_gradients([(kernel, reference[0]), (bias, reference[1])])
    for got, expected in zip(moved, reference, strict=True):
        np.testing.assert_array_equal(got.numpy(), expected.numpy())
        assert set(optimizer.get_slot_names()) >= set(plain.get_slot_names())
        assert optimizer.get_slot(got, "z") is None
    assert table.zeroed([7]).numpy().all()
    rules = optimizer.__class__(0.1), PLAIN[cls](0.1)
    assert [o.rule_of(moved[0]) for o in rules] == [rules[1].rule()] * 2


def test_dense_rows_become_zero_where_that_is_asked_for():
    dense = tf.Variable(tf.ones([3, 4]) * 0.1)
    optimizer = ours.GroupAdam(0.01, l21_regularization_strength=1.0, regularize_dense=True)
    for _ in range(50):
        optimizer.apply_gradients([(tf.constant([[0.0] * 4, [-1.0] * 4, [0.0] * 4]), dense)])
    assert (dense.numpy() != 0).any(1).tolist() == [False, True, False]
    assert tfplugin.explain(optimizer, [dense]).to_dict() == {dense.name: "fused: group_adam"}


def test_rows_with_a_constraint_are_penalized(make):
    table = make(dim=4, initializer=0.1, constraint=tf.identity)
    optimizer = ours.GroupAdam(0.01, l21_regularization_strength=1e3)
    optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([1, 4]), tf.constant([7], tf.int64)), table)])
    assert not table.sparse_read([7]).numpy().any()


def test_marks_survive_a_checkpoint_and_exports_leave_the_rows_out(make, optimizer, tmp_path):
    table = make(name="t")
    _train(table, optimizer)
    path = tf.train.Checkpoint(table=table).save(str(tmp_path / "c"))
    restored = make(name="t")
    tf.train.Checkpoint(table=restored).restore(path)
    np.testing.assert_array_equal(restored.zeroed(KEYS).numpy(), ~USEFUL)
    assert int(restored.zeroed_rows()) == (~USEFUL).sum()
    (export,) = export_saved_model(
        open_checkpoint(Path(path)), tmp_path / "served", policy=Policy.of(Criteria(norms=(Clip("abs", 1e-20),)))
    )
    assert (export.rows, export.cut) == (USEFUL.sum(), (~USEFUL).sum())


@pytest.mark.parametrize("dim", [1, 3, 8])
def test_a_penalty_on_the_norm_of_rows_is_l21_by_the_root_of_the_width(make, dim):
    """The rule of engines whose Ftrl takes its l1 for that of a row, not of an element."""
    rate, l1, l2, steps = 0.1, 2.0, 0.05, 6
    gradients = np.random.default_rng(dim).normal(size=(steps, 5, dim)) * np.array([0.01, 0.3, 1, 3, 9])[:, None]
    value, accum, linear = np.ones([5, dim]), np.full([5, dim], 0.1), np.zeros([5, dim])
    table = make(dim, initializer=1.0)
    optimizer = ours.GroupFtrl(rate, l21_regularization_strength=l1 / dim**0.5, l2_regularization_strength=l2)
    for gradient in gradients:
        new = accum + gradient**2
        linear += gradient - (np.sqrt(new) - np.sqrt(accum)) / rate * value
        accum = new
        norm = np.linalg.norm(linear, axis=1, keepdims=True)
        value = -linear * np.maximum(1 - l1 / norm, 0) / (np.sqrt(accum) / rate + 2 * l2)
        optimizer.apply_gradients([(tf.IndexedSlices(tf.constant(gradient, tf.float32), tf.range(5)), table)])
    assert not value[0].any() and value[4].all()
    np.testing.assert_allclose(table.sparse_read(np.arange(5)).numpy(), value, rtol=1e-4, atol=1e-6)
