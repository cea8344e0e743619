"""Tables in Redis between training and `kvtools`: what one writes, the other reads."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from redis_processes import Cluster

from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import dialect_for, open_checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, OutputError, UsageError
from kvtools.migrate import write_tables
from tfplugin import dynamic_embedding as de


@pytest.fixture
def url(running):
    return f"redis://127.0.0.1:{running.port}/0?model_tag=v1"


@pytest.fixture
def creator(client, running, tmp_path):
    path = tmp_path / "redis.json"
    path.write_text(json.dumps({"redis_host_port": running.port, "model_tag_runtime": "v1"}))
    return de.RedisTableCreator(de.RedisTableConfig(str(path)))


def by_key(keys, rows):
    return {int(key): np.asarray(row).tobytes() for key, row in zip(keys, rows, strict=True)}


def trained(creator, steps=3, name="tower/emb"):
    policy = de.FrequencyRestrictPolicy
    v = de.Variable(dim=2, name=name, initializer=0.5, kv_creator=creator, restrict_policy=policy)
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1))
    for step in range(steps):
        ids = tf.constant([1, 2, 5 + step, -3], tf.int64)
        loss = lambda ids=ids: tf.reduce_sum(de.embedding_lookup(v, ids, name="x") ** 2)  # noqa: E731
        optimizer.minimize(loss, var_list=[v.get_trainable_by_name("x")])
    return v, optimizer


def test_kvtools_opens_what_training_wrote(creator, url):
    v, optimizer = trained(creator)
    checkpoint = open_checkpoint(url)
    assert (checkpoint.dialect, checkpoint.path, list(checkpoint.tables)) == ("tfra_redis", url, ["tower_emb"])
    table = checkpoint.table("tower_emb")
    assert (table.rows, table.dim, table.schema.key_dtype, table.schema.value_dtype) == (6, 2, "int64", "float32")
    assert table.slots == ("Adam.m", "Adam.v") and table.schema.freq_dtype == "int32"
    assert "keys are taken as int64 and values are taken as float32" in table.schema.notes[0]
    read = table.to_numpy()
    assert by_key(read.keys, read.values) == by_key(*v.export())
    for slot in v.get_slot_variables(optimizer):
        column = read.slots[f"Adam.{slot.slot_name}"]
        assert by_key(read.keys, column) == by_key(*slot.export())
    freqs = dict(zip(read.keys.tolist(), read.freqs.tolist(), strict=True))
    assert freqs == {1: 3, 2: 3, -3: 3, 5: 1, 6: 1, 7: 1}


def test_training_goes_on_with_what_kvtools_wrote(creator, client, url, tmp_path):
    v, _ = trained(creator)
    account = write_tables(open_checkpoint(url).select([]), tmp_path / "out.npz", "npz", verify=True)
    assert account.lossless
    client.flushall()
    written = open_checkpoint(tmp_path / "out.npz").select([])
    assert dialect_for(url).name == "tfra_redis"
    account = write_tables(written, url, "tfra_redis", verify=True)
    assert account.lossless
    names = {"", "_Adam_m", "_Adam_v"}
    assert set(client.keys()) == {
        *(f"v1:tower_emb{name}{{3560}}".encode() for name in names),
        b"v1:status_tower_emb_frequency{3560}",
        b"kvtools-record:v1",
    }
    later, _ = trained(creator, 2, "tower/emb")
    # The same as five steps of one run, but for the optimizer's own count of steps.
    assert int(later.size()) == int(v.size())
    status = dict(zip(*(x.numpy().tolist() for x in later.restrict_policy.status.export()), strict=True))
    assert status[1] == [5] and status[7] == [1]


def test_rows_of_other_dtypes_are_read_where_one_says_so(creator, url):
    v = de.Variable(tf.int32, tf.float64, dim=3, name="emb", kv_creator=creator)
    v.upsert(tf.constant([1, -1]), tf.constant([[1.0, 2, 3], [4, 5, 6]], tf.float64))
    table = open_checkpoint(url, OpenOptions(value_dtype="float64")).table("emb")
    assert (table.schema.key_dtype, table.dim) == ("int32", 3)
    read = table.to_numpy()
    assert by_key(read.keys, read.values) == by_key(*v.export())
    with pytest.raises(CorruptFileError, match="rows of 24 bytes, expected 4 numbers of float32"):
        open_checkpoint(url, OpenOptions(dim=4))
    with pytest.raises(CorruptFileError, match="keys of 4 bytes, expected int64"):
        open_checkpoint(url, OpenOptions(key_dtype="int64"))


def test_a_table_of_string_keys_is_listed(creator, url):
    v = de.Variable(tf.string, dim=2, name="emb", kv_creator=creator)
    v.upsert(tf.constant(["a", "bc"]), tf.ones([2, 2]))
    table = open_checkpoint(url).table("emb")
    assert (table.schema.key_dtype, table.rows) == ("string", 2)
    with pytest.raises(BadInputError, match="reading table 'emb': its keys are string"):
        table.to_numpy()


def test_nothing_is_replaced_unless_asked_for(creator, client, url):
    keys, values = np.arange(5), np.ones([5, 2], np.float32)
    table = ArrayTable("emb", keys, values)
    write_tables([table], url, "tfra_redis")
    with pytest.raises(OutputError, match="there is a table 'emb' already; name another model_tag, or add --force"):
        write_tables([table], url, "tfra_redis")
    other = ArrayTable("emb", keys[:2], 2 * values[:2])
    write_tables([other], url, "tfra_redis", options=WriteOptions(force=True))
    v = de.Variable(dim=2, name="emb", kv_creator=creator)
    assert by_key(*v.export()) == by_key(keys[:2], 2 * values[:2])
    twice = ArrayTable("twice", np.array([1, 1]), values[:2])
    with pytest.raises(BadInputError, match="1 of 2 rows are there after writing"):
        write_tables([twice], url, "tfra_redis")
    assert sorted(client.keys()) == [b"kvtools-record:v1", b"v1:emb{3560}"]


def test_a_place_without_tables_is_told(client, url):
    with pytest.raises(BadInputError, match=r"there is no key 'v1:<table>\{<tag>\}'.*\?model_tag=test"):
        open_checkpoint(url)
    with pytest.raises(UsageError, match="got no model_tag, expected the model_tag_runtime"):
        write_tables([], url.partition("?")[0], "tfra_redis")


def test_slices_of_a_cluster_are_parts(tmp_path):
    cluster = Cluster(tmp_path)
    try:
        path = tmp_path / "redis.json"
        path.write_text(
            json.dumps({"redis_connection_mode": 0, "redis_host_port": cluster.ports[0], "storage_slice": 5})
        )
        v = de.Variable(dim=2, name="emb", kv_creator=de.RedisTableCreator(de.RedisTableConfig(str(path))))
        keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 100)
        v.upsert(keys, np.arange(200, dtype=np.float32).reshape(100, 2))
        table = open_checkpoint(f"redis://127.0.0.1:{cluster.ports[0]}?model_tag=test").table("emb")
        assert table.parts == 5 and table.rows == 100
        read = table.to_numpy()
        assert by_key(read.keys, read.values) == by_key(*v.export())
    finally:
        cluster.stop()
