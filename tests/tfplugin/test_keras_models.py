"""Tables in models of Keras: they are trained, and what would not be, or not saved or left alone, says so."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
from tfplugin import keras_models

KERAS = {"Keras 3": tf.keras, "tf_keras": tf_keras}
IDS = np.arange(12).reshape(4, 3)
UNSEEN = IDS + 1000
LABELS = np.ones((4, 1))


@pytest.fixture(params=KERAS)
def keras(request):
    return KERAS[request.param]


def _layers(keras):
    return importlib.import_module(f"tfplugin.{'tf_keras' if keras is tf_keras else 'keras'}")


def _layer(keras, table, held="attribute", **options):
    """A layer that pools the rows of three ids, and holds its table in one way or another."""

    class Pooled(keras.layers.Layer):
        def __init__(self):
            super().__init__(**options)
            if held == "attribute":
                self.table = table
            elif held == "list":
                self.tables = [table]
            elif held == "dictionary":
                self.tables = {"a": [table]}

        def call(self, ids):
            return tf.reduce_sum(tf.nn.embedding_lookup(table, ids), axis=1)

    return Pooled()


def _model(keras, layer, **options):
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, keras.layers.Dense(1)], name="ctr")
    model.compile(keras.optimizers.Adam(0.1), "mse", **options)
    return model


@pytest.mark.parametrize("held", ["attribute", "list", "dictionary"])
def test_fit_trains_the_tables_that_layers_hold(keras, make, rows_of, held):
    table = make(name="user", initializer=0.5)
    model = _model(keras, _layer(keras, table, held))
    model.fit(IDS, LABELS, verbose=0)
    trained = rows_of(table, IDS)
    assert (trained != 0.5).all()
    model.train_on_batch(IDS, LABELS)
    assert (rows_of(table, IDS) != trained).all()
    assert "train_step" not in vars(model)


def test_fit_says_which_table_it_cannot_train(keras, make, rows_of):
    table = make(name="user", initializer=0.5)
    model = _model(keras, _layer(keras, table, "closure"))
    message = (
        r"(?s)model 'ctr' looks up key-value variable 'user:0', and nothing updates it: .*Adam.*"
        r"an attribute of a layer.*apply_in_backward"
    )
    for train in (lambda: model.fit(IDS, LABELS, verbose=0), lambda: model.train_on_batch(IDS, LABELS)):
        with pytest.raises(ValueError, match=message):
            train()
    assert (rows_of(table, IDS) == 0.5).all()
    assert "train_step" not in vars(model)


@pytest.mark.parametrize("held", ["list", "closure"])
def test_nested_layers_eager_steps_and_partitioned_variables(keras, make, partitioner, held):
    table = make(name="user", partitioner=partitioner, initializer=0.5)
    inner = keras.Sequential([keras.Input((3,), dtype="int64"), _layer(keras, table, held)])
    model = _model(keras, inner, run_eagerly=True)
    if held == "closure":
        with pytest.raises(ValueError, match=r"variable 'user(:0)?', and nothing updates it"):
            model.fit(IDS, LABELS, verbose=0)
        return
    model.fit(IDS, LABELS, verbose=0)
    assert (table.export()[1].numpy() != 0.5).all()


def test_a_lookup_in_a_function_that_was_traced_before(keras, make):
    table = make(name="user")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.pooled = tf.function(lambda ids: tf.reduce_sum(tf.nn.embedding_lookup(table, ids), axis=1))

        def call(self, ids):
            return self.dense(self.pooled(ids))

    model = Model()
    model(tf.constant(IDS))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="'user:0', and nothing updates it"):
        model.fit(IDS, LABELS, verbose=0)


def test_a_table_that_its_lookups_update_is_trained(keras, make, rows_of):
    table = make(initializer=0.5)
    model = _model(keras, _layer(keras, table, "closure"))
    with pytest.raises(ValueError):
        model.fit(IDS, LABELS, verbose=0)
    tfplugin.apply_in_backward(table, keras.optimizers.Adam(0.5))
    model.fit(IDS, LABELS, verbose=0)
    model.train_on_batch(IDS, LABELS)
    assert (rows_of(table, IDS) != 0.5).all()


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_without_weights_keras_3_takes_no_gradient_that_could_update_a_table(make):
    table = make(name="user", dim=1)
    tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(0.5))
    model = tf.keras.Sequential([tf.keras.Input((3,), dtype="int64"), _layer(tf.keras, table)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="'user:0', and nothing updates it"):
        model.fit(IDS, LABELS, verbose=0)


@pytest.fixture
def policy(keras):
    """Sets the policy of layers that are made."""
    before = keras.mixed_precision.global_policy()
    yield keras.mixed_precision.set_global_policy
    keras.mixed_precision.set_global_policy(before)


@pytest.mark.parametrize("how", ["policy", "policy, eagerly", "optimizer", "train_on_batch", "function traced before"])
def test_rows_get_no_gradients_of_a_scaled_loss(keras, make, rows_of, policy, how):
    table = make(name="user", initializer=0.5)
    table.sparse_read(IDS)
    updates = tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(0.5))
    if how != "optimizer":
        policy("mixed_float16")
    layer = _layer(keras, table, dtype="float32")
    if how == "function traced before":
        pooled = tf.function(layer.call)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(pooled(tf.constant(IDS)))
        tape.gradient(loss, table)
        layer = keras.layers.Lambda(pooled, output_shape=(4,), dtype="float32")
    model = _model(keras, layer, run_eagerly="eagerly" in how)
    if how == "optimizer":
        model.compile(keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.5)), "mse")
    train = model.train_on_batch if how == "train_on_batch" else lambda *batch: model.fit(*batch, verbose=0)
    before, steps = rows_of(table, IDS), int(updates.steps[0])
    message = (
        r"model 'ctr' scales its loss, by LossScale\w+, and key-value variable 'user:0' is .*mixed_bfloat16.*undo\(\)"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            train(IDS, LABELS)
    if how == "function traced before":
        return
    np.testing.assert_array_equal(rows_of(table, IDS), before)
    assert int(updates.steps[0]) == steps


def test_a_constant_loss_scale_of_keras_3_is_refused_too(make):
    table = make(name="user")
    tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(0.5))
    model = _model(tf.keras, _layer(tf.keras, table))
    model.compile(tf.keras.optimizers.SGD(0.5, loss_scale_factor=8.0), "mse")
    with pytest.raises(ValueError, match="scales its loss, by SGD, and key-value variable 'user:0'"):
        model.fit(IDS, LABELS, verbose=0)


def test_mixed_bfloat16_scales_nothing(keras, make, rows_of, policy):
    moved = []
    for name in ("float32", "mixed_bfloat16"):
        policy(name)
        table = make(initializer=0.5)
        tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(0.5))
        model = keras.Sequential([keras.Input((3,), dtype="int64"), _layer(keras, table, dtype="float32")])
        model.add(keras.layers.Dense(1, kernel_initializer="ones", dtype=name))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(IDS, LABELS, verbose=0)
        moved.append(rows_of(table, IDS) - 0.5)
    assert (moved[0] != 0).all()
    np.testing.assert_allclose(moved[1], moved[0], rtol=0.02)


def _with_train_step(keras, table):
    """A model as `docs/kv-variable.md` has it."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__(name="ctr")
            self.pooled, self.score = _layer(keras, table, dtype="float32"), keras.layers.Dense(1, dtype="float32")

        def call(self, ids):
            return self.score(self.pooled(ids))

        def train_step(self, data):
            ids, labels, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                scores = self(ids, training=True)
                loss = self.compute_loss(x=ids, y=labels, y_pred=scores)
                scale = getattr(self.optimizer, "scale_loss", None) or getattr(self.optimizer, "get_scaled_loss", None)
                scaled = scale(loss) if scale else loss
            variables = [*self.trainable_weights, table]
            gradients = tape.gradient(scaled, variables)
            if hasattr(self.optimizer, "get_unscaled_gradients"):
                gradients = self.optimizer.get_unscaled_gradients(gradients)
            self.wrapper.apply_gradients(zip(gradients, variables, strict=True))
            self.metrics[0].update_state(loss, sample_weight=tf.shape(labels)[0])
            return self.compute_metrics(ids, labels, scores, None)

    return Model()


