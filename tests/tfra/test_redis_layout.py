"""What `RedisTableCreator` writes, byte by byte: the layout of TFRA, pinned against literal names and bytes."""

from __future__ import annotations

import gc
import hashlib
import json
import struct

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
from redis_processes import redis

from kvtools.dialects import tfra_redis_layout as layout
from tfplugin import dynamic_embedding as de


@pytest.fixture
def creator(running, tmp_path):
    def creator(**parameters):
        path = tmp_path / "redis.json"
        path.write_text(json.dumps({"redis_host_ip": "127.0.0.1", "redis_host_port": running.port, **parameters}))
        return de.RedisTableCreator(de.RedisTableConfig(str(path)))

    return creator


def test_a_row_is_a_field_of_a_hash(client, creator):
    v = de.Variable(dim=2, name="tower/emb", kv_creator=creator(model_tag_runtime="v7"))
    v.upsert(tf.constant([258, -1], tf.int64), tf.constant([[1.0, -2.0], [0.5, 0.0]]))
    assert client.keys() == [b"v7:tower_emb{3560}"]
    assert client.hgetall("v7:tower_emb{3560}") == {
        b"\x02\x01\x00\x00\x00\x00\x00\x00": b"\x00\x00\x80\x3f\x00\x00\x00\xc0",
        b"\xff\xff\xff\xff\xff\xff\xff\xff": b"\x00\x00\x00\x3f\x00\x00\x00\x00",
    }


def test_a_slot_is_a_table_of_its_own(client, creator):
    v = de.Variable(dim=1, name="tower/emb", kv_creator=creator())
    optimizer = de.DynamicEmbeddingOptimizer(tf.compat.v1.train.MomentumOptimizer(0.5, 0.9))
    shadow = v.get_trainable_by_name("x")
    optimizer.minimize(lambda: de.embedding_lookup(v, tf.constant([1], tf.int64), name="x"), var_list=[shadow])
    assert sorted(client.keys()) == [b"test:tower_emb_Momentum_momentum{3560}", b"test:tower_emb{3560}"]
    key = struct.pack("<q", 1)
    assert client.hgetall("test:tower_emb{3560}") == {key: struct.pack("<f", -0.5)}
    assert client.hgetall("test:tower_emb_Momentum_momentum{3560}") == {key: struct.pack("<f", 1)}


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("slices", [1, 4])
def test_without_a_cluster_the_first_slice_has_all_rows(client, creator, devices, slices):
    v = de.Variable(dim=1, name="emb", devices=["/CPU:0"] * devices, kv_creator=creator(storage_slice=slices))
    v.upsert(tf.range(9, dtype=tf.int64), tf.ones([9, 1]))
    assert client.hlen("test:emb{3560}") == 9 and client.dbsize() == 1 and int(v.size()) == 9


def test_names_are_digests_where_the_configuration_says_so(client, creator):
    v = de.Variable(dim=1, name="emb", kv_creator=creator(using_md5_prefix_name=True))
    v.upsert(tf.constant([1], tf.int64), tf.ones([1, 1]))
    assert client.keys() == [hashlib.md5(b"test:emb").digest() + b"{3560}"]


def test_hash_tags_are_those_that_were_given(client, creator):
    v = de.Variable(dim=1, name="emb", kv_creator=creator(redis_hash_tags_runtime=["{a}"]))
    v.upsert(tf.constant([1], tf.int64), tf.ones([1, 1]))
    assert client.keys() == [b"test:emb{a}"]


def test_rows_under_another_tag_are_found(client, creator):
    client.hset("test:emb{77}", struct.pack("<q", 5), struct.pack("<f", 2))
    client.hset("test:emb_Adam_m{77}", struct.pack("<q", 5), struct.pack("<f", 9))
    v = de.Variable(dim=1, name="emb", kv_creator=creator())
    assert v.lookup(tf.constant([5], tf.int64)).numpy().tolist() == [[2.0]]
    v = de.Variable(tf.int32, dim=1, name="emb", kv_creator=creator())
    with pytest.raises(ValueError, match=r"b'test:emb\{77\}' has keys of 8 bytes, which are not int32"):
        v.size()


