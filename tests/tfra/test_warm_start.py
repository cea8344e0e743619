"""`warm_start` and `WarmStartHook`: rows from the checkpoint of another model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfplugin import dynamic_embedding as de

v1 = tf.compat.v1
TFRA = Path(__file__).parents[1] / "data" / "tfra"
KEYS = np.array([0, -1, 7, 5, 12])
ROWS = np.random.default_rng(0).normal(size=(len(KEYS), 2)).astype(np.float32)


def by_key(exported):
    keys, rows = (np.asarray(x) for x in exported)
    return {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}


EXPECTED = by_key((KEYS, ROWS))


class Model:
    def __init__(self, *names, devices=1):
        self.tables = [de.get_variable(name, dim=2, devices=["/CPU:0"] * devices) for name in names]
        rows = [de.embedding_lookup(v, tf.constant(KEYS[:2]), name=f"x{i}") for i, v in enumerate(self.tables)]
        self.optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
        self.step = self.optimizer.minimize(tf.add_n([tf.reduce_sum(r) for r in rows]))


@pytest.fixture
def saved(tmp_path):
    with tf.Graph().as_default(), v1.Session() as session:
        model = Model("a", "b/c")
        saver = v1.train.Saver()
        session.run(v1.global_variables_initializer())
        session.run([v.upsert(KEYS, ROWS) for v in model.tables])
        session.run(model.step)
        session.run([v.upsert(KEYS, ROWS) for v in model.tables])
        saver.save(session, str(tmp_path / "m"), global_step=3)
    return str(tmp_path)


@pytest.mark.parametrize("devices", [1, 3])
def test_all_variables_start_from_the_latest_checkpoint_with_fresh_slots(saved, devices):
    with tf.Graph().as_default(), v1.Session() as session:
        model = Model("a", "b/c", devices=devices)
        start = de.warm_start(saved)
        session.run(v1.global_variables_initializer())
        session.run(model.tables[0].upsert([99], [[1.0, 2.0]]))
        session.run(start)
        for v in model.tables:
            assert by_key(session.run(v.export())) == EXPECTED
            assert all(not session.run(slot.lookup(KEYS)).any() for slot in v.get_slot_variables(model.optimizer))
        session.run(model.step)
        np.testing.assert_allclose(session.run(model.tables[0].lookup(KEYS[:2])), ROWS[:2] - 0.1, rtol=1e-5)


def test_which_variables_and_under_which_names(saved):
    path = f"{saved}/m-3"

    def started(*args):
        with tf.Graph().as_default(), v1.Session() as session:
            model = Model("a", "other")
            start = de.warm_start(path, *[arg(model) if callable(arg) else arg for arg in args])
            session.run(v1.global_variables_initializer())
            session.run(start)
            return [by_key(session.run(v.export())) for v in model.tables]

    assert started("a") == [EXPECTED, {}]
    assert started(["a", "oth.*"], {"other": "b/c"}) == [EXPECTED, EXPECTED]
    assert started(lambda model: model.tables[1:], {"other": "a"}) == [{}, EXPECTED]
    with pytest.raises(ValueError, match="must be a regular expression, a list of them or a list of dynamic"):
        de.warm_start(path, 5)
    with pytest.raises(ValueError, match="has no checkpoint"):
        de.warm_start(str(TFRA))


def test_a_checkpoint_of_tfra_starts_a_variable_in_eager_mode():
    v = de.Variable(dim=8, name="mine", devices=["/CPU:0"] * 2)
    de.warm_start(str(TFRA / "v1_adam"), [v], {"mine": "tower/ad_emb"})
    expected = np.load(TFRA / "expected_v1_adam.npz")
    assert by_key(v.export()) == by_key((expected["keys"], expected["values"]))


def test_a_hook_starts_when_the_session_is_made(saved):
    with tf.Graph().as_default():
        model = Model("a")
        rows = model.tables[0].lookup(KEYS)
        with v1.train.MonitoredSession(hooks=[de.WarmStartHook(saved, ".*")]) as session:
            np.testing.assert_array_equal(session.run(rows), ROWS)
