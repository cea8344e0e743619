"""Callbacks of Keras on models with tables: what they do to a model with a dense `Embedding`, they do to these."""

from __future__ import annotations

import importlib
import re
import sys

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kept_models import again, kept_pair, of
from keras_pairs import assert_alike, batches, losses, pair

import tfplugin
from tfplugin.optimizers import row_averages
from tfplugin.policies import ExpireAfterSteps

(IDS, LABELS), (VALIDATION_IDS, VALIDATION_LABELS) = batches(2)


def _fit(keras, model, callbacks, epochs=4, **options):
    """Trains by steps that go too far, so that some epoch in the middle is the best one."""
    return model.fit(
        IDS,
        LABELS,
        batch_size=len(IDS),
        shuffle=False,
        epochs=epochs,
        validation_data=(VALIDATION_IDS, VALIDATION_LABELS),
        verbose=0,
        callbacks=callbacks,
        **options,
    ).history


def _pair(keras, rate=0.3, **options):
    tf.keras.utils.set_random_seed(0)
    models = kept_pair(keras, **options)
    for model in models.models:
        model.compile(keras.optimizers.Adam(rate), "mse", run_eagerly=True)
    return models


def test_early_stopping_puts_back_the_rows_of_the_best_epoch(both_kerases):
    models, kept = _pair(both_kerases), []
    for model in models.models:
        stop = both_kerases.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
        history = _fit(both_kerases, model, [stop], epochs=12)
        kept.append(history["val_loss"])
        best = int(np.argmin(history["val_loss"]))
        assert best < len(history["val_loss"]) - 1
        evaluated = model.evaluate(VALIDATION_IDS, VALIDATION_LABELS, verbose=0)
        np.testing.assert_allclose(evaluated, history["val_loss"][best], rtol=1e-5)
    np.testing.assert_allclose(*kept, rtol=1e-5)
    assert_alike(models, VALIDATION_IDS)


