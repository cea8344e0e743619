"""A bounded table that was restored evicts what it would have evicted: scores, the order of equal ones, epochs."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfplugin
import tfplugin.keras
from kvtools.chain_fold import merge_chain

v1 = tf.compat.v1
EVICTIONS = ("lru", "lfu", "custom", "epoch_lru", "epoch_lfu")
CAPACITY = 120


def make(eviction: str, parts: int = 1) -> Any:
    partitioner = v1.fixed_size_partitioner(parts) if parts > 1 else None
    return tf.get_kv_variable(
        "t", embedding_dim=2, max_capacity=CAPACITY, eviction=eviction, partitioner=partitioner, initializer=1.0
    )


def touch(table: Any, steps: range) -> list[list[int]]:
    """The keys that steps evict, in their order: few counts, few scores, many in one second."""
    gone = []
    eviction = (table if isinstance(table, tfplugin.KvVariable) else next(iter(table))).eviction
    for step in steps:
        random = np.random.default_rng(step)
        keys = random.zipf(1.3, 40) % 600
        gone.append(table.sparse_read_and_evict(keys)[1].numpy().tolist())
        if eviction == "custom":
            table.set_scores(keys[::3], random.integers(0, 3, len(keys[::3])))
        if eviction.startswith("epoch") and step % 10 == 5:
            table.set_epoch(step // 10)
    return gone


def by_checkpoint(table: Any, again: Any, folder: Path) -> None:
    tf.train.Checkpoint(table=again).restore(tf.train.Checkpoint(table=table).write(str(folder / "a")))


def by_an_asynchronous_checkpoint(table: Any, again: Any, folder: Path) -> None:
    checkpoint = tf.train.Checkpoint(table=table)
    path = checkpoint.save(str(folder / "a"), tf.train.CheckpointOptions(enable_async=True))
    checkpoint.sync()
    tf.train.Checkpoint(table=again).restore(path)


def write_chain(table: Any, folder: Path) -> None:
    manager = tfplugin.CheckpointManager(tf.train.Checkpoint(table=table), folder, delta_every=0.0)
    manager.save()
    touch(table, range(30, 33))
    manager.save()
    manager.close()
    assert (folder / "ckpt-2.delta.index").exists()


def by_a_chain(table: Any, again: Any, folder: Path) -> None:
    write_chain(table, folder)
    manager = tfplugin.CheckpointManager(tf.train.Checkpoint(table=again), folder)
    manager.restore_or_initialize()
    manager.close()


def by_a_folded_chain(table: Any, again: Any, folder: Path) -> None:
    write_chain(table, folder)
    merge_chain(folder, folder / "whole")
    tf.train.Checkpoint(table=again).restore(str(folder / "whole"))


WAYS = [by_checkpoint, by_an_asynchronous_checkpoint, by_a_chain, by_a_folded_chain]


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("parts", [1, 2])
def test_the_same_rows_go_in_the_same_order(eviction, way: Callable[..., None], parts, tmp_path):
    table, again = make(eviction, parts), make(eviction, parts)
    touch(table, range(30))
    assert int(table.evicted_rows()) > 100
    way(table, again, tmp_path)
    assert touch(again, range(33, 60)) == touch(table, range(33, 60))


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_copy_evicts_what_the_table_evicts(eviction):
    table = make(eviction)
    touch(table, range(30))
    assert touch(copy.deepcopy(table), range(30, 50)) == touch(table, range(30, 50))


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_restore_into_other_parts_is_the_same_each_time(eviction, tmp_path):
    table = make(eviction, 3)
    touch(table, range(30))
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "a"))
    found = []
    for _ in range(2):
        again = make(eviction, 2)
        tf.train.Checkpoint(table=again).restore(path)
        found.append(touch(again, range(30, 50)))
    assert found[0] == found[1] and sum(map(len, found[0])) > 100


def test_of_equal_counts_the_older_touch_goes_first_after_a_restore_too(tmp_path):
    table, again = make("lfu"), make("lfu")
    keys = np.random.default_rng(0).permutation(CAPACITY)
    for key in keys:
        table.sparse_read([key])
    by_checkpoint(table, again, tmp_path)
    assert again.sparse_read_and_evict(np.arange(1000, 1040))[1].numpy().tolist() == keys[:40].tolist()


@pytest.mark.parametrize("how", ["file", "deepcopy"])
def test_a_model_of_keras_that_is_loaded_has_the_same_losses(how, tmp_path):
    keras.utils.set_random_seed(3)
    table = tfplugin.keras.Embedding(4, combiner="mean", max_capacity=300)
    model = keras.Sequential([keras.Input((8,), dtype="int64"), table, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse")

    def losses(model: Any, batches: range) -> list[float]:
        found = []
        for number in batches:
            ids = np.random.default_rng(number).zipf(1.2, [64, 8]) % 1000
            found.append(float(model.train_on_batch(ids, (ids % 7).mean(1, keepdims=True))))
        return found

    losses(model, range(15))
    model.save(tmp_path / "m.keras")
    again = copy.deepcopy(model) if how == "deepcopy" else keras.models.load_model(tmp_path / "m.keras")
    assert losses(again, range(15, 25)) == losses(model, range(15, 25))


def test_what_an_older_version_saved_is_restored_in_the_order_of_its_rows(tmp_path):
    """Without orders and the epoch."""
    table = make("lfu")
    table.sparse_read(np.arange(CAPACITY))
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "a"))
    reader = tf.train.load_checkpoint(path)
    prefix = "table/.ATTRIBUTES/kv"
    names = [name for name in reader.get_variable_to_shape_map() if name != f"{prefix}-orders"]
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "b"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[reader.get_tensor(name) for name in names],
    )
    again = make("lfu")
    tf.train.Checkpoint(table=again).restore(str(tmp_path / "b"))
    gone = again.sparse_read_and_evict(np.arange(1000, 1040))[1].numpy().tolist()
    assert gone == reader.get_tensor(f"{prefix}-keys")[:40].tolist()


@pytest.mark.parametrize("order", [0, 2**64 - 1])
def test_orders_that_no_table_has_are_taken_for_the_nearest(order, tmp_path):
    table = make("lfu")
    table.sparse_read(np.arange(CAPACITY))
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "a"))
    reader = tf.train.load_checkpoint(path)
    prefix = "table/.ATTRIBUTES/kv"
    tensors = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    tensors[f"{prefix}-orders"][tensors[f"{prefix}-keys"] < 60] = order
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "b"),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=list(tensors.values()),
    )
    again = make("lfu")
    tf.train.Checkpoint(table=again).restore(str(tmp_path / "b"))
    gone = again.sparse_read_and_evict(np.arange(1000, 1060))[1].numpy()
    assert sorted(gone.tolist()) == list(range(60) if order == 0 else range(60, CAPACITY))
    assert int(again.size()) == CAPACITY


def told(text: str) -> list[tuple[str, ...]]:
    """Of each part that is said to lack rows: its name, which rows, and how many it has."""
    return re.findall(r"key-value variable '([^']*)' is without rows of the checkpoint, ([^;]*); it has (\d+)\.", text)


@pytest.fixture
def aged(tmp_path: Path) -> tuple[str, int]:
    """A checkpoint, by names and of objects, of a table whose rows were written in several steps; how many it has."""
    with tf.Graph().as_default(), v1.Session() as session:
        table = tf.get_kv_variable("t", 2, expiry=tfplugin.policies.ExpireAfterSteps(100))
        keys = v1.placeholder(tf.int64)
        step = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(tf.nn.embedding_lookup(table, keys)))
        session.run(v1.global_variables_initializer())
        for number in range(10):
            session.run(step, {keys: np.arange(number * 3, 30 + number)})
        return v1.train.Saver().save(session, str(tmp_path / "model")), session.run(table.size())


LIMITS = [
    ({}, ""),
    ({"max_capacity": 12}, "beyond its max_capacity="),
    ({"expiry": tfplugin.policies.ExpireAfterSteps(2)}, "that have expired"),
    ({"padding_key": 7}, "that of its padding_key, 7"),
    ({"max_capacity": 12, "padding_key": 7}, "beyond its max_capacity="),
]


def check_told(text: str, held: list[int], whole: int, why: str) -> None:
    """That `text` tells once of each part that lacks rows, and of all of them."""
    said = told(text)
    assert len({name for name, *_ in said}) == len(said)
    assert all(int(rows) in held for _, _, rows in said)
    missing = [int(n) for _, which, _ in said for n in re.findall(r"(\d+) (?:beyond|that have)", which)]
    missing += [1 for _, which, _ in said if "padding_key, 7" in which]
    assert sum(missing) == whole - sum(held) and (sum(missing) > 0) == bool(why)
    assert any(why in which for _, which, _ in said) or not why


@pytest.mark.parametrize("way", ["checkpoint", "restore_tables"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("limits", "why"), LIMITS)
def test_rows_that_a_restore_leaves_out_are_told_once(
    aged: tuple[str, int], caplog: pytest.LogCaptureFixture, way: str, parts: int, limits: dict[str, Any], why: str
) -> None:
    path, whole = aged
    table = tf.get_kv_variable("t", 2, partitioner=v1.fixed_size_partitioner(parts) if parts > 1 else None, **limits)
    if way == "checkpoint":
        tf.train.Checkpoint(t=table).restore(path)
    else:
        assert tfplugin.restore_tables(path, table) == {"t": int(table.size())}
    check_told(caplog.text, [int(part.size()) for part in table._kv_parts], whole, why)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("limits", "why"), LIMITS)
def test_rows_that_a_restore_in_a_session_leaves_out_are_told_by_its_ops(
    aged: tuple[str, int], parts: int, limits: dict[str, Any], why: str
) -> None:
    path, whole = aged
    with tf.Graph().as_default() as graph, v1.Session() as session:
        partitioner = v1.fixed_size_partitioner(parts) if parts > 1 else None
        table = tf.get_kv_variable("t", 2, partitioner=partitioner, **limits)
        saver = v1.train.Saver()
        restores = [op for op in graph.get_operations() if op.type == "KvTableRestore"]
        assert len(restores) == parts and all(op.get_attr("log") for op in restores)
        said = session.run([op.outputs[0] for op in restores], {saver.saver_def.filename_tensor_name: path})
        held = session.run([part.size() for part in table._kv_parts])
    check_told(" ".join(text.decode() for text in said), held, whole, why)


IN_A_SESSION = """
import sys, tensorflow as tf, tfplugin
v1 = tf.compat.v1
with tf.Graph().as_default(), v1.Session() as session:
    table = tf.get_kv_variable("t", 2, max_capacity=12)
    saver, restore = v1.train.Saver(), tfplugin.restore_tables(sys.argv[1], table)
    saver.restore(session, sys.argv[1])
    print("then", file=sys.stderr, flush=True)
    session.run(restore)
"""


@pytest.mark.thorough
def test_the_log_of_a_session_tells_of_rows_that_are_left_out(aged: tuple[str, int], tmp_path: Path) -> None:
    path, whole = aged
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"}
    command = [sys.executable, "-c", IN_A_SESSION, path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True)
    for text in done.stderr.split("then\n"):
        check_told(text, [12], whole, "beyond its max_capacity=12")
