"""Trains tables in Redis with TFRA, or goes on with them: python redis_tables.py CONFIG STEPS IDS.npy OUT.npz

Writes the rows of the ids, of string keys, and how many rows there are then.
"""

import sys

import numpy as np
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

v1 = tf.compat.v1
STRINGS = ["a", "bc", "a string of 22 letters"]

if __name__ == "__main__":
    config, steps, ids_file, out = sys.argv[1:]
    v1.disable_eager_execution()
    v1.enable_resource_variables()
    creator = de.RedisTableCreator(de.RedisTableConfig(redis_config_abs_dir=config))
    ids = tf.constant(np.load(ids_file))
    v = de.get_variable("tower/emb", dim=2, initializer=0.5, kv_creator=creator, checkpoint=False)
    rows, trainable = de.embedding_lookup(v, ids, name="look", return_trainable=True)
    optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
    step = optimizer.minimize(tf.reduce_sum(rows**2), var_list=[trainable])
    named = de.get_variable("named", key_dtype=tf.string, dim=2, kv_creator=creator, checkpoint=False)
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        for _ in range(int(steps)):
            session.run(step)
        if int(steps):
            session.run(named.upsert(tf.constant(STRINGS), tf.constant(values)))
        found, strings, size = session.run([v.lookup(ids), named.lookup(tf.constant(STRINGS)), v.size()])
    np.savez(out, rows=found, strings=strings, size=size)