def test_a_train_step_reports_its_loss_and_scales_it_where_asked_to(keras, make, rows_of):
    moved = []
    for scales in (False, True):
        table = make(initializer=0.5)
        model = _with_train_step(keras, table)
        sgd = keras.optimizers.SGD(0.5)
        model.compile(keras.mixed_precision.LossScaleOptimizer(sgd) if scales else sgd, "mse", metrics=["mse"])
        model.wrapper = tfplugin.OptimizerWrapper(model.optimizer)
        model(tf.constant(IDS))
        model.score.set_weights([np.full((4, 1), 0.1), np.zeros(1)])
        history = model.fit(IDS, LABELS, batch_size=3, epochs=2, verbose=0, shuffle=False).history
        np.testing.assert_allclose(history["loss"], history["mse"], rtol=1e-6)
        assert (np.array(history["loss"]) > 0).all()
        evaluated = model.evaluate(IDS, LABELS, verbose=0, return_dict=True)
        np.testing.assert_allclose(evaluated["loss"], evaluated["mse"], rtol=1e-6)
        moved.append(rows_of(table, IDS) - 0.5)
    assert (moved[0] != 0).all()
    np.testing.assert_allclose(moved[1], moved[0], rtol=1e-5)


def test_a_train_step_of_ones_own_trains_it(keras, make, rows_of):
    table = make(initializer=0.5)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.pooled, self.dense = _layer(keras, table), keras.layers.Dense(1)
            self.all = tfplugin.OptimizerWrapper(keras.optimizers.Adam(0.1))

        def call(self, ids):
            return self.dense(self.pooled(ids))

        def train_step(self, data):
            ids, labels = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(ids) - labels) ** 2)
            variables = [*self.trainable_weights, table]
            self.all.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    model = Model()
    model.compile()
    model.fit(IDS, LABELS, verbose=0)
    assert (rows_of(table, IDS) != 0.5).all()
    model.predict(UNSEEN, verbose=0)  # calls the layer without saying training=False
    assert int(table.size()) == IDS.size


