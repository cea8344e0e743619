"""Chains of Savers in sessions, as a hook of monitored sessions and as a callback of Keras."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from chain_reference import folded, tables_in
from tasks import Tasks

import tfplugin
from kvtools.chain import members, newest_chain, record_of

v1 = tf.compat.v1


def build(parts: int):
    table = tf.get_kv_variable("user", embedding_dim=4, partitioner=v1.fixed_size_partitioner(parts))
    dense = v1.get_variable("w", [4, 1], initializer=v1.ones_initializer(), use_resource=False)
    step = v1.train.get_or_create_global_step()
    ids = v1.placeholder_with_default(tf.random.uniform([8], 0, 50, tf.int64), [None])
    loss = tf.reduce_mean((tf.nn.embedding_lookup(table, ids) @ dense - 1.0) ** 2)
    return table, ids, v1.train.AdamOptimizer(0.1).minimize(loss, global_step=step)


def names(folder):
    return [member.prefix.name for member in members(folder)]


def test_a_saver_saves_and_restores_a_chain_in_sessions(tmp_path):
    with tf.Graph().as_default(), v1.Session() as session:
        table, ids, train = build(3)
        saver = v1.train.Saver()
        manager = tfplugin.CheckpointManager(saver, tmp_path / "chain", delta_every=0.0)
        remove, initialize = table.remove([1, 2]), v1.global_variables_initializer()
        session.graph.finalize()
        session.run(initialize)
        for n in range(4):
            session.run(train, {ids: [n, n + 1, n + 2, 100 + n]})
            manager.save(session=session)
        session.run(remove)
        path = manager.save()
        reference = saver.save(session, str(tmp_path / "reference"))
    assert names(tmp_path / "chain") == ["ckpt-1", *(f"ckpt-{n}.delta" for n in range(2, 6))]
    chain = newest_chain(tmp_path / "chain")
    assert path == str(chain[-1].prefix) and record_of(chain[-1]).step == 4
    wanted = {name: rows for name, (rows, _) in tables_in(reference).items()}
    assert folded([str(member.prefix) for member in chain]) == wanted
    with tf.Graph().as_default(), v1.Session() as session:
        table, ids, train = build(2)
        saver = v1.train.Saver()
        manager = tfplugin.CheckpointManager(saver, tmp_path / "chain", delta_every=0.0)
        assert manager.restore_or_initialize(session) == path
        again = saver.save(session, str(tmp_path / "again"))
        session.run(train, {ids: [7]})
        assert manager.save() == str(tmp_path / "chain/ckpt-6.delta")
    assert {name: rows for name, (rows, _) in tables_in(again).items()} == wanted
    for name in ("w", "w/Adam", "global_step", "beta1_power"):
        np.testing.assert_array_equal(tf.train.load_variable(again, name), tf.train.load_variable(reference, name))


def test_the_first_step_does_not_hold_up_the_full_that_it_waits_for(tmp_path, monkeypatch):
    """It makes slots, each table's on a thread of the session, which wait until the rows are written."""
    one_thread = v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
    with tf.Graph().as_default(), v1.Session(config=one_thread) as session:
        _, _, train = build(2)
        manager = tfplugin.CheckpointManager(v1.train.Saver(), tmp_path / "chain", delta_every=0.0)
        stepping, write = threading.Event(), manager._write
        monkeypatch.setattr(manager, "_write", lambda *given: (stepping.wait(60), time.sleep(0.5), write(*given))[-1])
        session.run(v1.global_variables_initializer())
        manager.save_if_due()
        begun = time.monotonic()
        stepping.set()
        session.run(train)
        assert time.monotonic() - begun < 30  # after 60 seconds a step would give the full up
        manager.sync()
    assert names(tmp_path / "chain") == ["ckpt-1"]


