"""Chains with the variables of dynamic_embedding and sok, where they are key-value variables; where not, the error."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from chain_reference import folded, tables_in

import tfplugin
from kvtools.chain import newest_chain
from tfplugin import dynamic_embedding as de
from tfplugin import sok

v1 = tf.compat.v1


def same_as_a_full(checkpoint, folder, reference) -> bool:
    wanted = {table: rows for table, (rows, _) in tables_in(checkpoint.write(str(reference))).items()}
    return folded([str(member.prefix) for member in newest_chain(folder)]) == wanted


@pytest.mark.parametrize("devices", [["/CPU:0"], ["/CPU:0", "/CPU:0"]])
def test_dynamic_embedding_variables_are_in_a_chain(devices, tmp_path):
    def made():
        variable = de.Variable(tf.int64, tf.float32, dim=3, name="user", devices=devices)
        checkpoint = tf.train.Checkpoint(variable=variable)
        return variable, checkpoint, tfplugin.CheckpointManager(checkpoint, tmp_path / "chain", delta_every=0.0)

    variable, checkpoint, manager = made()
    variable.upsert(tf.range(10, dtype=tf.int64), tf.ones([10, 3]))
    manager.save()
    variable.upsert([3, 20], tf.zeros([2, 3]))
    variable.remove(tf.constant([5], tf.int64))
    assert manager.save().endswith("ckpt-2.delta")
    assert same_as_a_full(checkpoint, tmp_path / "chain", tmp_path / "reference")
    again, _, manager = made()
    manager.restore_or_initialize()
    keys, rows = again.export()
    held = dict(zip(keys.numpy().tolist(), rows.numpy()[:, 0].tolist(), strict=True))
    assert held == {**dict.fromkeys([0, 1, 2, 4, 6, 7, 8, 9], 1.0), 3: 0.0, 20: 0.0}


def test_dynamic_embedding_variables_of_a_saver_are_in_a_chain(tmp_path):
    def made():
        variable = de.get_variable("user", tf.int64, tf.float32, dim=3, devices=["/CPU:0", "/CPU:0"])
        keys, values = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float32, [None, 3])
        return variable, keys, values, variable.upsert(keys, values)

    with tf.Graph().as_default(), v1.Session() as session:
        variable, keys, values, upsert = made()
        manager = tfplugin.CheckpointManager(v1.train.Saver(), tmp_path, delta_every=0.0)
        session.run(v1.global_variables_initializer())
        for n in range(3):
            session.run(upsert, {keys: [n, n + 1], values: np.full([2, 3], n, np.float32)})
            manager.save()
    with tf.Graph().as_default(), v1.Session() as session:
        variable, *_ = made()
        manager = tfplugin.CheckpointManager(v1.train.Saver(), tmp_path)
        assert manager.restore_or_initialize().endswith("ckpt-3.delta")
        keys, rows = session.run(variable.export())
        assert dict(zip(keys.tolist(), rows[:, 0].tolist(), strict=True)) == {0: 0.0, 1: 1.0, 2: 2.0, 3: 2.0}


def test_a_partitioner_of_ones_own_is_refused_by_name(tmp_path):
    variable = de.Variable(
        tf.int64,
        tf.float32,
        dim=3,
        name="odd",
        devices=["/CPU:0"] * 2,
        partitioner=lambda keys, n: tf.cast(keys % n, tf.int32),
    )
    manager = tfplugin.CheckpointManager(tf.train.Checkpoint(variable=variable), tmp_path)
    with pytest.raises(ValueError, match="dynamic embedding variable 'odd' shares its keys out by another rule"):
        manager.save()


def test_a_saver_of_its_own_is_refused_by_name(tmp_path):
    creator = de.CuckooHashTableCreator(saver=de.FileSystemSaver())
    variable = de.Variable(tf.int64, tf.float32, dim=3, name="filed", kv_creator=creator)
    manager = tfplugin.CheckpointManager(tf.train.Checkpoint(variable=variable), tmp_path)
    with pytest.raises(ValueError, match="dynamic embedding variable 'filed' goes to files beside the checkpoint"):
        manager.save()
    with tf.Graph().as_default():
        de.get_variable("filed", tf.int64, tf.float32, dim=3, kv_creator=creator)
        with pytest.raises(ValueError, match=r"'filed.*' goes to files beside the checkpoint"):
            tfplugin.CheckpointManager(v1.train.Saver(), tmp_path)


def test_dynamic_variables_of_one_rank_are_in_a_chain(tmp_path):
    sok.init("single")
    variable = sok.DynamicVariable(3, "13", name="ranked")
    checkpoint = sok.Checkpoint(v=variable, static=sok.Variable(np.ones([4, 2], np.float32), name="static"))
    manager = tfplugin.CheckpointManager(checkpoint, tmp_path / "chain", delta_every=0.0)
    tf.nn.embedding_lookup(variable, tf.constant([1, 2], tf.int64))
    manager.save()
    sok.assign(variable, tf.constant([2, 9], tf.int64), tf.zeros([2, 3]))
    manager.save()
    assert same_as_a_full(checkpoint, tmp_path / "chain", tmp_path / "reference")
    expected = dict(zip(*(array.numpy().tolist() for array in sok.export(variable)), strict=True))

    # Its `size` is something else than that of the other variables.
    restored = sok.DynamicVariable(3, "13", name="restored")
    again = tfplugin.CheckpointManager(sok.Checkpoint(v=restored), tmp_path / "chain")
    again.restore_or_initialize()
    tables = sok.DynamicVariable(3, "13", name="tables")
    assert tfplugin.restore_tables(tmp_path / "chain", {tables: "v"}) == {"tables": 3}
    started = sok.DynamicVariable(3, "13", name="started")
    assert tfplugin.warm_start(tmp_path / "chain", {started: "ranked"}) == {"started": 3}
    for other in (restored, tables, started):
        assert dict(zip(*(array.numpy().tolist() for array in sok.export(other)), strict=True)) == expected
