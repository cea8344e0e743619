"""The examples of TFRA's API page as programs, with only the import changed."""

from __future__ import annotations

import pytest

IMPORTS = ["from tfplugin import dynamic_embedding as de", "import tfplugin.tfra as tfra\nde = tfra.dynamic_embedding"]

TRAINABLE = """
import tensorflow as tf
{imports}
ids = tf.constant([[1, 2], [2, 3]], tf.int64)

init = tf.keras.initializers.RandomNormal()
params = de.get_variable('{name}', dim=4, initializer=init)
optimizer = tf.keras.optimizers.Adam(1E-3)
optimizer = de.DynamicEmbeddingOptimizer(optimizer)

@tf.function
def loss_fn(ids):
  emb = de.embedding_lookup(params, ids, name='user_embedding')
  emb = tf.math.reduce_sum(emb, axis=1)
  loss = tf.reduce_mean(emb)
  return loss

for i in range(10):
  optimizer.minimize(lambda: loss_fn(ids),
                     var_list=[params.{getter}('user_embedding')])
"""

PARTITIONER = """
import tensorflow as tf
{imports}

def default_partition_fn(keys, shard_num):
  return tf.cast(keys % shard_num, dtype=tf.int32)

params = de.get_variable('{name}', dim=2, devices=['/CPU:0'] * 3, partitioner=default_partition_fn)
params.upsert(tf.constant([1, 2, 3], tf.int64), tf.ones([3, 2]))
sizes = [int(params.size(index=i)) for i in range(3)]
"""


@pytest.mark.parametrize("imports", IMPORTS, ids=["de", "tfra"])
@pytest.mark.parametrize("getter", ["get_eager_trainable_by_name", "get_trainable_by_name"])
def test_training_by_the_name_of_a_lookup(name, imports, getter):
    names = {}
    source = TRAINABLE.format(imports=imports, name=name, getter=getter)
    # AutoGraph reads the source of a function from a file, and does without where there is none.
    exec(compile(source, "page", "exec"), names)
    params, optimizer = names["params"], names["optimizer"]
    assert sorted(params.export()[0].numpy().tolist()) == [1, 2, 3]
    assert int(optimizer.iterations) == 10
    fresh = params.parts[0].kv_initializer
    assert (fresh.kind, fresh.b) == ("normal", 0.05)
    # Adam's steps are as long as the learning rate, and the gradient is positive all along.
    again = names["de"].Variable(dim=4, name=name, initializer=fresh)
    moved = again.lookup([1, 2, 3]).numpy() - params.lookup([1, 2, 3]).numpy()
    assert (abs(moved - 0.01) < 1e-4).all()


def test_a_partition_function(name):
    names = {}
    exec(compile(PARTITIONER.format(imports=IMPORTS[0], name=name), "page", "exec"), names)
    assert names["sizes"] == [1, 1, 1]
