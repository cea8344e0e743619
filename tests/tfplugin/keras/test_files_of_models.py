"""Files of models with tables: training goes on from them as that of a model with a dense `Embedding` does."""

from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import re
import warnings
import zipfile

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kept_models import again, kept_pair, of, rows, table_layer
from keras_pairs import KERASES, assert_alike, assert_same_losses, batches, losses, model_of

import tfplugin

DATA = batches(4)


def _whole(name):
    """Saves a model to a file, and loads it."""

    def there_and_back(keras, model, folder):
        path = str(folder / f"{model.layers[1].__class__.__name__}-{name}")
        if name == "folder":
            model.save(path, zipped=False)
        else:
            model.save(path, **({"save_format": "tf"} if name == "saved_model" else {}))
        return keras.models.load_model(path)

    return there_and_back


WAYS = {
    "keras": _whole("m.keras"),
    "h5": _whole("m.h5"),
    "folder": _whole("folder"),
    "saved_model": _whole("saved_model"),
    "deepcopy": lambda keras, model, folder: copy.deepcopy(model),
    "pickle": lambda keras, model, folder: pickle.loads(pickle.dumps(model)),
}
#: What one Keras alone has; and that Keras 3 writes no weights into an .h5 file that it would read again.
ONLY = {"h5": tf_keras, "saved_model": tf_keras, "folder": KERASES["keras3"]}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_training_goes_on_as_if_it_had_not_stopped(both_kerases, tmp_path, way):
    if ONLY.get(way, both_kerases) is not both_kerases:
        pytest.skip("this Keras has no such file")
    models = kept_pair(both_kerases)
    for model in models.models:
        list(losses(model, DATA[:2]))
    loaded = again(models, *(WAYS[way](both_kerases, model, tmp_path) for model in models.models))
    # A SavedModel of tf_keras brings no state of the optimizer, which starts anew for rows as for dense weights.
    stateless = way == "saved_model"
    assert loaded.table is not models.table
    assert loaded.table.slot_names() == (set() if stateless else models.table.slot_names())
    for slot in (None, *loaded.table.slot_names()):
        assert of(loaded.table, slot) == of(models.table, slot)
    on = [list(losses(model, DATA[2:])) for model in (*models.models, *loaded.models)]
    if not stateless:
        assert_same_losses(on[2], on[0])
    np.testing.assert_allclose(on[2], on[3], rtol=1e-5)
    assert_alike(loaded, DATA[0][0])


def test_what_unpickles_a_model_imports_the_layers_of_it(both_kerases, layers, monkeypatch):
    # As in a process of multiprocessing's "spawn", which is given a model and has imported nothing.
    keras = both_kerases
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layers.Embedding(2, combiner="sum")])
    data, import_module, imported = pickle.dumps(model), importlib.import_module, []
    monkeypatch.setattr(importlib, "import_module", lambda name: imported.append(name) or import_module(name))
    assert isinstance(pickle.loads(data).layers[-1], layers.Embedding)
    assert layers.__name__ in imported
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert b"tfplugin" not in pickle.dumps(plain)


@pytest.mark.parametrize("kind", ["w.weights.h5", "m.keras", "checkpoint"])
@pytest.mark.parametrize("built", [True, False], ids=["built", "unbuilt"])
def test_weights_go_into_another_model(both_kerases, tmp_path, kind, built):
    if kind == "checkpoint" and (both_kerases is not tf_keras or not built):
        pytest.skip("of tf_keras, which builds as it restores")
    models, others = kept_pair(both_kerases), kept_pair(both_kerases, seed=1)
    for number, (model, other) in enumerate(zip(models.models, others.models, strict=True)):
        list(losses(model, DATA[:2]))
        path = str(tmp_path / f"{number}-{kind}")
        (model.save if kind == "m.keras" else model.save_weights)(path)
        if built:
            other.optimizer.build(other.trainable_variables)
        other.load_weights(path)
    assert of(others.table) == of(models.table)
    # As for dense weights: an optimizer that has nothing yet does not take what the file has of its own.
    assert others.table.slot_names() == (models.table.slot_names() if built else set())
    on = [list(losses(model, DATA[2:])) for model in (*models.models, *others.models)]
    np.testing.assert_allclose(on[2], on[3], rtol=1e-5)
    if built:
        np.testing.assert_allclose(on[2], on[0], rtol=1e-6)
    assert_alike(others, DATA[0][0])