@pytest.mark.parametrize("parts", [1, 3])
def test_weights_are_keys_and_rows_and_go_back(both_kerases, parts):
    models = _pair(both_kerases, parts=parts)
    list(losses(models.ours, [(IDS, LABELS)]))
    weights = models.ours.get_weights()
    assert [len(weights), *(one.shape for one in weights[-2:])] == [4, (12,), (12, 4)]
    np.testing.assert_array_equal(weights[-2], np.arange(12))
    np.testing.assert_array_equal(weights[-1], models.rows()[0])
    of_layer = models.embedding.get_weights()
    for mine, of_model in zip(of_layer, weights[-2:], strict=True):
        np.testing.assert_array_equal(mine, of_model)
    moments = {slot: of(models.table, slot) for part in models.table._kv_parts for slot in part.slot_names()}
    models.ours.fit(IDS + 100, LABELS, verbose=0)
    models.table.remove([3])
    assert int(models.table.size()) == 23
    models.ours.set_weights(weights)
    for mine, before in zip(models.ours.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(mine, before)
    # Slots are the optimizer's: those of keys that stay stay, and that of a new one starts anew.
    for slot in moments:
        assert of(models.table, slot)[3] == [0.0] * 4 != moments[slot][3]
        assert of(models.table, slot)[4] != [0.0] * 4
    # In any order, and into another number of parts.
    order = np.random.default_rng(0).permutation(12)
    other = _pair(both_kerases, parts=4 - parts, seed=1)
    other.ours.set_weights([*weights[:-2], weights[-2][order], weights[-1][order]])
    assert of(other.table) == of(models.table)


@pytest.mark.parametrize("whole", [True, False], ids=["model", "weights"])
@pytest.mark.parametrize("file", ["m.keras", "{epoch}.weights.h5", "{epoch}.h5", "tf-{epoch}"])
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_a_model_checkpoint_has_the_rows_of_its_epoch(both_kerases, tmp_path, whole, file):
    if (file == "m.keras") is not whole and (
        both_kerases is not tf_keras or file.startswith("{epoch}.w") or "keras" in file
    ):
        pytest.skip("no such file of this Keras")
    if both_kerases is not tf_keras and file in ("{epoch}.h5", "tf-{epoch}"):
        pytest.skip("no such file of this Keras")
    models, loaded = _pair(both_kerases), []
    for number, model in enumerate(models.models):
        path = str(tmp_path / str(number) / file)
        checkpoint = both_kerases.callbacks.ModelCheckpoint(
            path, "val_loss", save_best_only=True, save_weights_only=not whole
        )
        best = int(np.argmin(_fit(both_kerases, model, [checkpoint], epochs=5)["val_loss"]))
        path = path.format(epoch=best + 1)
        if whole:
            loaded.append(both_kerases.models.load_model(path))
        else:
            model.load_weights(path)
            loaded.append(model)
    kept = again(models, *loaded)
    assert_alike(kept, VALIDATION_IDS)
    for data in ([(IDS, LABELS)] * 2,):
        np.testing.assert_allclose(*(list(losses(model, data)) for model in kept.models), rtol=1e-5)


class _PowerCut(Exception):
    pass


@pytest.mark.thorough
@pytest.mark.parametrize("every", ["epoch", 1])
def test_backup_and_restore_goes_on_where_training_was_cut(both_kerases, tmp_path, every):
    keras = both_kerases

    class Cut(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise _PowerCut

    made = []
    for which in range(2):
        unbroken = _pair(keras).models[which]
        expected = _fit(keras, unbroken, [], epochs=4)
        folder = str(tmp_path / str(which))
        with pytest.raises(_PowerCut):
            _fit(keras, _pair(keras).models[which], [keras.callbacks.BackupAndRestore(folder, save_freq=every), Cut()])
        resumed = _pair(keras, seed=1)
        history = _fit(keras, resumed.models[which], [keras.callbacks.BackupAndRestore(folder, save_freq=every)])
        if every == "epoch" or keras is tf_keras:  # from a batch Keras 3 begins its epoch once more
            np.testing.assert_allclose(history["val_loss"], expected["val_loss"][2:], rtol=1e-5)
        made.append((history["val_loss"], resumed))
    np.testing.assert_allclose(made[0][0], made[1][0], rtol=1e-5)
    assert_alike(again(made[0][1], made[0][1].ours, made[1][1].dense), VALIDATION_IDS)


def test_a_backup_that_was_cut_short_gives_way_to_the_one_before(tmp_path):
    models = _pair(tf.keras)
    backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path), double_checkpoint=True, delete_checkpoint=False)
    _fit(tf.keras, models.ours, [backup], epochs=2)
    latest = tmp_path / "latest.weights.h5"
    row = np.array(of(models.table)[3], np.float32).tobytes()
    latest.write_bytes(latest.read_bytes().replace(row, bytes(16)))
    resumed = _pair(tf.keras, seed=1)
    backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path), double_checkpoint=True)
    history = _fit(tf.keras, resumed.ours, [backup], epochs=2)
    assert len(history["loss"]) == 1
    assert_close = np.testing.assert_allclose
    assert_close(resumed.rows()[0], models.rows()[0], rtol=1e-5)


@pytest.mark.parametrize("limit", [None, 6], ids=["all rows", "some rows"])
def test_tensorboard_has_histograms_of_rows(both_kerases, tmp_path, monkeypatch, limit):
    from tfplugin import keras_weights

    if limit:
        monkeypatch.setattr(keras_weights, "HISTOGRAM_ROWS", limit)
    written = {}
    models = _pair(both_kerases)
    board = both_kerases.callbacks.TensorBoard(str(tmp_path), histogram_freq=1, write_graph=False)
    board.set_model(models.ours)
    # What writes them is a package of its own, which need not be there. TensorFlow's module
    # goes by several names, some of which come late.
    modules = [module for name, module in list(sys.modules.items()) if re.fullmatch(r"tensorflow\..*v2\.summary", name)]
    for kind in ("histogram", "scalar"):
        for summary in (tf.summary, importlib.import_module("tensorflow.summary"), *modules):
            monkeypatch.setattr(
                summary, kind, lambda name, data, step=None, **kw: written.update({name: np.asarray(data)})
            )
    _fit(both_kerases, models.ours, [board], epochs=1)
    shown = written["user/rows/histogram"]
    assert written["user/rows/count"] == 12
    every = models.rows()[0].astype(np.float32)
    assert shown.shape == ((6, 4) if limit else (12, 4))
    assert {tuple(row) for row in shown} <= {tuple(row) for row in every}
    assert [name for name in written if "kernel" in name]


