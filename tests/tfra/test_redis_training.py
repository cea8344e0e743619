"""Training tables in Redis by string keys, under restrict policies and from several processes."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import tensorflow as tf
from tasks import Tasks

from tfplugin import dynamic_embedding as de


@pytest.fixture
def creator(client, running, tmp_path):
    path = tmp_path / "redis.json"
    path.write_text(json.dumps({"redis_host_port": running.port}))
    return de.RedisTableCreator(de.RedisTableConfig(str(path)))


def by_key(exported):
    keys, rows = (np.asarray(x) for x in exported)
    assert len(set(keys.tolist())) == len(keys)
    return {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}


def step_of(v, optimizer):
    def step(ids):
        loss = lambda: tf.reduce_sum(de.embedding_lookup(v, ids, name="x") ** 2)  # noqa: E731
        optimizer.minimize(loss, var_list=[v.get_trainable_by_name("x")])

    return step


@pytest.mark.parametrize("traced", [False, True])
def test_string_keys_train_as_in_memory(creator, traced):
    tables = [
        de.Variable(tf.string, dim=2, name=f"s{traced}{i}", initializer=0.5, kv_creator=kv_creator)
        for i, kv_creator in enumerate([creator, de.CuckooHashTableCreator()])
    ]
    optimizers = [de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1)) for _ in tables]
    for v, optimizer in zip(tables, optimizers, strict=True):
        step = step_of(v, optimizer)
        step = tf.function(step) if traced else step
        for i in range(4):
            step(tf.constant(["a", "", "a", f"a longer string than that, {i}"]))
    assert by_key(tables[0].export()) == by_key(tables[1].export())
    slots = [
        [by_key(slot.export()) for slot in v.get_slot_variables(o)] for v, o in zip(tables, optimizers, strict=True)
    ]
    assert slots[0] == slots[1] and len(slots[0]) == 2
    assert not tables[0].names._held, "strings are held no longer than an update takes"
    assert int(tables[0].parts[0].size()) == 0
    tables[0].remove(tf.constant(["a"]))
    assert b"a" not in by_key(tables[0].export())
    assert all(b"a" not in by_key(slot.export()) for slot in tables[0].get_slot_variables(optimizers[0]))


def test_ids_whose_rank_only_the_session_knows_train_as_in_memory(creator):
    v1 = tf.compat.v1
    found = []
    for kv_creator in (creator, de.CuckooHashTableCreator()):
        with tf.Graph().as_default(), v1.Session() as session:
            v = de.Variable(dim=2, name="v", initializer=0.5, kv_creator=kv_creator)
            ids = v1.placeholder(tf.int64)
            _, trainable = de.embedding_lookup(v, ids, name="x", return_trainable=True)
            optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
            step = optimizer.minimize(lambda t=trainable: t * t, var_list=[trainable])
            session.run(v1.global_variables_initializer())
            for fed in ([3, 1], [[1], [2]]):
                session.run(step, {ids: fed})
            found.append(by_key(session.run(v.export())))
    assert found[0] == found[1] and set(found[0]) == {1, 2, 3}


def test_string_keys_train_in_a_graph(creator):
    v1 = tf.compat.v1
    found = []
    for kv_creator in (creator, de.CuckooHashTableCreator()):
        with tf.Graph().as_default(), v1.Session() as session:
            v = de.Variable(tf.string, dim=2, name="v", initializer=0.5, kv_creator=kv_creator)
            rows = de.embedding_lookup(v, tf.constant(["a", "b", "a"]), name="x")
            step = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1)).minimize(tf.reduce_sum(rows**2))
            session.run(v1.global_variables_initializer())
            for _ in range(3):
                session.run(step)
            found.append(by_key(session.run(v.export())))
            assert kv_creator is not creator or not v.names._held
    assert found[0] == found[1] and set(found[0]) == {b"a", b"b"}


@pytest.mark.parametrize("key_dtype", [tf.int64, tf.string], ids=lambda x: x.name)
def test_restrict_removes_rows_slots_and_status(client, creator, key_dtype):
    text = (lambda ids: tf.strings.as_string(ids)) if key_dtype == tf.string else lambda ids: ids
    v = de.Variable(
        key_dtype,
        dim=1,
        name=f"r_{key_dtype.name}",
        initializer=0.5,
        kv_creator=creator,
        restrict_policy=de.FrequencyRestrictPolicy,
    )
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adagrad(0.1))
    step = step_of(v, optimizer)
    for ids in ([1, 2, 3, 4], [2, 3], [3, 3]):
        step(text(tf.constant(ids, tf.int64)))
    status = dict(zip(*(x.numpy().tolist() for x in v.restrict_policy.status.export()), strict=True))
    key = (lambda i: str(i).encode()) if key_dtype == tf.string else (lambda i: i)
    assert status == {key(1): [1], key(2): [2], key(3): [3], key(4): [1]}
    assert client.dbsize() == 3, "rows, a slot and the status are in Redis"
    v.restrict(2, trigger=4)
    assert int(v.size()) == 4
    v.restrict(2, trigger=3)
    kept = {key(2), key(3)}
    (slot,) = v.get_slot_variables(optimizer)
    for table in (v, slot, v.restrict_policy.status):
        assert set(np.asarray(table.export()[0]).tolist()) == kept
    assert {client.hlen(name) for name in client.scan_iter()} == {2}


WORKER = """
import os
import sys
import time
import tensorflow as tf
from tfplugin import dynamic_embedding as de
creator = de.RedisTableCreator(de.RedisTableConfig(sys.argv[1]))
v = de.Variable(dim=1, name="shared", initializer=0.0, kv_creator=creator)
optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.SGD(1.0))
first = int(sys.argv[2])
print("ready", flush=True)
while not os.path.exists(sys.argv[3]):
    time.sleep(0.001)
