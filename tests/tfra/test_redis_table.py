"""`RedisTableCreator`: tables in a real Redis server, which may go away and come back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from redis_processes import Server

from tfplugin import dynamic_embedding as de
from tfplugin.dynamic_embedding import tf_keras as de_tf_keras

redis = pytest.importorskip("redis", reason="redis-py is not installed")

KEYS = np.array([0, -1, 7, -(2**63), 2**63 - 1, 5, 12])
ROWS = np.random.default_rng(0).normal(size=(len(KEYS), 2)).astype(np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def creator(server, tmp_path):
    def creator(**parameters):
        path = tmp_path / "redis.json"
        path.write_text(json.dumps({"redis_host_port": server.port, "redis_host_ip": ["127.0.0.1"], **parameters}))
        return de.RedisTableCreator(de.RedisTableConfig(str(path)))

    redis.Redis(port=server.port).flushall()
    return creator


def by_key(exported):
    keys, rows = (np.asarray(x) for x in exported)
    assert len(set(keys.tolist())) == len(keys)
    return {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}


def test_a_saver_of_nothing_else_is_an_error(creator):
    with tf.Graph().as_default():
        v = de.Variable(dim=2, name="alone", kv_creator=creator())
        with pytest.raises(ValueError, match="Tables in Redis have not"):
            tf.compat.v1.train.Saver([v])


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 2), (3, 1), (0, 2)], ids=str)
def test_rows_of_another_shape_are_an_error(mode, creator, shape):
    v = de.Variable(dim=2, name="wrong", kv_creator=creator())
    keys, rows = np.arange(3), np.ones(shape, np.float32)
    for write in (lambda: v.upsert(keys, rows), lambda: v.accum(keys, rows, rows, np.ones(3, bool))):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            mode(write)
    assert mode(v.size) == 0


@pytest.mark.parametrize("slices", [1, 3])
def test_rows_are_written_looked_up_exported_and_removed(mode, creator, devices, slices):
    v = de.Variable(
        dim=2,
        name="tower/emb",
        devices=devices,
        initializer=0.5,
        kv_creator=creator(storage_slice=slices, keys_sending_size=2),
    )
    mode(v.upsert, KEYS, ROWS)
    assert mode(v.size) == len(KEYS) and by_key(mode(v.export)) == by_key((KEYS, ROWS))
    asked = np.array([[7, 99], [5, 7]])
    rows, exists = mode(lambda keys: v.lookup(keys, return_exists=True), asked)
    np.testing.assert_array_equal(rows, [[ROWS[2], [0.5, 0.5]], [ROWS[5], ROWS[2]]])
    np.testing.assert_array_equal(exists, [[True, False], [True, True]])
    ones = np.ones([4, 2], np.float32)
    mode(v.accum, np.array([7, 99, 5, 98]), ones, 3 * ones, np.array([True, False, False, True]))
    expected = by_key((KEYS, ROWS)) | {7: (ROWS[2] + 2).tobytes(), 99: (3 * ones[0]).tobytes()}
    assert by_key(mode(v.export)) == expected
    mode(v.remove, np.array([7, 1234]))
    del expected[7]
    assert by_key(mode(v.export)) == expected
    mode(v.clear)
    assert mode(v.size) == 0 and len(mode(v.export)[0]) == 0


def test_another_variable_of_the_name_has_the_rows(creator):
    for i in range(2):
        v = de.Variable(dim=2, name="emb", kv_creator=creator())
        if i == 0:
            v.upsert(KEYS, ROWS)
        assert by_key(v.export()) == by_key((KEYS, ROWS))
    assert int(de.Variable(dim=2, name="emb", kv_creator=creator(model_tag_runtime="other")).size()) == 0
    with pytest.raises(ValueError, match=r"'emb' has a row of 8 bytes, which are not float32\[3\]"):
        de.Variable(dim=3, name="emb", kv_creator=creator()).lookup(KEYS)


@pytest.mark.parametrize("api", [de.keras, de_tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_file_of_keras_leaves_rows_in_redis(creator, name, api, keep, tmp_path):
    keras = tf.keras if api is de.keras else tf_keras
    layer = api.layers.BasicEmbedding(2, name=name, kv_creator=creator(), keep_distribution=keep)
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    layer.params.upsert(KEYS, ROWS)
    model.save(tmp_path / "model.keras")
    layer.params.upsert([7], np.ones([1, 2], np.float32))
    loaded = keras.models.load_model(tmp_path / "model.keras").layers[-1]
    assert isinstance(loaded.params.kv_creator, de.RedisTableCreator)
    assert vars(loaded.params.kv_creator.config) == vars(layer.params.kv_creator.config)
    assert by_key(loaded.params.export()) == by_key((KEYS, ROWS)) | {7: np.ones(2, np.float32).tobytes()}
    in_memory = api.layers.BasicEmbedding(2, name=f"{name}_in_memory")
    other = keras.Sequential([keras.Input((2,), dtype="int64"), in_memory])
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match="saved of a table in Redis, where they stayed"):
        other.load_weights(tmp_path / "model.weights.h5")


def test_a_name_of_a_table_in_memory_is_not_one_in_redis(creator, name):
    de.get_variable(name, dim=2)
    with pytest.raises(ValueError, match=f"{name} exists with its rows in memory, wanted in Redis"):
        de.get_variable(name, dim=2, kv_creator=creator())
    de.get_variable(f"{name}_there", dim=2, kv_creator=creator())
    assert de.get_variable(f"{name}_there", dim=2).rows_elsewhere


class Halving(tf_keras.optimizers.legacy.Adagrad):
    """Updated by its own ops, on the rows of the step."""

    def _resource_apply_dense(self, grad, var, apply_state=None):
        return super()._resource_apply_dense(grad / 2, var, apply_state)


OPTIMIZERS = {
    "keras_adam": lambda: tf.keras.optimizers.Adam(0.1),
    "tf_keras_adagrad": lambda: tf_keras.optimizers.Adagrad(0.1),
    "an_optimizer_that_the_engine_does_not_know": lambda: Halving(0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_is_that_of_a_table_in_memory(creator, devices, make):
    tables = [
        de.Variable(dim=2, name=f"v{i}", devices=devices, initializer=0.5, kv_creator=kv_creator)
        for i, kv_creator in enumerate([creator(), de.CuckooHashTableCreator()])
    ]
    optimizers = [de.DynamicEmbeddingOptimizer(make()) for _ in tables]
    for step in range(4):
        ids = tf.constant([1, 2, 1, 5 + step, -3], tf.int64)
        for v, optimizer in zip(tables, optimizers, strict=True):
            shadow = v.get_trainable_by_name("x")
            loss = lambda v=v, ids=ids: tf.reduce_sum(de.embedding_lookup(v, ids, name="x") ** 2)  # noqa: E731
            optimizer.minimize(loss, var_list=[shadow])
    assert by_key(tables[0].export()) == by_key(tables[1].export())
    slots = [
        [by_key(slot.export()) for slot in v.get_slot_variables(o)] for v, o in zip(tables, optimizers, strict=True)
    ]
    assert slots[0] == slots[1] and slots[0]
    assert int(tables[0].parts[0].size()) == 0
    tables[0].remove(tf.constant([1], tf.int64))
    assert 1 not in by_key(tables[0].get_slot_variables(optimizers[0])[0].export())


def test_a_graph_trains(creator):
    v1 = tf.compat.v1
    found = []
    for kv_creator in (creator(), de.CuckooHashTableCreator()):
        with tf.Graph().as_default(), v1.Session() as session:
            v = de.Variable(dim=2, name="v", initializer=0.5, kv_creator=kv_creator)
            rows = de.embedding_lookup(v, tf.constant([1, 2, 1], tf.int64), name="x")
            optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
            step = optimizer.minimize(tf.reduce_sum(rows**2))
            session.run(v1.global_variables_initializer())
            for _ in range(3):
                session.run(step)
            slots = [by_key(session.run(slot.export())) for slot in v.get_slot_variables(optimizer)]
            found.append((by_key(session.run(v.export())), slots))
    assert found[0] == found[1]


def test_a_server_that_goes_away_is_named_and_asked_again_when_it_is_back(tmp_path, creator):
    own = Server(tmp_path)
    v = de.Variable(dim=2, name="emb", kv_creator=creator(redis_host_port=[own.port]))
    v.upsert(KEYS, ROWS)
    own.stop()
    for call in (lambda: v.lookup(KEYS), lambda: v.upsert(KEYS, ROWS), v.size, v.export, v.clear):
        with pytest.raises(ConnectionError, match=f"'emb': the Redis server at 127.0.0.1:{own.port} does not"):
            call()
    with pytest.raises(tf.errors.OpError, match=f"the Redis server at 127.0.0.1:{own.port} does not"):
        tf.function(v.lookup)(tf.constant(KEYS))
    own.start()
    v.upsert(KEYS, ROWS)
    assert by_key(v.export()) == by_key((KEYS, ROWS))
    own.stop()


def test_a_checkpoint_leaves_the_rows_where_they_are(creator, tmp_path):
    v = de.Variable(dim=2, name="emb", kv_creator=creator())
    v.upsert(KEYS, ROWS)
    checkpoint = tf.train.Checkpoint(v=v, w=tf.Variable(1.0))
    path = checkpoint.save(str(tmp_path / "c"))
    checkpoint.restore(path)
    assert by_key(v.export()) == by_key((KEYS, ROWS))
    assert not any("kvmeta" in name for name, _ in tf.train.list_variables(path))
    with pytest.raises(TypeError, match="are not in this process: upsert them"):
        de.warm_start(path, [v])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        v = de.Variable(dim=2, name="emb", kv_creator=creator())
        w = tf.compat.v1.get_variable("w", [1], use_resource=True)
        session.run(w.initializer)
        for saver in (tf.compat.v1.train.Saver(), tf.compat.v1.train.Saver([v, w])):
            saved = saver.save(session, str(tmp_path / "m"))
            assert [name for name, _ in tf.train.list_variables(saved)] == ["w"]


def test_rows_go_to_files_and_back(creator, tmp_path):
    v = de.Variable(dim=2, name="emb", kv_creator=creator())
    v.upsert(KEYS, ROWS)
    v.save_to_file_system(str(tmp_path / "files"))
    v.clear()
    v.load_from_file_system(str(tmp_path / "files"))
    assert by_key(v.export()) == by_key((KEYS, ROWS))


def test_the_configuration_is_checked(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"cannot read '/none\.json'"):
        de.RedisTableConfig("/none.json").parameters()
    with pytest.raises(ValueError, match="the environment variable NONE is not set"):
        de.RedisTableConfig(redis_config_abs_dir_env="NONE").parameters()
    path = tmp_path / "c.json"
    path.write_text("[]")
    monkeypatch.setenv("TFRA_REDIS_CONFIG_PATH", str(path))
    with pytest.raises(ValueError, match="must be a JSON object, got a list"):
        de.RedisTableConfig().parameters()
    with pytest.raises(TypeError, match="config must be a RedisTableConfig, got 5"):
        de.RedisTableCreator(5)
    for given, message in {
        '{"redis_connection_mode": 3}': "redis_connection_mode must be one of .*0: 'a cluster'.*1: 'sentinels'",
        '{"redis_host_ip": ["a", "b"], "redis_host_port": [1, 2, 3]}': "2 redis_host_ip and 3 redis_host_port",
        '{"redis_host_port": ["6379"]}': r"redis_host_port must be a whole number or a list of such, got \['6379'\]",
        '{"redis_host_port": [0]}': "from 1 to 65535",
        '{"redis_connect_timeout": "1s"}': "redis_connect_timeout must be a whole number, got '1s'",
        '{"storage_slice": 0}': "storage_slice must be from 1 to 16384",
        '{"storage_slice": 2, "redis_hash_tags_runtime": ["{1}"]}': "1 redis_hash_tags_runtime for 2 slices",
        '{"redis_password": 12345}': "redis_password must be a string, got another value",
    }.items():
        path.write_text(given)
        with pytest.raises(ValueError, match=f"{path}': .*{message}"):
            de.RedisTableConfig().parameters()


def test_what_a_configuration_says_in_vain_is_told(tmp_path, caplog):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"table_store_mode": 1, "using_model_lib": False, "model_tag_import": "old"}))
    parameters = de.RedisTableConfig(str(path)).parameters()
    assert parameters["redis_host_port"] == [6379] and "table_store_mode" not in parameters
    for told in (
        "table_store_mode is not used: rows stay in the server",
        "using_model_lib, which is no parameter",
        "model_tag_import is not used: rows of another model tag are not copied",
    ):
        assert told in caplog.text
    caplog.clear()
    path.write_text(json.dumps({"table_store_mode": 2, "redis_connection_lifetime": 5, "model_lib_abs_dir": "/x"}))
    de.RedisTableConfig(str(path)).parameters()
    assert caplog.text == ""
