"""Parts on parameter servers of a real cluster: placement, training, sharded save and restore."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from ports import free_ports
from tasks import Tasks

import tfplugin

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


def test_parts_on_two_servers(tmp_path):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = json.dumps({"ps": addresses[:2], "worker": addresses[2:]})
    with Tasks(tmp_path) as tasks:
        for server in [tasks.start(SERVER, cluster, str(i)) for i in (0, 1)]:
            server.wait_for_line("ready")
        result = tasks.start(WORKER, cluster, str(tmp_path / "model")).result()
    assert result == {
        "devices": ["/job:ps/task:0", "/job:ps/task:1"],
        "moved": True,
        "emptied": 0,
        "same": True,
    }


SYNC_WORKER = """
import sys, json, numpy as np, tensorflow as tf, tfplugin
v1 = tf.compat.v1
v1.disable_eager_execution()
cluster, task, folder = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
config = v1.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"])
server = tf.distribute.Server(cluster, job_name="worker", task_index=task, config=config)
with v1.device(v1.train.replica_device_setter(worker_device=f"/job:worker/task:{task}", cluster=cluster)):
    table = v1.get_kv_variable("t", 2, partitioner=v1.fixed_size_partitioner(3), initializer=1.0)
    rows = tf.nn.embedding_lookup(table, tf.constant([1, 2**40, -5, 1], tf.int64))
    optimizer = v1.train.AdagradOptimizer(0.1, initial_accumulator_value=1.0)
    optimizer = v1.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=2, total_num_replicas=2)
    train = optimizer.minimize(tf.reduce_sum(rows), global_step=v1.train.get_or_create_global_step())
hooks = [optimizer.make_session_run_hook(task == 0), v1.train.StopAtStepHook(last_step=6)]
with v1.train.MonitoredTrainingSession(
    server.target, task == 0, folder, hooks=hooks, config=config, stop_grace_period_secs=1
) as session:
    while not session.should_stop():
        session.run(train)
"""


@pytest.mark.thorough
def test_two_workers_that_step_together(tmp_path):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(4)]
    cluster, folder = json.dumps({"ps": addresses[:2], "worker": addresses[2:]}), str(tmp_path / "run")
    with Tasks(tmp_path) as tasks:
        for server in [tasks.start(SERVER, cluster, str(i)) for i in (0, 1)]:
            server.wait_for_line("ready")
        for worker in [tasks.start(SYNC_WORKER, cluster, str(i), folder) for i in (0, 1)]:
            worker.wait()
    found = tfplugin.get_kv_variable("t", 2)
    tf.train.Checkpoint(found).read(folder + "/model.ckpt-6").expect_partial()
    squares = 1.0 + np.outer([1, 2, 3, 4, 5, 6], [4.0, 1.0, 1.0])  # of the mean gradients: 2, 1 and 1
    expected = 1.0 - 0.1 * (np.array([2.0, 1.0, 1.0]) / np.sqrt(squares)).sum(0)
    rows = found.sparse_read([1, 2**40, -5], training=False)
    np.testing.assert_allclose(rows, np.stack([expected, expected], 1), rtol=1e-6)


STRATEGY_TASK = """
import sys, json, tensorflow as tf
cluster, job, task = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
server = tf.distribute.Server(cluster, job_name=job, task_index=task, protocol="grpc")
print("ready", flush=True)
server.join()
"""

#: Two servers and two workers, each a fork of a process that has imported TensorFlow alone.
WITHOUT_TABLES = """
import os, sys, tensorflow
for task in (["ps", "0"], ["ps", "1"], ["worker", "0"], ["worker", "1"]):
    if os.fork() == 0:
        sys.argv += task
        break
else:
    os.waitpid(-1, 0)
    sys.exit("a task has ended")
