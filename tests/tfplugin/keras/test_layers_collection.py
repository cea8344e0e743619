"""`EmbeddingCollection`: many features in one lookup, beside a layer for each."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

LABELS = np.random.default_rng(2).normal(size=(2, 1)).astype(np.float32)


@pytest.fixture
def features(layers):
    """Makes the features of a model, of which two share a table."""

    def features(**of_item):
        item = layers.TableConfig("item", embedding_dim=4, combiner="mean", **of_item)
        user = layers.TableConfig("user", embedding_dim=2, combiner=None)
        tag = layers.TableConfig("tag", embedding_dim=3, combiner="sum", key_dtype="string")
        return {
            "user": layers.FeatureConfig("user", user),
            "items": [layers.FeatureConfig("seen", item), layers.FeatureConfig("candidate", item)],
            "tags": (layers.FeatureConfig("tag", tag),),
        }

    return features


def _inputs():
    return {
        "user": tf.constant([7, 8], tf.int64),
        "items": [tf.ragged.constant([[1, 2, 1], [3]], dtype=tf.int64), tf.constant([[2], [5]], tf.int64)],
        "tags": (tf.constant([["a", "b"], ["b", ""]]),),
    }


def _flat(structure):
    return {"user": structure["user"], "seen": structure["items"][0], "candidate": structure["items"][1]} | {
        "tag": structure["tags"][0]
    }


def _each(layers, collection):
    """A layer for each table of the collection, with the same rows."""
    made = {}
    for name, table in collection.tables.items():
        options = collection._features.options[name]
        made[name] = layers.Embedding(table.dim, options.combiner, key_dtype=options.key_dtype)
        made[name].table.upsert(*table.export())
    return made


def test_one_op_looks_up_all_that_can_share_it(layers, features):
    layer = layers.EmbeddingCollection(features(), name="all")
    outputs = layer(_inputs(), training=True)
    tf.nest.assert_same_structure(outputs, features())
    assert {name: int(table.size()) for name, table in layer.tables.items()} == {"user": 2, "item": 4, "tag": 3}
    one_by_one = _each(layers, layer)
    tables = {"user": "user", "seen": "item", "candidate": "item", "tag": "tag"}
    for feature, rows in _flat(outputs).items():
        np.testing.assert_allclose(rows, one_by_one[tables[feature]](_flat(_inputs())[feature]), rtol=1e-6)

    @tf.function
    def step(inputs):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(rows**2) for rows in tf.nest.flatten(layer(inputs, training=True))])
        return tape.gradient(loss, list(layer.tables.values()))

    ops = [op.type for op in step.get_concrete_function(_inputs()).graph.get_operations()]
    assert ops.count("KvTablePool") == ops.count("KvTablePoolGradient") == 1
    # One table is looked up plainly.
    assert sum(ops.count(op) for op in ("KvTableGather", "KvTableGatherMany")) == 1


def test_structures_and_weights(layers, features):
    item = layers.TableConfig("item", embedding_dim=4, combiner="sum", initializer=1.0)
    single = layers.EmbeddingCollection(layers.FeatureConfig("f", item))
    np.testing.assert_array_equal(single(tf.constant([[1, 2]]), training=True), np.full((1, 4), 2.0))
    two = layers.EmbeddingCollection([layers.FeatureConfig("f", item), layers.FeatureConfig("g", item)])
    ids = [tf.constant([[1, 2]]), tf.constant([[3, 4]])]
    outputs = two(ids, weights=[tf.constant([[0.5, 2.0]]), None], training=True)
    np.testing.assert_array_equal(tf.concat(outputs, 0)[:, 0], [2.5, 2.0])
    assert two.compute_output_shape([(None, 2), (None, 3)]) == [(None, 4), (None, 4)]


def test_shapes_that_features_say(layers):
    table = layers.TableConfig("item", embedding_dim=4, combiner="sum", initializer=1.0)
    layer = layers.EmbeddingCollection({"f": layers.FeatureConfig("f", table, (None, 2), (None, 4))})
    cut = layer({"f": tf.ragged.constant([[1, 2, 3], [4]], dtype=tf.int64)}, training=True)
    np.testing.assert_array_equal(cut["f"][:, 0], [2, 1])
    assert int(layer.tables["item"].size()) == 3
    with pytest.raises(ValueError, match=r"Feature 'f' of layer .* its input is of shape \(1, 3\)"):
        layer({"f": tf.constant([[1, 2, 3]])})
    wrong = layers.EmbeddingCollection({"f": layers.FeatureConfig("f", table, None, (None, 5))})
    with pytest.raises(ValueError, match=r"its output is of shape \(1, 4\), and output_shape says \(None, 5\)"):
        wrong({"f": tf.constant([[1, 2, 3]])})


def test_inputs_of_another_structure(both_kerases, layers, features):
    layer = layers.EmbeddingCollection(features(), name="all")
    inputs = _inputs()
    del inputs["user"]
    message = (
        r"(?s)Layer 'all': inputs must have the structure of its feature_configs, .*'items': \['seen', 'candidate'\]"
    )
    with pytest.raises(ValueError, match=message):
        layer(inputs)
    with pytest.raises(ValueError, match="Layer 'all': weights must have the structure"):
        layer(_inputs(), weights={"user": None})
    ids = both_kerases.Input((3,))
    with pytest.raises(TypeError, match=r"Feature 'user' of layer 'all' has int64 keys, got ids of float32"):
        layer({**_inputs(), "user": tf.constant([1.0])})
    one = layers.EmbeddingCollection({"f": layers.FeatureConfig("f", layers.TableConfig("t", embedding_dim=2))})
    with pytest.raises(TypeError, match=r"Feature 'f' .* got ids of float32"):
        one({"f": ids})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda m: m.TableConfig("t", embedding_dim=2, vocabulary_size=9),
            "no vocabulary: leave vocabulary_size=9 out",
        ),
        (lambda m: m.TableConfig("t", 9, 2), "positional arguments"),
        (lambda m: m.TableConfig("", embedding_dim=2), "name must be the name of the table"),
        (lambda m: m.TableConfig("t", embedding_dim=0), "'t': the width of a row .* must be 1 or more"),
        (lambda m: m.TableConfig("t", embedding_dim=2, placement="sparsecore"), "placement must be one of"),
        (lambda m: m.TableConfig("t", embedding_dim=2, combiner="max"), "combiner must be None or one of"),
        (lambda m: m.FeatureConfig("f", "t"), r"table must be a TableConfig of tfplugin, got builtins\.str"),
        (lambda m: m.EmbeddingCollection({"f": "t"}), "must be FeatureConfigs of tfplugin"),
        (lambda m: m.EmbeddingCollection({}), "has no feature"),
        (
            lambda m: m.EmbeddingCollection([m.FeatureConfig("f", m.TableConfig("t", embedding_dim=2))] * 2),
            "two features of the name 'f'",
        ),
        (
            lambda m: m.EmbeddingCollection(
                [m.FeatureConfig(f"f{dim}", m.TableConfig("t", embedding_dim=dim)) for dim in (2, 3)]
            ),
            "two tables of the name 't' that are not the same",
        ),
    ],
)
def test_configs_that_make_no_sense(layers, wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        wrong(layers)


def test_fields_have_the_names_and_defaults_of_keras_rs(layers):
    table = layers.TableConfig("t", embedding_dim=16, max_ids_per_partition=256, max_unique_ids_per_partition=256)
    assert (table.combiner, table.placement) == ("mean", "auto")
    feature = layers.FeatureConfig("f", table, (8, 1), (8, 16))
    assert (feature.input_shape, feature.output_shape) == ((8, 1), (8, 16))
    layer = layers.EmbeddingCollection(feature)
    rows = layer(np.arange(400)[:, None], training=True).numpy()
    assert abs(rows.std() - 0.25) < 0.02 and np.abs(rows).max() < 2.3 * 0.25  # 1 / sqrt(16), cut off at two


def test_configs_make_the_collection_again(both_kerases, layers, features):
    keras = both_kerases
    options = {"optimizer": keras.optimizers.Adagrad(0.5), "regularizer": "l2", "max_capacity": 50}
    layer = layers.EmbeddingCollection(
        features(admission=tfplugin.policies.CountAdmission(2), **options), name="all", dtype="mixed_bfloat16"
    )
    config = layer.get_config()
    saving = keras.utils if hasattr(keras.utils, "serialize_keras_object") else keras.saving
    for again in (
        type(layer).from_config(config),
        saving.deserialize_keras_object(saving.serialize_keras_object(layer)),
    ):
        assert again.get_config() == layer.get_config() == config
        tf.nest.assert_same_structure(again.feature_configs, features())
        seen, candidate = again.feature_configs["items"]
        assert seen.table is candidate.table
        assert again.tables["item"] is not layer.tables["item"]
        assert again.tables["item"].name == layer.tables["item"].name == "item:0"
        assert again.table_optimizer(again.tables["item"]).get_config() == options["optimizer"].get_config()
        assert again.table_optimizer(again.tables["user"]) is None
    feature = features()["items"][0]
    assert type(feature).from_config(feature.get_config()).get_config() == feature.get_config()


def _model(keras, collection):
    inputs = {
        "user": keras.Input((), dtype="int64"),
        "items": [keras.Input((3,), dtype="int64"), keras.Input((1,), dtype="int64")],
        "tags": (keras.Input((2,), dtype="string"),),
    }
    outputs = tf.nest.flatten(collection(inputs))
    joined = keras.layers.Concatenate()(outputs)
    return keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(joined))


def test_files_of_keras_have_the_tables(both_kerases, layers, features, tmp_path):
    keras = both_kerases
    collection = layers.EmbeddingCollection(features(), name="all")
    model = _model(keras, collection)
    model.compile("adam", "mse")
    inputs = (tf.constant([7, 8]), tf.constant([[1, 2, 1], [3, 3, 3]]), tf.constant([[2], [5]]))
    inputs = {"user": inputs[0], "items": list(inputs[1:]), "tags": (tf.constant([["a", "b"], ["b", ""]]),)}
    model.train_on_batch(inputs, LABELS)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(inputs), model(inputs))
    tables = again.get_layer("all").tables
    assert {name: int(table.size()) for name, table in tables.items()} == {"user": 2, "item": 4, "tag": 3}


def test_a_regularizer_sees_each_row_once(layers, features):
    layer = layers.EmbeddingCollection(features(regularizer=lambda rows: tf.reduce_sum(rows**2), initializer=0.5))
    layer(_inputs(), training=True)
    # Of "seen" three rows, of "candidate" two, one of them another, each of four numbers.
    assert [float(loss) for loss in layer.losses] == [4 * 4 * 0.25]
