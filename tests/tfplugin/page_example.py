"""The example of the KvVariable page, unchanged but for its import lines and Python 2 slips. argv: a folder."""

# ruff: noqa
import tensorflow.compat.v1 as tf
import tfplugin  # makes tf.get_kv_variable available

tf.disable_eager_execution()
import os
import sys

os.chdir(sys.argv[1])

ckp_dir = "./checkpoint"
ckp_path = os.path.join(ckp_dir, "model.ckpt")
num_shards = 5
with tf.variable_scope("test", reuse=tf.AUTO_REUSE):
    var = tf.get_kv_variable(
        "kv_embedding",
        embedding_dim=64,
        key_dtype=tf.int64,
        initializer=tf.compat.v1.ones_initializer(),
        partitioner=tf.compat.v1.fixed_size_partitioner(num_shards=num_shards),
    )
emb = tf.nn.embedding_lookup(var, tf.convert_to_tensor([1, 2, 3, 6, 8, 9], dtype=tf.int64))
emb1 = tf.nn.embedding_lookup(var, tf.convert_to_tensor([1000000000000000], dtype=tf.int64))
fun = tf.add(emb, 1.0, name="add")
loss = tf.reduce_sum(fun)
opt = tf.train.FtrlOptimizer(0.005, l1_regularization_strength=0.025, l2_regularization_strength=0.00001)
g_v = opt.compute_gradients(loss)
train_op = opt.apply_gradients(g_v)
init = tf.global_variables_initializer()
saver = tf.train.Saver()
with tf.Session() as sess:
    sess.run(init)
    print(sess.run({"emb": emb, "fun": fun, "train": train_op}))
    print(sess.run(emb1))
    save_path = saver.save(sess, ckp_path)
    print("model saved in file %s" % save_path)
    trained = sess.run({"emb": emb, "fun": fun}), sess.run(emb1)
with tf.Session() as sess:
    saver.restore(sess, ckp_path)
    print(sess.run(emb1))
    print(sess.run({"emb": emb, "fun": fun}))
    print(sess.run(emb1))
    # Not on the page: what the test compares.
    restored = sess.run({"emb": emb, "fun": fun}), sess.run(emb1)
import numpy as np

assert (trained[0]["emb"] == restored[0]["emb"]).all() and (trained[0]["fun"] == restored[0]["fun"]).all()
assert (trained[1] == restored[1]).all() and (restored[1] == 1).all()
assert not (trained[0]["emb"] == 1).any()
print("ROWS EQUAL")
