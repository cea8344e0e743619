"""Layers that are trained, beside dense ones and NumPy: in loops of one's own and under ``compile``."""

from __future__ import annotations

import gc
import weakref

import keras_pairs
import numpy as np
import pytest
import tensorflow as tf

import tfplugin

DIM, LENGTH, VOCABULARY = keras_pairs.DIM, keras_pairs.LENGTH, keras_pairs.VOCABULARY


def _pooling(combiner):
    """A model in which dense rows are pooled by a layer of Keras, and ours by themselves."""

    def build(keras, embedding):
        ids = keras.Input((LENGTH,), dtype="int64")
        rows = embedding(ids)
        if type(embedding).__module__.startswith("tfplugin"):
            assert tuple(rows.shape) == (None, DIM)
        elif combiner == "mean":
            rows = keras.layers.GlobalAveragePooling1D()(rows)
        else:
            rows = keras.layers.Lambda(lambda rows: tf.reduce_sum(rows, 1), output_shape=(DIM,))(rows)
        return keras.Model(ids, keras.layers.Dense(1)(rows), name="pooling")

    return build


@pytest.mark.parametrize("combiner", [None, "mean", "sum"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_under_compile_it_is_the_dense_model(both_kerases, layers, combiner, optimizer):
    models = keras_pairs.pair(
        both_kerases,
        embedding=lambda keras, **options: layers.Embedding(DIM, combiner, name="embedding", **options),
        **({} if combiner is None else {"build": _pooling(combiner)}),
        initial=0.05,
    ).compile(lambda: getattr(both_kerases.optimizers, optimizer)(0.05))
    data = keras_pairs.batches()
    ours, dense = (list(keras_pairs.losses(model, data)) for model in models.models)
    np.testing.assert_allclose(ours, dense, rtol=1e-5)
    keras_pairs.assert_alike(models, data[0][0])


@pytest.mark.parametrize("own", [None, "adam"])
def test_the_rows_of_a_model_go_with_it(both_kerases, layers, own):
    keras = both_kerases

    def handle_of_model():
        parts = [keras.Input((LENGTH,), dtype="int64"), layers.Embedding(DIM, optimizer=own), keras.layers.Dense(1)]
        model = keras.Sequential(parts)
        model.compile("sgd", "mse")
        model.train_on_batch(np.zeros([2, LENGTH], np.int64), np.ones([2, LENGTH, 1]))
        handle = weakref.ref(model.layers[0].table.handle)
        assert handle() is not None
        return handle

    # Of a function that goes on TensorFlow may have looked at the frame, which then keeps what was in it.
    handle = handle_of_model()
    keras.backend.clear_session()
    gc.collect()
    assert handle() is None


def test_only_fit_gives_keys_their_rows(both_kerases, layers):
    keras = both_kerases
    layer = layers.Embedding(DIM, "mean", initializer=1.0, parts=2)
    model = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), layer, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    ids = np.arange(12).reshape(4, 3)
    labels = np.ones((4, 1))
    model(tf.constant(ids))
    model.predict(ids, verbose=0)
    model.evaluate(ids, labels, verbose=0)
    assert int(layer.table.size()) == 0
    model.fit(ids, labels, verbose=0)
    assert int(layer.table.size()) == 12
    model.evaluate(ids + 100, labels, verbose=0)
    assert int(layer.table.size()) == 12
    layer.trainable = False
    model.compile("adam", "mse")
    model.fit(ids + 100, labels, verbose=0)
    assert int(layer.table.size()) == 12


def test_functions_of_a_layer_take_the_mode_of_the_model(both_kerases):
    keras = both_kerases

    class Traced(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = tfplugin.get_kv_variable("traced", embedding_dim=DIM)
            self.rows = tf.function(lambda ids: tf.reduce_sum(tf.nn.embedding_lookup(self.table, ids), 1))

        def call(self, ids):
            return self.rows(ids)

        def compute_output_shape(self, shape):
            return (shape[0], DIM)

    layer, ids = Traced(), np.arange(12).reshape(4, 3)
    model = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(ids, np.ones((4, 1)), verbose=0)
    model.predict(ids + 100, verbose=0)
    model.evaluate(ids + 100, np.ones((4, 1)), verbose=0)
    model(tf.constant(ids + 100), training=False)
    with tfplugin.inference_mode():
        layer(tf.constant(ids + 100))
    assert int(layer.table.size()) == 12


BAGS, WEIGHTS = [[3, 1, 3], [], [7, 0]], [[0.5, 2.0, 1.0], [], [3.0, 0.25]]
LABELS = np.array([[1.0], [2.0], [-1.0]])


def _of(kind, values, dtype):
    ragged = tf.ragged.constant(values, dtype=dtype)
    return ragged.to_sparse() if kind == "sparse" else ragged


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
@pytest.mark.parametrize("regularized", [False, True])
def test_a_step_in_a_loop_of_ones_own(both_kerases, layers, kind, regularized):
    rows = np.random.default_rng(1).normal(size=(VOCABULARY, DIM))
    # d/dr of sum((sum over dim of the pooled - label) ** 2), and of 0.1 * r ** 2 for each row that is there once.
    pooled = np.stack(
        [(np.array(w)[:, None] * rows[np.array(b, int)]).sum(0) for b, w in zip(BAGS, WEIGHTS, strict=True)]
    )
    of_sample = 2 * (pooled.sum(1, keepdims=True) - LABELS)
    expected = rows.copy()
    for bag, weights, gradient in zip(BAGS, WEIGHTS, of_sample, strict=True):
        for one, weight in zip(bag, weights, strict=True):
            expected[one] -= 0.1 * weight * gradient
    if regularized:
        seen = sorted({one for bag in BAGS for one in bag})
        expected[seen] -= 0.1 * 2 * 0.1 * rows[seen]

    options = {"regularizer": both_kerases.regularizers.L2(0.1)} if regularized else {}
    layer = layers.Embedding(DIM, "sum", dtype="float64", **options)
    layer.table.upsert(np.arange(VOCABULARY), rows)
    optimizer = tfplugin.OptimizerWrapper(both_kerases.optimizers.SGD(0.1))

    @tf.function
    def step(ids, weights):
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights=weights, training=True)
            loss = tf.reduce_sum((tf.reduce_sum(outputs, 1, keepdims=True) - LABELS) ** 2)
            loss += tf.add_n(layer.losses) if regularized else 0.0
        optimizer.apply_gradients([(tape.gradient(loss, layer.table), layer.table)])

    step(_of(kind, BAGS, tf.int64), _of(kind, WEIGHTS, tf.float64))
    keys, moved = (column.numpy() for column in layer.table.export())
    np.testing.assert_allclose(moved, expected[keys], rtol=1e-6)


def test_a_regularizer_is_part_of_the_loss_of_fit(both_kerases, layers):
    keras = both_kerases
    models = {}
    for regularizer in (None, keras.regularizers.L2(0.5)):
        layer = layers.Embedding(DIM, initializer=1.0, regularizer=regularizer)
        model = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), layer, keras.layers.Flatten()])
        model.add(keras.layers.Dense(1, kernel_initializer="zeros"))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        models[regularizer] = (layer, np.ravel(model.train_on_batch(np.array([[1, 2, 1]]), np.zeros((1, 1))))[0])
    (plain, loss), (decayed, regularized) = models.values()
    np.testing.assert_allclose(regularized - loss, 0.5 * 2 * DIM)  # two rows of ones
    np.testing.assert_array_equal(plain.table.export()[1], np.ones((2, DIM)))
    np.testing.assert_allclose(decayed.table.export()[1], np.full((2, DIM), 1 - 0.1 * 2 * 0.5), rtol=1e-6)