for _ in range(5):
    ids = tf.range(first, first + 10, dtype=tf.int64)
    loss = lambda: tf.reduce_sum(de.embedding_lookup(v, ids, name="x"))
    optimizer.minimize(loss, var_list=[v.get_trainable_by_name("x")])
"""


def test_processes_see_the_rows_of_each_other(creator, tmp_path):
    begin = tmp_path / "begin"
    with Tasks(tmp_path) as tasks:
        config = creator.config.redis_config_abs_dir
        workers = [tasks.start(WORKER, config, str(first), str(begin)) for first in (0, 10)]
        for worker in workers:
            worker.wait_for_line("ready")
        begin.touch()
        for worker in workers:
            worker.wait()
    v = de.Variable(dim=1, name="shared", kv_creator=creator)
    assert by_key(v.export()) == {key: np.float32([-5]).tobytes() for key in range(20)}


def test_slots_and_status_are_found_where_eager_tfra_keeps_them(client, creator):
    """It calls slots of Keras' optimizers by the lookup, in a layer by the layer's, and status without ``status``."""
    key = struct.pack("<q", 1)
    ids = tf.constant([[1]], tf.int64)
    layer = de.keras.layers.Embedding(1, name="emb", kv_creator=creator, restrict_policy=de.FrequencyRestrictPolicy)
    v = de.Variable(dim=1, name="tower/v", kv_creator=creator, restrict_policy=de.FrequencyRestrictPolicy)
    slots = {"emb-parameter": "emb-parameter_DynamicEmbedding_emb-shadow", "tower_v": "tower_v_look"}
    for name, lookup in slots.items():
        client.hset(f"test:{name}{{3560}}", key, struct.pack("<f", 0.5))
        client.hset(f"test:{name}_frequency{{3560}}", key, struct.pack("<i", 5))
        client.hset(f"test:{lookup}_accumulator{{3560}}", key, struct.pack("<f", 8))
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adagrad(0.1))
    trained = [v.get_trainable_by_name("look"), layer.shadow]
    optimizer.minimize(
        lambda: tf.reduce_sum(de.embedding_lookup(v, ids, name="look")) + tf.reduce_sum(layer(ids)), var_list=trained
    )
    assert client.dbsize() == 6
    for name, lookup in slots.items():
        assert client.hgetall(f"test:{name}_frequency{{3560}}") == {key: struct.pack("<i", 6)}
        assert client.hgetall(f"test:{lookup}_accumulator{{3560}}") == {key: struct.pack("<f", 9)}
    (slot,) = v.get_slot_variables(optimizer)
    np.testing.assert_array_equal(slot.lookup([1]), [[9.0]])
    assert int(v.size()) == 1 and 0.4 < v.lookup([1]).numpy().item() < 0.5


def test_slots_of_several_lookups_are_not_taken_for_one_another(client, creator):
    v = de.Variable(dim=1, name="v", kv_creator=creator)
    for lookup in "xy":
        client.hset(f"test:v_{lookup}_accumulator{{3560}}", struct.pack("<q", 1), struct.pack("<f", 8))
        v.get_trainable_by_name(lookup)
    with pytest.raises(ValueError, match=r"v_x_accumulator, v_y_accumulator\. RENAME .* 'v_Adagrad_accumulator'"):
        step_of(v, de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adagrad(0.1)))(tf.constant([1], tf.int64))
