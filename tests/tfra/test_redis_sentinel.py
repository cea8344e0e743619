"""`RedisTableCreator` through a real sentinel, which makes another server the primary; and passwords."""

from __future__ import annotations

import json

import numpy as np
import pytest
from redis_processes import Guarded, Server, wait_until

from tfplugin import dynamic_embedding as de

KEYS = np.array([0, -1, 7, 5])
ROWS = np.random.default_rng(0).normal(size=(len(KEYS), 2)).astype(np.float32)
SECRET = "hunter2/@:x"


def creator(tmp_path, port, **parameters):
    path = tmp_path / "redis.json"
    path.write_text(json.dumps({"redis_host_ip": ["127.0.0.1"], "redis_host_port": [port], **parameters}))
    return de.RedisTableCreator(de.RedisTableConfig(str(path)))


def test_calls_go_on_with_the_server_that_takes_over(tmp_path):
    guarded = Guarded(tmp_path, SECRET)
    try:
        v = de.Variable(dim=2, name="emb", kv_creator=creator(tmp_path, guarded.sentinel.port, redis_password=SECRET))
        v.upsert(KEYS, ROWS)
        np.testing.assert_array_equal(v.lookup(KEYS), ROWS)
        first = guarded.primary()
        assert guarded.servers[0].client().dbsize() == 1
        guarded.fail_over()
        wait_until(lambda: guarded.primary() != first, "the replica takes over")
        v.upsert(KEYS, -ROWS)
        np.testing.assert_array_equal(v.lookup(KEYS), -ROWS)
        assert int(v.size()) == len(KEYS)
    finally:
        guarded.stop()
    with pytest.raises(ConnectionError, match=r"what the Redis sentinels know as 'master' at 127\.0\.0\.1:") as told:
        v.size()
    assert SECRET not in str(told.value)


def test_a_name_that_sentinels_do_not_know_is_told(tmp_path):
    guarded = Guarded(tmp_path)
    try:
        v = de.Variable(dim=2, name="emb", kv_creator=creator(tmp_path, guarded.sentinel.port, redis_master_name="no"))
        with pytest.raises(ConnectionError, match=r"know as 'no' at .* No master found for 'no'"):
            v.size()
    finally:
        guarded.stop()


@pytest.mark.parametrize("mode", [1, 2])
def test_a_password_is_used_and_never_told(tmp_path, mode):
    server = Server(tmp_path, password=SECRET)
    try:
        v = de.Variable(
            dim=2,
            name="emb",
            kv_creator=creator(tmp_path, server.port, redis_connection_mode=mode, redis_password=SECRET),
        )
        v.upsert(KEYS, ROWS)
        assert int(v.size()) == len(KEYS)
        wrong = SECRET[::-1]
        for password in (wrong, ""):
            refused = creator(tmp_path, server.port, redis_connection_mode=mode, redis_password=password)
            with pytest.raises(ConnectionError, match="Correct redis_user and redis_password") as told:
                de.Variable(dim=2, name="emb", kv_creator=refused).size()
            assert wrong not in str(told.value) and SECRET not in str(told.value)
    finally:
        server.stop()
    with pytest.raises(ConnectionError) as told:
        v.lookup(KEYS)
    assert SECRET not in str(told.value)
