"""Files of models that are not what they should be, or cannot be written: errors, and all as it was."""

from __future__ import annotations

import errno
import json
import re
import shlex
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kept_models import kept_pair, of, rows
from keras_pairs import batches, losses, model_of

import kvtools
from kvtools.errors import BadInputError, OutputError
from tfplugin import table_files

DATA = batches(2)


def _model(keras, **options):
    model = model_of(keras, rows(keras, **options))
    model.get_layer("embedding").table.upsert([1], np.ones((1, options.get("dim", 4))))
    return model


@pytest.mark.parametrize(
    "other, message",
    [
        ({"dim": 2}, r"table 'user' as int64 -> float32\[4\], and in model 'ctr' it is int64 -> float32\[2\]"),
        ({"value_dtype": "float16"}, r"in model 'ctr' it is int64 -> float16\[4\]"),
        ({"key_dtype": "int32"}, r"in model 'ctr' it is int32 -> float32\[4\]"),
        ({"table": "item"}, r"has the tables \['user'\], and model 'ctr' holds \['item'\].*tfplugin\.restore_tables"),
    ],
)
@pytest.mark.parametrize("file", ["m.keras", "w.weights.h5"])
def test_weights_of_another_table_are_refused_before_anything_is_loaded(both_kerases, tmp_path, other, message, file):
    saved, model = _model(both_kerases), _model(both_kerases, **other)
    path = str(tmp_path / file)
    (saved.save if file == "m.keras" else saved.save_weights)(path)
    before = model.get_weights()
    with pytest.raises(ValueError, match=f"(?s){re.escape(file)}.*{message}.*Nothing was loaded.*skip_mismatch=True"):
        model.load_weights(path)
    for mine, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, old)


def test_what_does_not_fit_can_be_skipped(both_kerases, tmp_path):
    saved, model = _model(both_kerases), _model(both_kerases, dim=2)
    saved.save_weights(str(tmp_path / "w.weights.h5"))
    with pytest.warns(UserWarning, match="skipped|[Cc]ould not"):
        model.load_weights(str(tmp_path / "w.weights.h5"), skip_mismatch=True)
    assert of(model.get_layer("embedding").table) == {1: [1.0, 1.0]}


@pytest.mark.parametrize("file", ["m.keras", "w.weights.h5"])
def test_bytes_that_changed_are_found_before_anything_is_loaded(both_kerases, tmp_path, file):
    models, other = kept_pair(both_kerases), kept_pair(both_kerases, seed=1)
    path = tmp_path / file
    (models.ours.save if file == "m.keras" else models.ours.save_weights)(str(path))
    data = path.read_bytes()
    row = np.array(of(models.table)[3], np.float32).tobytes()
    assert data.count(row) == 1
    path.write_bytes(data.replace(row, bytes(16)))
    before = other.ours.get_weights()
    with pytest.raises(table_files.DamagedTablesError, match=f"{re.escape(file)}.*its tables are damaged"):
        other.ours.load_weights(str(path))
    for mine, old in zip(other.ours.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, old)
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises((OSError, zipfile.BadZipFile)):
        other.ours.load_weights(str(path))
    for mine, old in zip(other.ours.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, old)


def test_a_damaged_model_is_not_loaded(both_kerases, tmp_path):
    models = kept_pair(both_kerases)
    models.ours.save(str(tmp_path / "m.keras"))
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    for name, content, message in (
        ("kv_tables/tables.json", b"{", "cannot be read"),
        ("kv_tables/tables.json", b'{"layout": 1, "tables": [{}], "iterations": 0}', "cannot be read"),
        ("kv_tables/tables.json", json.dumps({"layout": 2}).encode(), "a later version"),
        ("kv_tables/../../away", b"", "is no file of tables"),
    ):
        with zipfile.ZipFile(tmp_path / "n.keras", "w") as archive:
            for file, data in {**files, name: content}.items():
                archive.writestr(file, data)
        with pytest.raises(ValueError, match=message):
            both_kerases.models.load_model(str(tmp_path / "n.keras"))
    assert not (tmp_path.parent / "away").exists()


@pytest.mark.parametrize("file", ["m.keras", "w.weights.h5", "m.h5", "weights-1.h5"])
def test_where_the_disk_is_full_what_stood_there_stays(both_kerases, tmp_path, monkeypatch, file):
    if file in ("m.h5", "weights-1.h5") and both_kerases is not tf_keras:
        pytest.skip("Keras 3 writes no such file")
    models = kept_pair(both_kerases)
    save = models.ours.save_weights if "weights" in file else models.ours.save
    save(str(tmp_path / file))
    before = (tmp_path / file).read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(table_files, "add_to_archive", full)
    monkeypatch.setattr(table_files, "add_to_hdf5", full)
    models.table.upsert([1], [[2.0] * 4])
    with pytest.raises(OutputError, match=f"{re.escape(file)}.*No space left on device.*nothing was changed"):
        save(str(tmp_path / file))
    assert (tmp_path / file).read_bytes() == before and [one.name for one in tmp_path.iterdir()] == [file]


def test_a_file_without_the_rows_of_a_table_that_the_model_holds(both_kerases, tmp_path):
    models = kept_pair(both_kerases)
    models.ours.save_weights(str(tmp_path / "w.weights.h5"))
    with h5py.File(tmp_path / "w.weights.h5", "r+") as file:
        del file["kv_tables"]
    with pytest.raises(ValueError, match=r"has no rows of 'user', which model 'ctr' holds"):
        models.ours.load_weights(str(tmp_path / "w.weights.h5"))
    models.ours.save(str(tmp_path / "m.keras"))
    with zipfile.ZipFile(tmp_path / "m.keras") as full, zipfile.ZipFile(tmp_path / "n.keras", "w") as archive:
        for name in full.namelist():
            if not name.startswith("kv_tables/"):
                archive.writestr(name, full.read(name))
    with pytest.raises(ValueError, match=r"n\.keras' has no rows of 'user'"):
        both_kerases.models.load_model(str(tmp_path / "n.keras"))