def _shown(model):
    lines = []
    model.summary(print_fn=lambda *args, **kwargs: lines.append(str(args[0])), line_length=100)
    return "\n".join(lines)


def test_summary_and_count_params_count_rows(both_kerases):
    models = _pair(both_kerases)
    ours, dense = models.models
    assert ours.count_params() == dense.count_params() == 12 * 4 + 12 + 1
    assert models.embedding.count_params() == 48
    told = _shown(ours)
    total = next(line for line in told.splitlines() if "Trainable params" in line or "Trainable params" in line.strip())
    assert " 61 (244.00 B" in total
    counts = tfplugin.summary(models.table)
    assert "user (embedding): 12 rows of 4 float32, int64 keys: " in told
    assert f"{counts.bytes / 1024:,.2f} KB in memory, {counts.row_bytes:,.2f} B of it rows" in told
    ours.fit(IDS + 100, LABELS, verbose=0)
    assert ours.count_params() == 24 * 4 + 13 and "24 rows" in _shown(ours)
    models.embedding.trainable = False
    frozen = next(line for line in _shown(ours).splitlines() if "Non-trainable params" in line)
    assert " 96 (384.00 B" in frozen
    assert "Tables" not in _shown(dense)


def test_summary_says_what_lies_in_a_file(tmp_path):
    layer = tfplugin.keras.Embedding(16, combiner="sum", name="item", max_memory=100_000, spill=str(tmp_path))
    model = tf.keras.Sequential([tf.keras.Input((1,), dtype="int64"), layer])
    assert "in a file" not in _shown(model)
    layer(np.arange(40_000)[:, None], training=True)
    counts = tfplugin.summary(layer.table)
    assert counts.file_rows > 10_000
    size = f"{counts.bytes / 2**20:,.2f} MB in memory, {counts.row_bytes / 1024:,.2f} KB of it rows"
    assert f"{size}; {counts.file_rows:,} rows in a file of {counts.file_bytes / 2**20:,.2f} MB" in _shown(model)


def test_a_state_tree_would_lack_rows():
    models = pair(tf.keras).compile(lambda: tf.keras.optimizers.SGD(0.1))
    if not hasattr(models.dense, "get_state_tree"):
        pytest.skip("this Keras has none")
    tree = models.dense.get_state_tree(value_format="numpy_array")
    models.dense.set_state_tree(tree)
    for ask in (models.ours.get_state_tree, lambda: models.ours.set_state_tree(tree)):
        with pytest.raises(ValueError, match=r"model 'ctr', which .*OrbaxCheckpoint saves, has no rows of .*'pair'"):
            ask()


def test_best_weights_and_files_would_lack_rows_that_no_layer_holds(both_kerases, tmp_path):
    keras = both_kerases
    table = tfplugin.get_kv_variable("user", embedding_dim=4)
    tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(0.1))

    class Closure(keras.layers.Layer):
        def call(self, ids):
            return tf.reduce_sum(tf.nn.embedding_lookup(table, ids), axis=1)

        def compute_output_shape(self, shape):
            return (shape[0], 4)

    model = keras.Sequential([keras.Input((3,), dtype="int64"), Closure(), keras.layers.Dense(1)], name="ctr")
    model.compile("sgd", "mse")
    stop = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    lacking = r"would lack the rows of key-value variable 'user:0', which the model looks up and no layer of it holds"
    with pytest.raises(ValueError, match=lacking):
        model.fit(IDS, LABELS, verbose=0, callbacks=[stop])
    for file in ("m.keras", "w.weights.h5", *(["m.h5", "checkpoint"] if keras is tf_keras else [])):
        save = model.save if file in ("m.keras", "m.h5") else model.save_weights
        with pytest.raises(ValueError, match=lacking):
            save(str(tmp_path / file))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_moving_averages_are_swapped_in_to_evaluate(swap_on_epoch, parts, tmp_path):
    keras = tf.keras
    models, histories, during = kept_pair(keras, parts=parts), [], []
    for number, model in enumerate(models.models):
        optimizer = keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.7)
        model.compile(optimizer, "mse", run_eagerly=True)
        callbacks = [
            keras.callbacks.SwapEMAWeights(swap_on_epoch),
            keras.callbacks.ModelCheckpoint(str(tmp_path / f"{number}-{{epoch}}.weights.h5"), save_weights_only=True),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda *_, model=model: during.append(model.predict(IDS, verbose=0))
            ),
        ]
        histories.append(_fit(keras, model, callbacks))
    np.testing.assert_allclose(*(history["val_loss"] for history in histories), rtol=1e-4)
    np.testing.assert_allclose(*(history["loss"] for history in histories), rtol=1e-4)
    np.testing.assert_allclose(during[:4], during[4:], atol=1e-5)
    assert_alike(models, IDS)
    for number, model in enumerate(models.models):
        model.load_weights(str(tmp_path / f"{number}-2.weights.h5"))
    assert_alike(models, IDS)