@pytest.mark.parametrize("number", [1, 4, 1000])
def test_hash_slots_of_tags_are_spread_evenly(number):
    slots = [redis.crc.key_slot(tag.encode()) for tag in layout.hash_tags(number)]
    assert slots == [16384 // number * i + 16384 % number for i in range(number)]


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_slices_go_by_the_low_32_bits_or_by_crc(dtype):
    keys = np.array([0, 5, -1, -7, 2**31 - 1, -(2**31)], dtype)
    low = [int(key) % 2**32 % 7 for key in keys]
    assert layout.slices_of(keys, 7).tolist() == low
    crcs = [(google_crc32c.value(key.tobytes()) ^ 0xFFFFFFFF) % 7 for key in keys]
    assert layout.slices_of(keys, 7, by_crc=True).tolist() == crcs
    assert layout.slices_of(np.array([2**32 + 5, -(2**33) + 6]), 7).tolist() == [5, 6]


def test_slices_of_short_strings_go_by_tensorflows_object():
    keys = np.array([b"abc", b"", b"a" * 22, b"b" * 23], object)
    objects = [b"\x0cab", b"", b"\x58" + b"a" * 21, b"b" * 23]
    assert layout.slices_of(keys, 5).tolist() == [(google_crc32c.value(x) ^ 0xFFFFFFFF) % 5 for x in objects]


VALUES = [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int8, tf.int32, tf.int64, tf.bool]


@pytest.mark.parametrize("key_dtype", [tf.int64, tf.int32, tf.string], ids=lambda x: x.name)
@pytest.mark.parametrize("value_dtype", VALUES, ids=lambda x: x.name)
def test_every_dtype_lies_as_in_memory(mode, client, creator, key_dtype, value_dtype):
    keys = np.array([b"a", b"", b"x\0y"], object) if key_dtype == tf.string else np.array([1, -1, 0], np.int64)
    keys = keys if key_dtype == tf.string else keys.astype(key_dtype.as_numpy_dtype)
    rows = np.array([[1, 0], [0, 1], [1, 1]]).astype(value_dtype.as_numpy_dtype)
    v = de.Variable(key_dtype, value_dtype, dim=2, name="emb", kv_creator=creator())
    mode(v.upsert, keys, rows)
    fields = [key if key_dtype == tf.string else key.tobytes() for key in keys]
    assert client.hgetall("test:emb{3560}") == {f: row.tobytes() for f, row in zip(fields, rows, strict=True)}
    found, exists = mode(lambda keys: v.lookup(keys, return_exists=True), keys[[2, 0, 1]])
    np.testing.assert_array_equal(found, rows[[2, 0, 1]])
    assert exists.all()
    exported, _ = mode(v.export)
    assert sorted(exported.tolist()) == sorted(keys.tolist())
    mode(v.remove, keys[:1])
    assert mode(v.size) == 2 and client.hlen("test:emb{3560}") == 2
    mode(v.clear)
    assert len(mode(v.export)[0]) == 0


def test_strings_of_rows_have_their_lengths_before_them(mode, client, creator):
    v = de.Variable(tf.int64, tf.string, dim=2, name="emb", initializer="none", kv_creator=creator())
    mode(v.upsert, np.array([1, 2]), np.array([[b"ab", b""], [b"\0", b"cde"]], object))
    assert client.hgetall("test:emb{3560}") == {
        struct.pack("<q", 1): b"\2\0\0\0ab\0\0\0\0",
        struct.pack("<q", 2): b"\1\0\0\0\0\3\0\0\0cde",
    }
    rows, exists = mode(lambda keys: v.lookup(keys, return_exists=True), np.array([2, 3]))
    assert rows.tolist() == [[b"\0", b"cde"], [b"none", b"none"]] and exists.tolist() == [True, False]
    keys, rows = mode(v.export)
    assert dict(zip(keys.tolist(), rows.tolist(), strict=True)) == {1: [b"ab", b""], 2: [b"\0", b"cde"]}
    mode(v.remove, np.array([1]))
    assert mode(v.size) == 1
    client.hset("test:emb{3560}", struct.pack("<q", 1), b"\2\0\0\0a")
    if mode.name == "eager":
        with pytest.raises(ValueError, match=r"a row of 5 bytes, which are not string\[2\]"):
            v.lookup(tf.constant([1], tf.int64))
        with pytest.raises(TypeError, match="has string values"):
            v.accum([1], [["a", "b"]], [["a", "b"]], [True])


def test_rows_stay_for_good_unless_the_configuration_says_how_long(client, creator):
    for name, parameters, seconds in (("a", {}, -1), ("b", {"expire_model_tag_in_seconds": 1000}, 1000)):
        key = f"test:{name}{{3560}}"
        client.hset(key, struct.pack("<q", 5), struct.pack("<f", 2))
        client.expire(key, 100)
        v = de.Variable(dim=1, name=name, kv_creator=creator(**parameters))
        assert int(v.size()) == 1 and client.ttl(key) == -1  # Nobody has it go while it is used.
        del v
        gc.collect()
        assert (client.ttl(key) if seconds < 0 else round(client.ttl(key), -2)) == seconds
