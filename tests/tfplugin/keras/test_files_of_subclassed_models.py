"""Models of a class of one's own in ``.keras`` files, which Keras builds of the shapes of their inputs alone."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin

IDS = np.array([[7, 4, 7], [1, 3, 9]])
WORDS = np.array([["a", "b", "a"], ["c", "d", "e"]])
LABELS = np.ones((2, 1), np.float32)


@functools.cache
def _classes(keras):
    """Classes of models, once for each Keras: their names are those in files."""
    layers = tfplugin.tf_keras if keras is tf_keras else tfplugin.keras
    register = keras.utils.register_keras_serializable("subclassed")

    @register
    class Scores(keras.Model):
        def __init__(self, options=None, **kwargs):
            super().__init__(**kwargs)
            self.options = dict(options or {})
            self.e = layers.Embedding(4, **{"combiner": "sum", "name": "a", **self.options})
            self.flat, self.d = keras.layers.Flatten(), keras.layers.Dense(1)

        def call(self, x, training=None):
            return self.d(self.flat(self.e(x, training=training)))

        def get_config(self):
            return {"options": self.options}

    @register
    class Several(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            word = layers.TableConfig("word", embedding_dim=4, combiner="sum", key_dtype="string")
            item = layers.TableConfig("item", embedding_dim=4, combiner="mean")
            features = {"word": layers.FeatureConfig("word", word), "item": layers.FeatureConfig("item", item)}
            self.e, self.d = layers.EmbeddingCollection(features), keras.layers.Dense(1)

        def call(self, x, training=None):
            rows = self.e(x, training=training)
            return self.d(rows["word"] + rows["item"])

        def get_config(self):
            return {}

    @register
    class Words(keras.Model):
        """Does with strings what floats do not bear."""

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.e, self.d = layers.Embedding(4, combiner="sum", key_dtype="string", name="w"), keras.layers.Dense(1)

        def call(self, x, training=None):
            return self.d(self.e(tf.strings.lower(x), training=training))

        def get_config(self):
            return {}

    @register
    class Tower(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.e, self.d = layers.Embedding(4, combiner="sum"), keras.layers.Dense(3)

        def call(self, x, training=None):
            return self.d(self.e(x, training=training))

    @register
    class Nested(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            inner = layers.Embedding(4, combiner="sum", name="q")
            self.tower, self.inner = Tower(), keras.Sequential([inner, keras.layers.Dense(3)])
            self.d = keras.layers.Dense(1)

        def call(self, x, training=None):
            return self.d(self.tower(x, training=training) + self.inner(x, training=training))

        def get_config(self):
            return {}

    return Scores, Several, Words, Nested


def _trained(model, inputs):
    model.compile("adam", "mse")
    model.fit(inputs, LABELS, verbose=0)
    return model


def _goes_on_from(path, keras, model, inputs):
    loaded = keras.models.load_model(path)
    np.testing.assert_array_equal(loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0))
    first, second = (one.fit(inputs, LABELS, epochs=2, verbose=0).history["loss"] for one in (model, loaded))
    assert first == second


@pytest.mark.parametrize(
    "options, inputs",
    [
        ({}, IDS),
        ({"combiner": None, "mask_zero": True}, IDS),
        ({"regularizer": "l2", "padding_id": 4}, IDS),
        ({"key_dtype": "string", "padding_id": "a"}, WORDS),
    ],
    ids=["pooled", "masked", "regularized", "strings"],
)
def test_a_model_of_ones_own_class_goes_on_from_a_file(both_kerases, tmp_path, options, inputs):
    inputs = tf.constant(inputs)
    model = _trained(_classes(both_kerases)[0](options), inputs)
    model.save(str(tmp_path / "m.keras"))
    _goes_on_from(str(tmp_path / "m.keras"), both_kerases, model, inputs)


def test_a_collection_in_one(both_kerases, tmp_path):
    inputs = {"word": tf.constant(WORDS), "item": tf.constant(IDS)}
    model = _trained(_classes(both_kerases)[1](), inputs)
    model.save(str(tmp_path / "m.keras"))
    _goes_on_from(str(tmp_path / "m.keras"), both_kerases, model, inputs)


def test_layers_and_models_in_one(both_kerases, tmp_path):
    model = _trained(_classes(both_kerases)[3](), IDS)
    model.save(str(tmp_path / "m.keras"))
    _goes_on_from(str(tmp_path / "m.keras"), both_kerases, model, IDS)


def test_a_sequential_model_without_an_input(both_kerases, layers, tmp_path):
    keras = both_kerases
    model = _trained(keras.Sequential([layers.Embedding(4, combiner="sum", name="a"), keras.layers.Dense(1)]), IDS)
    model.save(str(tmp_path / "m.keras"))
    _goes_on_from(str(tmp_path / "m.keras"), keras, model, IDS)


def test_building_by_shapes_makes_no_rows_and_floats_stay_an_error(both_kerases):
    model = _classes(both_kerases)[0]()
    if both_kerases is tf_keras:
        model.build((None, 3))
        assert model.built and model.d.built
    else:
        model.build_from_config({"input_shape": (None, 3)})
        assert model.d.built
    assert int(model.e.table.size()) == 0
    with pytest.raises(TypeError, match=r"'a' has int64 keys, got ids of float32"):
        model.e(tf.constant([[1.0]]))


def test_what_cannot_be_built_of_shapes_is_an_error(both_kerases, tmp_path):
    made = _classes(both_kerases)[2]
    words = tf.constant(WORDS)
    model = _trained(made(name="mine"), words)
    path = str(tmp_path / "m.keras")
    model.save(path)
    with pytest.raises(ValueError, match=r"(?s)'words(_\d)?' \(Words\) cannot be built.*'dense.*float.*load_weights"):
        both_kerases.models.load_model(path)
    again = made()
    again(words)
    again.load_weights(path)
    np.testing.assert_array_equal(again.predict(words, verbose=0), model.predict(words, verbose=0))
