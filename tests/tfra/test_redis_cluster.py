"""`RedisTableCreator` on a real cluster of three nodes, one of which may go away and come back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from redis_processes import Cluster, redis, wait_until

from kvtools.dialects import tfra_redis_layout as layout
from tfplugin import dynamic_embedding as de

KEYS = np.concatenate([[0, -1, -(2**63), 2**63 - 1], np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 200)])
ROWS = np.random.default_rng(0).normal(size=(len(KEYS), 2)).astype(np.float32)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(running):
    running.clear()
    return running


@pytest.fixture
def creator(cluster, tmp_path):
    def creator(**parameters):
        path = tmp_path / "redis.json"
        where = {"redis_connection_mode": 0, "redis_host_port": cluster.ports, "redis_host_ip": ["127.0.0.1"] * 3}
        path.write_text(json.dumps({**where, "keys_sending_size": 16, "storage_slice": 7, **parameters}))
        return de.RedisTableCreator(de.RedisTableConfig(str(path)))

    return creator


def by_key(exported):
    keys, rows = (np.asarray(x) for x in exported)
    assert len(set(keys.tolist())) == len(keys)
    return {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}


@pytest.mark.parametrize("slices", [1, 3, 7])
def test_rows_are_spread_over_nodes_and_found_again(mode, cluster, creator, slices):
    v = de.Variable(dim=2, name="tower/emb", initializer=0.5, kv_creator=creator(storage_slice=slices))
    mode(v.upsert, KEYS, ROWS)
    assert mode(v.size) == len(KEYS) and by_key(mode(v.export)) == by_key((KEYS, ROWS))
    held = [sum(node.client().hlen(key) for key in node.client().scan_iter()) for node in cluster.nodes]
    assert sum(held) == len(KEYS) and sum(count > 0 for count in held) == min(slices, 3)
    rows, exists = mode(lambda keys: v.lookup(keys, return_exists=True), np.array([-1, 99]))
    np.testing.assert_array_equal(rows, [ROWS[1], [0.5, 0.5]])
    np.testing.assert_array_equal(exists, [True, False])
    mode(v.remove, KEYS[1:])
    assert by_key(mode(v.export)) == by_key((KEYS[:1], ROWS[:1]))
    mode(v.clear)
    assert mode(v.size) == 0 and not any(node.client().dbsize() for node in cluster.nodes)


def test_training_is_that_of_a_table_in_memory(creator):
    tables = [
        de.Variable(dim=2, name=f"v{i}", initializer=0.5, kv_creator=kv_creator)
        for i, kv_creator in enumerate([creator(), de.CuckooHashTableCreator()])
    ]
    optimizers = [de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1)) for _ in tables]
    for step in range(4):
        ids = tf.constant([1, 2, 1, 5 + step, -3, 2**40], tf.int64)
        for v, optimizer in zip(tables, optimizers, strict=True):
            loss = lambda v=v, ids=ids: tf.reduce_sum(de.embedding_lookup(v, ids, name="x") ** 2)  # noqa: E731
            optimizer.minimize(loss, var_list=[v.get_trainable_by_name("x")])
    assert by_key(tables[0].export()) == by_key(tables[1].export())
    slots = [
        [by_key(slot.export()) for slot in v.get_slot_variables(o)] for v, o in zip(tables, optimizers, strict=True)
    ]
    assert slots[0] == slots[1] and len(slots[0]) == 2


def test_a_graph_trains(creator):
    v1 = tf.compat.v1
    found = []
    for kv_creator in (creator(), de.CuckooHashTableCreator()):
        with tf.Graph().as_default(), v1.Session() as session:
            v = de.Variable(dim=2, name="v", initializer=0.5, kv_creator=kv_creator)
            rows = de.embedding_lookup(v, tf.constant([1, 2, 1, 3, 4], tf.int64), name="x")
            step = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1)).minimize(tf.reduce_sum(rows**2))
            session.run(v1.global_variables_initializer())
            for _ in range(3):
                session.run(step)
            found.append(by_key(session.run(v.export())))
    assert found[0] == found[1]


def test_rows_under_other_tags_of_whoever_wrote_them_are_found(cluster, creator):
    """As TFRA chooses them: by the first hash slot of each node, in the order in which a node names them."""
    client = redis.RedisCluster("127.0.0.1", cluster.ports[0])
    order = [2, 0, 1]
    for key, row, i in zip(KEYS, ROWS, layout.slices_of(KEYS, 3), strict=True):
        tag = layout.tag_in_slot([0, 5461, 10923][order[i]])
        client.hset(f"test:emb{{{tag}}}", key.tobytes(), row.tobytes())
    v = de.Variable(dim=2, name="emb", kv_creator=creator(storage_slice=3))
    np.testing.assert_array_equal(v.lookup(KEYS), ROWS)
    v.upsert(KEYS, -ROWS)
    assert by_key(v.export()) == by_key((KEYS, -ROWS))
    assert sum(node.client().dbsize() for node in cluster.nodes) == 3
    with pytest.raises(ValueError, match="which are not 2 slices: give the storage_slice and the redis_hash_tags"):
        de.Variable(dim=2, name="emb", kv_creator=creator(storage_slice=2)).size()


def test_a_node_that_goes_away_is_named_and_asked_again_when_it_is_back(cluster, creator):
    v = de.Variable(dim=2, name="emb", kv_creator=creator(redis_connect_timeout=10_000, redis_socket_timeout=10_000))
    v.upsert(KEYS, ROWS)
    gone = cluster.nodes[1]
    gone.stop()
    try:
        ports = ", ".join(f"127.0.0.1:{port}" for port in cluster.ports)
        for call in (lambda: v.lookup(KEYS), lambda: v.upsert(KEYS, ROWS), v.size, v.export, v.clear):
            with pytest.raises(ConnectionError, match=f"'emb': the Redis cluster at {ports} does not .* Start it"):
                call()
        with pytest.raises(tf.errors.OpError, match=f"the Redis cluster at {ports} does not"):
            tf.function(v.lookup)(tf.constant(KEYS))
    finally:
        gone.start()
        cluster.wait()
    wait_until(lambda: v.upsert(KEYS, ROWS) is None, "the cluster takes rows again")
    assert by_key(v.export()) == by_key((KEYS, ROWS))


def test_a_mode_that_is_not_the_servers_is_told(cluster, creator):
    one = {"redis_connection_mode": 2, "redis_host_port": cluster.ports[1:2], "redis_host_ip": ["127.0.0.1"]}
    v = de.Variable(dim=2, name="emb", kv_creator=creator(**one, storage_slice=1))
    with pytest.raises(ConnectionError, match="It is a node of a cluster: set redis_connection_mode to 0"):
        v.size()