@pytest.mark.parametrize("file", ["m.keras", "w.weights.h5"])
def test_rows_are_not_left_out_where_the_model_holds_no_table(both_kerases, tmp_path, file):
    models = kept_pair(both_kerases)
    (models.ours.save if file == "m.keras" else models.ours.save_weights)(str(tmp_path / file))
    with pytest.raises(ValueError, match=f"{re.escape(file)}' has rows of tables, and model 'ctr' holds no table"):
        models.dense.load_weights(str(tmp_path / file))


def test_a_link_in_a_file_of_weights_is_not_followed(both_kerases, tmp_path):
    models = kept_pair(both_kerases)
    models.ours.save_weights(str(tmp_path / "w.weights.h5"))
    with h5py.File(tmp_path / "w.weights.h5", "r+") as file:
        del file["kv_tables/tables.index"]
        file["kv_tables/tables.index"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/secret")
    with pytest.raises(table_files.DamagedTablesError, match=r"'kv_tables/tables\.index' is no file of tables"):
        models.ours.load_weights(str(tmp_path / "w.weights.h5"))


@pytest.mark.parametrize("file", ["w.weights.h5", "m.h5"])
def test_kvtools_says_how_to_take_the_tables_out(both_kerases, tmp_path, file):
    if file == "m.h5" and both_kerases is not tf_keras:
        pytest.skip("Keras 3 writes no such file")
    models = kept_pair(both_kerases)
    (models.ours.save if file == "m.h5" else models.ours.save_weights)(str(tmp_path / file))
    with pytest.raises(BadInputError, match=f"{re.escape(file)}' as HDF5: it is a file of Keras") as refused:
        kvtools.open(tmp_path / file)
    (command,) = re.findall(r"`(python -c .*)`", str(refused.value))
    _, _, line = shlex.split(command)
    subprocess.run([sys.executable, "-c", line], cwd=tmp_path, check=True)
    table = kvtools.open(tmp_path / "kv_tables/tables").tables["user"]
    assert table.schema.rows == int(models.table.size()) == 12


def test_weights_in_shards_are_refused(tmp_path):
    models = kept_pair(tf.keras)
    with pytest.raises(ValueError, match=r"'user' go into one file only. Leave max_shard_size out"):
        models.ours.save_weights(str(tmp_path / "w.weights.json"), max_shard_size=0.1)
    assert not list(tmp_path.iterdir())


def test_a_part_alone_is_refused(both_kerases, tmp_path):
    from keras_pairs import held

    import tfplugin

    whole = tfplugin.get_kv_variable("whole", embedding_dim=4, partitioner=tf.compat.v1.fixed_size_partitioner(2))
    model = model_of(both_kerases, held(both_kerases, whole[0]))
    with pytest.raises(ValueError, match=r"'embedding' holds a part of key-value variable 'whole'"):
        model.save_weights(str(tmp_path / "w.weights.h5"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "weights, got",
    [
        (lambda w: w[:-2], r"int64\[12\]|float32"),
        (lambda w: [*w[:-1], w[-1][:, :2]], r"float32\[12, 2\]"),
        (lambda w: [*w[:-1], w[-1][:3]], r"float32\[3, 4\]"),
        (lambda w: [*w[:-2], w[-2] * 0, w[-1]], r"int64\[12\]"),
        (lambda w: [*w[:-2], w[-2] * 0.5, w[-1]], r"float64\[12\]"),
        (lambda w: w[:1], "Got arrays of"),
    ],
    ids=["without keys", "narrower", "too few rows", "equal keys", "float keys", "one array"],
)
def test_weights_that_are_no_keys_and_rows(both_kerases, weights, got):
    model = kept_pair(both_kerases).ours
    before = model.get_weights()
    with pytest.raises(ValueError, match=f"(?s)set_weights of 'ctr' takes what its get_weights gives.*'user'.*{got}"):
        model.set_weights(weights([*before]))
    for mine, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, old)


def test_dense_weights_of_another_shape_leave_the_rows(both_kerases):
    models = kept_pair(both_kerases)
    before, given = of(models.table), models.ours.get_weights()
    given[0] = given[0][:-1]
    given[-1] = given[-1] * 2
    with pytest.raises(ValueError):
        models.ours.set_weights(given)
    assert of(models.table) == before


def test_rows_that_are_not_numbers_are_kept_as_they_are(both_kerases):
    models = kept_pair(both_kerases)
    given = models.ours.get_weights()
    given[-1][2] = np.nan
    models.ours.set_weights(given)
    assert np.isnan(of(models.table)[2]).all() and np.isfinite(of(models.table)[3]).all()
    with pytest.raises(AssertionError):
        assert all(np.isfinite(list(losses(models.ours, DATA[:1]))))


def test_models_without_tables_and_files_of_them_are_left_alone(both_kerases, tmp_path):
    keras = both_kerases
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.save(str(tmp_path / "m.keras"))
    model.save_weights(str(tmp_path / "w.weights.h5"))
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        assert not [name for name in archive.namelist() if "kv" in name]
    model.load_weights(str(tmp_path / "w.weights.h5"))
    again = keras.models.load_model(str(tmp_path / "m.keras"))
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
    if keras is tf_keras:
        model.save(str(tmp_path / "m.h5"))
        keras.models.load_model(str(tmp_path / "m.h5"))
