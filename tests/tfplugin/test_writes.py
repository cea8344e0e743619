"""upsert, accumulate, remove, contains, export, size and clear, whole and in parts."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from tfplugin.ops import raw


@pytest.fixture
def table(make, partitioner):
    return make(dim=2, partitioner=partitioner, initializer=10.0)


def test_upsert_writes_and_of_equal_keys_the_last_wins(table, rows_of):
    table.upsert([[1, -2], [1, 5]], [[[1, 1], [2, 2]], [[3, 3], [4, 4]]])
    np.testing.assert_array_equal(rows_of(table, [1, -2, 5]), [[3, 3], [2, 2], [4, 4]])
    table.upsert([5, -2], [[6, 6], [7, 7]])
    np.testing.assert_array_equal(rows_of(table, [1, -2, 5]), [[3, 3], [7, 7], [6, 6]])
    table.upsert(9, [8, 8])
    assert int(table.size()) == 4


def test_accumulate_adds_each_occurrence_to_the_initial_value(table, rows_of):
    table.accumulate([1, 1, -2], [[1, 2], [1, 2], [5, 5]])
    np.testing.assert_array_equal(rows_of(table, [1, -2]), [[12, 14], [15, 15]])


def test_remove_and_contains(table):
    table.upsert([1, -2, 3], np.zeros([3, 2]))
    assert int(table.remove([1, 7, 1])) == 1
    assert table.contains([[1, -2], [3, 4]]).numpy().tolist() == [[False, True], [True, False]]
    assert int(table.size()) == 2


def test_export_and_clear(table):
    table.upsert(np.arange(100), np.arange(200).reshape(100, 2))
    keys, rows = table.export()
    order = np.argsort(keys)
    np.testing.assert_array_equal(np.asarray(keys)[order], np.arange(100))
    np.testing.assert_array_equal(np.asarray(rows)[order], np.arange(200).reshape(100, 2))
    table.clear()
    assert int(table.size()) == 0
    assert [part.shape[0] for part in table.export()] == [0, 0]


def test_an_export_beside_inserts_has_every_key_that_was_there(make):
    table, there = make(dim=256), np.arange(40_000)  # several chunks of an export
    table.upsert(there, np.zeros([len(there), 256], np.float32))
    stop = threading.Event()

    def insert():
        for first in itertools.count(len(there), 100):
            if stop.is_set():
                return
            table.upsert(np.arange(first, first + 100), np.ones([100, 256], np.float32))

    other = threading.Thread(target=insert)
    other.start()
    try:
        for _ in range(2):
            keys, rows = table.export()
            assert np.isin(there, keys).all() and len(np.unique(keys)) == len(keys) == len(rows)
            assert np.isin(there, raw.kv_table_keys(table.handle, Tkeys=tf.int64)).all()
    finally:
        stop.set()
        other.join()


def test_batches_of_nothing(table):
    table.upsert(tf.zeros([0], tf.int64), tf.zeros([0, 2]))
    table.accumulate(tf.zeros([0], tf.int64), tf.zeros([0, 2]))
    assert int(table.remove(tf.zeros([0], tf.int64))) == 0
    assert table.contains(tf.zeros([0, 3], tf.int64)).shape == (0, 3)
    assert int(table.size()) == 0


def test_writes_in_functions(table, rows_of):
    @tf.function
    def write(keys, rows):
        table.upsert(keys, rows)
        table.accumulate(keys, rows)
        return table.size()

    assert int(write(tf.constant([1, 2], tf.int64), tf.ones([2, 2]))) == 2
    np.testing.assert_array_equal(rows_of(table, [1, 2]), np.full([2, 2], 2.0))


def test_writes_in_graph_mode(session, partitioner):
    table = tf.compat.v1.get_kv_variable("t", embedding_dim=2, partitioner=partitioner)
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(table.upsert([1, 2, 4], np.ones([3, 2])))
    session.run(table.accumulate([1], [[1.0, 1.0]]))
    assert session.run(table.remove([4])) == 1
    keys, rows = session.run(table.export())
    assert dict(zip(keys.tolist(), rows.tolist(), strict=True)) == {1: [2, 2], 2: [1, 1]}
    freqs, _ = session.run(table.stamps([1, 9]))
    assert freqs.shape == (2,)
    session.run(table.clear())
    assert session.run(table.size()) == 0


@pytest.mark.parametrize("dtype", tfplugin.kv_variable.VALUE_DTYPES, ids=lambda d: d.name)
def test_value_dtypes(make, rows_of, dtype):
    table = make(dim=2, value_dtype=dtype)
    table.upsert([1], [[1.5, 2.5]])
    table.accumulate([1], [[1, 1]])
    assert rows_of(table, [1]).tolist() == [[2.5, 3.5]]


WRITES = {
    "upsert": lambda part, keys, rows: part.upsert(keys, rows),
    "accumulate": lambda part, keys, rows: part.accumulate(keys, rows),
    "scatter_update": lambda part, keys, rows: part.scatter_update(tf.IndexedSlices(rows, keys)),
    "scatter_sub": lambda part, keys, rows: part.scatter_sub(tf.IndexedSlices(rows, keys)),
    "scatter_mul": lambda part, keys, rows: part.scatter_mul(tf.IndexedSlices(rows, keys)),
}
OTHERS = [1, -2, 5, 3, 0, 6]  # of three parts, where part 1 has 1, -2 and no other


@pytest.mark.parametrize("method", WRITES)
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_part_refuses_keys_of_other_parts(make, method, mode):
    table = make(dim=2, partitioner=tf.compat.v1.fixed_size_partitioner(3), initializer=1.0)
    part = table[1]

    def write(part, keys, rows):
        WRITES[method](part, keys, rows)

    write = write if mode == "eager" else tf.function(write, autograph=False)
    told = rf"{method} of part 1 of key-value variable \W+{part.partitioned_name}\W+3 parts\): key"
    with pytest.raises(tf.errors.InvalidArgumentError, match=told) as error:
        write(part, tf.constant(OTHERS, tf.int64), tf.ones([len(OTHERS), 2]))
    message = error.value.message
    assert "Write to the variable as a whole, which hands each key to its part." in message
    if mode == "eager":
        assert "key 5 belongs to part 2, key 3 belongs to part 0, key 0 belongs to part 0 (and 1 more)." in message
    else:
        assert "[5 3 0]" in message and "[2 0 0]" in message
    assert int(table.size()) == 0
    write(part, tf.constant([1, -2], tf.int64), tf.ones([2, 2]))
    assert int(part.size()) == 2


def test_a_part_refuses_keys_of_other_parts_in_a_graph(session):
    v1 = tf.compat.v1
    table = tf.get_kv_variable("e", embedding_dim=2, partitioner=v1.fixed_size_partitioner(3))
    keys = v1.placeholder(tf.int64, [None])
    written = table[0].upsert(keys, tf.ones([tf.size(keys), 2]))
    session.run(v1.global_variables_initializer())
    session.run(written, {keys: [3, 0, -3]})
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"upsert of part 0 .*keys\] \[4\] \[belong to parts\] \[1\]"
    ):
        session.run(written, {keys: [3, 4]})
    assert session.run(table.size()) == 3


@pytest.mark.parametrize("eviction", [None, "lru", "lfu"])
def test_rows_that_are_rewritten_count_as_no_use(eviction):
    bound = {} if eviction is None else {"max_capacity": 4, "eviction": eviction}
    table = tf.get_kv_variable("v", 2, **bound)
    for keys in ([1, 2, 3, 4], [2, 3, 4], [2, 3]):
        table.sparse_read(np.array(keys), training=True)
    before = [stamp.numpy() for stamp in table.stamps([1, 2, 3, 4])]
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    for _ in range(3):
        table.write_rows(tf.constant([1, 4, 99], tf.int64), [tf.constant(rows)], [], rewrites=True)
    assert int(table.size()) == 4  # 99 has no row
    np.testing.assert_array_equal(table.sparse_read([1, 4], training=False), rows[:2])
    for stamp, expected in zip(table.stamps([1, 2, 3, 4]), before, strict=True):
        np.testing.assert_array_equal(stamp, expected)
    if eviction is not None:
        table.sparse_read(np.array([5]), training=True)
        assert sorted(table.export()[0].numpy()) == [2, 3, 4, 5]  # 1 is still the one that goes first