"""

CHIEF = """
import os, sys, json, numpy as np, tensorflow as tf, tfplugin
os.environ["TF_CONFIG"] = json.dumps({"cluster": json.loads(sys.argv[1]), "task": {"type": "chief", "index": 0}})
strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    if sys.argv[3] == "without tables":
        try:
            tfplugin.get_kv_variable("t", 2)
        except RuntimeError as error:
            print(json.dumps(str(error)))
        sys.exit()
    table = tfplugin.get_kv_variable("t", 2, initializer=0.0)
    other = tfplugin.get_kv_variable("other", 1, partitioner=tf.compat.v1.fixed_size_partitioner(3))
    weight = tf.Variable(tf.ones([2]))
optimizer = tfplugin.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(1.0))

def replica(keys):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys)) + tf.reduce_sum(weight)
    variables = [*table, weight]
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss

@tf.function
def step(keys):
    return strategy.run(replica, args=(keys,))

errors = []
try:
    coordinator.schedule(step, args=(tf.constant([1], tf.int64),))
    coordinator.join()
except ValueError as error:
    errors.append(str(error))
chiefs = tfplugin.get_kv_variable("chiefs", 2)
try:
    coordinator.schedule(tf.function(lambda: strategy.run(lambda: tf.nn.embedding_lookup(chiefs, [1]))))
    coordinator.join()
except tf.errors.FailedPreconditionError as error:
    errors.append(str(error))
tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(1.0))

@tf.function
def step(keys):
    return strategy.run(replica, args=(keys,))

keys = np.random.default_rng(0).integers(-3, 30, (100, 20))
for batch in keys:
    coordinator.schedule(step, args=(tf.constant(batch),))
coordinator.join()
distinct, counts = np.unique(keys, return_counts=True)
updates = np.array([sum(key in batch for batch in keys) for key in distinct])
none_lost = bool((tf.nn.embedding_lookup(table, distinct).numpy() == -counts[:, None]).all())
stamped = bool((table.stamps(distinct)[0].numpy() == updates).all())
manager = tfplugin.CheckpointManager(tf.train.Checkpoint(table=table, weight=weight), sys.argv[2] + "-chain")
manager.save()
for part in table:
    part.remove([1, 2, 3, 4])
for batch in ([1, 2], [1, 5], [100, 101]):
    coordinator.schedule(step, args=(tf.constant(batch, tf.int64),))
coordinator.join()
manager.save()
manager.sync()
members = sorted(os.path.basename(path) for path in tf.io.gfile.glob(sys.argv[2] + "-chain/*.index"))
later = np.sort(np.concatenate([part.export()[0].numpy() for part in table]))
later_rows = table.sparse_read(later, training=False).numpy()
followed = tfplugin.get_kv_variable("followed", 2)
chained = tfplugin.CheckpointManager(tf.train.Checkpoint(table=followed), sys.argv[2] + "-chain")
chained.restore_or_initialize()
folded = np.sort(followed.export()[0].numpy()).tolist() == later.tolist()
folded = folded and bool((followed.sparse_read(later, training=False).numpy() == later_rows).all())
rows = table.sparse_read(distinct, training=False).numpy()
weight.assign([-99.0, -99.0])
path = tf.train.Checkpoint(table=table, other=other, weight=weight).save(sys.argv[2])
for part in table:
    part.clear()