def test_tables_that_are_not_to_be_trained(keras, make):
    fixed = _model(keras, _layer(keras, make(name="fixed", trainable=False)))
    fixed.fit(IDS, LABELS, verbose=0)
    frozen = _layer(keras, make(name="frozen"))
    frozen.trainable = False
    _model(keras, frozen).fit(IDS, LABELS, verbose=0)


def test_evaluate_and_predict_insert_nothing(keras, make):
    table = make()
    model = _model(keras, _layer(keras, table, "closure"))
    model.predict(UNSEEN, verbose=0)
    model.evaluate(UNSEEN, LABELS, verbose=0)
    model.test_on_batch(UNSEEN, LABELS)
    model.predict_on_batch(UNSEEN)
    model(tf.constant(UNSEEN), training=False)
    assert int(table.size()) == 0
    model(tf.constant(UNSEEN))
    assert int(table.size()) == UNSEEN.size


@pytest.mark.parametrize("file", ["m.keras", "m.h5", "w.weights.h5"])
def test_a_file_of_keras_would_lack_the_rows_of_a_table_that_no_layer_holds(keras, make, tmp_path, file):
    model = _model(keras, _layer(keras, make(name="user"), "closure"))
    model.predict(UNSEEN, verbose=0)
    save = model.save_weights if "weights" in file else model.save
    lacks = r"would lack the rows of key-value variable 'user:0'.*an attribute of the layer.*tf\.train\.Checkpoint"
    with pytest.raises(ValueError, match=lacks):
        save(str(tmp_path / file))
    assert not list(tmp_path.iterdir())


