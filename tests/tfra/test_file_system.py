"""`save_to_file_system` and `load_from_file_system`: the bare files that TFRA reads and writes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import kvtools
from tfplugin import dynamic_embedding as de

SAMPLE = Path(__file__).parents[1] / "data" / "tfra" / "filesystem" / "TFRADynamicEmbedding"
KEYS = np.array([0, -1, 7, -(2**63), 2**63 - 1, 5, 12])
ROWS = np.random.default_rng(0).normal(size=(len(KEYS), 2)).astype(np.float32)


def by_key(exported):
    keys, rows = (np.asarray(x) for x in exported)
    assert len(set(keys.tolist())) == len(keys)
    return {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


def halves(keys, n):
    return tf.cast(keys // 2 % n, tf.int32)


EXPECTED = by_key((KEYS, ROWS))


def sample_rows():
    return by_key(
        (
            np.concatenate([np.fromfile(SAMPLE / f"fs_emb_mht_{i}of2_rank0_size1-keys", np.int64) for i in (1, 2)]),
            np.concatenate(
                [
                    np.fromfile(SAMPLE / f"fs_emb_mht_{i}of2_rank0_size1-values", np.float32).reshape(-1, 8)
                    for i in (1, 2)
                ]
            ),
        )
    )


def test_the_files_are_the_keys_and_the_rows_of_each_table(mode, tmp_path):
    v = de.Variable(dim=2, name="tower/emb", devices=["/CPU:0"] * 3)
    mode(v.upsert, KEYS, ROWS)
    mode(lambda: v.save_to_file_system(str(tmp_path)))
    names = [f"tower_emb_mht_{i}of3_rank0_size1" for i in (1, 2, 3)]
    assert files_in(tmp_path) == sorted(f"{n}-{what}" for n in names for what in ("keys", "values"))
    found = {}
    for i, name in enumerate(names):
        keys = np.fromfile(tmp_path / f"{name}-keys", np.int64)
        assert (keys % 3 == i).all()
        found |= by_key((keys, np.fromfile(tmp_path / f"{name}-values", np.float32).reshape(-1, 2)))
    assert found == EXPECTED
    table = kvtools.open(tmp_path).table("tower_emb")
    assert sum(table.schema.part_rows) == len(KEYS) and table.schema.dim == 2


@pytest.mark.parametrize("buffer_size", [2, 4096])
def test_what_is_saved_is_loaded(mode, tmp_path, devices, buffer_size):
    v = de.Variable(dim=2, name="emb", devices=devices)
    mode(v.upsert, KEYS, ROWS)
    mode(lambda: v.save_to_file_system(str(tmp_path), buffer_size=buffer_size))
    mode(v.clear)
    mode(v.upsert, np.array([7, 99]), np.ones([2, 2], np.float32))
    mode(lambda: v.load_from_file_system(tf.constant(str(tmp_path)), buffer_size=buffer_size))
    assert by_key(mode(v.export)) == EXPECTED | {99: np.ones(2, np.float32).tobytes()}


def test_files_of_tfra_load(mode, devices):
    v = de.Variable(dim=8, name="fs_emb", devices=["/CPU:0"] * 2)
    mode(lambda: v.load_from_file_system(str(SAMPLE), buffer_size=7))
    assert by_key(mode(v.export)) == sample_rows() and len(sample_rows()) > 10
    for load in (
        lambda v: v.load_from_file_system(str(SAMPLE), load_entire_dir=True),
        lambda v: v.load_from_file_system_with_restore_function(str(SAMPLE)),
    ):
        v = de.Variable(dim=8, name="fs_emb", devices=devices)
        mode(lambda load=load, v=v: load(v))
        assert by_key(mode(v.export)) == sample_rows()


def test_rows_go_where_the_partitioner_says_whatever_file_they_are_in(tmp_path):
    for what in ("keys", "values"):
        for i in (1, 2):
            shutil.copy(SAMPLE / f"fs_emb_mht_{i}of2_rank0_size1-{what}", tmp_path / f"fs_emb_mht_{3 - i}of2-{what}")
    v = de.Variable(dim=8, name="fs_emb", devices=["/CPU:0"] * 2)
    v.load_from_file_system(str(tmp_path), file_name_list=["fs_emb_mht_1of2", "fs_emb_mht_2of2"])
    for i, table in enumerate(v.tables):
        assert (table.export()[0].numpy() % 2 == i).all()
    assert by_key(v.export()) == sample_rows()


def test_processes_save_their_own_files_and_any_number_of_them_loads_its_share(tmp_path):
    for rank in range(3):
        v = de.Variable(dim=2, name="emb", devices=["/CPU:0"] * 2)
        own = rank == (KEYS % 6 // 2)
        v.upsert(KEYS[own], ROWS[own])
        v.save_to_file_system(str(tmp_path), proc_size=3, proc_rank=rank)
    assert len(files_in(tmp_path)) == 12 and (tmp_path / "emb_mht_2of2_rank2_size3-keys").exists()
    for rank in range(3):
        v = de.Variable(dim=2, name="emb", devices=["/CPU:0"] * 2)
        v.load_from_file_system_with_restore_function(str(tmp_path), proc_size=3, proc_rank=rank)
        assert set(by_key(v.export())) == set(KEYS[rank == (KEYS % 6 // 2)].tolist())
    found = {}
    for rank in range(2):
        v = de.Variable(dim=2, name="emb")
        v.load_from_file_system_with_restore_function(str(tmp_path), proc_size=2, proc_rank=rank)
        assert set(by_key(v.export())) == set(KEYS[rank == (KEYS % 2)].tolist())
        found |= by_key(v.export())
    assert found == EXPECTED
    (tmp_path / "emb_mht_2of2_rank1_size3-keys").unlink()
    with pytest.raises(FileNotFoundError, match="lacks device 2 of process 1"):
        de.Variable(dim=2, name="emb").load_from_file_system_with_restore_function(str(tmp_path))
    de.Variable(dim=2, name="emb", devices=["/CPU:0"] * 3).save_to_file_system(str(tmp_path))
    with pytest.raises(ValueError, match="several saves, of 2 devices in 3 processes and 3 devices in 1 processes"):
        de.Variable(dim=2, name="emb").load_from_file_system_with_restore_function(str(tmp_path))


def test_slots_and_status_have_files_of_their_own(tmp_path, devices):
    def made():
        v = de.Variable(dim=2, name="emb", devices=devices, restrict_policy=de.FrequencyRestrictPolicy)
        return v, de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1))

    def train(v, optimizer):
        shadow = v.get_trainable_by_name("x")
        loss = lambda: tf.reduce_sum(de.embedding_lookup(v, tf.constant(KEYS[:4]), name="x") ** 2)  # noqa: E731
        optimizer.minimize(loss, var_list=[shadow])

    def everything(v, optimizer):
        return [v, *v.get_slot_variables(optimizer), v.restrict_policy.status]

    v, optimizer = made()
    v.upsert(KEYS, ROWS)
    train(v, optimizer)
    for one in everything(v, optimizer):
        one.save_to_file_system(str(tmp_path))
    names = {file.partition("_mht_")[0] for file in files_in(tmp_path)}
    assert names == {"emb", "emb_Adam_m", "emb_Adam_v", "status_emb_frequency"}
    w, other = made()
    train(w, other)
    for one in everything(w, other):
        one.load_from_file_system(str(tmp_path))
    assert [by_key(x.export()) for x in everything(w, other)] == [by_key(x.export()) for x in everything(v, optimizer)]


@pytest.mark.parametrize(
    ("key_dtype", "value_dtype"),
    [(tf.int64, tf.float16), (tf.int64, tf.bfloat16), (tf.int32, tf.float64), (tf.int64, tf.int8), (tf.int64, tf.bool)],
    ids=lambda d: d.name,
)
def test_all_dtypes_go_to_files_and_back(mode, tmp_path, key_dtype, value_dtype):
    v = de.Variable(key_dtype, value_dtype, dim=3, name="emb")
    keys = np.array([1, -2, 3], key_dtype.as_numpy_dtype)
    rows = np.array([[1, 0, 1], [0, 0, 1], [1, 1, 0]]).astype(value_dtype.as_numpy_dtype)
    mode(v.upsert, keys, rows)
    mode(lambda: v.save_to_file_system(str(tmp_path)))
    assert (tmp_path / "emb_mht_1of1_rank0_size1-values").stat().st_size == rows.nbytes
    mode(v.clear)
    mode(lambda: v.load_from_file_system(str(tmp_path)))
    assert by_key(mode(v.export)) == by_key((keys, rows))


def test_a_table_saves_itself_without_a_rank(tmp_path):
    v = de.Variable(
        dim=2, name="tower/emb", devices=["/CPU:0"] * 2, partitioner=lambda k, n: tf.cast(k // 2 % n, tf.int32)
    )
    v.upsert(KEYS, ROWS)
    for table in v.tables:
        table.save_to_file_system(str(tmp_path))
    assert "tower_emb_mht_2of2-values" in files_in(tmp_path)
    before = [by_key(table.export()) for table in v.tables]
    v.clear()
    for table in v.tables:
        table.load_from_file_system(str(tmp_path))
    assert [by_key(table.export()) for table in v.tables] == before
    v.clear()
    v.load_from_file_system(str(tmp_path), load_entire_dir=True)
    assert by_key(v.export()) == EXPECTED


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    v = de.Variable(dim=2, name="emb")
    v.upsert(KEYS, ROWS)
    monkeypatch.setenv("TFRA_SAVED_KV", str(tmp_path / "a"))
    v.save_to_file_system(str(tmp_path / "b"))
    assert files_in(tmp_path) == ["a"]
    v.save_to_file_system(str(tmp_path / "b"), dirpath_env=None)
    assert files_in(tmp_path) == ["a", "b"]


def test_slots_of_a_keras_layer_are_found_by_the_name_that_tfra_gives_them(tmp_path):
    layer = de.keras.layers.Embedding(2, name="emb")
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adagrad(0.1))
    optimizer.minimize(lambda: tf.reduce_sum(layer(tf.constant([[1, 2]], tf.int64))), var_list=[layer.shadow])
    (slot,) = layer.params.get_slot_variables(optimizer)
    slot.upsert(np.array([1]), np.array([[7.0, 8.0]], np.float32))
    theirs = "emb-parameter_DynamicEmbedding_emb-shadow_accumulator_mht_1of1_rank0_size1"
    slot.save_to_file_system(str(tmp_path), file_name_list=[theirs])
    slot.upsert(np.array([1]), np.zeros([1, 2], np.float32))
    slot.load_from_file_system(str(tmp_path))
    np.testing.assert_array_equal(slot.lookup(np.array([1])), [[7.0, 8.0]])


def test_rows_are_appended(tmp_path):
    v = de.Variable(dim=2, name="emb")
    v.upsert(KEYS[:3], ROWS[:3])
    v.save_to_file_system(str(tmp_path))
    v.clear()
    v.upsert(KEYS[3:], ROWS[3:])
    v.save_to_file_system(str(tmp_path), append_to_file=True)
    v.load_from_file_system(str(tmp_path))
    assert by_key(v.export()) == EXPECTED


def test_a_save_that_fails_leaves_the_old_files(tmp_path, monkeypatch):
    v = de.Variable(dim=2, name="emb", devices=["/CPU:0"] * 2)
    v.upsert(KEYS, ROWS)
    v.save_to_file_system(str(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    v.upsert(KEYS, -ROWS)
    synced = []

    def full(descriptor):
        synced.append(descriptor)
        if len(synced) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        v.save_to_file_system(str(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_empty_variable_is_saved_and_loaded(mode, tmp_path):
    v = de.Variable(dim=2, name="emb")
    mode(lambda: v.save_to_file_system(str(tmp_path)))
    mode(lambda: v.load_from_file_system(str(tmp_path)))
    assert mode(v.size) == 0


def test_files_that_are_cut_off_or_do_not_fit_are_refused_before_a_row_is_read(mode, tmp_path):
    v = de.Variable(dim=2, name="emb", devices=["/CPU:0"] * 2)
    mode(v.upsert, KEYS, ROWS)
    mode(lambda: v.save_to_file_system(str(tmp_path)))
    mode(v.clear)
    keys, values = (tmp_path / f"emb_mht_2of2_rank0_size1-{what}" for what in ("keys", "values"))
    error = ValueError if mode.name == "eager" else tf.errors.InvalidArgumentError

    def refused(message, **kwargs):
        w = v if not kwargs else de.Variable(**kwargs, devices=["/CPU:0"] * 2)
        with pytest.raises(error, match=message):
            mode(lambda: w.load_from_file_system(str(tmp_path)))
        assert mode(w.size) == 0

    refused(r"of float32\[3\]: one of the files is cut off", dim=3, name="emb")
    os.truncate(values, values.stat().st_size - 1)
    refused(r"2of2_rank0_size1-values' has 31 bytes, where the 4 keys .* want 32 of float32\[2\]")
    os.truncate(keys, 31)
    refused(r"2of2_rank0_size1-keys' has 31 bytes, which is no number of int64 keys")
    values.unlink()
    with pytest.raises(
        FileNotFoundError if mode.name == "eager" else tf.errors.OpError,
        match=r"there is no file .*2of2_rank0_size1-values'. The folder has emb_mht_1of2_rank0_size1",
    ):
        mode(lambda: v.load_from_file_system(str(tmp_path)))


def test_what_files_cannot_hold_is_refused(tmp_path):
    v = de.Variable(tf.string, dim=2, name="emb")
    with pytest.raises(TypeError, match="it has strings"):
        v.save_to_file_system(str(tmp_path))
    with pytest.raises(TypeError, match="it has strings"):
        v.load_from_file_system(str(tmp_path))
    with pytest.raises(TypeError, match="it has strings"):
        de.Variable(tf.int64, tf.string, dim=2, name="emb").save_to_file_system(str(tmp_path))
    v = de.Variable(dim=2, name="emb", devices=["/CPU:0"] * 2)
    with pytest.raises(ValueError, match=r"2 tables want as many names in file_name_list, all different, got \['a'\]"):
        v.save_to_file_system(str(tmp_path), file_name_list=["a"])
    with pytest.raises(ValueError, match="proc_rank must be from 0 to proc_size - 1, got proc_rank 2 and proc_size 2"):
        v.save_to_file_system(str(tmp_path), proc_size=2, proc_rank=2)
    with pytest.raises(ValueError, match="buffer_size must be 1 or more, got 0"):
        v.save_to_file_system(str(tmp_path), buffer_size=0)
    with pytest.raises(FileNotFoundError, match="There is no such folder"):
        v.load_from_file_system(str(tmp_path / "none"))
