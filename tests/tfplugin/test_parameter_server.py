"""Parts on parameter servers of a real cluster: placement, training, sharded save and restore."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

SERVER = """
import sys, json, tensorflow as tf, tfplugin
server = tf.distribute.Server(json.loads(sys.argv[1]), job_name="ps", task_index=int(sys.argv[2]))
print("ready", flush=True)
server.join()
"""

WORKER = """
import sys, json, numpy as np, tensorflow as tf, tfplugin
v1 = tf.compat.v1
cluster = json.loads(sys.argv[1])
server = tf.distribute.Server(cluster, job_name="worker", task_index=0)
with tf.Graph().as_default():
    with v1.device(v1.train.replica_device_setter(cluster=cluster)):
        table = v1.get_kv_variable("t", 2, partitioner=v1.fixed_size_partitioner(2), initializer=1.0)
        weight = v1.get_variable("w", initializer=tf.ones([2]), use_resource=True)
    with tf.device("/job:worker/task:0"):
        keys = tf.constant([1, 2, 3, -1], tf.int64)
        rows = tf.nn.embedding_lookup(table, keys)
        op = v1.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(rows * weight))
        size = table.size()
        after = table.sparse_read(keys, training=False)
    saver = v1.train.Saver(sharded=True)
    with v1.Session(server.target) as session:
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            session.run(op)
        trained = session.run(after)
        path = saver.save(session, sys.argv[2])
        session.run(op)
        changed = session.run(after)
        session.run([part.clear() for part in table])
        emptied = session.run(size)
        saver.restore(session, path)
        restored = session.run(after)
print(json.dumps({
    "devices": [part.device for part in table],
    "moved": bool((trained < 1).all() and (changed < trained).all()),
    "emptied": int(emptied),
    "same": bool((restored == trained).all()),
}))
"""


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def test_parts_on_two_servers(tmp_path):
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(3)]
    cluster = json.dumps({"ps": addresses[:2], "worker": addresses[2:]})
    python = [sys.executable, "-c"]
    servers = [
        subprocess.Popen([*python, SERVER, cluster, str(i)], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
        for i in (0, 1)
    ]
    try:
        assert [server.stdout.readline() for server in servers] == ["ready\n"] * 2
        done = subprocess.run(
            [*python, WORKER, cluster, str(tmp_path / "model")],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {
        "devices": ["/job:ps/task:0", "/job:ps/task:1"],
        "moved": True,
        "emptied": 0,
        "same": True,
    }
