"""Saves and restores go by chunks, on several threads: whatever lies how in the files, the rows are the same."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tasks import Tasks

import kvtools
import tfplugin

ROWS, DIM = 100_000, 64  # more than one chunk


@pytest.fixture(scope="module")
def large():
    """A table of several chunks, and its rows in the order of the keys."""
    table = tf.get_kv_variable("large", DIM)
    keys = np.arange(ROWS) * 7919 - 31
    rows = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    table.upsert(keys, rows)
    return table, keys, rows


def _check(table, keys, rows):
    found, values = table.export()
    order = np.argsort(found)
    np.testing.assert_array_equal(found.numpy()[order], np.sort(keys))
    np.testing.assert_array_equal(values.numpy()[order], rows[np.argsort(keys)])


def test_one_file_for_each_thread_that_stock_tensorflow_and_kvtools_read(tmp_path, large):
    table, keys, rows = large
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "c"))
    reader = tf.train.load_checkpoint(path)
    order = np.argsort(reader.get_tensor("table/.ATTRIBUTES/kv-keys"))
    np.testing.assert_array_equal(reader.get_tensor("table/.ATTRIBUTES/kv-values")[order], rows)
    (again,) = kvtools.open(path).tables.values()
    chunk = again.to_numpy()
    np.testing.assert_array_equal(chunk.values[np.argsort(chunk.keys)], rows)
    restored = tf.get_kv_variable("restored", DIM)
    tf.train.Checkpoint(table=restored).restore(path)
    _check(restored, keys, rows)
    in_parts = tf.get_kv_variable("parts", DIM, partitioner=tf.compat.v1.fixed_size_partitioner(3))
    tf.train.Checkpoint(table=in_parts).restore(path)
    _check(in_parts, keys, rows)


@pytest.fixture
def whole(tmp_path, large):
    """The same table, by kvtools: each column as one tensor."""
    path = tf.train.Checkpoint(table=large[0]).write(str(tmp_path / "c"))
    kvtools.write_tables(list(kvtools.open(path).tables.values()), tmp_path / "whole", "tfplugin")
    return tmp_path / "whole"


def test_tensors_that_are_stored_whole_are_read_a_chunk_at_a_time(whole, large):
    table = tf.get_kv_variable("large", DIM)
    assert tfplugin.restore_tables(whole, table) == {"large": ROWS}
    _check(table, *large[1:])


@pytest.mark.parametrize("place", [0.02, 0.5, 0.9])
def test_a_bit_that_differs_is_found_and_the_table_is_as_it_was(whole, place):
    file = next(whole.parent.glob("whole.data-*"))
    with file.open("r+b") as data:
        data.seek(int(file.stat().st_size * place))
        byte = data.read(1)[0]
        data.seek(-1, 1)
        data.write(bytes([byte ^ 16]))
    table = tf.get_kv_variable("large", DIM)
    table.upsert([5], np.ones([1, DIM], np.float32))
    with pytest.raises(tf.errors.DataLossError, match=r"tensor 'table/.*differs from its checksum"):
        tfplugin.restore_tables(whole, table)
    assert int(table.size()) == 1


def test_a_data_file_that_was_cut_is_an_error_that_names_the_tensor(whole):
    file = next(whole.parent.glob("whole.data-*"))
    with file.open("r+b") as data:
        data.truncate(file.stat().st_size - 1000)
    table = tf.get_kv_variable("large", DIM)
    with pytest.raises(tf.errors.DataLossError, match=r"tensor 'table/.* is damaged"):
        tfplugin.restore_tables(whole, table)
    assert int(table.size()) == 0


def test_many_small_tables_share_the_threads(tmp_path):
    tables = [tf.get_kv_variable(f"t{i}", 8) for i in range(40)]
    for i, table in enumerate(tables):
        table.upsert(np.arange(i * 50), np.full([i * 50, 8], i, np.float32))
    path = tf.train.Checkpoint(tables=tables).write(str(tmp_path / "c"))
    again = [tf.get_kv_variable(f"t{i}", 8) for i in range(40)]
    tf.train.Checkpoint(tables=again).restore(path)
    for i, table in enumerate(again):
        _check(table, np.arange(i * 50), np.full([i * 50, 8], i, np.float32))


def _out_of_the_page_cache(prefix):
    for path in prefix.parent.glob(prefix.name + ".data-*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_files_that_are_not_in_the_page_cache_are_read_and_checked_all_the_same(tmp_path, large):
    table, keys, rows = large
    path = tmp_path / "c"
    tf.train.Checkpoint(table=table).write(str(path))
    again = tf.get_kv_variable("again", DIM)
    _out_of_the_page_cache(path)
    tf.train.Checkpoint(table=again).restore(str(path))
    _check(again, keys, rows)
    file = max(tmp_path.glob("c.data-*"), key=lambda one: one.stat().st_size)
    with file.open("r+b") as data:
        data.seek(file.stat().st_size // 2)
        byte = data.read(1)[0]
        data.seek(-1, 1)
        data.write(bytes([byte ^ 1]))
    _out_of_the_page_cache(path)
    with pytest.raises(tf.errors.DataLossError, match="differs from its checksum"):
        tf.train.Checkpoint(table=again).restore(str(path))
    _check(again, keys, rows)


@pytest.mark.thorough
def test_files_beyond_what_is_left_in_the_page_cache_are_the_same_to_the_last_byte(tmp_path):
    rows, dim = 230_000, 256  # each of two threads writes 118 MB, 67 of them by way of the page cache
    table = tf.get_kv_variable("beyond", dim)
    values = np.arange(rows * dim, dtype=np.float32).reshape(rows, dim)
    table.upsert(np.arange(rows), values)
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "c"))
    reader = tf.train.load_checkpoint(path)  # looks at checksums, too
    order = np.argsort(reader.get_tensor("table/.ATTRIBUTES/kv-keys"))
    np.testing.assert_array_equal(reader.get_tensor("table/.ATTRIBUTES/kv-values")[order], values)
    again = tf.get_kv_variable("again", dim)
    _out_of_the_page_cache(tmp_path / "c")
    tf.train.Checkpoint(table=again).restore(path)
    _check(again, np.arange(rows), values)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000_000, before[1]))
    try:
        with pytest.raises(tf.errors.OpError, match="File too large"):
            tf.train.Checkpoint(table=table).write(str(tmp_path / "d"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob("d*"))


MEMORY = """
import sys, numpy as np, tensorflow as tf, tfplugin

def mebibytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) / 1024

def peak_of(work):
    before = mebibytes("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    work()
    return mebibytes("VmHWM") - max(before, mebibytes("VmRSS"))

table = tf.get_kv_variable("t", 256)
for first in range(0, 600_000, 50_000):
    table.upsert(np.arange(first, first + 50_000), np.ones([50_000, 256], np.float32))
checkpoint = tf.train.Checkpoint(t=table)
print(peak_of(lambda: checkpoint.write(sys.argv[1])))
import kvtools
kvtools.write_tables(list(kvtools.open(sys.argv[1]).tables.values()), sys.argv[1] + "-whole", "tfplugin")
table.initialize()
print(peak_of(lambda: tfplugin.restore_tables(sys.argv[1] + "-whole", table)))
"""


@pytest.mark.thorough
def test_at_most_256_mebibytes_beside_the_table(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "c")], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert [float(peak) < 256 for peak in run.stdout.split()] == [True, True], run.stdout


KILLED = """
import sys, numpy as np, tensorflow as tf, tfplugin
table = tf.get_kv_variable("t", 64)
step = tf.Variable(0)
manager = tf.train.CheckpointManager(tf.train.Checkpoint(t=table, step=step), sys.argv[1], max_to_keep=2)
options = tf.train.CheckpointOptions(enable_async=sys.argv[2] == "async")
while True:
    step.assign_add(1)
    table.upsert(np.arange(100_000), np.full([100_000, 64], float(step), np.float32))
    manager.save(options=options)
    print(int(step), flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["at once", "async"])
def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path, how):
    saved = tmp_path / "saved"
    with Tasks(tmp_path) as tasks:
        tasks.start(KILLED, str(saved), how).wait_for_line("3")
    table, step = tf.get_kv_variable("t", 64), tf.Variable(0)
    path = tf.train.latest_checkpoint(str(saved))
    tf.train.Checkpoint(t=table, step=step).restore(path).expect_partial()
    assert int(step) >= 1
    _, rows = table.export()
    assert (rows.numpy() == float(step)).all() and int(table.size()) == 100_000
