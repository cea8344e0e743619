"""`MonitoredTrainingSession` initializes, saves and recovers key-value variables beside dense ones."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1


def test_training_goes_on_after_a_restart(tmp_path, partitioner):
    def train(steps):
        with tf.Graph().as_default():
            step = v1.train.get_or_create_global_step()
            table = v1.get_kv_variable("t", embedding_dim=2, partitioner=partitioner, initializer=0.0)
            weight = v1.get_variable("w", initializer=1.0, use_resource=True)
            rows = tf.nn.embedding_lookup(table, tf.constant([1, -1], tf.int64))
            op = v1.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(rows) + weight, global_step=step)
            after, size = table.sparse_read(tf.constant([1, -1, 5], tf.int64), training=False), table.size()
            with v1.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path), save_checkpoint_steps=2) as session:
                for _ in range(steps):
                    session.run(op)
                return session.run([after, size, step, weight])

    after, size, step, weight = train(3)
    np.testing.assert_array_equal(after, [[-3, -3], [-3, -3], [0, 0]])
    assert (size, step, weight) == (2, 3, -2)
    after, size, step, weight = train(2)
    np.testing.assert_array_equal(after, [[-5, -5], [-5, -5], [0, 0]])
    assert (size, step, weight) == (2, 5, -4)
