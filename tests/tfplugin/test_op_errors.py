"""What goes wrong in an op is the op's error, and never the end of the process."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfplugin.ops import raw

SOURCES = Path(__file__).parents[2] / "kernels" / "tensorflow"
CONSTANT = '{"kind": "constant", "a": 0.0}'


def handle(dim=4, **kwargs):
    return raw.kv_table_handle(
        variable="emb",
        key_dtype=tf.int64,
        dtype=tf.float32,
        shape=[dim],
        dim=dim,
        anonymous=True,
        **kwargs,
    )


@pytest.fixture
def table():
    made = handle()
    raw.kv_table_initialize(made, tf.zeros([0, 4]), initializer=CONSTANT)
    return made


@contextlib.contextmanager
def memory_for(more: int) -> Iterator[None]:
    """Lets this process have so many bytes more than it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_every_kernel_is_one_whose_exceptions_are_caught():
    """`Kernel` and `AsyncKernel` are what TensorFlow calls: they catch. A kernel made past them would not."""
    for path in SOURCES.glob("*.*"):
        text = path.read_text()
        if path.name.startswith("kernel."):
            continue
        assert not re.search(r"\b(Async)?OpKernel\b|REGISTER_KERNEL_BUILDER|\bCompute(Async)?\(", text), path.name
        registered = re.findall(r"KVTOOLS_REGISTER(?:_ON)?\((?:tf::\w+,)?\s*(?:[^;]*?),\s*([\w<>]+)\);", text)
        for name in registered:
            assert re.search(rf"class {name.split('<')[0]}\b", text), (path.name, name)
        assert not registered or not re.search(r"explicit \w+Op\(", text), f"{path.name}: what may fail is in SetUp"
    assert "catch (...)" in (SOURCES / "kernel.cc").read_text()


def test_no_memory_for_a_write(table):
    keys = tf.range(1 << 21, dtype=tf.int64)
    rows = tf.zeros([1 << 21, 4])
    with (
        memory_for(16 << 20),
        pytest.raises(tf.errors.ResourceExhaustedError, match=r"'emb': (out of memory|The system refused)"),
    ):
        raw.kv_table_upsert(table, keys, rows)
    raw.kv_table_upsert(table, keys[:8], rows[:8])


def test_no_memory_for_the_sums_of_a_dense_variable():
    n = 1 << 24
    variable = tf.Variable([[1.0]])
    indices, gradients = tf.zeros([n], tf.int32), tf.zeros([n, 1])
    with memory_for(32 << 20), pytest.raises(tf.errors.ResourceExhaustedError, match="variable 'w'"):
        raw.kv_apply_dense(
            [variable.handle],
            indices,
            gradients,
            [tf.constant(0.1)],
            variable="w",
            optimizer="sgd",
            names=["learning_rate"],
            sparse=True,
        )
    assert variable.numpy().tolist() == [[1.0]]


def test_no_memory_for_the_rows_that_a_rank_asks_for_is_an_error_of_all_ranks():
    with memory_for(64 << 20):
        message, splits, _ = raw.kv_exchange_request(
            [tf.constant([1], tf.int64)],
            [tf.constant([[0, 0]], tf.int64)],
            [tf.constant([1 << 30, 1], tf.int64)],
            [],
            [],
            rank=0,
            ranks=1,
            names=["emb"],
            owners=[-1],
            rows=[-1],
            key_dtypes=[tf.int64],
            dims=[4],
            hotness=[-1],
            outer=[1],
            weighted=[False],
        )
    with pytest.raises(tf.errors.InvalidArgumentError, match="rank 0: 'emb': there is no memory for the 1073741824"):
        raw.kv_exchange_serve(message, splits, Tout=[tf.int64], ranks=1, local=[False])


def test_more_rows_than_any_memory_has_room_for():
    with pytest.raises((tf.errors.ResourceExhaustedError, tf.errors.InvalidArgumentError), match="'emb'"):
        raw.kv_table_initialize(handle(capacity_hint=1 << 62), tf.zeros([0, 4]), initializer=CONSTANT)


def test_a_dense_variable_without_rows():
    variable = tf.Variable(tf.zeros([0, 4]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="'w' has 0 rows, got index 0"):
        raw.kv_apply_dense(
            [variable.handle],
            tf.constant([0]),
            tf.zeros([1, 4]),
            [tf.constant(0.1)],
            variable="w",
            optimizer="sgd",
            names=["learning_rate"],
            sparse=True,
        )


def test_sizes_that_are_none():
    with pytest.raises(tf.errors.InvalidArgumentError, match="size must be 0 or more, got -1"):
        raw.kv_exchange_pool_gradient(
            tf.constant(-1, tf.int64),
            [tf.zeros([1, 4])],
            [tf.constant([0], tf.int64)],
            [tf.constant([0, 1], tf.int64)],
            [],
            [],
            dims=[4],
            combiners=["sum"],
            outer=[-1],
            weighted=[False],
        )
    for count in (-1, 1 << 62):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"cannot ask for {count} rows of 4"):
            raw.kv_exchange_reply([tf.zeros([1, 4])], tf.constant([[count]], tf.int64), dims=[4])


def test_a_prefix_that_is_not_one(table):
    prefixes = tf.constant(["a", "b"])
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=r"prefix|rank 0"):
        raw.kv_table_save(prefixes, [table], tensor_prefixes=["emb"], names=["emb"], part=[0], parts=[1])
    # Several are a whole checkpoint and its increments.
    with pytest.raises(tf.errors.InvalidArgumentError, match="wants a prefix"):
        raw.kv_table_restore(table, prefixes[:0], tensor_prefix="emb", part_infix="/part_", part=0, parts=1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="part 3 is none of 2 parts"):
        raw.kv_table_restore(table, "a", tensor_prefix="emb", part_infix="/part_", part=3, parts=2)


def test_attributes_that_are_not_what_they_should_be():
    for attributes, message in (
        ({"dim": 1 << 61}, "'emb' has rows of dim 2305843009213693952, expected 1 to"),
        ({"initial": "{"}, "reading the initializer of key-value variable 'emb': bad JSON at offset 1"),
        ({"initial": '{"kind": "rows"}', "initial_rows": b"\0" * 7}, "'emb' wants initial rows of 16 bytes each"),
        ({"initial": '{"kind": "magic"}'}, "unknown initializer kind 'magic'"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            handle(**attributes)
    made = handle(initial=CONSTANT)
    for slots in ("[", "{}", "[1]", '[{"name": "m", "width": -1, "init": "constant"}]'):
        with pytest.raises(tf.errors.InvalidArgumentError, match="KvTableReadRows"):
            raw.kv_table_read_rows(
                made,
                tf.constant([1], tf.int64),
                dtype=tf.float32,
                slots=slots,
                all_slots="[]",
                generation=1,
                widths=[4],
                N=1,
            )
    assert np.asarray(raw.kv_table_size(made)) == 0
