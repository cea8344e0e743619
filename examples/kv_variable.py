"""The smallest key-value variable in graph mode: look up, train, save, restore. Runs in seconds.

python examples/kv_variable.py
"""

import tempfile

import quiet_tensorflow  # noqa: F401  (before TensorFlow)
import tensorflow.compat.v1 as tf

import tfplugin  # noqa: F401  (makes tf.get_kv_variable available)

tf.disable_eager_execution()

with tf.variable_scope("ads", reuse=tf.AUTO_REUSE):
    table = tf.get_kv_variable(
        "ad",
        embedding_dim=4,
        initializer=tf.random_normal_initializer(stddev=0.01, seed=1),
        partitioner=tf.fixed_size_partitioner(3),
    )

ids = tf.constant([[17, -3], [17, 1 << 60]], tf.int64)  # any int64 is a key
rows = tf.nn.embedding_lookup(table, ids)  # [2, 2, 4]
loss = tf.reduce_sum(tf.square(rows - 1.0))
train = tf.train.AdamOptimizer(0.1).minimize(loss)
saver = tf.train.Saver()

with tempfile.TemporaryDirectory() as folder:
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(20):
            loss_now, _ = session.run([loss, train])
        print("loss", loss_now, "after 20 steps;", session.run(table.size()), "rows")
        path = saver.save(session, f"{folder}/model.ckpt")
        trained = session.run(rows)

    with tf.Session() as session:
        saver.restore(session, path)
        assert (session.run(rows) == trained).all()
        print("restored: the same rows, bit for bit")