def test_training_goes_on_from_the_checkpoint_that_the_refusal_names(keras, make, rows_of, tmp_path):
    def built():
        table = make(name="user", initializer=0.5)
        updates = tfplugin.apply_in_backward(table, keras.optimizers.Adam(0.1))
        model = _model(keras, _layer(keras, table, "closure"))
        model.layers[-1].set_weights([np.full((4, 1), 0.1), np.zeros(1)])
        return table, updates, model

    def train(model):
        for step in range(2):
            model.train_on_batch(IDS, (step + 1) * LABELS)

    table, updates, model = built()
    train(model)
    with pytest.raises(
        ValueError, match=r"Checkpoint\(model=model, table=table, updates=updates\) with what tfplugin\.a"
    ):
        model.save(str(tmp_path / "m.keras"))
    path = tf.train.Checkpoint(model=model, table=table, updates=updates).save(str(tmp_path / "c"))
    train(model)
    expected = rows_of(table, IDS), model.predict(IDS, verbose=0)
    table, updates, model = built()
    tf.train.Checkpoint(model=model, table=table, updates=updates).restore(path).assert_existing_objects_matched()
    train(model)
    np.testing.assert_array_equal(rows_of(table, IDS), expected[0])
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), expected[1])
    assert int(updates.steps[0]) == 4


def test_a_train_step_goes_on_from_a_checkpoint_of_the_model(keras, make, rows_of, tmp_path):
    def built():
        table = make(name="user", initializer=0.5)
        model = _with_train_step(keras, table)
        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.wrapper = tfplugin.OptimizerWrapper(model.optimizer)
        model(tf.constant(IDS), training=False)
        return table, model

    table, model = built()
    model.train_on_batch(IDS, LABELS)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
    model.train_on_batch(IDS, LABELS)
    expected = rows_of(table, IDS), model.predict(IDS, verbose=0)
    table, model = built()
    tf.train.Checkpoint(model=model).restore(path)
    model.train_on_batch(IDS, LABELS)
    np.testing.assert_array_equal(rows_of(table, IDS), expected[0])
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), expected[1])


def test_a_layer_that_saves_its_rows_itself_is_asked_to(keras, make, rows_of, tmp_path):
    class Saved(type(_layer(keras, make()))):
        def __init__(self, table):
            super().__init__()
            self.table = table

        def call(self, ids):
            return tf.reduce_sum(tf.nn.embedding_lookup(self.table, ids), axis=1)

        def save_own_variables(self, store):
            store["keys"], store["rows"] = (column.numpy() for column in self.table.export())

        def load_own_variables(self, store):
            self.loaded = sorted(np.asarray(store["keys"]).tolist())

    model, other = (_model(keras, Saved(make(name="user"))) for _ in range(2))
    model.layers[0].table.upsert([1, 2], np.ones([2, 4]))
    model.save_weights(str(tmp_path / "w.weights.h5"))
    other.load_weights(str(tmp_path / "w.weights.h5"))
    assert other.layers[0].loaded == [1, 2] and (rows_of(other.layers[0].table, [1, 2]) == 1).all()


@pytest.mark.parametrize("held", ["attribute", "list", "dictionary"])
def test_checkpoints_have_tables_however_a_layer_holds_them(keras, make, rows_of, tmp_path, held):
    def built():
        table = make(initializer=0.5)
        return table, _model(keras, _layer(keras, table, held))

    table, model = built()
    table.upsert([1, 2], np.ones([2, 4]))
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
    table, model = built()
    tf.train.Checkpoint(model=model).restore(path).assert_existing_objects_matched().assert_consumed()
    assert (rows_of(table, [1, 2]) == 1).all()


