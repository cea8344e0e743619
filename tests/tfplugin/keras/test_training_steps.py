"""Models with a ``train_step`` of their own."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras_pairs import DIM, assert_alike, assert_same_losses, batches, held, losses, pair

import tfplugin

DATA = batches()
IDS, LABELS = DATA[0]


def _model_with(keras, train_step):
    """Builds models as `model_of` does, with a train_step."""

    def build(keras, embedding, name="ctr"):
        ids = keras.Input((3,), dtype="int64")
        score = keras.layers.Dense(1)(keras.layers.Flatten()(embedding(ids)))
        model = type("Model", (keras.Model,), {"train_step": train_step})(ids, score, name=name)
        return model

    return build


def _step(model, data, training=True):
    """As the guides of Keras write it."""
    ids, labels = data[:2]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(ids, training=training) - labels) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"loss": loss}


def _clipped_step(model, data):
    ids, labels = data[:2]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(ids, training=True) - labels) ** 2)
    gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_weights), 0.1)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
    return {"loss": loss}


def _upper_step(model, data):
    """What is around Keras's own."""
    return type(model).__mro__[1].train_step(model, data)


@pytest.mark.parametrize("step", [_step, _clipped_step, _upper_step])
@pytest.mark.parametrize("eagerly", [False, True], ids=["traced", "eager"])
def test_a_train_step_that_trains_trainable_weights(both_kerases, step, eagerly):
    keras = both_kerases
    models = pair(keras, build=_model_with(keras, step))
    models.compile(lambda: keras.optimizers.Adam(0.05), run_eagerly=eagerly)
    ours, dense = (list(losses(model, DATA)) for model in models.models)
    np.testing.assert_allclose(ours, dense, rtol=1e-5)
    assert_alike(models, IDS)


def _eager_values_step(model, data):
    """As only eager code can be: it looks at values."""
    returned = _step(model, data)
    assert float(returned["loss"].numpy()) < 1e9
    return returned


def _inference_step(model, data):
    """Without dropout, as fine-tuning is done."""
    return _step(model, data, training=False)


@pytest.mark.parametrize(
    ("step", "eagerly"),
    [(_eager_values_step, True), (_inference_step, False), (_inference_step, True)],
    ids=["values", "training=False, traced", "training=False, eager"],
)
def test_a_train_step_of_any_kind_trains_trainable_weights(both_kerases, step, eagerly):
    keras = both_kerases
    models = pair(keras, build=_model_with(keras, step))
    for model in models.models:
        model.predict(IDS, verbose=0)
    models.compile(lambda: keras.optimizers.SGD(0.05), run_eagerly=eagerly)
    before = models.ours.predict(IDS, verbose=0)
    ours, dense = (list(losses(model, DATA)) for model in models.models)
    np.testing.assert_allclose(ours, dense, rtol=1e-5)
    assert_alike(models, IDS)
    assert (models.ours.predict(IDS, verbose=0) != before).any()


