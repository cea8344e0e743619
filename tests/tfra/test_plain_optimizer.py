"""An optimizer that is not wrapped in `DynamicEmbeddingOptimizer` is refused with a sentence that says so."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tfplugin import dynamic_embedding as de
from tfplugin.dynamic_embedding import tf_keras as de_tf_keras

v1 = tf.compat.v1
REFUSED = "is trained by an optimizer as it is, which knows no tables: wrap it, as in .*DynamicEmbeddingOptimizer"
IDS = tf.constant([[1, 2], [3, 4]], tf.int64)
OPTIMIZERS = {
    "keras_3_adam": (tf.keras, de.keras, lambda: tf.keras.optimizers.Adam(0.1)),
    "keras_3_sgd": (tf.keras, de.keras, lambda: tf.keras.optimizers.SGD(0.1)),
    "tf_keras_adam": (tf_keras, de_tf_keras, lambda: tf_keras.optimizers.Adam(0.1)),
    "tf_keras_sgd": (tf_keras, de_tf_keras, lambda: tf_keras.optimizers.SGD(0.1)),
    "tf_keras_legacy": (tf_keras, de_tf_keras, lambda: tf_keras.optimizers.legacy.Adam(0.1)),
}


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS)
def kind(request, name):
    """A model whose first weight is dense, and what makes an optimizer."""
    keras, layers, make = request.param
    ids = keras.Input([2], dtype="int64")
    scale = keras.layers.Dense(1)
    rows = layers.layers.SquashedEmbedding(2, name=name)(ids)
    return keras.Model(ids, scale(rows)), make


@pytest.mark.parametrize("eager", [False, True])
def test_fit_of_a_model(kind, eager):
    model, make = kind
    model.compile(make(), "mse", run_eagerly=eager)
    with pytest.raises(TypeError, match=REFUSED):
        model.fit(IDS, np.ones([2, 1], np.float32), verbose=0)
    model.compile(de.DynamicEmbeddingOptimizer(make()), "mse", run_eagerly=eager)
    model.fit(IDS, np.ones([2, 1], np.float32), verbose=0)
    (layer,) = [layer for layer in model.layers if hasattr(layer, "params")]
    assert int(layer.params.size()) == 4


def test_a_tape(kind):
    model, make = kind
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(IDS) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    for optimizer in (make(), v1.train.AdamOptimizer(0.1)):
        with pytest.raises(TypeError, match=REFUSED):
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def test_a_graph():
    with tf.Graph().as_default():
        v = de.Variable(dim=2, name="v")
        rows = de.embedding_lookup(v, tf.constant(IDS.numpy()), name="x")
        for optimizer in (v1.train.AdamOptimizer(0.1), v1.train.GradientDescentOptimizer(0.1)):
            with pytest.raises(TypeError, match=REFUSED):
                optimizer.minimize(tf.reduce_sum(rows**2))