ONE_THREAD = """
import json, sys, threading, time, tensorflow as tf, tfplugin
v1 = tf.compat.v1
# Its session is another process's, as it were: all that it runs comes on the threads of the server.
server = v1.train.Server.create_local_server(config=v1.ConfigProto(inter_op_parallelism_threads=1))
with tf.Graph().as_default(), v1.Session(server.target) as session:
    table = tf.get_kv_variable("user", embedding_dim=4, partitioner=v1.fixed_size_partitioner(2))
    rows = tf.nn.embedding_lookup(table, tf.range(100, dtype=tf.int64))
    optimizer = v1.train.AdamOptimizer(0.1)
    train = optimizer.minimize(tf.reduce_sum(rows**2))
    manager = tfplugin.CheckpointManager(v1.train.Saver(), sys.argv[1], delta_every=0.0)
    stepping, write = threading.Event(), manager._write
    manager._write = lambda *given: (stepping.wait(60), time.sleep(0.5), write(*given))[-1]
    session.run(v1.global_variables_initializer())
    session.run(rows)
    manager.save_if_due()
    begun = time.monotonic()
    stepping.set()
    session.run(train)
    took = time.monotonic() - begun
    manager.sync()
    manager.save()
print(json.dumps({"the step took": took}))
"""


def test_nor_where_a_server_has_one_thread(tmp_path):
    with Tasks(tmp_path) as tasks:
        said = tasks.start(ONE_THREAD, str(tmp_path / "chain")).result()
    assert said["the step took"] < 30
    assert names(tmp_path / "chain") == ["ckpt-1", "ckpt-2"]


def test_a_plain_saver_refuses_an_increment(tmp_path):
    with tf.Graph().as_default(), v1.Session() as session:
        build(1)
        saver = v1.train.Saver()
        manager = tfplugin.CheckpointManager(saver, tmp_path, delta_every=0.0)
        session.run(v1.global_variables_initializer())
        manager.save()
        path = manager.save()
        with pytest.raises(tf.errors.OpError, match=r"tfplugin\.CheckpointManager"):
            saver.restore(session, path)


def test_a_saver_needs_a_session(tmp_path):
    with tf.Graph().as_default():
        build(1)
        manager = tfplugin.CheckpointManager(v1.train.Saver(), tmp_path)
        with pytest.raises(ValueError, match="needs a session"):
            manager.save()
        with pytest.raises(ValueError, match=r"give it a tf\.compat\.v1\.train\.Saver"):
            tfplugin.CheckpointManager(tf.train.Checkpoint(), tmp_path).save()


def test_a_hook_restores_saves_between_steps_and_at_the_end(tmp_path):
    def train(steps: int) -> tuple[int, int]:
        with tf.Graph().as_default():
            table, _, train = build(2)
            size = table.size()
            manager = tfplugin.CheckpointManager(v1.train.Saver(), tmp_path, delta_every=0.0)
            with v1.train.MonitoredSession(hooks=[manager.hook()]) as session:
                before = session.run_step_fn(lambda step_context: step_context.session.run(size))
                for _ in range(steps):
                    session.run(train)
                return before, session.run_step_fn(lambda step_context: step_context.session.run(size))

    first = train(5)
    assert first[0] == 0 and first[1] > 0
    assert record_of(members(tmp_path)[-1]).step == 5
    again = train(3)
    assert again[0] == first[1]
    assert record_of(members(tmp_path)[-1]).step == 8
    assert {member.kind for member in newest_chain(tmp_path)} == {"full", "delta"}


@pytest.mark.parametrize("keras_name", ["keras", "tf_keras"])
def test_a_callback_of_keras_saves_between_batches_and_at_the_end(keras_name, tmp_path):
    keras = pytest.importorskip(keras_name)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = tf.get_kv_variable("user", embedding_dim=4)
            self.top = keras.layers.Dense(1)

        def call(self, ids):
            return self.top(tf.nn.embedding_lookup(self.table, ids))

    ids = np.arange(64, dtype=np.int64)

    def made():
        model = Model()
        updates = tfplugin.apply_in_backward(model.table, keras.optimizers.Adam(0.1))
        model.compile(keras.optimizers.Adam(0.1), "mse")
        checkpoint = tf.train.Checkpoint(model=model, updates=updates)
        manager = tfplugin.CheckpointManager(checkpoint, tmp_path, delta_every=0.0)
        return model, manager

    model, manager = made()
    model.fit(ids, np.ones([64, 1]), batch_size=8, verbose=0, callbacks=[manager.callback(keras)])
    chain = newest_chain(tmp_path)
    assert len(chain) > 1 and record_of(chain[-1]).step == 8
    again, manager = made()
    again.predict(ids, verbose=0)
    manager.restore_or_initialize()
    np.testing.assert_array_equal(again.predict(ids, verbose=0), model.predict(ids, verbose=0))
