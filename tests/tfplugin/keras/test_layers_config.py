"""Layers that are made again from what they tell of themselves."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from tfplugin import policies

IDS = tf.constant([[1, 2, 3]], tf.int64)


def _everything(keras):
    return {
        "combiner": "sqrtn",
        "mask_zero": True,
        "initializer": keras.initializers.RandomNormal(stddev=0.5, seed=3),
        "regularizer": keras.regularizers.L1(0.5),
        "constraint": keras.constraints.MaxNorm(1.0, axis=1),
        "max_capacity": 100,
        "eviction": "lfu",
        "admission": policies.BloomAdmission(2, 1000),
        "max_hbm": 1 << 20,
        "key_dtype": "uint64",
        "dtype": "mixed_float16",
        "optimizer": keras.optimizers.Adagrad(0.25),
        "name": "user",
        "expiry": [policies.ExpireAfterSteps(7), policies.KeepTop(50, by="norm")],
        "expire_every": 10,
        "expire_on_save": True,
        "capacity_hint": 64,
        "parts": 2,
        "trainable": False,
        "padding_id": 5,
    }


def _round_trips(keras, layer):
    saving = keras.utils if hasattr(keras.utils, "serialize_keras_object") else keras.saving
    yield type(layer).from_config(layer.get_config())
    yield saving.deserialize_keras_object(saving.serialize_keras_object(layer))


def test_a_config_has_all_that_was_said(both_kerases, layers):
    layer = layers.Embedding(8, **_everything(both_kerases))
    for again in _round_trips(both_kerases, layer):
        assert again.get_config() == layer.get_config()
        assert again.table is not layer.table
        for of_table in ("name", "dim", "key_dtype", "dtype", "max_capacity", "eviction", "policies"):
            assert getattr(again.table, of_table) == getattr(layer.table, of_table)
        assert len(again.table) == 2 and not again.trainable
        assert again.table[0].kv_initializer == layer.table[0].kv_initializer
        assert again.compute_dtype == "float16"
        assert type(again.optimizer) is type(layer.optimizer)


def test_what_was_not_said_is_not_in_the_way(both_kerases, layers):
    layer = layers.Embedding(8)
    for again in _round_trips(both_kerases, layer):
        assert again.get_config() == layer.get_config()
        np.testing.assert_array_equal(again(IDS, training=True), layer(IDS, training=True))


@pytest.mark.parametrize(
    "initializer",
    [None, 0.5, "zeros", "glorot_uniform", [0.0, 1.0, 2.0], np.ones((3, 3), np.float32)],
    ids=["None", "number", "zeros", "glorot", "list", "array"],
)
def test_initializers(both_kerases, layers, initializer):
    layer = layers.Embedding(3, initializer=initializer, name="a")
    rows = layer(IDS, training=True)
    for again in _round_trips(both_kerases, layer):
        np.testing.assert_array_equal(again(IDS, training=True), rows)


@pytest.mark.parametrize("padding", [b"none", b"\xff", "größe"], ids=repr)
def test_padding_of_bytes(both_kerases, layers, padding):
    """JSON has none, and Keras makes objects of them that no layer gets back."""
    layer = layers.Embedding(3, "sum", key_dtype="string", padding_id=padding, initializer=1.0)
    words = tf.constant([["a", padding, "?"]])
    for again in (
        *_round_trips(both_kerases, layer),
        type(layer).from_config(json.loads(json.dumps(layer.get_config()))),
    ):
        assert again.get_config() == layer.get_config()
        assert again(words, training=True).numpy().tolist() == [[2.0] * 3]


def test_what_no_config_holds(both_kerases, layers):
    with pytest.raises(ValueError, match=r"its optimizer Adagrad is none of \w+'s, of which alone a config says"):
        layers.Embedding(3, optimizer=tfplugin.optimizers.Adagrad(0.1)).get_config()


@pytest.mark.parametrize("told", ["adagrad", "config", "legacy"])
def test_optimizers_by_name_and_config(both_kerases, layers, told):
    optimizers = both_kerases.optimizers
    wanted = optimizers.Adagrad
    if told == "legacy":
        if not hasattr(optimizers, "legacy") or not hasattr(optimizers.legacy.Adagrad, "get_slot"):
            pytest.skip("Keras 3 has none")
        wanted = optimizers.legacy.Adagrad
    given = told if told == "adagrad" else wanted(0.5) if told == "legacy" else optimizers.serialize(wanted(0.5))
    layer = layers.Embedding(3, optimizer=given)
    assert isinstance(layer.table_optimizer(layer.table), wanted)
    for again in _round_trips(both_kerases, layer):
        assert again.get_config() == layer.get_config()
    assert layers.Embedding(3).table_optimizer(None) is None


@pytest.mark.parametrize("of", ["layer", "table of a collection"])
def test_what_is_no_optimizer(both_kerases, layers, of):
    def make(optimizer):
        if of == "layer":
            return layers.Embedding(3, optimizer=optimizer, name="item")
        return layers.TableConfig("item", embedding_dim=3, optimizer=optimizer)

    name = both_kerases.__name__.rpartition(".")[2]
    wanted = rf"'item': optimizer must be a name, an optimizer of {name} or one of tfplugin\.optimizers, got "
    with pytest.raises(TypeError, match=wanted + r"3\."):
        make(3)
    with pytest.raises(TypeError, match=wanted + "the class Adam: make one of it"):
        make(both_kerases.optimizers.Adam)
    assert make(tfplugin.optimizers.Adagrad(0.1)).optimizer is not None


def test_models_of_every_kind_are_made_again(both_kerases, layers):
    keras = both_kerases

    def functional():
        ids = keras.Input((3,), dtype="int64")
        rows = layers.Embedding(4, mask_zero=True, name="rows")(ids)
        return keras.Model(ids, keras.layers.GlobalAveragePooling1D()(rows))

    def sequential():
        return keras.Sequential([keras.Input((3,), dtype="int64"), layers.Embedding(4, "mean", name="rows")])

    for model in (functional(), sequential()):
        layer = model.get_layer("rows")
        layer.table.upsert([1, 2, 3], np.ones((3, 4)))
        again = type(model).from_config(model.get_config())
        assert again.output_shape == model.output_shape == (None, 4)
        np.testing.assert_array_equal(model.predict(IDS, verbose=0), np.ones((1, 4)))
        np.testing.assert_array_equal(again.predict(IDS, verbose=0), np.zeros((1, 4)))  # none has a row
        assert again.get_layer("rows").table.name == layer.table.name == "rows:0"


def test_tables_are_there_before_any_data(both_kerases, layers):
    layer = layers.Embedding(4, name="early")
    assert int(layer.table.size()) == 0 and layer.table.name == "early:0"
    layer.build((None, 3))
    assert layer.built and len(layer.weights) == 0
    generated = layers.Embedding(4)
    assert generated.table.name == f"{generated.name}:0"


def test_a_layer_without_embeddings_tells_of_its_table(both_kerases, layers):
    layer = layers.Embedding(4, name="rows")
    with pytest.raises(AttributeError, match=r"^Layer 'rows' has no embeddings: its rows lie in its attribute table\."):
        _ = layer.embeddings
    with pytest.raises(AttributeError):
        layer.embeddings = np.zeros((3, 4))
    assert not hasattr(layer, "embeddings")