def test_slots_that_stood_under_another_optimizers_name_are_those_of_the_models_own(both_kerases, tmp_path):
    models = kept_pair(both_kerases)
    before = models.ours.optimizer  # alive, and has the name
    list(losses(models.ours, DATA[:1]))
    models.ours.compile(both_kerases.optimizers.Adam(0.1), "mse", run_eagerly=True)
    list(losses(models.ours, DATA[:2]))
    assert any(name.startswith("Adam_1.") for name in models.table.slot_names()), before
    models.ours.save(str(tmp_path / "m.keras"))
    loaded = both_kerases.models.load_model(str(tmp_path / "m.keras"))
    assert_same_losses(losses(loaded, DATA[2:]), losses(models.ours, DATA[2:]))


@pytest.mark.parametrize("saved, loaded", [(1, 3), (3, 1), (2, 3)])
def test_any_number_of_parts_goes_into_any_other(both_kerases, tmp_path, saved, loaded):
    models, other = kept_pair(both_kerases, parts=saved), kept_pair(both_kerases, parts=loaded, seed=1)
    models.ours.save_weights(str(tmp_path / "a.weights.h5"))
    other.ours.load_weights(str(tmp_path / "a.weights.h5"))
    assert of(other.table) == of(models.table)


def test_several_tables_of_one_model_and_a_layer_that_two_places_share(both_kerases, tmp_path):
    keras = both_kerases
    layer = table_layer(keras)

    def made():
        ids = keras.Input((3,), dtype="int64")
        shared, other = layer(table="user"), layer(table="item")
        inner = keras.Sequential([keras.Input((3,), dtype="int64"), layer(table="nested")])
        values = keras.layers.Concatenate()([shared(ids), shared(ids + 1), other(ids), inner(ids)])
        return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(values))), (shared, other, inner.layers[0])

    model, layers = made()
    for number, one in enumerate(layers):
        one.table.upsert(np.arange(3 + number), np.full((3 + number, 4), number + 1.0))
    assert model.count_params() == 4 * (3 + 4 + 5) + len(np.ravel(model.get_weights()[0])) + 1
    model.save(str(tmp_path / "m.keras"))
    ids = np.arange(6).reshape(2, 3)
    loaded = keras.models.load_model(str(tmp_path / "m.keras"))
    np.testing.assert_array_equal(loaded.predict(ids, verbose=0), model.predict(ids, verbose=0))
    model.save_weights(str(tmp_path / "w.weights.h5"))
    second, tables = made()
    second.load_weights(str(tmp_path / "w.weights.h5"))
    assert [of(one.table) for one in tables] == [of(one.table) for one in layers]