def test_averages_of_a_loaded_model_are_swapped(tmp_path):
    """Before its optimizer has made a step; rows that are new by then are what they are."""
    keras = tf.keras
    models, evaluated = kept_pair(keras), []
    loaded = []
    for number, model in enumerate(models.models):
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7), "mse", run_eagerly=True)
        list(losses(model, batches(3)))
        model.save(tmp_path / f"{number}.keras")
        loaded.append(keras.models.load_model(tmp_path / f"{number}.keras"))
    loaded = again(models, *loaded)
    loaded.table.upsert([99], np.ones((1, loaded.table.dim)))
    before = loaded.table.export()
    for model in loaded.models:
        plain = model.evaluate(VALIDATION_IDS, VALIDATION_LABELS, verbose=0)
        swapped = model.evaluate(
            VALIDATION_IDS, VALIDATION_LABELS, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()]
        )
        evaluated.append((plain, swapped))
    np.testing.assert_allclose(*evaluated, rtol=1e-4)
    assert abs(plain - swapped) > 1e-3
    for column, after in zip(before, loaded.table.export(), strict=True):
        np.testing.assert_array_equal(column, after)
    with_rows = [list(losses(model, batches(2))) for model in loaded.models]
    np.testing.assert_allclose(*with_rows, rtol=1e-4)


def test_a_swap_that_fails_changes_no_row(monkeypatch):
    keras = tf.keras
    model = kept_pair(keras).ours
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse", run_eagerly=True)
    list(losses(model, batches(3)))
    table = model.get_layer("embedding").table
    before, weights = table.export()[1], model.get_weights()[0]
    monkeypatch.setattr(row_averages, "_CHUNK", 5)
    written, stock = [], type(table).write_rows

    def write_rows(self, keys, *args, **kwargs):
        written.append(keys)
        if len(written) == 2:
            raise KeyboardInterrupt
        return stock(self, keys, *args, **kwargs)

    monkeypatch.setattr(type(table), "write_rows", write_rows)
    with pytest.raises(KeyboardInterrupt):
        model.evaluate(IDS, LABELS, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])
    assert len(written) == 3
    np.testing.assert_array_equal(table.export()[1], before)
    np.testing.assert_array_equal(model.get_weights()[0], weights)


@pytest.mark.parametrize(
    "options",
    [
        {"max_capacity": 20, "eviction": "lru"},
        {"max_capacity": 20, "eviction": "lfu"},
        {"expiry": [ExpireAfterSteps(12)]},
        {},
    ],
    ids=["lru", "lfu", "expiry", "neither"],
)
def test_averages_are_no_use_of_rows(options):
    """Neither in a step nor where they are swapped, nor as rows become them: other rows would go, and be counted."""
    keras, found = tf.keras, []
    ids = np.minimum(np.random.default_rng(0).zipf(1.3, (120, 3)), 60).astype(np.int64)
    for averages in (False, True):
        embedding = tfplugin.keras.Embedding(4, combiner="mean", name=f"items_{averages}", **options)
        model = keras.Sequential([keras.Input((3,), dtype="int64"), embedding, keras.layers.Dense(1)])
        # What is looked at is which rows are there, not what is in them.
        model.compile(keras.optimizers.SGD(0.1, use_ema=averages, ema_overwrite_frequency=None), "mse")
        callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if averages else []
        for _ in range(2):  # `fit` ends with rows that become their averages
            model.fit(ids, np.ones(120), batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        keys = np.sort(embedding.table.export()[0])
        freqs, versions = embedding.table.stamps(keys)
        found.append((keys, freqs.numpy(), versions.numpy() if "expiry" in options else None))
    for plain, averaged in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, averaged)
