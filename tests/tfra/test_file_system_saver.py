"""`FileSystemSaver`: tables in files beside the checkpoints of `tf.compat.v1.train.Saver` and `tf.train.Checkpoint`."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from trained_graph import KEYS, NAME, PARTITIONERS, ROWS, by_key
from trained_graph import Graph as ModelGraph

import kvtools
from tfplugin import dynamic_embedding as de

v1 = tf.compat.v1
TFRA = Path(__file__).parents[1] / "data" / "tfra" / "filesystem"


def creator(*args, **kwargs):
    return de.CuckooHashTableCreator(saver=de.FileSystemSaver(*args, **kwargs))


def Graph(devices, saver=None, **kwargs):
    return ModelGraph(devices, kv_creator=saver or creator(), **kwargs)


def table(devices, name=NAME, saver=None, **kwargs):
    return de.Variable(
        dim=2,
        name=name,
        devices=["/CPU:0"] * devices,
        kv_creator=saver or creator(),
        restrict_policy=de.FrequencyRestrictPolicy,
        **kwargs,
    )


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 3), (3, 2)])
def test_a_saver_writes_files_and_restores_them(tmp_path, before, after, partitioner):
    with tf.Graph().as_default():
        saved = Graph(before, **partitioner)
        saved.session.run(saved.table.upsert(KEYS, ROWS))
        for _ in range(3):
            saved.session.run(saved.step)
        path = saved.saver.save(saved.session, str(tmp_path / "m"), global_step=20)
        expected = saved.state()
        saved.session.run(saved.step)
        later = saved.state()
        saved.saver.save(saved.session, str(tmp_path / "m"), global_step=21)
    folder = tmp_path / "TFRADynamicEmbedding-20"
    bases = {p.name.partition("_mht_")[0] for p in folder.iterdir() if p.name.endswith("-keys")}
    assert bases == {"scope_emb", "scope_emb_Adam_m", "scope_emb_Adam_v", "status_scope_emb_frequency"}
    assert (folder / f"scope_emb_Adam_v_mht_{before}of{before}_rank0_size1-values").exists()
    names = [name for name, _ in tf.train.list_variables(path)]
    assert not any("values" in name or "kvmeta" in name for name in names) and "dense" in names
    assert f"{NAME}-prev_global_shard_num" in names
    (read,) = [t for t in kvtools.open(path).tables.values() if t.schema.name == NAME]
    assert {slot.name for slot in read.schema.slots} == {"Adam.m", "Adam.v"}
    with tf.Graph().as_default():
        restored = Graph(after, **partitioner)
        restored.session.run(restored.table.upsert([99], [[1.0, 2.0]]))
        restored.saver.restore(restored.session, path)
        assert restored.state() == expected
        restored.session.run(restored.step)
        assert restored.state() == later


def trained(v, optimizer, steps):
    shadow = v.get_trainable_by_name("x")
    for _ in range(steps):
        optimizer.minimize(
            lambda: tf.reduce_sum(de.embedding_lookup(v, tf.constant(KEYS[:4]), name="x")), var_list=[shadow]
        )


def state(v, optimizer):
    slots = {slot.name: by_key(slot.export()) for slot in v.get_slot_variables(optimizer)}
    return by_key(v.export()), slots, by_key(v.restrict_policy.status.export())


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 2)])
def test_a_checkpoint_writes_files_and_restores_them_also_before_the_first_step(tmp_path, before, after, partitioner):
    def made(devices):
        v = table(devices, **partitioner)
        optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1))
        return v, optimizer, tf.train.Checkpoint(model=tf.train.Checkpoint(v=v), optimizer=optimizer)

    v, optimizer, checkpoint = made(before)
    v.upsert(KEYS, ROWS)
    trained(v, optimizer, 3)
    path = checkpoint.save(str(tmp_path / "c"))
    expected = state(v, optimizer)
    trained(v, optimizer, 1)
    later = state(v, optimizer)
    checkpoint.save(str(tmp_path / "c"))
    assert (tmp_path / "TFRADynamicEmbedding-1" / f"scope_emb_mht_1of{before}_rank0_size1-keys").exists()
    assert not any("kvmeta" in name for name, _ in tf.train.list_variables(path))
    assert NAME in kvtools.open(path).tables

    v, optimizer, checkpoint = made(after)
    v.upsert([99], [[1.0, 2.0]])
    checkpoint.restore(path)
    assert by_key(v.export()) == expected[0] and by_key(v.restrict_policy.status.export()) == expected[2]
    trained(v, optimizer, 1)
    assert state(v, optimizer) == later


def test_folders_go_after_their_checkpoints_also_those_of_savers_and_no_others(tmp_path):
    (tmp_path / "TFRADynamicEmbedding-77").mkdir()
    (tmp_path / "TFRADynamicEmbedding-77" / "emb_mht_1of1_rank0_size1-keys").write_bytes(b"of TFRA")
    v = de.Variable(dim=2, name="emb", kv_creator=creator())
    v.upsert(KEYS, ROWS)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(v=v), str(tmp_path), max_to_keep=2)
    for _ in range(5):
        path = manager.save()
    folders = {path.name for path in tmp_path.glob("TFRADynamicEmbedding*")}
    assert folders == {f"TFRADynamicEmbedding-{step}" for step in (3, 4, 5, 77)}
    v.clear()
    tf.train.Checkpoint(v=v).restore(path)
    assert by_key(v.export()) == by_key((KEYS, ROWS))
    with tf.Graph().as_default(), v1.Session() as session:
        w = de.Variable(dim=2, name="emb", kv_creator=creator())
        session.run(w.upsert(KEYS, ROWS))
        saver = v1.train.Saver([w], max_to_keep=1)
        for step in range(4):
            saver.save(session, str(tmp_path / "g" / "m"), global_step=step)
    assert {path.name for path in (tmp_path / "g").glob("TFRA*")} == {f"TFRADynamicEmbedding-{step}" for step in (2, 3)}


def test_a_checkpoint_that_holds_the_rows_restores_into_a_variable_with_a_saver_and_the_other_way_round(tmp_path):
    for first, second in ((de.CuckooHashTableCreator(), creator()), (creator(), de.CuckooHashTableCreator())):
        v = table(2, saver=first)
        v.upsert(KEYS, ROWS)
        path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
        w = table(3, saver=second)
        tf.train.Checkpoint(v=w).restore(path)
        assert by_key(w.export()) == by_key((KEYS, ROWS))
        shutil.rmtree(tmp_path)


def test_files_of_tfra_beside_a_checkpoint_restore():
    v = de.Variable(dim=8, name="fs_emb", devices=["/CPU:0"] * 3, kv_creator=creator())
    w = de.Variable(dim=8, name="fs_emb", devices=["/CPU:0"] * 2)
    w.load_from_file_system(str(TFRA / "TFRADynamicEmbedding"))
    tf.train.Checkpoint(m=tf.train.Checkpoint(v=v)).restore(str(TFRA / "ckpt"))
    assert by_key(v.export()) == by_key(w.export()) and int(v.size()) > 10


@pytest.mark.parametrize("processes", [2, 3])
def test_each_process_saves_its_files_and_any_number_restores(tmp_path, processes):
    for rank in range(2):
        v = table(2, saver=creator(2, rank, str(tmp_path / "files")))
        own = KEYS % 4 // 2 == rank  # noqa: SIM300
        v.upsert(KEYS[own], ROWS[own])
        path = tf.train.Checkpoint(v=v).save(str(tmp_path / f"{rank}" / "c"))
    assert len(list((tmp_path / "files").glob("scope_emb_mht_*"))) == 8
    found = {}
    for rank in range(processes):
        v = table(2, saver=creator(processes, rank, str(tmp_path / "files")))
        tf.train.Checkpoint(v=v).restore(path)
        got = by_key(v.export())
        assert set(got) == set(KEYS[KEYS % (2 * processes) // 2 == rank].tolist())
        found |= got
    assert found == by_key((KEYS, ROWS))


def test_a_save_removes_files_of_other_numbers_of_devices_and_no_others(tmp_path):
    for devices, name in ((3, NAME), (2, NAME), (1, "scope/emb_2")):
        v = table(devices, name)
        v.upsert(KEYS, ROWS)
        path = tf.train.Checkpoint(v=v).write(str(tmp_path / "c"))
    names = sorted(p.name for p in (tmp_path / "TFRADynamicEmbedding").glob("scope_emb*-keys"))
    assert names == [
        "scope_emb_2_mht_1of1_rank0_size1-keys",
        "scope_emb_mht_1of2_rank0_size1-keys",
        "scope_emb_mht_2of2_rank0_size1-keys",
    ]
    assert path == str(tmp_path / "c")


def test_restoring_refuses_files_that_are_cut_off_gone_or_of_other_dtypes(tmp_path):
    v = table(1)
    v.upsert(KEYS, ROWS)
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    values = tmp_path / "TFRADynamicEmbedding-1" / "scope_emb_mht_1of1_rank0_size1-values"
    w = de.Variable(dim=3, name=NAME, kv_creator=creator())
    with pytest.raises(
        ValueError, match=r"int64 keys and rows of float32\[2\], the variable int64 keys and float32\[3\]"
    ):
        tf.train.Checkpoint(v=w).restore(path)
    values.write_bytes(values.read_bytes()[:-3])
    with pytest.raises(ValueError, match="has 53 bytes, where the 7 keys"):
        tf.train.Checkpoint(v=table(1)).restore(path)
    values.unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no file .*scope_emb_mht_1of1_rank0_size1-values"):
        tf.train.Checkpoint(v=table(1)).restore(path)


def test_other_dtypes_and_empty_variables_go_through_files(tmp_path):
    v = [
        de.Variable(tf.int32, tf.float16, dim=3, name="a", kv_creator=creator()),
        de.Variable(tf.int64, tf.bfloat16, dim=2, name="b", kv_creator=creator()),
        de.Variable(tf.int64, tf.float32, dim=5, name="c", kv_creator=creator()),
    ]
    v[0].upsert(tf.constant([1, -2]), tf.ones([2, 3], tf.float16))
    v[1].upsert(tf.constant([5], tf.int64), tf.ones([1, 2], tf.bfloat16))
    expected = [by_key(x.export()) for x in v]
    checkpoint = tf.train.Checkpoint(v=v)
    path = checkpoint.save(str(tmp_path / "c"))
    for x in v:
        x.clear()
    checkpoint.restore(path)
    assert [by_key(x.export()) for x in v] == expected


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
@pytest.mark.parametrize("devices", [1, 3])
def test_a_saved_model_holds_the_rows_itself(tmp_path, devices, partitioner):
    model = tf.Module()
    model.v = table(devices, **partitioner)
    model.serve = tf.function(lambda ids: model.v.lookup(ids), input_signature=[tf.TensorSpec([None], tf.int64)])
    model.v.upsert(KEYS, ROWS)
    tf.saved_model.save(model, str(tmp_path / "model"), signatures=model.serve)
    assert not list((tmp_path / "model").rglob("TFRADynamicEmbedding*"))
    (got,) = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"](tf.constant(KEYS)).values()
    np.testing.assert_array_equal(got, ROWS)


def test_a_saved_model_of_one_of_several_processes_is_an_error_and_one_process_that_restores_all_saves_it(tmp_path):
    def model_of(saver):
        model = tf.Module()
        model.v = de.Variable(dim=2, name=NAME, kv_creator=saver)
        model.serve = tf.function(lambda ids: model.v.lookup(ids), input_signature=[tf.TensorSpec([None], tf.int64)])
        return model

    first, second = model_of(creator(2, 0)), model_of(creator(2, 1))
    first.v.upsert(KEYS[:3], ROWS[:3])
    second.v.upsert(KEYS[3:], ROWS[3:])
    with pytest.raises(ValueError, match=r"'scope/emb' is spread over 2 processes.*rows of this one alone"):
        tf.saved_model.save(first, str(tmp_path / "model"), signatures=first.serve)

    path = tf.train.Checkpoint(v=first.v).write(str(tmp_path / "c"))
    second.v.save_to_file_system(str(tmp_path / "TFRADynamicEmbedding"), proc_size=2, proc_rank=1)
    alone = model_of(creator())
    tf.train.Checkpoint(v=alone.v).read(path)
    tf.saved_model.save(alone, str(tmp_path / "whole"), signatures=alone.serve)
    (got,) = tf.saved_model.load(str(tmp_path / "whole")).signatures["serving_default"](tf.constant(KEYS)).values()
    np.testing.assert_array_equal(got, ROWS)


def test_arguments_of_the_saver_are_checked():
    with pytest.raises(TypeError, match="proc_size and proc_rank together, got proc_size=2, proc_rank=None"):
        de.FileSystemSaver(proc_size=2)
    with pytest.raises(ValueError, match="proc_rank 2 and proc_size 2"):
        de.FileSystemSaver(2, 2)
    with pytest.raises(TypeError, match="saver must be a DynamicEmbeddingSaver, got 'files'"):
        de.CuckooHashTableCreator(saver="files")
    config = de.FileSystemSaver().config
    assert (config.proc_size, config.proc_rank, config.save_path, config.buffer_size) == (1, 0, None, 4096)