@pytest.mark.parametrize("held", ["list", "dictionary", "Sequential"])
def test_checkpoints_have_tables_however_a_model_holds_their_layers(keras, tmp_path, held):
    class Scored(keras.Model):
        def __init__(self, pooled, scored):
            super().__init__()
            self.steps = [pooled, scored] if held == "list" else {"pooled": [pooled], "scored": scored}

        def call(self, ids):
            pooled, scored = self.steps if held == "list" else (self.steps["pooled"][0], self.steps["scored"])
            return scored(pooled(ids))

    def built(rows):
        layer = _layers(keras).Embedding(4, combiner="sum", name="user")
        layer.table.upsert(IDS.ravel(), np.full([IDS.size, 4], rows))
        layers = [layer, keras.layers.Dense(1)]
        model = keras.Sequential(layers) if held == "Sequential" else Scored(*layers)
        return model, model(IDS, training=False)

    model, expected = built(1.0)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
    model, _ = built(2.0)
    tf.train.Checkpoint(model=model).restore(path).assert_existing_objects_matched().assert_consumed()
    np.testing.assert_array_equal(model(IDS, training=False), expected)  # dense weights of these layers, too


def test_a_table_that_keras_saves_has_one_place_in_a_checkpoint(tmp_path):
    keras = tf.keras
    layers = [keras.Input((3,), dtype="int64"), _layers(keras).Embedding(4, name="user"), keras.layers.Dense(1)]
    model = keras.Model(layers[0], keras.Sequential(layers)(layers[0]))
    model.compile("sgd", "mse")
    model.fit(IDS, np.ones((4, 3, 1)), verbose=0)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
    tables = [name for name, _ in tf.train.list_variables(path) if name.endswith("kv-keys")]
    assert tables == ["model/_operations/1/_functional/_operations/1/table/.ATTRIBUTES/kv-keys"]


def test_a_layer_of_a_saved_model_holds_its_tables(tmp_path):
    keras = tf.keras
    layers = [_layers(keras).Embedding(4, combiner="sum", name="user", parts=2), keras.layers.Dense(1)]
    source = keras.Sequential([keras.Input((3,), dtype="int64"), *layers])
    source(IDS, training=True)
    source.export(str(tmp_path / "source"), verbose=False)
    for trainable in (True, False):
        layer = keras.layers.TFSMLayer(str(tmp_path / "source"), trainable=trainable)
        np.testing.assert_array_equal(layer(IDS), source(IDS))
        ids = keras.Input((3,), dtype="int64")
        model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer="ones")(layer(ids)))
        model.compile("sgd", "mse")
        model.fit(IDS, LABELS, verbose=0)
        assert (layer(IDS) != source(IDS)).numpy().any() == trainable
        [table] = layer.tables
        moved = table.sparse_read(IDS, training=False) != layers[0].table.sparse_read(IDS, training=False)
        assert moved.numpy().any() == trainable and int(table.size()) == IDS.size
        model.save(str(tmp_path / "m.keras"))
        loaded = keras.models.load_model(str(tmp_path / "m.keras"), safe_mode=False)
        np.testing.assert_array_equal(loaded(IDS), model(IDS))
    model.export(str(tmp_path / "again"), verbose=False)
    saved = tf.train.list_variables(str(tmp_path / "again" / "variables" / "variables"))
    assert len([name for name, _ in saved if name.endswith("-keys")]) == 2  # a part each, once


def test_weights_in_the_format_of_checkpoints_have_tables_that_the_model_holds(make, rows_of, tmp_path):
    model = _model(tf_keras, _layer(tf_keras, make(name="user")))
    model.save_weights(str(tmp_path / "w"))
    assert any("kv-keys" in name for name, _ in tf.train.list_variables(str(tmp_path / "w")))
    model = _model(tf_keras, _layer(tf_keras, make(name="user"), "closure"))
    model.predict(UNSEEN, verbose=0)
    with pytest.raises(ValueError, match="The weights file of model 'ctr' would lack"):
        model.save_weights(str(tmp_path / "v"))


def test_early_stopping_would_restore_half_of_the_model(keras, make):
    table = make(name="user")
    tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(0.1))
    model = _model(keras, _layer(keras, table, "closure"))
    stop = keras.callbacks.EarlyStopping(monitor="loss", restore_best_weights=True)
    with pytest.raises(
        ValueError, match=r"puts back of model 'ctr' would lack the rows of key-value variable 'user:0'"
    ):
        model.fit(IDS, LABELS, verbose=0, callbacks=[stop])
    stop.restore_best_weights = False
    model.fit(IDS, LABELS, verbose=0, callbacks=[stop])


