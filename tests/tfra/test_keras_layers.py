"""The Keras layers of `dynamic_embedding`, for Keras 3 and for tf_keras."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tfplugin import dynamic_embedding as de
from tfplugin.dynamic_embedding import tf_keras as de_tf_keras

KINDS = {"Keras 3": (tf.keras, de.keras), "tf_keras": (tf_keras, de_tf_keras)}
IDS = np.array([[15, 2, 4], [4, 92, 4], [22, 4, -1]], np.int64)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kinds(request):
    return request.param


@pytest.fixture
def keras(kinds):
    return kinds[0]


@pytest.fixture
def layers(kinds):
    return kinds[1].layers


def row(key: int) -> np.ndarray:
    return np.array([key, key + 0.5], np.float32)


def fill(layer) -> None:
    keys = np.unique(IDS)
    layer.params.upsert(keys, np.stack([row(key) for key in keys]))


ROWS = np.stack([[row(key) for key in sample] for sample in IDS])

# ---- Lookups ----


@pytest.mark.parametrize("with_unique", [True, False])
@pytest.mark.parametrize("shape", [(9,), (3, 3), (3, 1, 3)])
def test_rows_have_the_shape_of_the_ids(layers, name, shape, with_unique):
    layer = layers.Embedding(2, name=name, with_unique=with_unique)
    fill(layer)
    ids = tf.constant(IDS.reshape(shape))
    np.testing.assert_array_equal(layer(ids), ROWS.reshape(*shape, 2))
    np.testing.assert_array_equal(tf.function(layer)(ids), ROWS.reshape(*shape, 2))
    assert layers.BasicEmbedding is layers.Embedding
    assert layer.compute_output_shape(shape) == (*shape, 2)


def test_ragged_ids_have_ragged_rows(layers, name):
    layer = layers.Embedding(2, name=name)
    fill(layer)
    rows = layer(tf.ragged.constant([[15, 2], [], [4]], dtype=tf.int64))
    assert rows.to_list() == [[row(15).tolist(), row(2).tolist()], [], [row(4).tolist()]]


def test_a_lookup_inserts_nothing_and_gives_initial_values(layers, name):
    layer = layers.Embedding(4, name=name)
    rows = layer(tf.constant(IDS)).numpy()
    assert layer.params.size().numpy() == 0 and layer.params.name == f"{name}-parameter"
    assert 0 < np.abs(rows).max() < 0.5  # RandomNormal(stddev=0.05)
    assert not layers.Embedding(4, name=f"{name}_zeros", initializer="zeros")(tf.constant(IDS)).numpy().any()


COMBINERS = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod, "std": np.std}


@pytest.mark.parametrize("combiner", COMBINERS)
def test_squashed_combines_the_rows_of_a_sample(layers, name, combiner):
    layer = layers.SquashedEmbedding(2, combiner=combiner, name=name)
    fill(layer)
    np.testing.assert_allclose(layer(tf.constant(IDS)), COMBINERS[combiner](ROWS, axis=1), rtol=1e-5)
    np.testing.assert_allclose(layer(tf.constant(IDS[0])), COMBINERS[combiner](ROWS[0], axis=0), rtol=1e-5)
    assert layer.compute_output_shape((None, 3)) == (None, 2)
    if combiner != "std":  # of which several dimensions are not one
        deep = layer(tf.constant(IDS[:, np.newaxis, :]))
        np.testing.assert_allclose(deep, COMBINERS[combiner](ROWS, axis=1), rtol=1e-5)


def test_squashed_takes_ragged_ids_and_functions(layers, name):
    layer = layers.SquashedEmbedding(2, combiner=lambda values, axis: -tf.reduce_sum(values, axis), name=name)
    fill(layer)
    rows = layer(tf.ragged.constant([[15, 2], [], [4]], dtype=tf.int64))
    np.testing.assert_allclose(rows, -np.array([row(15) + row(2), np.zeros(2), row(4)]))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrt_n"])
def test_field_wise_combines_the_rows_of_a_field(layers, name, combiner):
    layer = layers.FieldWiseEmbedding(2, 4, lambda ids: ids % 3, combiner=combiner, name=name)
    fill(layer)
    expected = np.zeros((3, 4, 2), np.float32)
    for sample in range(3):
        for field in range(4):
            found = ROWS[sample][IDS[sample] % 3 == field]
            if len(found):
                divisor = {"sum": 1, "mean": len(found), "sqrt_n": len(found) ** 0.5}[combiner]
                expected[sample, field] = found.sum(0) / divisor
    np.testing.assert_allclose(layer(tf.constant(IDS)), expected, rtol=1e-6)
    np.testing.assert_allclose(tf.function(layer)(tf.constant(IDS)), expected, rtol=1e-6)
    assert layer.compute_output_shape((None, 3)) == (None, 4, 2)


def test_rows_longer_than_max_norm_are_scaled_down(layers, name):
    layer = layers.Embedding(2, max_norm=1.0, name=name)
    fill(layer)
    norms = np.linalg.norm(ROWS, axis=-1, keepdims=True)
    np.testing.assert_allclose(layer(tf.constant(IDS)), ROWS / np.maximum(norms, 1), rtol=1e-5)


# ---- Arguments ----


def test_arguments_reach_the_variable(layers, name):
    layer = layers.Embedding(
        4,
        key_dtype=tf.int32,
        value_dtype=tf.float64,
        initializer=0.25,
        devices=["/CPU:0"] * 3,
        name=name,
        trainable=False,
        bp_v2=True,
        restrict_policy=de.TimestampRestrictPolicy,
        init_capacity=64,
        checkpoint=False,
    )
    params = layer.params
    assert (params.key_dtype, params.value_dtype, params.dim, params.shard_num) == (tf.int32, tf.float64, 4, 3)
    assert not params.trainable and not layer.trainable_weights and params.bp_v2 and params.init_size == 64
    assert isinstance(params.restrict_policy, de.TimestampRestrictPolicy) and not params.checkpoint
    assert layer(tf.constant([1], tf.int32)).numpy().tolist() == [[0.25] * 4]


def test_layers_of_one_name_share_their_rows(layers, name):
    layer, again = layers.Embedding(2, name=name), layers.SquashedEmbedding(2, name=name)
    assert again.params is layer.params and again.shadow is not layer.shadow


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda layers: layers.Embedding("wide"), TypeError, "embedding_size must be a number, got 'wide'"),
        (lambda layers: layers.SquashedEmbedding(2, combiner="median"), ValueError, "got 'median'"),
        (lambda layers: layers.FieldWiseEmbedding(2, 3), ValueError, "slot_map_fn must be a function"),
        (lambda layers: layers.FieldWiseEmbedding(2, None, abs), TypeError, "nslots must be a number, got None"),
        (lambda layers: layers.FieldWiseEmbedding(2, 3, abs, combiner="max"), ValueError, "combiner must be one of"),
    ],
)
def test_wrong_arguments_are_told(layers, make, error, said):
    with pytest.raises(error, match=said):
        make(layers)


def test_wrong_ids_are_told(layers, name):
    with pytest.raises(ValueError, match="ids are of float32, its keys of int64"):
        layers.Embedding(2, name=name)(tf.constant([1.0]))
    fields = layers.FieldWiseEmbedding(2, 3, lambda ids: ids, name=f"{name}_fields")
    with pytest.raises(NotImplementedError, match=r"ids must be of shape \[batch, n\]"):
        fields(tf.constant([1], tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"must give fields in \[0, 3\)"):
        fields(tf.constant([[3]], tf.int64))


# ---- Training ----


def model_of(keras, layer, *more):
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.05))
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, *more, keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse")
    return model


@pytest.mark.parametrize("with_unique", [True, False])
def test_fit_trains_as_with_a_dense_embedding(keras, layers, name, with_unique):
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, 40, [64, 3]), rng.normal(size=(64, 1)).astype(np.float32)
    layer = layers.Embedding(4, name=name, with_unique=with_unique, devices=["/CPU:0"] * 2)
    model = model_of(keras, layer, keras.layers.Flatten())
    # A table of Keras's own has its update wrong where a batch has equal ids, in Keras 3.
    one_hot, dense = keras.layers.Lambda(lambda x: tf.one_hot(x, 40)), keras.layers.Dense(4, use_bias=False)
    twin = keras.Sequential(
        [keras.Input((3,), dtype="int64"), one_hot, dense, keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    twin.compile(keras.optimizers.Adam(0.05), loss="mse")
    twin(tf.constant(ids))
    layer.params.upsert(np.arange(40), np.asarray(dense.get_weights()[0]))
    model.layers[-1].set_weights(twin.layers[-1].get_weights())
    # Adam moves rows that a batch does not have, in the dense one: every batch is the whole.
    history = [m.fit(ids, targets, batch_size=64, epochs=5, verbose=0).history["loss"] for m in (model, twin)]
    np.testing.assert_allclose(history[0], history[1], rtol=1e-4)
    assert history[0][-1] < history[0][0]
    np.testing.assert_allclose(layer.params.lookup(np.arange(40)), dense.get_weights()[0], atol=1e-4)
    assert len(layer.params.get_slot_variables(model.optimizer)) == 2


@pytest.mark.parametrize("kind", ["SquashedEmbedding", "FieldWiseEmbedding"])
def test_fit_inserts_the_ids_and_lowers_the_loss(keras, layers, name, kind):
    own = (lambda ids: ids % 2,) if kind == "FieldWiseEmbedding" else ()
    layer = getattr(layers, kind)(4, *(2, *own) if own else (), name=name)
    model = model_of(keras, layer, keras.layers.Flatten())
    ids = np.arange(90).reshape(30, 3)
    losses = model.fit(ids, np.ones([30, 1]), epochs=8, verbose=0).history["loss"]
    assert layer.params.size().numpy() == 90 and losses[-1] < losses[0] / 2
    assert model.evaluate(ids, np.ones([30, 1]), verbose=0) < losses[0]


def test_the_optimizers_of_v1_train_in_fit(layers, name):
    if layers is not de_tf_keras.layers:
        pytest.skip("Keras 3 takes its own optimizers only")
    layer = layers.Embedding(4, name=name)
    model = tf_keras.Sequential([tf_keras.Input((3,), dtype="int64"), layer, tf_keras.layers.Dense(1)])
    model.compile(de.DynamicEmbeddingOptimizer(tf.compat.v1.train.AdamOptimizer(0.01)), loss="mse")
    model.fit(IDS, np.ones([3, 3, 1]), verbose=0)
    assert layer.params.size().numpy() == len(np.unique(IDS))


def test_a_frozen_layer_is_not_trained(keras, layers, name):
    layer = layers.Embedding(4, name=name)
    layer.trainable = False
    model = model_of(keras, layer)
    assert len(model.trainable_weights) == 2
    model.fit(IDS, np.ones([3, 3, 1]), verbose=0)
    assert layer.params.size().numpy() == 0


def test_a_summary_counts_the_rows(keras, layers, name):
    layer = layers.Embedding(4, name=name)
    fill_keys = np.arange(10)
    layer.params.upsert(fill_keys, np.zeros([10, 4], np.float32))
    model = model_of(keras, layer)
    lines: list[str] = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    assert "45" in "\n".join(lines)  # 10 * 4 + 4 + 1
    assert sum(v is layer.shadow for v in model.trainable_variables) == 1


# ---- Making it again ----


def same_field(ids):
    return ids * 0


@pytest.mark.parametrize("kind", ["Embedding", "SquashedEmbedding", "FieldWiseEmbedding"])
def test_it_can_be_made_again_from_its_config(layers, name, kind):
    own = {"nslots": 3, "slot_map_fn": same_field} if kind == "FieldWiseEmbedding" else {}
    layer = getattr(layers, kind)(
        4,
        **own,
        key_dtype=tf.int32,
        name=name,
        restrict_policy=de.FrequencyRestrictPolicy,
        combiner="mean",
        max_norm=2.0,
        with_unique=False,
    )
    config = layer.get_config()
    again = type(layer).from_config({**config, "name": f"{name}_again"})
    assert again.get_config() == {**config, "name": f"{name}_again"}
    assert isinstance(again.params.restrict_policy, de.FrequencyRestrictPolicy)
    assert again.params.key_dtype == tf.int32 and again.params is not layer.params


# ---- Files ----


def twice_the_sum(rows, axis):
    return 2 * tf.reduce_sum(rows, axis)


def field_of(ids):
    return tf.math.floormod(ids, 2)


@pytest.mark.parametrize("kind", ["SquashedEmbedding", "FieldWiseEmbedding"])
@pytest.mark.parametrize("how", ["registered", "custom_objects", "lambda"])
def test_a_file_of_keras_brings_functions_back(keras, layers, name, kind, how, tmp_path):
    squashed = kind == "SquashedEmbedding"
    function = twice_the_sum if squashed else field_of
    known = {function.__name__: function} if how == "custom_objects" else {}
    if how == "registered":
        # A copy: what is registered keeps its name.
        code, module = function.__code__, function.__globals__
        function = keras.utils.register_keras_serializable(name)(type(function)(code, module, function.__name__))
    if how == "lambda":
        # Of a lambda Keras keeps the code, and not the names that it knows.
        function = (lambda rows, axis: rows[:, 0]) if squashed else (lambda ids: ids % 2)
    own = {"combiner": function} if squashed else {"nslots": 2, "slot_map_fn": function}
    model = keras.Sequential([keras.Input((2,), dtype="int64"), getattr(layers, kind)(2, **own, name=name)])
    fill(model.layers[-1])
    expected = model.predict(IDS[:, :2], verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras: of a lambda
        model.save(tmp_path / "model.keras")
    if how == "lambda":
        with pytest.raises((TypeError, ValueError), match="lambda"):
            keras.models.load_model(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras", custom_objects=known, safe_mode=how != "lambda")
    np.testing.assert_array_equal(again.predict(IDS[:, :2], verbose=0), expected)


@pytest.mark.parametrize("way", ["model.keras", "rows.weights.h5", "checkpoint"])
def test_rows_are_saved_and_restored(keras, layers, name, way, tmp_path):
    def make():
        return model_of(keras, layers.SquashedEmbedding(4, name=name, devices=["/CPU:0"] * 2))

    model = make()
    model.fit(IDS, np.ones([3, 1]), epochs=2, verbose=0)
    expected, old = model.predict(IDS, verbose=0), model.layers[-2].params
    path = str(tmp_path / way)
    if way == "model.keras":
        model.save(path)
    elif way == "rows.weights.h5":
        model.save_weights(path)
    else:
        path = tf.train.Checkpoint(model).save(path)
    keras.backend.clear_session()
    if way == "model.keras":
        model = keras.models.load_model(path, compile=False)
        model.compile(de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.05)), loss="mse")
    else:
        model = make()
        assert not np.allclose(model.predict(IDS, verbose=0), expected)
        if way == "rows.weights.h5":
            model.load_weights(path)
        else:
            tf.train.Checkpoint(model).restore(path)
    params = model.layers[-2].params
    assert params is not old and params.size().numpy() == len(np.unique(IDS))
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), expected)
    model.fit(IDS, np.ones([3, 1]), verbose=0)
    assert not np.allclose(params.lookup(IDS), old.lookup(IDS))


@pytest.mark.parametrize("keys", [[], [b"a", b"", b"nul\0", "Stra\u00dfe".encode()]], ids=["none", "some"])
def test_string_keys_are_saved_and_restored(keras, layers, name, keys, tmp_path):
    path = str(tmp_path / "rows.weights.h5")

    def model_of_strings():
        layer = layers.Embedding(2, key_dtype=tf.string, name=name)
        return layer, keras.Sequential([keras.Input((1,), dtype="string"), layer])

    layer, model = model_of_strings()
    rows = np.arange(2.0 * len(keys), dtype=np.float32).reshape(-1, 2)
    layer.params.upsert(tf.constant(keys, tf.string), rows)
    model.save_weights(path)
    layer.params.upsert([b"other"], [[9.0, 9.0]])
    model.load_weights(path)
    found = dict(zip(layer.params.export()[0].numpy().tolist(), layer.params.export()[1].numpy().tolist(), strict=True))
    assert found == dict(zip(keys, rows.tolist(), strict=True))


def test_rows_of_another_width_are_told(layers, name):
    with pytest.raises(ValueError, match="rows of 2 elements, the file some of shape"):
        layers.Embedding(2, name=name).load_own_variables({"keys": np.zeros(1), "values": np.zeros([1, 4])})


@pytest.mark.parametrize("kind", ["Embedding", "HvdAllToAllEmbedding"])
def test_a_saved_model_has_rows_and_slots(keras, kinds, name, kind, tmp_path):
    def make():
        layer = getattr(kinds[1].layers, kind)(embedding_size=4, name=name)
        return model_of(keras, layer)

    model = make()
    model.fit(IDS, np.ones([3, 3, 1]), epochs=2, verbose=0)
    expected = model.predict(IDS, verbose=0)
    path = tmp_path / "model"
    kinds[1].models.de_save_model(model, path)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        kinds[1].models.de_hvd_save_model(model, str(path), overwrite=False)
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    (got,) = served(tf.constant(IDS)).values()
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    model.fit(IDS, np.ones([3, 3, 1]), verbose=0)
    trained_on = model.predict(IDS, verbose=0)
    keras.backend.clear_session()
    model = make()
    tf.train.Checkpoint(model).restore(str(path / "variables" / "variables"))
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), expected)
    model.fit(IDS, np.ones([3, 3, 1]), verbose=0)
    np.testing.assert_allclose(model.predict(IDS, verbose=0), trained_on, rtol=1e-5)


def test_export_of_keras_3_has_the_rows(name, tmp_path):
    model = model_of(tf.keras, de.keras.layers.SquashedEmbedding(4, name=name))
    model.fit(IDS, np.ones([3, 1]), verbose=0)
    model.export(str(tmp_path), verbose=False)
    served = tf.saved_model.load(str(tmp_path))
    np.testing.assert_allclose(served.serve(tf.constant(IDS)), model.predict(IDS, verbose=0), rtol=1e-6)


@pytest.mark.parametrize("save_weights_only", [False, True])
def test_the_callback_saves_the_model_of_each_epoch(keras, kinds, name, save_weights_only, tmp_path):
    layer = kinds[1].layers.Embedding(4, name=name)
    model = model_of(keras, layer)
    path = str(tmp_path / "epoch-{epoch}" / "model")
    options = tf.train.CheckpointOptions() if save_weights_only else tf.saved_model.SaveOptions()
    callback = kinds[1].callbacks.ModelCheckpoint(path, save_weights_only=save_weights_only, options=options)
    assert isinstance(callback, kinds[1].callbacks.DEHvdModelCheckpoint)
    model.fit(IDS, np.ones([3, 3, 1]), epochs=2, verbose=0, callbacks=[callback])
    assert isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.model is model
    expected = model.predict(IDS, verbose=0)
    model.fit(IDS, np.ones([3, 3, 1]), verbose=0)
    saved = path.format(epoch=2) if save_weights_only else f"{path.format(epoch=2)}/variables/variables"
    tf.train.Checkpoint(model).read(saved)
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), expected)


def test_the_callback_saves_the_best_model_only_if_asked(keras, kinds, name, tmp_path):
    model = model_of(keras, kinds[1].layers.Embedding(4, name=name))
    path = tmp_path / "{epoch}"
    callback = kinds[1].callbacks.DEHvdModelCheckpoint(
        path, monitor="loss", save_best_only=True, initial_value_threshold=0.0
    )
    model.fit(IDS, np.ones([3, 3, 1]), epochs=2, verbose=0, callbacks=[callback])
    assert not list(tmp_path.iterdir())


# ---- Over ranks; on several of them see tests/sok/collective/check_de_keras.py ----


def test_on_one_rank_all_to_all_is_an_embedding(layers, name):
    layer = layers.HvdAllToAllEmbedding(True, True, None, None, 2, name=name)
    fill(layer)
    np.testing.assert_array_equal(layer(tf.constant(IDS)), ROWS)
    assert isinstance(layer, layers.Embedding)
    config = {**layer.get_config(), "name": f"{name}_again"}
    assert type(layer).from_config(config).get_config() == config


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((8,), {}, r"embedding_size is missing, and with_unique is 8\. .*\(embedding_size=8\)"),
        ((), {}, "embedding_size is missing"),
        ((True, None, None, 8), {}, "embedding_size is missing"),
        ((8, True, None, None), {"embedding_size": 8}, "with_unique must be True or False, and with_unique is 8"),
        ((True, 2), {"embedding_size": 8}, "with_secondary_unique must be True or False, got 2.*take mpi_size"),
        ((True, True, True), {"embedding_size": 8}, "mpi_size must be a number of ranks or None, got True"),
    ],
)
def test_positional_arguments_that_are_meant_for_others_are_told(layers, args, kwargs, told):
    with pytest.raises(TypeError, match=f"HvdAllToAllEmbedding: {told}"):
        layers.HvdAllToAllEmbedding(*args, **kwargs)


def test_a_number_of_ranks_that_there_are_not_is_told(layers, name):
    with pytest.raises(ValueError, match="mpi_size must be the number of ranks, 1"):
        layers.HvdAllToAllEmbedding(embedding_size=2, name=name, mpi_size=4)


# ---- What Keras does with a model ----


def trained_model(keras, layers, name, combiner="mean"):
    model = model_of(keras, layers.SquashedEmbedding(4, name=name, combiner=combiner))
    model.fit(IDS, np.ones([3, 1]), epochs=2, verbose=0)
    return model


def rows_by_key(layer):
    keys, rows = layer.params.export()
    return dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True))


def test_weights_are_all_rows_and_go_back(keras, layers, name):
    model = trained_model(keras, layers, name)
    layer = model.layers[-2]
    weights, rows = model.get_weights(), rows_by_key(layer)

    def slots():
        found = layer.params.get_slot_variables(model.optimizer)
        return [slot.lookup(weights[0].keys).numpy().tolist() for slot in found]

    assert weights[0].shape == (6, 4)
    assert dict(zip(weights[0].keys.tolist(), weights[0].tolist(), strict=True)) == rows
    model.fit(np.array([[100, 101, 102]]), np.ones([1, 1]), verbose=0)
    assert layer.params.size().numpy() == 9
    moments = slots()
    model.set_weights([copy.deepcopy(weights[0]), *weights[1:]])
    assert rows_by_key(layer) == rows and slots() == moments
    with pytest.raises(TypeError, match="takes what get_weights gives of a table"):
        model.set_weights([weights[0] * 2, *weights[1:]])


def test_early_stopping_restores_the_best_weights(keras, layers, name):
    model = trained_model(keras, layers, name)
    states = []

    class Worse(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["loss"] = float(epoch)
            states.append(rows_by_key(model.layers[-2]))

    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=2, restore_best_weights=True)
    model.fit(IDS, np.ones([3, 1]), epochs=9, verbose=0, callbacks=[Worse(), stop])
    assert len(states) == 3 and rows_by_key(model.layers[-2]) == states[0] != states[1]


def test_mixed_float16_trains_and_skips_what_overflows(keras, layers, name):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = model_of(keras, layers.SquashedEmbedding(4, name=name))
        losses = model.fit(IDS, np.ones([3, 1]), epochs=6, verbose=0).history["loss"]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert "LossScale" in type(model.optimizer).__name__ and losses[-1] < losses[0]
    assert len(rows_by_key(model.layers[-2])) == 6
    assert len(model.layers[-2].params.get_slot_variables(model.optimizer)) == 2


def test_fit_ends_with_the_moving_averages_of_rows_as_of_a_dense_embedding(keras, layers, name):
    found = []
    for layer in (
        layers.Embedding(2, name=name, initializer=keras.initializers.Constant(0.5)),
        keras.layers.Embedding(3, 2, embeddings_initializer=keras.initializers.Constant(0.5)),
    ):
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((2,), dtype="int64"), layer, keras.layers.Flatten(), dense])
        sgd = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        model.compile(de.DynamicEmbeddingOptimizer(sgd) if not found else sgd, loss="mse")
        model.fit(np.array([[1, 2]]), np.ones([1, 1]), epochs=3, verbose=0)
        found.append([layer(tf.constant([1, 2], tf.int64)).numpy(), dense.get_weights()[0]])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_tensorboard_gets_a_histogram_of_all_rows(keras, layers, name, tmp_path, monkeypatch):
    model = trained_model(keras, layers, name)
    logged = {}
    # What needs TensorBoard, which need not be installed.
    told = {"histogram": lambda tag, data, step: logged.update({tag: tf.identity(data)})}
    told |= dict.fromkeys(("scalar", "trace_on", "trace_export"), lambda *args, **kwargs: None)
    board = keras.callbacks.TensorBoard(str(tmp_path), histogram_freq=1, write_graph=False)
    for module in [getattr(board, "summary", tf.summary), tf.compat.v2.summary]:
        for what, function in told.items():
            monkeypatch.setattr(module, what, function, raising=False)
    model.fit(IDS, np.ones([3, 1]), verbose=0, callbacks=[board])
    (tag,) = [tag for tag in logged if name in tag]
    rows = rows_by_key(model.layers[-2])
    assert tag.endswith("/histogram") and sorted(logged[tag].numpy().tolist()) == sorted(rows.values())


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss_scale"])
def test_a_model_is_loaded_with_its_compiled_state(keras, layers, name, scaled, tmp_path):
    def made():
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.05), bp_v2=True)
        if scaled:
            scale = keras.optimizers if keras is tf.keras else keras.mixed_precision
            optimizer = de.DynamicEmbeddingOptimizer(scale.LossScaleOptimizer(optimizer))
        model = model_of(keras, layers.SquashedEmbedding(4, name=name))
        model.compile(optimizer, loss="mse")
        return model

    model = made()
    model.fit(IDS, np.ones([3, 1]), epochs=3, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[-2].params is not model.layers[-2].params
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
    assert getattr(loaded.optimizer, "inner_optimizer", loaded.optimizer)._bp_v2
    for _ in range(2):  # with the moments of the rows, too
        model.fit(IDS, np.ones([3, 1]), verbose=0)
        loaded.fit(IDS, np.ones([3, 1]), verbose=0)
        np.testing.assert_allclose(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0), rtol=1e-6)


def test_a_model_with_nadam_of_keras_3_is_loaded_and_goes_on_as_if_it_had_not_stopped(tmp_path):
    keras = tf.keras
    model = model_of(keras, de.keras.layers.SquashedEmbedding(4, name="with_nadam"))
    model.compile(de.DynamicEmbeddingOptimizer(keras.optimizers.Nadam(0.05)), loss="mse")
    model.fit(IDS, np.ones([3, 1]), epochs=3, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, loaded):  # in one order: sums of other orders differ by a bit
        one.fit(IDS, np.ones([3, 1]), epochs=3, shuffle=False, verbose=0)
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0))


def test_an_optimizer_and_its_legacy_namesake_are_told_apart_in_files():
    for _ in range(2):  # whichever came last
        for stock in (tf_keras.optimizers.Adam, tf_keras.optimizers.legacy.Adam):
            optimizer = de.DynamicEmbeddingOptimizer(stock(0.05))
            again = tf_keras.saving.deserialize_keras_object(tf_keras.saving.serialize_keras_object(optimizer))
            assert type(again) is type(optimizer) and isinstance(again, stock)
            assert float(again.learning_rate) == pytest.approx(0.05)


def test_a_clone_has_rows_of_its_own(keras, layers, name):
    model = trained_model(keras, layers, name)
    clone = keras.models.clone_model(model)
    assert clone.layers[-2].params is not model.layers[-2].params and not rows_by_key(clone.layers[-2])
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(clone.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
    clone.compile(de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    before = rows_by_key(model.layers[-2])
    clone.fit(IDS, np.ones([3, 1]), verbose=0)
    assert rows_by_key(model.layers[-2]) == before != rows_by_key(clone.layers[-2])


# ---- Samples without ids, and sparse ids ----


@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_sample_without_ids_gives_zeros(layers, name, combiner):
    layer = layers.SquashedEmbedding(2, combiner=combiner, name=name)
    fill(layer)
    expected = [COMBINERS[combiner](np.array(x), axis=0) if x else [0, 0] for x in ([row(15), row(2)], [], [row(4)])]
    ids = tf.ragged.constant([[15, 2], [], [4]], dtype=tf.int64)
    with tf.GradientTape() as tape:
        rows = layer(ids)
        loss = tf.reduce_sum(rows)
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    if combiner != "std":  # whose gradient is no number for the one row of the last sample
        assert np.isfinite(tape.gradient(loss, layer.shadow).values).all()
    np.testing.assert_allclose(layer(ids.to_sparse()), expected, rtol=1e-6)
    assert layer(tf.zeros([2, 0], tf.int64)).numpy().tolist() == [[0, 0], [0, 0]]


def test_sparse_ids_with_holes(keras, layers, name):
    ids = tf.SparseTensor([[0, 0], [0, 2], [2, 1]], tf.constant([15, 2, 4], tf.int64), [3, 3])
    single, fields = layers.Embedding(2, name=name), layers.FieldWiseEmbedding(2, 2, lambda i: i % 2, name=name)
    fill(single)
    expected = np.zeros([3, 3, 2], np.float32)
    expected[0, 0], expected[0, 2], expected[2, 1] = row(15), row(2), row(4)
    np.testing.assert_array_equal(single(ids), expected)
    by_field = np.zeros([3, 2, 2], np.float32)
    by_field[0, 1], by_field[0, 0], by_field[2, 0] = row(15), row(2), row(4)
    np.testing.assert_array_equal(fields(ids), by_field)
    with pytest.raises(ValueError, match=r"sparse ids must be of shape \[batch, n\]"):
        layers.SquashedEmbedding(2, name=name)(tf.sparse.expand_dims(ids, -1))
    given = keras.Input((3,), dtype="int64", sparse=True)
    squashed = layers.SquashedEmbedding(2, name=f"{name}_model")
    model = keras.Model(given, keras.layers.Dense(1)(squashed(given)))
    model.compile(de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.05)), loss="mse")
    model.fit(ids, np.ones([3, 1]), verbose=0)
    assert sorted(rows_by_key(squashed)) == [2, 4, 15]


@pytest.mark.parametrize("kind", ["Embedding", "SquashedEmbedding", "FieldWiseEmbedding"])
def test_a_layer_of_keras_3_in_a_model_of_tf_keras_is_an_error(name, kind):
    own = {"nslots": 2, "slot_map_fn": lambda ids: ids % 2} if kind == "FieldWiseEmbedding" else {}
    layer = getattr(de.keras.layers, kind)(2, name=name, **own)
    with pytest.raises(TypeError, match=r"tfplugin\.dynamic_embedding\.tf_keras"):
        layer(tf_keras.Input((3,), dtype="int64"))


@pytest.mark.parametrize("lookup", [de.embedding_lookup, de.embedding_lookup_unique], ids=lambda f: f.__name__)
def test_a_lookup_between_the_layers_of_tf_keras_is_an_error(name, lookup):
    v = de.Variable(dim=2, name=name)
    with pytest.raises(TypeError, match="in the call of a layer of the same Keras"):
        lookup(v, tf_keras.Input((3,), dtype="int64"), name="x")
    with pytest.raises(TypeError, match="in the call of a layer of the same Keras"):
        v.lookup(tf_keras.Input((3,), dtype="int64"))


@pytest.mark.parametrize("keep", [False, True])
def test_a_file_has_the_bounds_of_a_table(keras, layers, name, keep, tmp_path):
    @keras.utils.register_keras_serializable("tests_of_bounds")
    def scores(keys):
        return keys

    config = de.HkvHashTableConfig(
        init_capacity=8,
        max_capacity=64,
        evict_strategy=de.HkvEvictStrategy.CUSTOMIZED,
        gen_scores_fn=scores,
    )
    layer = layers.BasicEmbedding(
        2, name=name, kv_creator=de.HkvHashTableCreator(config), keep_distribution=keep, devices=["/CPU:0"] * 2
    )
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    model.save(tmp_path / "model.keras")
    (loaded,) = [one for one in keras.models.load_model(tmp_path / "model.keras").layers if hasattr(one, "params")]
    assert loaded.keep_distribution == keep and loaded.params.shard_num == (2 if keep else 1)
    again = loaded.params.kv_creator.config
    assert vars(again) == vars(config) and loaded.params.parts[0].max_capacity == 64


def test_a_file_has_a_distribution_that_is_kept(keras, layers, name, tmp_path):
    layer = layers.BasicEmbedding(2, name=name, keep_distribution=True, devices=["/CPU:0"] * 2)
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    model.save(tmp_path / "model.keras")
    (loaded,) = [one for one in keras.models.load_model(tmp_path / "model.keras").layers if hasattr(one, "params")]
    assert loaded.keep_distribution and loaded.params.shard_num == 2