@pytest.mark.parametrize("file", ["m.keras", "w.weights.h5"])
def test_all_that_a_row_has_comes_back(both_kerases, tmp_path, file):
    options = {"value_dtype": "bfloat16", "key_dtype": "uint64", "max_capacity": 32}
    model, other = (model_of(both_kerases, rows(both_kerases, **options)) for _ in range(2))
    before = model.get_layer("embedding").table
    keys = np.array([0, 2**63, 2**64 - 1], np.uint64)
    before.upsert(keys, [[1.0] * 4, [np.nan] * 4, [-np.inf] * 4])
    if file == "m.keras":
        model.save(str(tmp_path / file))
        other = both_kerases.models.load_model(str(tmp_path / file))
    else:
        model.save_weights(str(tmp_path / file))
        other.load_weights(str(tmp_path / file))
    table = other.get_layer("embedding").table
    assert table.dtype == tf.bfloat16 and table.key_dtype == tf.uint64 and table.max_capacity == 32
    kept, loaded = (tf.cast(one.sparse_read(keys, training=False), tf.float32) for one in (before, table))
    np.testing.assert_array_equal(loaded, kept)
    for mine, theirs in zip(table.stamps(keys), before.stamps(keys), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_tables_of_an_archive_are_a_checkpoint_that_every_tool_reads(both_kerases, tmp_path):
    from kvtools.dialects.detect import open_checkpoint

    models = kept_pair(both_kerases)
    list(losses(models.ours, DATA[:1]))
    models.ours.save(str(tmp_path / "m.keras"))
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        listed = json.loads(archive.read("kv_tables/tables.json"))
        archive.extractall(tmp_path / "out", [name for name in archive.namelist() if name.startswith("kv_tables/")])
    assert [(one["name"], one["rows"]) for one in listed["tables"]] == [("user", 12)]
    source = open_checkpoint(tmp_path / "out" / "kv_tables" / "tables")
    assert list(source.tables) == ["user"]
    fresh = tfplugin.get_kv_variable("user", embedding_dim=4)
    tfplugin.restore_tables(str(tmp_path / "out" / "kv_tables" / "tables"), fresh)
    assert of(fresh) == of(models.table)


def test_steps_of_updates_in_the_backward_pass_go_on(both_kerases, tmp_path):
    models, other = kept_pair(both_kerases), kept_pair(both_kerases, seed=1)
    optimizer = both_kerases.optimizers.Adam(0.1)
    tfplugin.apply_in_backward(models.table, optimizer)
    list(losses(models.ours, DATA[:2]))
    models.ours.save(str(tmp_path / "m.keras"))
    models.ours.save_weights(str(tmp_path / "w.weights.h5"))
    loaded = both_kerases.models.load_model(str(tmp_path / "m.keras"))
    tfplugin.apply_in_backward(loaded.get_layer("embedding").table, optimizer)
    tfplugin.apply_in_backward(other.table, optimizer)
    other.ours.optimizer.build(other.ours.trainable_variables)
    other.ours.load_weights(str(tmp_path / "w.weights.h5"))
    expected = list(losses(models.ours, DATA[2:]))
    assert_same_losses(losses(loaded, DATA[2:]), expected)
    np.testing.assert_allclose(list(losses(other.ours, DATA[2:])), expected, rtol=1e-6)


def test_a_clone_has_a_table_of_its_own_and_no_rows(both_kerases):
    models = kept_pair(both_kerases, initial=0.5)
    models.table.upsert([1], [[2.0] * 4])
    clone = both_kerases.models.clone_model(models.ours)
    table = clone.get_layer("embedding").table
    assert table is not models.table and int(table.size()) == 0
    clone.set_weights(models.ours.get_weights())
    assert of(table) == of(models.table)
    np.testing.assert_array_equal(clone.predict(DATA[0][0], verbose=0), models.ours.predict(DATA[0][0], verbose=0))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_deep_copy_of_a_layer_has_rows_of_its_own(both_kerases, parts):
    models = kept_pair(both_kerases, parts=parts)
    list(losses(models.ours, DATA[:1]))
    copied = copy.deepcopy(models.table)
    assert of(copied) == of(models.table) and copied.name == models.table.name
    for mine, theirs in zip(copied._kv_parts, models.table._kv_parts, strict=True):
        assert mine.slot_names() == theirs.slot_names() != set()
    models.table.upsert([1], [[9.0] * 4])
    assert of(copied)[1] != of(models.table)[1]
    if both_kerases is tf_keras:
        assert of(copy.deepcopy(models.embedding).table) == of(models.table)


def test_a_copy_of_a_variable_of_a_graph_is_refused(session):
    table = tfplugin.get_kv_variable("user", embedding_dim=4)
    with pytest.raises(NotImplementedError, match="one of a graph"):
        copy.deepcopy(table)


def test_a_loaded_model_that_is_not_compiled_has_rows_and_no_slots(both_kerases, tmp_path):
    models = kept_pair(both_kerases)
    list(losses(models.ours, DATA[:2]))
    models.ours.save(str(tmp_path / "m.keras"))
    loaded = both_kerases.models.load_model(str(tmp_path / "m.keras"), compile=False)
    table = loaded.get_layer("embedding").table
    assert of(table) == of(models.table) and table.slot_names() == set()


def test_a_folder_whose_name_is_no_utf8(tmp_path):
    keras = KERASES["keras3"]  # tf_keras reads none itself
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    models = kept_pair(keras)
    list(losses(models.ours, DATA[:1]))
    models.ours.save(str(folder / "m.keras"))
    assert of(keras.models.load_model(str(folder / "m.keras")).get_layer("embedding").table) == of(models.table)


def test_a_model_without_rows_yet(both_kerases, tmp_path):
    models = kept_pair(both_kerases, initial=0.5)
    models.ours.save(str(tmp_path / "m.keras"))
    loaded = both_kerases.models.load_model(str(tmp_path / "m.keras"))
    assert int(loaded.get_layer("embedding").table.size()) == 0
    np.testing.assert_array_equal(loaded.predict(DATA[0][0], verbose=0), models.ours.predict(DATA[0][0], verbose=0))


def test_a_subclassed_model_and_a_table_of_the_model_itself(both_kerases, tmp_path):
    keras = both_kerases

    @keras.utils.register_keras_serializable("tests")
    class Scores(keras.Model):
        def __init__(self, **options):
            super().__init__(**options)
            self.tables = {"a": [tfplugin.get_kv_variable("own", embedding_dim=2)]}
            self.score = keras.layers.Dense(1)

        def call(self, ids):
            return self.score(tf.reduce_sum(tf.nn.embedding_lookup(self.tables["a"][0], ids), axis=1))

    models = [Scores(), Scores()]
    for number, model in enumerate(models):
        model(tf.constant([[1, 2, 3 + number]], tf.int64))
    models[0].save_weights(str(tmp_path / "w.weights.h5"))
    models[1].load_weights(str(tmp_path / "w.weights.h5"))
    assert of(models[1].tables["a"][0]) == of(models[0].tables["a"][0])


def test_a_model_that_was_loaded_serves_from_stock_tensorflow(both_kerases, tmp_path):
    models = kept_pair(both_kerases)
    list(losses(models.ours, DATA[:1]))
    models.ours.save(str(tmp_path / "m.keras"))
    loaded = both_kerases.models.load_model(str(tmp_path / "m.keras"))
    tfplugin.export_saved_model(loaded, tmp_path / "served")
    served = tf.saved_model.load(str(tmp_path / "served")).signatures["serving_default"]
    (name,) = served.structured_input_signature[1]
    (answer,) = served(**{name: tf.constant(DATA[0][0])}).values()
    np.testing.assert_allclose(answer, models.ours.predict(DATA[0][0], verbose=0), rtol=1e-6)


def test_names_that_keras_numbers_are_the_same_table(both_kerases, layers, tmp_path):
    first, second = (_of_three(both_kerases, layers, None, None, "given_1") for _ in range(2))
    names = [[table.name for table in tables] for _, tables in (first, second)]
    assert names[0][:2] != names[1][:2] and names[0][2] == names[1][2]
    for number, table in enumerate(first[1]):
        table.upsert([number], [[1.0] * 4])
    path = str(tmp_path / "m.keras")
    first[0].save(path)
    loaded = both_kerases.models.load_model(path)  # whose names are those in the config
    loaded.save_weights(str(tmp_path / "w.weights.h5"))
    for file in (path, str(tmp_path / "w.weights.h5")):
        second[0].load_weights(file)
        assert [of(table) for table in second[1]] == [{number: [1.0] * 4} for number in range(3)]
        for table in second[1]:
            table.remove(np.arange(3))


def _of_three(keras, layers, *names):
    ids = keras.Input((3,), dtype="int64")
    made = [layers.Embedding(4, combiner="sum", name=name) for name in names]
    return keras.Model(ids, keras.layers.Concatenate()([one(ids) for one in made])), [one.table for one in made]


@pytest.mark.parametrize(
    "there, here",
    [
        (("clicks_7", "clicks_30"), ("clicks_30", "clicks_90")),
        (("user_1",), ("user_2",)),
        (("user_1",), ("user",)),
        (("embedding_1", "embedding_2"), ("embedding_2", "embedding_3")),
    ],
)
@pytest.mark.parametrize("file", ["m.keras", "w.weights.h5"])
def test_numbers_of_names_that_the_user_gave_are_part_of_them(both_kerases, layers, tmp_path, there, here, file):
    (saved, _), (model, tables) = (_of_three(both_kerases, layers, *names, "z") for names in (there, here))
    (saved.save if file == "m.keras" else saved.save_weights)(str(tmp_path / file))
    message = re.escape(f"has the tables {sorted([*there, 'z'])}") + ".*" + re.escape(f"{sorted([*here, 'z'])}")
    with pytest.raises(ValueError, match=f"{message}.*Nothing was loaded"):
        model.load_weights(str(tmp_path / file))
    assert not any(int(table.size()) for table in tables)


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 3}, {"use_ema": True}], ids=["gathering", "averages"]
)
def test_what_an_optimizer_of_keras_3_has_gathered_goes_on(tmp_path, options):
    models = kept_pair(tf.keras)
    for number, model in enumerate(models.models):
        model.compile(tf.keras.optimizers.Adam(0.1, **options), "mse", run_eagerly=True)
        list(losses(model, DATA[:2]))
        model.save(str(tmp_path / f"{number}.keras"))
    loaded = again(models, *(tf.keras.models.load_model(str(tmp_path / f"{number}.keras")) for number in range(2)))
    on = [list(losses(model, [*DATA[2:], *DATA])) for model in (*models.models, *loaded.models)]
    np.testing.assert_allclose(on[2], on[0], rtol=1e-6)
    np.testing.assert_allclose(on[2], on[3], rtol=1e-5)
    for model in loaded.models:
        model.optimizer.finalize_variable_values(model.trainable_variables)
    if "use_ema" not in options:
        assert_alike(loaded, DATA[0][0])


