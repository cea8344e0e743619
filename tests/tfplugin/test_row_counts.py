"""Counts, stamps, and writes under the names that TFPlus's variables have."""

import time

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

v1 = tf.compat.v1
UPDATES = {
    "update": lambda rows, operands: operands,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
}


@pytest.mark.parametrize("what", UPDATES)
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float64])
def test_scatter_changes_rows_as_numpy_does(what, dtype, partitioner):
    v = tfplugin.get_kv_variable("v", 4, value_dtype=dtype, initializer=1.5, partitioner=partitioner)
    rows = np.array([[1, -2, 3, 8], [5, 6, -7, 8]], np.float32)
    v.upsert([1, 2], rows)
    operands = np.array([[2, 4, -1, 0.5], [-3, 2, 8, 16], [4, 1, 2, 0.25]], np.float32)
    getattr(v, f"scatter_{what}")(tf.IndexedSlices(tf.cast(operands, dtype), [1, 2, 7]))
    expected = UPDATES[what](np.concatenate([rows, [[1.5] * 4]]), operands)
    found = tf.cast(v.sparse_read([1, 2, 7], training=False), tf.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-2 if dtype == tf.bfloat16 else 1e-6)


@pytest.mark.parametrize("what", ["mul", "div", "min", "max"])
def test_equal_keys_count_one_after_the_other(make, what):
    v = make(dim=1, initializer=8.0)
    getattr(v, f"scatter_{what}")(tf.IndexedSlices([[4.0], [2.0]], [1, 1]))
    assert v.sparse_read([1]).numpy() == [[UPDATES[what](UPDATES[what](8.0, 4.0), 2.0)]]


def test_scatter_in_a_session(session, partitioner):
    v = tfplugin.get_kv_variable("v", 2, initializer=1.0, partitioner=partitioner)
    op = v.scatter_add(tf.IndexedSlices(tf.ones([2, 2]), tf.constant([3, 3], tf.int64)))
    session.run(v1.global_variables_initializer())
    session.run(op)
    assert session.run(v.export())[1].tolist() == [[3.0, 3.0]]


def test_scatter_takes_indexed_slices(make):
    with pytest.raises(TypeError, match=r"scatter_div of key-value variable.*takes tf.IndexedSlices\(rows, keys\)"):
        make().scatter_div([[1.0]])
    with pytest.raises(ValueError, match=r"scatter_max of key-value variable.*wants rows of shape"):
        make().scatter_max(tf.IndexedSlices(tf.ones([1, 3]), [1]))


def test_counts_of_a_table_that_admits_all(partitioner):
    v = tfplugin.get_kv_variable("v", 2, partitioner=partitioner)
    v.upsert([1, 2, 2], tf.ones([3, 2]))
    v.increase_counting([[1], [7]], 5)
    np.testing.assert_array_equal(v.get_counting([[1, 2], [7, 1]]), [[6, 2], [0, 6]])
    assert (int(v.total_count()), int(v.total_freq())) == (2, 8)
    v.increase_counting([1], [2**40])
    assert v.get_counting([1]).numpy() == [2**32 - 1]


def test_rows_go_by_the_day_in_which_they_were_written(partitioner):
    v = tfplugin.get_kv_variable("v", 2, partitioner=partitioner)
    today = int(time.time()) // 86400
    for part in list(v) if partitioner else [v]:
        own = [key for key in range(6) if key % len(list(v) if partitioner else [v]) == part.part]
        versions = [(today - key) * 86400 + 5 for key in own]
        tfplugin.ops.raw.kv_table_import(
            part.handle,
            tf.constant(own, tf.int64),
            tf.ones([len(own), 2]),
            [0] * len(own),
            tf.constant(versions, tf.uint32),
        )
    assert v.get_timestamp([0, 3, 99]).numpy().tolist() == [today, today - 3, 0]
    assert int(v.delete_with_timestamp(3)) == 2  # those of 4 and 5 days ago
    assert sorted(v.export()[0].numpy().tolist()) == [0, 1, 2, 3]
    assert int(v.delete([0, 1, 50])) == 2
    with pytest.raises(ValueError, match="threshold must be days, 0 or more; got -1"):
        v.delete_with_timestamp(-1)