def test_a_constraint_is_of_the_rows_that_a_step_changed(both_kerases, layers):
    keras = both_kerases
    layer = layers.Embedding(DIM, "sum", initializer=5.0, constraint=keras.constraints.UnitNorm(axis=1))
    layer.table.upsert([99], np.full((1, DIM), 5.0))
    model = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(np.array([[1, 2, 3]]), np.zeros((1, 1)), verbose=0)
    norms = dict(zip(layer.table.export()[0].numpy(), np.linalg.norm(layer.table.export()[1], axis=1), strict=True))
    np.testing.assert_allclose([norms[1], norms[2], norms[3], norms[99]], [1, 1, 1, 10], rtol=1e-5)


def test_a_collection_is_trained_as_dense_layers_are(both_kerases, layers):
    keras = both_kerases
    numbers = np.random.default_rng(3)
    rows = {name: numbers.normal(size=(VOCABULARY, DIM)).astype(np.float32) for name in ("item", "user")}
    item, user = (layers.TableConfig(name, embedding_dim=DIM) for name in ("item", "user"))
    collection = layers.EmbeddingCollection(
        {
            "seen": layers.FeatureConfig("seen", item, (None, LENGTH), (None, DIM)),
            "next": layers.FeatureConfig("next", item),
            "user": layers.FeatureConfig("user", user),
        }
    )
    for name, table in collection.tables.items():
        table.upsert(np.arange(VOCABULARY), rows[name])
    dense = {name: keras.layers.Embedding(VOCABULARY, DIM) for name in rows}

    def pooled(inputs):
        of_table = {"seen": "item", "next": "item", "user": "user"}
        mean = keras.layers.GlobalAveragePooling1D()
        return {feature: mean(dense[of_table[feature]](ids)) for feature, ids in inputs.items()}

    lengths = {"seen": LENGTH, "next": 1, "user": 1}
    models = []
    for look_up in (collection, pooled):
        inputs = {feature: keras.Input((length,), dtype="int64", name=feature) for feature, length in lengths.items()}
        found = look_up(inputs)
        joined = keras.layers.Concatenate()([found[feature] for feature in lengths])
        model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(joined))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        models.append(model)
    for name, layer in dense.items():
        layer.set_weights([rows[name]])
    ids = {feature: numbers.integers(0, VOCABULARY, (8, length)) for feature, length in lengths.items()}
    labels = numbers.normal(size=(8, 1)).astype(np.float32)
    histories = [
        model.fit(ids, labels, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"] for model in models
    ]
    np.testing.assert_allclose(*histories, rtol=1e-5)
    np.testing.assert_allclose(*(model.predict(ids, verbose=0) for model in models), rtol=1e-5, atol=1e-5)
    for name, table in collection.tables.items():
        keys, moved = (column.numpy() for column in table.export())
        np.testing.assert_allclose(moved, dense[name].get_weights()[0][keys], rtol=1e-5, atol=1e-6)


def _two_inputs(keras, layer, nested):
    """A model that calls a layer twice, with a regularizer that is no sum over rows."""
    first, second = (keras.Input((LENGTH,), dtype="int64") for _ in range(2))
    if nested:
        ids = keras.Input((LENGTH,), dtype="int64")
        layer = keras.Model(ids, layer(ids), name="inner")
    rows = keras.layers.Flatten()(keras.layers.Add()([layer(first), layer(second)]))
    return keras.Model([first, second], keras.layers.Dense(1, kernel_initializer="ones")(rows))


def _subclassed(keras, layer):
    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.score = layer, keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs):
            first, second = (tf.reshape(self.embedding(ids), [-1, LENGTH * DIM]) for ids in inputs)
            return self.score(first + second)

        def train_step(self, data):
            inputs, labels = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(inputs, training=True) - labels) ** 2)
                loss += tf.add_n(self.losses)
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
            return {"loss": loss}

    return Twice()


