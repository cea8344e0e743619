"""Tables on the parameter servers of a real cluster that two workers train, each with a graph of its own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ports import free_ports
from tasks import Tasks

SERVER = """
import sys, json, tensorflow as tf, tfplugin
server = tf.distribute.Server(json.loads(sys.argv[1]), job_name="ps", task_index=int(sys.argv[2]))
print("ready", flush=True)
server.join()
"""

# Run once for each worker, one after the other; the rows are the servers'.
WORKER = """
import sys, json, numpy as np, tensorflow as tf
from tfplugin import dynamic_embedding as de
v1 = tf.compat.v1
cluster, task, folder = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
config = v1.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"])
server = tf.distribute.Server(cluster, job_name="worker", task_index=task, config=config)
servers = [f"/job:ps/replica:0/task:{i}/CPU:0" for i in range(len(cluster["ps"]))]
own = lambda keys, n: tf.cast(keys % n, tf.int32)
partitioner = own if sys.argv[4] == "own" else de.variable.default_partition_fn
with tf.Graph().as_default():
    setter = v1.train.replica_device_setter(worker_device=f"/job:worker/task:{task}", cluster=cluster)
    with v1.device(setter):
        step = v1.train.get_or_create_global_step()
        weight = v1.get_variable("w", initializer=tf.ones([2]), use_resource=True)
        table = de.get_variable("t", dim=2, devices=servers, initializer=1.0, partitioner=partitioner,
                                restrict_policy=de.FrequencyRestrictPolicy)
        keys = tf.constant([1, 2, 2, -1] if task == 0 else [2, 3, 3, 2**40], tf.int64)
        rows, trainable = de.embedding_lookup(table, keys, name="rows", return_trainable=True)
        pooled = de.embedding_lookup_sparse(table, tf.sparse.from_dense(tf.reshape(keys, [2, 2])), None, combiner="sum")
        optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdagradOptimizer(0.1, initial_accumulator_value=1.0))
        train = optimizer.minimize(tf.reduce_sum(rows * weight), global_step=step, var_list=[trainable])
        exported, size = table.export(), [table.size(i) for i in range(len(servers))]
        slot = table.get_slot_variables(optimizer)[0].export()
        cleared, restricted = table.clear(), table.restrict(num_reserved=2)
        saver = v1.train.Saver(sharded=True)
        init = v1.global_variables_initializer()
    with v1.Session(server.target, config=config) as session:
        if task == 0:
            session.run(init)
        for _ in range(3):
            session.run(train)
        def held(columns):
            found, values = session.run(columns)
            return sorted([int(key), *row] for key, row in zip(found, values.tolist()))
        after = {"rows": held(exported), "slot": held(slot), "sizes": [int(s) for s in session.run(size)],
                 "pooled": session.run(pooled).tolist(), "step": int(session.run(step)),
                 "devices": sorted({trainable.device, *(t.kv.device for t in table.tables)})}
        path = saver.save(session, folder + "/model")
        session.run(cleared)
        after["emptied"] = int(sum(session.run(size)))
        saver.restore(session, path)
        after["restored"] = held(exported) == after["rows"] and held(slot) == after["slot"]
        session.run(restricted)
        after["restricted"] = held(exported)
        saver.restore(session, path)
print(json.dumps(after))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("partitioner", ["default", "own"])
def test_two_workers_train_tables_on_two_servers(tmp_path, partitioner):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(4)]
    cluster = json.dumps({"ps": addresses[:2], "worker": addresses[2:]})
    with Tasks(tmp_path) as tasks:
        for server in [tasks.start(SERVER, cluster, str(i)) for i in (0, 1)]:
            server.wait_for_line("ready")
        results = [tasks.start(WORKER, cluster, task, str(tmp_path), partitioner).result() for task in ("0", "1")]

    # Adagrad in NumPy; the gradient of a key is the number of times that it is in the batch.
    value, squares = {}, {}
    for task, (counts, sizes) in enumerate([({1: 1, 2: 2, -1: 1}, [1, 2]), ({2: 1, 3: 2, 2**40: 1}, [2, 3])]):
        for _ in range(3):
            for key, gradient in counts.items():
                squares[key] = squares.get(key, 1.0) + gradient**2
                value[key] = value.get(key, 1.0) - 0.1 * gradient / np.sqrt(squares[key])
        result = results[task]
        expected = sorted([key, x, x] for key, x in value.items())
        np.testing.assert_allclose(result["rows"], expected, rtol=1e-5)
        np.testing.assert_allclose(result["slot"], sorted([key, x, x] for key, x in squares.items()), rtol=1e-5)
        assert result["sizes"] == sizes and result["step"] == 3 * (task + 1)
        keys = [1, 2, 2, -1] if task == 0 else [2, 3, 3, 2**40]
        pooled = [[value[keys[i]] + value[keys[i + 1]]] * 2 for i in (0, 2)]
        np.testing.assert_allclose(result["pooled"], pooled, rtol=1e-5)
        assert result["emptied"] == 0 and result["restored"]
        assert len(result["restricted"]) == 2
        assert result["devices"][-1] == "/job:ps/replica:0/task:1/device:CPU:0", result["devices"]
