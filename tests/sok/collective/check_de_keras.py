"""`dynamic_embedding.keras` over the ranks: lookups, training, and what the ranks save together."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tfplugin import dynamic_embedding as de
from tfplugin import ranks, sok
from tfplugin.dynamic_embedding import tf_keras as de_tf_keras

KINDS = {"Keras 3": (tf.keras, de.keras), "tf_keras": (tf_keras, de_tf_keras)}
KEYS = 30


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kinds(request, rank):
    ranks.found()
    request.param[0].backend.clear_session()
    request.param[0].utils.set_random_seed(0)
    return request.param


def ids_of(rank: int, step: int = 0) -> np.ndarray:
    return np.random.default_rng(100 * step + rank).integers(0, KEYS, [4, 3])


def filled(layers, name, **kwargs):
    """A layer with a row [key, key + 0.5] for each key, on its rank."""
    layer = layers.HvdAllToAllEmbedding(embedding_size=2, name=name, **kwargs)
    keys = np.arange(KEYS)
    keys = keys[keys % ranks.size() == ranks.rank()]
    layer.params.upsert(keys, np.stack([keys, keys + 0.5], 1).astype(np.float32))
    return layer


def test_rows_come_from_the_ranks_that_have_them(kinds, rank):
    layer = filled(kinds[1].layers, "spread")
    ids = ids_of(rank)
    expected = np.stack([ids, ids + 0.5], -1)
    np.testing.assert_array_equal(layer(tf.constant(ids)), expected)
    np.testing.assert_array_equal(tf.function(layer)(tf.constant(ids)), expected)
    ragged = layer(tf.RaggedTensor.from_row_lengths(tf.constant(ids.ravel()), [5, 0, 7]))
    np.testing.assert_array_equal(ragged.flat_values, expected.reshape(-1, 2))


def test_a_lookup_inserts_nothing(kinds):
    layer = kinds[1].layers.HvdAllToAllEmbedding(embedding_size=2, name="empty", initializer="ones")
    assert layer(tf.constant([[1, 2]], tf.int64)).numpy().tolist() == [[[1, 1], [1, 1]]]
    assert layer.params.size().numpy() == 0


def test_training_sums_the_gradients_of_all_ranks(kinds, rank, size):
    keras, layers = kinds[0], kinds[1].layers
    layer = filled(layers, "trained")
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1))
    expected = np.stack([np.arange(KEYS), np.arange(KEYS) + 0.5], 1)
    for step in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant(ids_of(rank, step))) ** 2) / 10
        optimizer.apply_gradients([(tape.gradient(loss, layer.shadow), layer.shadow)])
        moved = np.zeros_like(expected)
        for of_rank in range(size):
            np.add.at(moved, ids_of(of_rank, step).ravel(), 2 * expected[ids_of(of_rank, step).ravel()] / 10)
        expected = expected - 0.1 * moved
    ids = np.arange(KEYS).reshape(-1, 3)
    np.testing.assert_allclose(layer(tf.constant(ids)), expected[ids], rtol=1e-5)


def model_of(keras, layer):
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.05), synchronous=False), loss="mse")
    return model


@pytest.mark.parametrize("clip", [{}, {"global_clipnorm": 0.1}], ids=["plain", "clipped"])
def test_a_synchronous_fit_is_that_of_one_rank_with_all_batches(kinds, clip, rank, size, gather):
    keras, layers = kinds[0], kinds[1].layers

    def trained(layer, ids, ranks_):
        keras.utils.set_random_seed(3)
        flat = keras.layers.Flatten()
        model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, flat, keras.layers.Dense(1)])
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1, **clip), synchronous=ranks_ > 1)
        model.compile(optimizer, loss="mse", loss_weights=[1 / ranks_])
        for step in ids:
            model.train_on_batch(step, np.ones([len(step), 1]))
        keys, rows = layer.params.export()
        return dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True)), model.get_layer(index=-1).kernel

    steps = range(3)
    options = {"embedding_size": 2, "initializer": "ones"}
    mine, kernel = trained(
        layers.HvdAllToAllEmbedding(name="joint", **options), [ids_of(rank, step) for step in steps], size
    )
    every = [np.concatenate([ids_of(of_rank, step) for of_rank in range(size)]) for step in steps]
    expected, expected_kernel = trained(layers.Embedding(name="alone", **options), every, 1)
    np.testing.assert_allclose(kernel, expected_kernel, rtol=1e-5)
    rows = {key: row for of_rank in gather(mine) for key, row in of_rank.items()}
    assert rows.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_allclose(rows[key], row, rtol=1e-5)


@pytest.mark.parametrize("told", [None, False, True])
def test_dense_variables_that_would_drift_are_warned_of(kinds, told, size):
    keras, layers = kinds[0], kinds[1].layers
    if told and size == 1:
        pytest.skip("wants Horovod, which one rank has not started")
    layer, dense = layers.HvdAllToAllEmbedding(embedding_size=2, name="drifts"), tf.Variable([1.0], name="bias")
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1), synchronous=told)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([[1, 2]], tf.int64))) + dense[0]
    gradients = tape.gradient(loss, [layer.shadow, dense])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.apply_gradients(zip(gradients, [layer.shadow, dense], strict=True))
    warned = [str(one.message) for one in caught if "dense variables" in str(one.message)]
    assert len(warned) == (told is None and size > 1)
    assert all("'bias" in one and "synchronous=True)" in one for one in warned)
    assert dense.numpy() == (pytest.approx(1 - 0.1 * size) if told else pytest.approx(0.9))
    config = optimizer.get_config()
    assert type(optimizer).from_config(config)._de_synchronous is told


def test_tables_alone_are_not_warned_of(kinds):
    layer = kinds[1].layers.HvdAllToAllEmbedding(embedding_size=2, name="by itself")
    optimizer = de.DynamicEmbeddingOptimizer(kinds[0].optimizers.SGD(0.1))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([[1, 2]], tf.int64)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.apply_gradients([(tape.gradient(loss, layer.shadow), layer.shadow)])


def fit(model, rank, epochs=2, **kwargs):
    return model.fit(ids_of(rank), np.ones([4, 1]), epochs=epochs, verbose=0, **kwargs).history["loss"]


def test_fit_trains_on_all_ranks(kinds, rank, size, gather):
    layer = kinds[1].layers.HvdAllToAllEmbedding(embedding_size=4, name="fitted")
    losses = fit(model_of(kinds[0], layer), rank, 20)
    assert losses[-1] < losses[0] / 2
    mine = layer.params.export()[0].numpy()
    assert (mine % size == rank).all()
    every = {int(key) for of_rank in range(size) for key in ids_of(of_rank).ravel()}
    assert sorted(key for keys in gather(mine.tolist()) for key in keys) == sorted(every)


def saved_column(path, column, keys):
    """Rows of keys in a SavedModel of one table; zeros where there are none."""
    reader = tf.train.load_checkpoint(str(path / "variables" / "variables"))
    found = {}
    for name in reader.get_variable_to_shape_map():
        if name.endswith(f"-{column}"):
            of_part = reader.get_tensor(f"{name.removesuffix(column)}keys")
            found |= dict(zip(of_part.tolist(), reader.get_tensor(name), strict=True))
    return np.stack([found.get(key, np.zeros(4, np.float32)) for key in keys.tolist()])


@pytest.mark.thorough
def test_a_saved_model_has_the_rows_of_all_ranks(kinds, rank, size, gather, shared_path):
    def make():
        return model_of(kinds[0], kinds[1].layers.HvdAllToAllEmbedding(embedding_size=4, name="saved"))

    model = make()
    fit(model, rank)
    # The layers beside it are each rank's own, as they are without Horovod's callbacks; rank 0's are saved.
    weights = gather([np.asarray(w) for w in model.layers[-1].get_weights()])[0]
    model.layers[-1].set_weights(weights)
    expected = model.predict(ids_of(rank), verbose=0)
    path = shared_path / "model"
    kinds[1].models.de_hvd_save_model(model, path if rank == 0 else "ignored")
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    (got,) = served(tf.constant(ids_of(rank))).values()
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    before = sorted(gather(model.layers[-3].params.size().numpy()))
    mine = np.arange(rank, KEYS, size)
    moments = model.layers[-3].params.get_slot_variables(model.optimizer)[0].lookup(mine).numpy()
    assert np.abs(moments).max() > 0
    np.testing.assert_array_equal(saved_column(path, "slot-Adam.m", mine), moments)
    kinds[0].backend.clear_session()
    model = make()
    tf.train.Checkpoint(model).restore(str(path / "variables" / "variables"))
    np.testing.assert_allclose(model.predict(ids_of(rank), verbose=0), expected, rtol=1e-6)
    assert sorted(gather(model.layers[-3].params.size().numpy())) == before
    assert model.layers[-3].params.parts[0].ranks == size
    fit(model, rank, 1)


def test_a_sok_checkpoint_of_a_model_has_the_rows_of_all_ranks(kinds, rank, gather, shared_path):
    """What the callback writes for weights."""
    layer = filled(kinds[1].layers, "written")
    path = sok.Checkpoint(layer).write(str(shared_path / "rows"))
    other = kinds[1].layers.HvdAllToAllEmbedding(embedding_size=2, name="written")
    tf.train.Checkpoint(other).restore(path).expect_partial()
    np.testing.assert_array_equal(other(tf.constant(ids_of(rank))), layer(tf.constant(ids_of(rank))))
    assert sum(gather(int(other.params.size()))) == KEYS


@pytest.mark.thorough
def test_the_callback_saves_on_all_ranks(kinds, rank, shared_path):
    def make():
        return model_of(kinds[0], kinds[1].layers.HvdAllToAllEmbedding(embedding_size=4, name="called"))

    model = make()
    path = str(shared_path / "{epoch}")
    callback = kinds[1].callbacks.DEHvdModelCheckpoint(path, monitor="loss", save_best_only=True)
    weights = kinds[1].callbacks.DEHvdModelCheckpoint(f"{path}-weights", save_weights_only=True)
    fit(model, rank, callbacks=[callback, weights])
    rows = model.layers[-3](tf.constant(ids_of(rank))).numpy()
    for saved in (shared_path / "2" / "variables" / "variables", shared_path / "2-weights"):
        kinds[0].backend.clear_session()
        again = make()
        tf.train.Checkpoint(again).restore(str(saved)).expect_partial()
        np.testing.assert_array_equal(again.layers[-3](tf.constant(ids_of(rank))), rows)


def test_the_broadcast_gives_all_ranks_the_dense_variables_of_one(kinds, rank, gather):
    kinds[0].utils.set_random_seed(rank)
    model = model_of(kinds[0], kinds[1].layers.HvdAllToAllEmbedding(embedding_size=4, name="broadcast"))
    fit(model, rank, 1, callbacks=[kinds[1].callbacks.DEHvdBroadcastGlobalVariablesCallback()])
    weights = gather([np.asarray(w) for w in model.layers[-1].get_weights()])
    moments = gather([np.asarray(v) for v in model.optimizer.variables])
    for others in (weights, moments):
        for mine, first in zip(others[rank], others[0], strict=True):
            np.testing.assert_array_equal(mine, first)


def test_a_rank_alone_does_not_save_its_rows(kinds, size, tmp_path):
    model = model_of(kinds[0], kinds[1].layers.HvdAllToAllEmbedding(embedding_size=4, name="alone"))
    if size > 1:
        with pytest.raises(ValueError, match="de_hvd_save_model"):
            model.save_weights(str(tmp_path / "rows.weights.h5"))
        with pytest.raises(ValueError, match=r"sok\.Checkpoint"):
            tf.train.Checkpoint(model).save(str(tmp_path / "checkpoint"))


def test_wrong_ids_of_one_rank_fail_on_all(kinds, rank, size):
    layer = kinds[1].layers.HvdAllToAllEmbedding(embedding_size=2, name="wrong")
    ids = tf.constant([[1.0]]) if rank == size - 1 else tf.constant([[1]], tf.int64)
    with pytest.raises((TypeError, ValueError, tf.errors.InvalidArgumentError)):
        layer(ids)
        if size > 1 and rank != size - 1:
            raise AssertionError("this rank heard of nothing")


def test_several_devices_are_told(kinds, size):
    if size > 1:
        with pytest.raises(ValueError, match="one device"):
            kinds[1].layers.HvdAllToAllEmbedding(embedding_size=2, name="devices", devices=["/CPU:0"] * 2)


def test_each_rank_may_have_a_table_for_itself(kinds, rank, size):
    layer = kinds[1].layers.HvdAllToAllEmbedding(embedding_size=1, name="own", mpi_size=1)
    layer.params.upsert([7], [[float(rank)]])
    assert layer(tf.constant([7], tf.int64)).numpy().tolist() == [[rank]]
    assert ranks.size() == size


def test_the_status_of_a_restrict_policy_lies_with_the_rows(kinds, rank, size):
    layer = filled(kinds[1].layers, "restricted", restrict_policy=de.FrequencyRestrictPolicy)
    optimizer = de.DynamicEmbeddingOptimizer(kinds[0].optimizers.SGD(0.1))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant(ids_of(rank))))
    optimizer.apply_gradients([(tape.gradient(loss, layer.shadow), layer.shadow)])
    keys = layer.params.restrict_policy.status.export()[0].numpy()
    every = {int(key) for of_rank in range(size) for key in ids_of(of_rank).ravel()}
    assert sorted(keys) == sorted(key for key in every if key % size == rank)


# ---- HvdVariable ----


def test_a_hvd_variable_spreads_the_rows_of_its_shadow(rank):
    ranks.found()
    v = de.Variable(dim=2, name="hvd", restrict_policy=de.FrequencyRestrictPolicy)
    shadow = de.shadow_ops.ShadowVariable(v, name="hvd")
    spread = de.shadow_ops.HvdVariable("hvd", shadow, 2)
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.SGD(1.0))
    ids = tf.constant(ids_of(rank))
    optimizer.minimize(lambda: tf.reduce_sum(spread.embedding_lookup(ids)[0]), var_list=[shadow])
    keys, counts = np.unique(np.concatenate([ids_of(r) for r in range(ranks.size())]), return_counts=True)
    expected = {int(k): [-float(c)] * 2 for k, c in zip(keys, counts, strict=True) if k % ranks.size() == rank}
    found, rows = (x.numpy().tolist() for x in v.export())
    assert dict(zip(found, rows, strict=True)) == expected
    looked_up, _ = spread.embedding_lookup(ids)
    np.testing.assert_array_equal(looked_up[..., 0], -counts[np.searchsorted(keys, ids_of(rank))])
    if ranks.size() == 1:
        return
    with pytest.raises(ValueError, match="is spread over"):
        tf.train.Checkpoint(v=v).save("never/written")
    with pytest.raises(ValueError, match="is spread over"):
        tf.compat.v1.train.Saver(v.tables).save(None, "never/written")