@pytest.mark.parametrize("how", ["functional", "nested", "subclassed"])
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}], ids=str)
def test_a_row_is_regularized_once_in_a_step_however_often_it_is_looked_up(both_kerases, layers, how, options):
    keras = both_kerases

    class Norm(keras.regularizers.Regularizer):  # of its class, as Keras 3.12 takes no functions
        def __call__(self, rows):
            return tf.sqrt(tf.reduce_sum(rows**2))

    regularizer = Norm()
    ids = np.arange(VOCABULARY).reshape(-1, LENGTH)
    inputs, labels = [ids, ids[::-1] % (VOCABULARY - 2)], np.ones((len(ids), 1), np.float32)
    trained = []
    for layer in (
        layers.Embedding(DIM, initializer=0.5, regularizer=regularizer),
        keras.layers.Embedding(
            VOCABULARY, DIM, embeddings_initializer=keras.initializers.Constant(0.5), embeddings_regularizer=regularizer
        ),
    ):
        model = _subclassed(keras, layer) if how == "subclassed" else _two_inputs(keras, layer, how == "nested")
        model.compile(keras.optimizers.SGD(0.01), "mse", **options)
        history = model.fit(inputs, labels, batch_size=len(ids), epochs=3, verbose=0).history["loss"]
        after = [] if how == "subclassed" else [model.evaluate(inputs, labels, verbose=0)]
        rows = layer.table.sparse_read(np.arange(VOCABULARY)) if hasattr(layer, "table") else layer.embeddings
        trained.append((history + after, np.asarray(rows)))
    (losses, rows), (expected, dense) = trained
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(rows, dense, rtol=1e-5)