def test_gradients_of_float64_that_an_optimizer_has_gathered_are_saved_whole(tmp_path):
    optimizer = tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((2,), dtype="int64"),
            tfplugin.keras.Embedding(4, combiner="sum", initializer=1 / 3, dtype="float64"),
            tf.keras.layers.Dense(1, dtype="float64"),
        ]
    )
    model.compile(optimizer, "mse")
    ids, labels = np.array([[1, 2], [3, 4]]), np.array([[0.1], [0.7]])
    model.train_on_batch(ids, labels)
    model.save(str(tmp_path / "m.keras"))
    loaded = tf.keras.models.load_model(str(tmp_path / "m.keras"))
    for one in (model, loaded):
        for _ in range(2):
            one.train_on_batch(ids, labels)
    ours, others = (one.layers[0].table.sparse_read([1, 2, 3, 4]).numpy() for one in (model, loaded))
    assert (ours != 1 / 3).all()
    np.testing.assert_array_equal(others, ours)


@pytest.mark.parametrize(
    "optimizer, file, message",
    [
        (lambda: tf_keras.optimizers.Nadam(), "m.keras", "saves no product of the momenta of optimizer Nadam"),
        (lambda: tf_keras.optimizers.Nadam(), "m.h5", "saves no product of the momenta of optimizer Nadam"),
        (
            lambda: tf_keras.optimizers.legacy.Adam(),
            "m.keras",
            "not restored the state of optimizer Adam .* step 0, .* 2",
        ),
        (lambda: tf_keras.optimizers.legacy.Adam(), "m.h5", None),
        (lambda: tf_keras.optimizers.Adam(), "m.keras", None),
        (lambda: tf_keras.optimizers.Adam(), "m.h5", None),
    ],
)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_a_state_that_tf_keras_does_not_restore_is_told(tmp_path, optimizer, file, message):
    model = model_of(tf_keras, rows(tf_keras))
    model.compile(optimizer(), "mse", run_eagerly=True)
    list(losses(model, DATA[:2]))
    model.save(str(tmp_path / file))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaded = tf_keras.models.load_model(str(tmp_path / file))
    told = [str(one.message) for one in told if "losses are others" in str(one.message)]
    same = list(losses(model, DATA)) == list(losses(loaded, DATA))
    if message is None:
        assert not told and same
    else:
        assert len(told) == 1 and re.search(message, told[0]) and not same
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tf_keras.models.load_model(str(tmp_path / file), compile=False)


