"""Tables in Redis that TFRA trains, this project trains on, and TFRA reads again: one server, and a cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis_processes import Cluster, Server

from kvtools.dialects.detect import open_checkpoint

pytestmark = pytest.mark.thorough

Run = Callable[..., None]
IDS = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 60)

TRAIN_ON = """
import sys
import numpy as np
import tensorflow as tf
from tfplugin import dynamic_embedding as de
config, ids_file, out = sys.argv[1:]
v1 = tf.compat.v1
creator = de.RedisTableCreator(de.RedisTableConfig(config))
ids = np.load(ids_file)
with tf.Graph().as_default(), v1.Session() as session:
    v = de.get_variable("tower/emb", dim=2, initializer=0.5, kv_creator=creator)
    rows = de.embedding_lookup(v, tf.constant(ids), name="look")
    optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
    step = optimizer.minimize(tf.reduce_sum(rows**2))
    named = de.get_variable("named", key_dtype=tf.string, dim=2, kv_creator=creator)
    session.run(v1.global_variables_initializer())
    strings = session.run(named.lookup(tf.constant(["a", "bc", "a string of 22 letters"])))
    before = session.run(v.lookup(tf.constant(ids)))
    session.run(step)
    session.run(named.upsert(tf.constant(["bc"]), tf.constant([[9.0, 9.0]])))
    slots = [session.run(slot.lookup(tf.constant(ids))) for slot in v.get_slot_variables(optimizer)]
    np.savez(out, before=before, rows=session.run(v.lookup(tf.constant(ids))), strings=strings, slots=slots)
"""


@pytest.fixture(params=["one_server", "cluster"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """What a configuration says of them, and their URL."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    running = Server(tmp_path) if request.param == "one_server" else Cluster(tmp_path)
    ports = running.ports if isinstance(running, Cluster) else [running.port]
    slices = {"redis_connection_mode": 0, "storage_slice": 3} if len(ports) > 1 else {"redis_connection_mode": 2}
    try:
        yield (
            {"redis_host_ip": ["127.0.0.1"] * len(ports), "redis_host_port": ports, **slices},
            f"redis://127.0.0.1:{ports[0]}/0?model_tag=v1",
        )
    finally:
        running.stop()


def test_tables_go_to_and_fro(tfra: Run, servers: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    parameters, url = servers
    config = tmp_path / "redis.json"
    config.write_text(json.dumps({**parameters, "model_tag_runtime": "v1", "table_store_mode": 2}))
    np.save(tmp_path / "ids.npy", IDS)
    tfra("redis_tables.py", config, 3, tmp_path / "ids.npy", tmp_path / "theirs.npz")
    theirs = np.load(tmp_path / "theirs.npz")
    assert theirs["size"] == len(IDS)

    read = open_checkpoint(url).table("tower_emb")
    assert read.rows == len(IDS) and read.slots == ("Adam.m", "Adam.v")
    chunk = read.to_numpy()
    by_key = dict(zip(chunk.keys.tolist(), chunk.values.tolist(), strict=True))
    np.testing.assert_array_equal([by_key[key] for key in IDS.tolist()], theirs["rows"])

    command = [sys.executable, "-P", "-c", TRAIN_ON, config, tmp_path / "ids.npy", tmp_path / "ours.npz"]
    subprocess.run(list(map(str, command)), check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}, timeout=300)
    ours = np.load(tmp_path / "ours.npz")
    np.testing.assert_array_equal(ours["before"], theirs["rows"])
    np.testing.assert_array_equal(ours["strings"], theirs["strings"])

    tfra("redis_tables.py", config, 0, tmp_path / "ids.npy", tmp_path / "again.npz")
    again = np.load(tmp_path / "again.npz")
    np.testing.assert_array_equal(again["rows"], ours["rows"])
    np.testing.assert_array_equal(again["strings"], [theirs["strings"][0], [9, 9], theirs["strings"][2]])
    assert again["size"] == len(IDS)
    # A step of Adam on what TFRA's three left, with the bias correction of a first step.
    m, v = 0.9 * chunk.slots["Adam.m"], 0.999 * chunk.slots["Adam.v"]
    expected_m = dict(zip(chunk.keys.tolist(), (m + 0.1 * 2 * chunk.values).tolist(), strict=True))
    expected_v = dict(zip(chunk.keys.tolist(), (v + 0.001 * 4 * chunk.values**2).tolist(), strict=True))
    for got, expected in zip(ours["slots"], (expected_m, expected_v), strict=True):
        np.testing.assert_allclose(got, [expected[key] for key in IDS.tolist()], rtol=1e-5)
