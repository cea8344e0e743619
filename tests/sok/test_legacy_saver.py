"""`sok.Saver` on a single rank."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf

import tfplugin.sok as sok
from kvtools.dialects.detect import open_checkpoint


def test_files_are_plain_keys_and_rows(tmp_path):
    variable = sok.DynamicVariable(2, name="emb")
    sok.assign(variable, [7, -1, 3], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    sok.Saver().dump_to_file(variable, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["emb_keys.file", "emb_values.file"]
    assert np.fromfile(tmp_path / "emb_keys.file", np.int64).tolist() == [-1, 3, 7]
    assert np.fromfile(tmp_path / "emb_values.file", np.float32).tolist() == [3, 4, 5, 6, 1, 2]
    assert open_checkpoint(tmp_path).table("emb").schema.rows == 3


@pytest.mark.parametrize("key_type", [tf.int64, tf.int32, tf.uint64])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_a_dynamic_variable_comes_back(tmp_path, key_type, dtype):
    variable = sok.DynamicVariable(2, name="emb", key_type=key_type, dtype=dtype)
    keys = tf.constant([5, 0], key_type)
    variable.upsert(keys, tf.cast([[1.0, 2.0], [3.0, 4.0]], dtype))
    sok.Saver().dump_to_file(variable, tmp_path)
    variable.clear()
    sok.Saver().restore_from_file(variable, tmp_path)
    np.testing.assert_array_equal(tf.cast(variable.sparse_read(keys), tf.float32), [[1, 2], [3, 4]])


def test_a_static_variable_comes_back(tmp_path):
    variable = sok.Variable(np.arange(10.0).reshape(5, 2), dtype=tf.float32, name="a/b")
    sok.Saver().dump_to_file(variable, tmp_path)
    variable.assign(variable * 0)
    sok.Saver().restore_from_file(variable, tmp_path)
    np.testing.assert_array_equal(variable, np.arange(10.0).reshape(5, 2))


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_a_layer_comes_back(tmp_path, use_hashtable):
    layer = sok.All2AllDenseEmbedding(8, 2, 1, 1, use_hashtable=use_hashtable)
    rows = layer(tf.constant([[[3]], [[5]]], tf.int64)).numpy()
    sok.Saver().dump_to_file(layer, tmp_path)
    variable = layer.embedding_variable
    _ = variable.clear() if use_hashtable else variable.assign(variable * 0)
    sok.Saver().restore_from_file(layer.embedding_variable, tmp_path)
    np.testing.assert_array_equal(layer(tf.constant([[[3]], [[5]]], tf.int64)), rows)


def test_unsigned_keys_of_four_bytes_are_known_by_the_sizes(tmp_path):
    np.array([1, 4, 2**32 - 1, 9], np.uint32).tofile(tmp_path / "emb_keys.file")
    np.arange(8, dtype=np.float32).tofile(tmp_path / "emb_values.file")
    variable = sok.DynamicVariable(2, name="emb")
    sok.Saver().restore_from_file(variable, tmp_path)
    np.testing.assert_array_equal(variable.sparse_read([4, 2**32 - 1]), [[2, 3], [4, 5]])
    small = sok.DynamicVariable(2, name="emb", key_type=tf.int32)
    with pytest.raises(ValueError, match="keys from 1 to 4294967295"):
        sok.Saver().restore_from_file(small, tmp_path)


def test_files_that_do_not_fit_change_nothing(tmp_path):
    variable = sok.DynamicVariable(2, name="emb")
    sok.assign(variable, [1, 2, 3], np.ones((3, 2)))
    saver = sok.Saver()
    saver.dump_to_file(variable, tmp_path)
    with pytest.raises(ValueError, match="rows of 3 float32"):
        saver.restore_from_file(sok.DynamicVariable(3, name="emb"), tmp_path)
    os.truncate(tmp_path / "emb_values.file", 20)
    with pytest.raises(ValueError, match="truncated"):
        saver.restore_from_file(variable, tmp_path)
    (tmp_path / "emb_keys.file").unlink()
    with pytest.raises(FileNotFoundError, match=r"emb_keys\.file"):
        saver.restore_from_file(variable, tmp_path)
    np.testing.assert_array_equal(variable.values, np.ones((3, 2)))


def test_what_the_format_cannot_hold_is_told(tmp_path):
    saver = sok.Saver()
    with pytest.raises(ValueError, match="float64"):
        saver.dump_to_file(sok.DynamicVariable(2, dtype=tf.float64), tmp_path)
    wide = sok.DynamicVariable(2, key_type=tf.uint64, name="wide")
    wide.upsert(tf.constant([2**64 - 1], tf.uint64), [[1.0, 2.0]])
    with pytest.raises(ValueError, match="18446744073709551615"):
        saver.dump_to_file(wide, tmp_path)
    with pytest.raises(TypeError, match=r"got Variable|got ResourceVariable"):
        saver.dump_to_file(tf.Variable([[1.0]]), tmp_path)