def _factors(keras, embeddings, in_turns):
    """A model without dense weights. In turns each step looks up, and trains, one of its two layers."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.two = embeddings
            self.steps = 0

        def call(self, ids):
            return tf.reduce_sum(self.one(ids) * self.two(ids), -1)

        def train_step(self, data):
            ids, labels = data[:2]
            self.steps += 1
            layers = [self.one, self.two] if not in_turns else [(self.one, self.two)[self.steps % 2]]
            with tf.GradientTape() as tape:
                scores = tf.reduce_sum(tf.reduce_prod([layer(ids) for layer in layers], 0), -1)
                loss = tf.reduce_mean((scores - labels) ** 2)
            weights = [weight for layer in layers for weight in layer.trainable_weights]
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    return Model()


@pytest.mark.parametrize(
    ("eagerly", "in_turns"), [(False, False), (True, False), (True, True)], ids=["traced", "eager", "eager, in turns"]
)
def test_an_optimizer_of_tables_only(both_kerases, eagerly, in_turns):
    """The two tables are trained in each step, or one in each."""
    keras = both_kerases
    embedding = importlib.import_module(
        "tfplugin.tf_keras" if keras.__name__ == "tf_keras" else "tfplugin.keras"
    ).Embedding
    initializer = keras.initializers.Constant(0.5)
    tables = [embedding(4, name=name, initializer=0.5) for name in ("one", "two")]
    stock = [keras.layers.Embedding(7, 4, embeddings_initializer=initializer) for _ in tables]
    ids, labels = np.arange(12).reshape(4, 3) % 7, np.zeros((4, 1))
    models = [_factors(keras, embeddings, in_turns) for embeddings in (tables, stock)]
    for model in models:
        model(ids)
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=eagerly)
        model.optimizer.build(model.trainable_variables)
        for _ in range(4):
            model.fit(ids, labels, verbose=0)
    for table, layer in zip(tables, stock, strict=True):
        keys, rows = (array.numpy() for array in table.table.export()[:2])
        np.testing.assert_allclose(rows, layer.get_weights()[0][keys], rtol=1e-5)
        assert (rows < 0.49).all()


def test_apply_of_keras_3():
    def step(model, data):
        ids, labels = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids, training=True) - labels) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        return {"loss": loss}

    keras = tf.keras
    for scaled in (False, True):
        models = pair(keras, build=_model_with(keras, step))
        models.ours.compile(keras.optimizers.Adam(0.05), "mse")
        models.dense.compile(keras.optimizers.Adam(0.05), "mse")
        ours, dense = (list(losses(model, DATA)) for model in models.models)
        np.testing.assert_allclose(ours, dense, rtol=1e-5)
        del scaled


@pytest.mark.parametrize("eagerly", [False, True], ids=["traced", "eager"])
@pytest.mark.parametrize("together", [True, False])
def test_a_train_step_that_updates_its_table_keeps_its_way(both_kerases, make, rows_of, eagerly, together):
    keras = both_kerases
    mine, left = make(DIM, "mine", initializer=0.5), make(DIM, "left", initializer=0.5)
    seen = []

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.layers_ = [held(keras, mine, "mine"), held(keras, left, "left")]
            self.flat, self.score = keras.layers.Flatten(), keras.layers.Dense(1, kernel_initializer="ones")
            self.wrapper = tfplugin.OptimizerWrapper(keras.optimizers.SGD(0.0))

        def call(self, ids):
            return self.score(self.flat(sum(layer(ids) for layer in self.layers_)))

        def train_step(self, data):
            ids, labels = data[:2]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(ids, training=True) - labels) ** 2)
            weights = self.trainable_weights
            seen[:] = weights
            gradients = tape.gradient(loss, [*weights, mine])
            if together:
                pairs = [*zip(gradients, [*weights, mine], strict=True)]
                self.wrapper.apply_gradients(pairs[-1:])
                self.optimizer.apply_gradients(pairs[:-1])
            else:
                self.optimizer.apply_gradients(zip(gradients[:-1], weights, strict=True))
                self.wrapper.apply_gradients([(gradients[-1], mine)])
            return {"loss": loss}

    model = Model()
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=eagerly)
    for _ in range(2):
        model.fit(IDS, LABELS, verbose=0)
    assert any(weight is left for weight in seen) and not any(weight is mine for weight in seen)
    assert (rows_of(mine, IDS) == 0.5).all()
    assert (rows_of(left, IDS) != 0.5).all()


@pytest.mark.parametrize("optimizers", [tf_keras.optimizers, tf_keras.optimizers.legacy], ids=["tf_keras", "legacy"])
def test_minimize_of_tf_keras(optimizers):
    def step(model, data):
        ids, labels = data[:2]
        loss = lambda: tf.reduce_mean((model(ids, training=True) - labels) ** 2)  # noqa: E731
        model.optimizer.minimize(loss, model.trainable_variables)
        return {"loss": loss()}

    models = pair(tf_keras, build=_model_with(tf_keras, step))
    models.compile(lambda: optimizers.SGD(0.05))
    ours, dense = (list(losses(model, DATA)) for model in models.models)
    np.testing.assert_allclose(ours, dense, rtol=1e-5)
    assert_alike(models, IDS)


def test_two_optimizers_for_two_parts_of_a_model(both_kerases, make, rows_of):
    keras = both_kerases
    tables = [make(DIM, name, initializer=0.5) for name in ("one", "two")]

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.towers = [
                keras.Sequential(
                    [
                        keras.Input((3,), dtype="int64"),
                        held(keras, table),
                        keras.layers.Flatten(),
                        keras.layers.Dense(1),
                    ]
                )
                for table in tables
            ]
            self.other = keras.optimizers.SGD(0.0)

        def call(self, ids):
            return self.towers[0](ids) + self.towers[1](ids)

        def train_step(self, data):
            ids, labels = data[:2]
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean((self(ids, training=True) - labels) ** 2)
            for tower, optimizer in zip(self.towers, (self.optimizer, self.other), strict=True):
                weights = tower.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    model = Model()
    model.compile(keras.optimizers.SGD(0.1))
    model.fit(IDS, LABELS, verbose=0)
    assert (rows_of(tables[0], IDS) != 0.5).all()
    assert (rows_of(tables[1], IDS) == 0.5).all()


@pytest.mark.parametrize("file", ["w.weights.h5", "m.keras"])
def test_a_wide_and_deep_model_of_tf_keras_has_two_optimizers(tmp_path, file):
    optimizers = tf_keras.optimizers

    def wide_and_deep(embedding_of):
        towers = []
        for name in ("linear", "deep"):
            tower = tf_keras.Sequential(
                [tf_keras.Input((3,), dtype="int64"), embedding_of(name), tf_keras.layers.Flatten()]
            )
            tower.add(tf_keras.layers.Dense(1, kernel_initializer="ones"))
            towers.append(tower)
        model = tf_keras.experimental.WideDeepModel(*towers)
        model.compile([optimizers.Ftrl(0.05), optimizers.Adam(0.05)], "mse")
        return model

    def ours():
        return wide_and_deep(lambda name: tfplugin.tf_keras.Embedding(DIM, initializer=0.5, name=name))

    start = tf_keras.initializers.Constant(0.5)
    models = [ours(), wide_and_deep(lambda name: tf_keras.layers.Embedding(12, DIM, start, name=name))]
    data = [((ids, ids), labels) for ids, labels in DATA[:2]]
    np.testing.assert_allclose(*([*losses(model, data)] for model in models), rtol=1e-5)
    model = models[0]
    if file == "m.keras":  # Keras gives no such model the state of its optimizers back
        model.save(tmp_path / file)
        with pytest.warns(UserWarning, match="not restored the state of optimizer Ftrl and Adam"):
            again = tf_keras.models.load_model(tmp_path / file)
        assert again.dnn_model.layers[0].table.slot_names() == set()
        np.testing.assert_array_equal(again.predict(data[0][0], verbose=0), model.predict(data[0][0], verbose=0))
        return
    model.save_weights(tmp_path / file)
    again = ours()
    list(losses(again, data[:1]))
    again.load_weights(tmp_path / file)
    assert_same_losses(*(losses(one, data) for one in (again, model)))


def test_a_train_step_that_updates_a_table_twice_says_so(both_kerases, make):
    """Where nothing can be seen of that before: the step looks at values."""
    keras = both_kerases
    table = make(DIM, "twice")

    def step(model, data):
        ids, labels = data[:2]
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((model(ids, training=True) - labels) ** 2)
        assert float(loss.numpy()) < 1e9
        weights = model.trainable_weights
        model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        tfplugin.OptimizerWrapper(keras.optimizers.SGD(0.1)).apply_gradients([(tape.gradient(loss, table), table)])
        return {"loss": loss}

    model = _model_with(keras, step)(keras, held(keras, table))
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    with pytest.raises(ValueError, match=r"updates key-value variable 'twice:0' twice"):
        model.fit(IDS, LABELS, verbose=0)


def test_a_train_step_that_leaves_a_table_out_says_so(both_kerases, make):
    keras = both_kerases

    def step(model, data):
        ids, labels = data[:2]
        weights = model.layers[-1].trainable_weights
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids, training=True) - labels) ** 2)
        model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}

    model = _model_with(keras, step)(keras, held(keras, make(DIM, "out")))
    model.compile("sgd")
    with pytest.raises(ValueError, match=r"'out:0', and nothing updates it.*its train_step"):
        model.fit(IDS, LABELS, verbose=0)


def test_a_function_that_xla_compiles_refuses_lookups(make):
    table = make()

    @tf.function(jit_compile=True)
    def pooled(ids):
        return tf.reduce_sum(tf.nn.embedding_lookup(table, ids), axis=1)

    with pytest.raises(ValueError, match="'v:0' is looked up in a function with jit_compile=True"):
        pooled(tf.constant(IDS))