def test_a_frozen_layer_is_regularized_where_that_of_keras_is(both_kerases, layers):
    keras = both_kerases
    ids, labels = np.array([[1, 2, 1]]), np.zeros((1, 1))
    losses = []
    for layer in (
        layers.Embedding(DIM, initializer=1.0, regularizer=keras.regularizers.L2(0.5)),
        keras.layers.Embedding(
            5, DIM, embeddings_initializer="ones", embeddings_regularizer=keras.regularizers.L2(0.5 * 2 / 5)
        ),
    ):
        dense = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), layer, keras.layers.Flatten(), dense])
        of_layer = []
        for trainable in (True, False, True):
            layer.trainable = trainable
            model.compile(keras.optimizers.SGD(0.0), "mse")
            of_layer += [
                np.ravel(model.train_on_batch(ids, labels))[0],
                np.ravel(model.evaluate(ids, labels, verbose=0))[0],
            ]
        losses.append(of_layer)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_layers_that_share_a_table_regularize_a_row_once(both_kerases, layers):
    keras = both_kerases
    first, second = (layers.Embedding(DIM, initializer=1.0, regularizer=keras.regularizers.L2(0.5)) for _ in range(2))
    second.table = first.table
    other = layers.Embedding(DIM, initializer=1.0, regularizer=keras.regularizers.L2(0.5))
    ids = keras.Input((LENGTH,), dtype="int64")
    rows = keras.layers.Add()([first(ids), second(ids), other(ids)])
    model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer="zeros")(keras.layers.Flatten()(rows)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    assert np.ravel(model.train_on_batch(np.array([[1, 2, 1]]), np.zeros((1, 1))))[0] == 2 * (0.5 * 2 * DIM)
    for layer in (first, other):
        np.testing.assert_allclose(layer.table.export()[1], np.full((2, DIM), 1 - 0.1 * 2 * 0.5), rtol=1e-6)


def test_each_forward_pass_has_a_penalty_of_its_own(both_kerases, layers):
    layer = layers.Embedding(DIM, "sum", initializer=1.0, regularizer=lambda rows: tf.reduce_sum(rows))
    for ids in ([[1, 2]], [[2, 3]]):
        layer(tf.constant(ids), training=True)
        assert [float(loss) for loss in layer.losses] == [2 * DIM]

    class Twice(both_kerases.layers.Layer):
        def __init__(self):
            super().__init__()
            self.embedding = layer

        def call(self, ids):
            return self.embedding(ids) + self.embedding(ids + 1)

    twice = Twice()
    with tf.GradientTape() as tape:
        twice(tf.constant([[1, 2]]))
    # Read where no tape records.
    assert [float(loss) for loss in twice.losses] == [3 * DIM]
    gradient = tape.gradient(twice.losses, layer.table)
    assert sorted(set(gradient.indices.numpy())) == [1, 2, 3]
    assert float(tf.reduce_sum(gradient.values)) == 3 * DIM


def test_a_regularizer_in_a_function_that_the_step_calls(both_kerases, layers):
    """Keras 3 traces the function before, for shapes, and the step would have no penalty."""
    keras = both_kerases

    class Inner(keras.Model):
        def __init__(self, regularizer):
            super().__init__(name="outer")
            self.embedding = layers.Embedding(DIM, "sum", initializer=1.0, regularizer=regularizer, name="items")
            self.score = keras.layers.Dense(1)

        @tf.function
        def rows(self, ids):
            return self.embedding(ids)

        def call(self, ids):
            return self.score(self.rows(ids))

    for regularizer in (None, "l2"):
        model = Inner(regularizer)
        model.compile("sgd", "mse")
        if regularizer is None:
            model.fit(np.array([[1, 2]]), np.zeros((1, 1)), verbose=0)
        elif keras.__name__ == "tf_keras":
            with pytest.raises((TypeError, ValueError), match=r"items.* out of scope"):
                model.fit(np.array([[1, 2]]), np.zeros((1, 1)), verbose=0)
        else:
            with pytest.raises(ValueError, match=r"'outer' lacks .*of layer 'items'.*Call the layer outside"):
                model.fit(np.array([[1, 2]]), np.zeros((1, 1)), verbose=0)