@pytest.mark.parametrize("file", ["m.keras", "w.weights.h5", "m.h5"])
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_layers_of_ours_with_optimizers_of_their_own(both_kerases, tmp_path, file):
    keras, layers = (
        both_kerases,
        importlib.import_module(f"tfplugin.{'tf_keras' if both_kerases is tf_keras else 'keras'}"),
    )
    if file == "m.h5" and keras is not tf_keras:
        pytest.skip("Keras 3 writes no such file")

    def made():
        ids = keras.Input((3,), dtype="int64")
        own = layers.TableConfig("own", embedding_dim=4, combiner="sum", optimizer=keras.optimizers.Adam(0.05))
        other = layers.TableConfig("other", embedding_dim=2, combiner="mean")
        features = {"a": layers.FeatureConfig("a", own), "b": layers.FeatureConfig("b", other)}
        several = layers.EmbeddingCollection(features, name="several")({"a": ids, "b": ids})
        # Nadam of Keras 3 has a product of momenta that is no slot; tf_keras saves none.
        optimizer = "adagrad" if keras is tf_keras else "nadam"
        one = layers.Embedding(3, combiner="sum", optimizer=optimizer, name="one")(ids)
        values = keras.layers.Concatenate()([several["a"], several["b"], one])
        model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer="ones")(values))
        model.compile(keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
        return model

    model, loaded = made(), made()
    list(losses(model, DATA[:2]))
    model.get_layer("one").optimizer.learning_rate = 0.25
    path = str(tmp_path / file)
    if "weights" in file:
        loaded.optimizer.build(loaded.trainable_variables)
        model.save_weights(path)
        loaded.load_weights(path)
    else:
        model.save(path)
        loaded = keras.models.load_model(path)
    tables = [{**one.get_layer("several").tables, "one": one.get_layer("one").table} for one in (model, loaded)]
    for name, table in tables[0].items():
        assert of(tables[1][name]) == of(table) and tables[1][name].slot_names() == table.slot_names() != set()
    assert_same_losses(losses(loaded, DATA[2:]), losses(model, DATA[2:]))
