"""`sok.All2AllDenseEmbedding` on a single rank, as a layer of each Keras."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin.sok as sok
from tfplugin.sok.tf_keras import All2AllDenseEmbedding as TfKerasLayer

KERAS = {"Keras 3": (tf.keras, sok.All2AllDenseEmbedding), "tf_keras": (tf_keras, TfKerasLayer)}
KEYS = np.array([[[1, 5], [7, 1]], [[0, 9], [5, 5]]], np.int64)


@pytest.fixture(params=KERAS.values(), ids=KERAS)
def keras_and_layer(request):
    return request.param


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_rows_have_the_shape_of_the_keys(keras_and_layer, use_hashtable):
    layer = keras_and_layer[1](16, 3, 2, 2, use_hashtable=use_hashtable)
    rows = layer(tf.constant(KEYS)).numpy()
    assert rows.shape == (2, 2, 2, 3)
    by_key: dict[int, np.ndarray] = {}
    for key, row in zip(KEYS.ravel(), rows.reshape(-1, 3), strict=True):
        np.testing.assert_array_equal(row, by_key.setdefault(int(key), row))
    assert (np.abs(rows) <= 0.05).all() and np.unique(rows).size > 10


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_a_layer_that_was_built_on_another_number_of_ranks(keras_and_layer, use_hashtable):
    layer = keras_and_layer[1](16, 3, 2, 2, use_hashtable=use_hashtable)
    layer(tf.constant(KEYS))
    layer.embedding_variable.num_gpus = 2
    with pytest.raises(ValueError, match=r"made by one of 2 ranks.*there are 1 now.*sok.Checkpoint"):
        layer(tf.constant(KEYS))


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_dynamic_input_between_unique_and_gather(keras_and_layer, use_hashtable):
    layer = keras_and_layer[1](16, 3, 2, 2, dynamic_input=True, use_hashtable=use_hashtable)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64)])
    def look_up(keys):
        unique, where = tf.unique(tf.reshape(keys, [-1]))
        return tf.gather(layer(unique), where)

    rows = look_up(tf.constant(KEYS.reshape(2, 4)))
    assert rows.shape == (8, 3)
    np.testing.assert_array_equal(rows, layer(tf.constant(KEYS.ravel())))


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_a_model_trains_as_with_a_dense_embedding(keras_and_layer, use_hashtable):
    keras, make = keras_and_layer
    layer = make(16, 3, 2, 2, use_hashtable=use_hashtable, embedding_initializer="ones")
    model = keras.Sequential([keras.Input((2, 2), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    dense, head = tf.Variable(tf.ones([16, 3])), [tf.Variable(w) for w in model.layers[-1].get_weights()]
    optimizer, plain = sok.OptimizerWrapper(keras.optimizers.SGD(0.1)), tf_keras.optimizers.SGD(0.1)

    @tf.function
    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(keys, training=True) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    for _ in range(3):
        with tf.GradientTape() as tape:
            flat = tf.reshape(tf.gather(dense, KEYS), [2, -1])
            loss = tf.reduce_sum((flat @ head[0] + head[1]) ** 2)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, [dense, *head])]
        np.testing.assert_allclose(step(tf.constant(KEYS)), loss, rtol=1e-5)
        plain.apply_gradients(zip(gradients, [dense, *head], strict=True))
    np.testing.assert_allclose(layer(tf.constant(KEYS)), tf.gather(dense, KEYS), rtol=1e-5, atol=1e-5)
    assert any(v is layer.variable for v in sok.filter_variables(model.trainable_variables)[0])


def test_no_training_inserts_nothing(keras_and_layer):
    layer = keras_and_layer[1](16, 3, 2, 2)
    assert not layer(tf.constant(KEYS), training=False).numpy().any()
    assert layer.variable.size.numpy().tolist() == [0, 3]


def test_it_can_be_made_again_from_its_config(keras_and_layer):
    layer = keras_and_layer[1](16, 3, 2, 2, use_hashtable=False, key_dtype=tf.int32, name="ads")
    again = type(layer).from_config(layer.get_config())
    assert again.get_config() == layer.get_config() and again.key_dtype == tf.int32


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        (np.zeros([2, 3, 2], np.int64), ValueError, r"must be of shape \(None, 2, 2\)"),
        (np.zeros([2, 2, 2], np.float32), TypeError, "keys must be int64, got float32"),
    ],
)
def test_wrong_inputs_are_told(keras_and_layer, keys, error, said):
    with pytest.raises(error, match=said):
        keras_and_layer[1](16, 3, 2, 2)(tf.constant(keys))


@pytest.mark.parametrize("what", ["max_vocabulary_size_per_gpu", "embedding_vec_size", "slot_num", "nnz_per_slot"])
def test_wrong_sizes_are_told(keras_and_layer, what):
    sizes = {"max_vocabulary_size_per_gpu": 4, "embedding_vec_size": 4, "slot_num": 1, "nnz_per_slot": 1}
    with pytest.raises(ValueError, match=f"{what} must be a number of 1 or more, got 0"):
        keras_and_layer[1](**{**sizes, what: 0})
