"""Which keys of a dynamic embedding variable get a row: there updates count, as lookups insert nothing."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tfplugin import dynamic_embedding as de
from tfplugin.dynamic_embedding import tf_keras as de_tf_keras
from tfplugin.policies import BloomAdmission, CountAdmission, ExpireBelowNorm, KeepTop, Policies


def keys_of(variable):
    return sorted(variable.export()[0].numpy().tolist())


def step(variable, optimizer, ids, name):
    with tf.GradientTape() as tape:
        rows, shadow = de.embedding_lookup(variable, tf.constant(ids, tf.int64), name=name, return_trainable=True)
        loss = tf.reduce_sum(rows)
    optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])


@pytest.mark.parametrize("admission", [CountAdmission(2), BloomAdmission(2, 1000, 1e-6)], ids=["counts", "filter"])
@pytest.mark.parametrize("kind", ["fused", "generic"])
def test_the_update_that_reaches_the_threshold_makes_the_row(admission, kind, devices, name):
    v = de.get_variable(name, dim=2, devices=devices, initializer=1.0, admission=admission, padding_key=9)
    cls = tf.keras.optimizers.SGD if kind == "fused" else type("Unknown", (tf.keras.optimizers.SGD,), {})
    optimizer = de.DynamicEmbeddingOptimizer(cls(0.25))
    step(v, optimizer, [1, 2, 9], f"{name}_l")
    assert keys_of(v) == []
    step(v, optimizer, [1, 3, 9], f"{name}_l")
    assert keys_of(v) == [1]
    np.testing.assert_array_equal(v.lookup(tf.constant([1, 2, 9], tf.int64)), [[0.75, 0.75], [1.0, 1.0], [0.0, 0.0]])
    step(v, optimizer, [2], f"{name}_l")
    assert keys_of(v) == [1, 2]


@pytest.mark.parametrize(
    ("keras", "layers"), [(tf.keras, de.keras.layers), (tf_keras, de_tf_keras.layers)], ids=["Keras 3", "tf_keras"]
)
def test_layers_take_policies_and_keep_them_in_their_config(keras, layers, name):
    layer = layers.Embedding(2, name=name, enter_threshold=2, padding_key=0)
    again = layers.Embedding.from_config(layer.get_config())
    assert again.params.policies == layer.params.policies == Policies(CountAdmission(2), "update", 0)
    plain = layers.Embedding(2, name=f"{name}_plain")
    assert plain.get_config()["policies"] is None and plain.params.policies == Policies()


def test_tables_that_admit_every_key_say_so(name):
    with pytest.raises(ValueError, match="tables of strings have no policies: hash the keys"):
        de.Variable(key_dtype=tf.string, name=name, enter_threshold=2)
    with pytest.raises(ValueError, match="below must be 'initial', got 'zeros'"):
        de.Variable(name=name, admission=CountAdmission(2, "zeros"))
    with pytest.raises(ValueError, match="enter_threshold must be a number of lookups"):
        de.Variable(name=name, enter_threshold=-1)
    v = de.get_variable(name, dim=2, enter_threshold=3)
    assert de.get_variable(name, dim=2) is v
    with pytest.raises(ValueError, match=f"variable {name} exists with policies.*wanted"):
        de.get_variable(name, dim=2, enter_threshold=4)


def test_rows_are_evicted_on_demand_by_the_top_of_all_tables(devices, name):
    v = de.Variable(dim=1, name=name, devices=devices)
    v.upsert(tf.range(10, dtype=tf.int64), tf.reshape(tf.range(10.0), [10, 1]))
    assert int(v.evict(ExpireBelowNorm(2.0))) == 2
    assert int(tf.function(lambda: v.evict(KeepTop(3, by="norm")))()) == 5
    assert keys_of(v) == [7, 8, 9]
    with pytest.raises(TypeError, match=f"evict of dynamic embedding variable '{name}'.*KeepTop; got 3"):
        v.evict(3)
    strings = de.Variable(key_dtype=tf.string, name=f"{name}_strings")
    with pytest.raises(ValueError, match=r"tables of strings.* expire no rows. Take remove\(keys\)"):
        strings.evict(KeepTop(3))