emptied = int(table.size())
weight.assign([0.0, 0.0])
tf.train.Checkpoint(table=table, weight=weight).read(path).expect_partial()
again = table.sparse_read(distinct, training=False).numpy()
whole = tfplugin.get_kv_variable("whole", 2)
tf.train.Checkpoint(table=whole).read(path).expect_partial()
print(json.dumps({
    "errors": errors,
    "devices": [part.device for part in table] + [part.device for part in other],
    "whole": whole.device,
    "members": members,
    "folded": folded,
    "none lost": none_lost,
    "stamped once a step": stamped,
    "dense": weight.numpy().tolist(),
    "emptied": emptied,
    "restored": bool((again == rows).all()),
    "restored in one part": bool((whole.sparse_read(distinct, training=False).numpy() == rows).all()),
    "size": [int(table.size()), int(whole.size()), len(later)],
}))
"""


KERAS_CHIEF = """
import os, sys, json, numpy as np, tensorflow as tf, tfplugin, keras, tf_keras
os.environ["TF_CONFIG"] = json.dumps({"cluster": json.loads(sys.argv[1]), "task": {"type": "chief", "index": 0}})
strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
said = {}
for library in (keras, tf_keras):
    with strategy.scope():
        table = tfplugin.get_kv_variable(library.__name__, 2, initializer=0.0)
        tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(1.0))

        class Lookup(library.layers.Layer):
            def __init__(self):
                super().__init__()
                self.table = table

            def call(self, ids):
                return tf.nn.embedding_lookup(self.table, ids)

        ids = library.layers.Input([], dtype="int64")
        model = library.Model(ids, library.layers.Lambda(lambda rows: tf.reduce_sum(rows, -1))(Lookup()(ids)))
        model.compile("sgd", loss=lambda wanted, sums: tf.reduce_sum(sums))
    data = tf.data.Dataset.from_tensors((tf.constant([1, 1, 5], tf.int64), tf.zeros([3]))).repeat()
    try:
        model.fit(data, steps_per_epoch=4, verbose=0)
        said[library.__name__] = table.sparse_read([1, 5], training=False).numpy().tolist()
    except NotImplementedError as error:
        said[library.__name__] = str(error)
print(json.dumps(said))
"""


def _under_strategy(tmp_path, chief=CHIEF):
    """What the chief of two workers and two servers says at the end."""
    cluster = _cluster_of_a_strategy()
    with Tasks(tmp_path) as tasks:
        others = [tasks.start(STRATEGY_TASK, cluster, job, str(i)) for job in ("ps", "worker") for i in (0, 1)]
        for other in others:
            other.wait_for_line("ready")
        return tasks.start(chief, cluster, str(tmp_path / "model"), "with tables").result()


def _cluster_of_a_strategy():
    addresses = [f"127.0.0.1:{port}" for port in free_ports(5)]
    return json.dumps({"ps": addresses[:2], "worker": addresses[2:4], "chief": addresses[4:]})


@pytest.mark.thorough
def test_two_workers_and_two_servers_lose_no_update(tmp_path):
    said = _under_strategy(tmp_path)
    server = "/job:ps/replica:0/task:{}/device:CPU:0"
    assert said["devices"] == [server.format(task) for task in (0, 1, 0, 1, 0)]
    assert "/job:ps" not in said["whole"]
    assert len(said["errors"]) == 2 and "'t' cannot be updated by apply_gradients" in said["errors"][0]
    assert "tfplugin.apply_in_backward(table, optimizer)" in said["errors"][0]
    assert "'chiefs' is in one process, on /job:chief" in said["errors"][1]
    assert "make it in the scope of the strategy" in said["errors"][1]
    assert said["none lost"] and said["stamped once a step"]
    assert said["dense"] == [-99.0, -99.0]
    assert said["members"] == ["ckpt-1.index", "ckpt-2.delta.index"] and said["folded"]
    assert said["emptied"] == 0 and said["restored"] and said["restored in one part"]
    assert said["size"] == [said["size"][2]] * 3


@pytest.mark.thorough
def test_servers_that_have_not_imported_tfplugin_are_named(tmp_path):
    cluster = _cluster_of_a_strategy()
    others = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TABLES + STRATEGY_TASK, cluster],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        assert [others.stdout.readline() for _ in range(4)] == ["ready\n"] * 4
        with Tasks(tmp_path) as tasks:
            said = tasks.start(CHIEF, cluster, "", "without tables").result()
    finally:
        os.killpg(others.pid, signal.SIGKILL)
        others.communicate()
    assert "'t/part_0' cannot be made on parameter server 0" in said and "import tfplugin" in said


@pytest.mark.thorough
def test_tf_keras_fits_on_parameter_servers_and_keras_3_says_that_it_does_not(tmp_path):
    said = _under_strategy(tmp_path, KERAS_CHIEF)
    assert "Keras 3 does not train under tf.distribute.ParameterServerStrategy" in said["keras"]
    assert "tf_keras" in said["keras"] and "apply_in_backward" in said["keras"]
    assert said["tf_keras"] == [[-8.0, -8.0], [-4.0, -4.0]]