@pytest.mark.parametrize("held", ["attribute", "closure"])
def test_what_keras_exports_has_the_rows(keras, make, tmp_path, capsys, held):
    table = make(initializer=0.5)
    model = _model(keras, _layer(keras, table, held))
    table.upsert(IDS, np.random.default_rng(0).normal(size=(*IDS.shape, 4)))
    model.export(str(tmp_path / "m"))
    served = tf.saved_model.load(str(tmp_path / "m"))
    both = np.concatenate([IDS, UNSEEN])
    np.testing.assert_allclose(served.serve(tf.constant(both)), model.predict(both, verbose=0), rtol=1e-6)


def test_formats_without_tables_say_how_a_model_is_converted(make, tmp_path):
    model = _model(tf.keras, _layer(tf.keras, make(name="user")))
    for format, file in (("litert", "m.tflite"), ("onnx", "m.onnx")):
        with pytest.raises(ValueError, match=rf"'{format}' has no operation .* 'user.*perfect.*TFLiteConverter"):
            model.export(str(tmp_path / file), format=format)
    plain = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    plain.export(str(tmp_path / "plain"), format="tf_saved_model", verbose=False)
    model.export(str(tmp_path / "ctr"), "tf_saved_model", verbose=False)


def test_a_subclassed_model_of_keras_3_is_exported_for_integers(make, tmp_path):
    table = make(initializer=0.5)
    keras = tf.keras

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.pooled, self.score = _layer(keras, table), keras.layers.Dense(1)

        def call(self, ids):
            return self.score(self.pooled(ids))

    model = Model()
    ids = np.array([[2**60 + 1, 2**60 + 2, -(2**60) - 1]])
    table.upsert(ids, np.random.default_rng(0).normal(size=(1, 3, 4)))
    expected = model.predict(ids, verbose=0)
    for save in (lambda: model.export(str(tmp_path / "m")), lambda: tf.saved_model.save(model, str(tmp_path / "m"))):
        with pytest.raises(TypeError, match=r"got ids of float32: .*model\.export\(path, input_signature=") as raised:
            save()
        assert "tf.cast" not in str(raised.value)
    model.export(str(tmp_path / "n"), input_signature=[keras.InputSpec(shape=(None, 3), dtype="int64")], verbose=False)
    served = tf.saved_model.load(str(tmp_path / "n"))
    np.testing.assert_allclose(served.serve(tf.constant(ids)), expected, rtol=1e-6)


def test_tables_come_in_the_order_in_which_a_layer_holds_them():
    tables = [tf.get_kv_variable(f"held_{number}", embedding_dim=1) for number in range(4)]
    held = {"first": tables[0], "more": [tables[1], (tables[2],)], "last": tables[3]}
    assert [table.name for table in keras_models.variables_in(held)] == [table.name for table in tables]


def test_models_without_tables_are_left_alone(keras, tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(IDS, LABELS, verbose=0, validation_data=(IDS, LABELS))
    model.save(str(tmp_path / "m.keras"))
    np.testing.assert_array_equal(
        keras.models.load_model(str(tmp_path / "m.keras")).predict(IDS, verbose=0), model.predict(IDS, verbose=0)
    )


@pytest.mark.parametrize(
    "lookup",
    [
        tf.nn.embedding_lookup,
        tf.gather,
        lambda table, ids: table.sparse_read(ids),
        lambda table, ids: tfplugin.lookup_many([table], [ids]),
    ],
    ids=["embedding_lookup", "gather", "sparse_read", "lookup_many"],
)
def test_a_lookup_between_the_layers_of_a_tf_keras_model_is_an_error(lookup):
    table = tfplugin.get_kv_variable("between", embedding_dim=2)
    with pytest.raises(TypeError, match=r"'between.*in the call of a layer of the same Keras"):
        lookup(table, tf_keras.Input((3,), dtype="int64"))
