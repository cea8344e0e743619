"""Plain ``compile`` and ``fit`` train tables: as a dense ``Embedding`` on the same ids, to 1e-5."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras_pairs import DIM, KERASES, LENGTH, VOCABULARY, assert_alike, batches, by_hand, held, losses, model_of, pair
from tensorflow.python.eager import context

import tfplugin.keras
import tfplugin.tf_keras

DATA = batches()
IDS = np.concatenate([ids for ids, _ in DATA])
LABELS = np.concatenate([labels for _, labels in DATA])
ROWS = len(DATA[0][0])
UNSEEN = np.arange(1000, 1000 + IDS.size).reshape(IDS.shape)


@pytest.fixture(params=["keras3", pytest.param("tf_keras", marks=pytest.mark.thorough)])
def both_kerases(request):
    """Keras 3, and where there is time tf_keras."""
    return KERASES[request.param]


def _embedding(keras, **options):
    layers = tfplugin.tf_keras if keras is tf_keras else tfplugin.keras
    return layers.Embedding(DIM, name="embedding", **options)


def _adam(keras, **options):
    return lambda: keras.optimizers.Adam(0.05, **options)


def _fit(model, **options):
    history = model.fit(IDS, LABELS, batch_size=ROWS, epochs=2, shuffle=False, verbose=0, **options).history
    return history["loss"]


def _assert_same_fit(models, bound=1e-5, **options):
    ours, dense = (_fit(model, **options) for model in models.models)
    np.testing.assert_allclose(ours, dense, rtol=bound)
    assert_alike(models, IDS, bound)


@pytest.mark.parametrize("layer", [_embedding, by_hand])
def test_fit_and_train_on_batch_are_those_of_a_dense_embedding(both_kerases, layer):
    keras = both_kerases
    models = pair(keras, layer, initial=0.5).compile(_adam(keras))
    assert int(models.table.size()) == 0
    _assert_same_fit(models, validation_data=(IDS, LABELS))
    ours, dense = (list(losses(model, DATA)) for model in models.models)
    np.testing.assert_allclose(ours, dense, rtol=1e-5)
    assert_alike(models, IDS)


OPTIONS = {
    "clipnorm": lambda keras: keras.optimizers.SGD(0.1, clipnorm=0.2),
    "clipvalue": lambda keras: keras.optimizers.Adam(0.05, clipvalue=0.02),
    "global_clipnorm": lambda keras: keras.optimizers.Adam(0.05, global_clipnorm=0.2),
    "weight_decay": lambda keras: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "schedule": lambda keras: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "loss scale": lambda keras: keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.Adam(0.05, global_clipnorm=0.2)
    ),
    "use_ema": lambda keras: keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8),
    "ema_overwrite_frequency": lambda keras: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_what_an_optimizer_does_beside_its_update(both_kerases, option):
    _assert_same_fit(pair(both_kerases, _embedding).compile(lambda: OPTIONS[option](both_kerases)))


@pytest.mark.parametrize("option", ["use_ema", "ema_overwrite_frequency", "global_clipnorm"])
def test_a_train_step_of_ones_own(both_kerases, option):
    keras = both_kerases

    class Stepping(keras.Model):
        def train_step(self, data):
            ids, labels = data[:2]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(ids, training=True) - labels) ** 2)
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    models = pair(keras, _embedding)
    ours, dense = (Stepping(model.inputs, model.outputs) for model in models.models)
    models = dataclasses.replace(models, ours=ours, dense=dense)
    _assert_same_fit(models.compile(lambda: OPTIONS[option](keras)))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 3, "global_clipnorm": 0.2, "weight_decay": 0.01},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("how", [{}, {"run_eagerly": True}], ids=["traced", "eager"])
def test_what_optimizers_of_keras_3_do(options, how):
    _assert_same_fit(pair(tf.keras).compile(_adam(tf.keras, **options), **how))


@pytest.mark.parametrize(
    "clip", [{"clipnorm": 0.05}, {"clipvalue": 0.01}, {"global_clipnorm": 0.05}], ids=lambda clip: next(iter(clip))
)
def test_bags_of_one_table_under_clipping_and_accumulation(clip):
    """Their gradients have a key once each, so that the table has it twice in a step."""
    keras, random = tf.keras, np.random.default_rng(3)
    rows = random.standard_normal([VOCABULARY, DIM]).astype(np.float32)

    def trained(embed):
        ids = keras.Input((LENGTH,), dtype="int64")
        score = keras.layers.Dense(1, kernel_initializer="ones")(embed(ids) * embed(ids[:, ::2]))
        model = keras.Model(ids, score)
        model.compile(keras.optimizers.Adam(0.05, gradient_accumulation_steps=2, **clip), "mse")
        return _fit(model)

    bags = tfplugin.keras.Embedding(DIM, combiner="sum", name="bags")
    bags.table.upsert(range(VOCABULARY), rows)
    dense = keras.layers.Embedding(VOCABULARY, DIM)
    dense.build()
    dense.set_weights([rows])
    np.testing.assert_allclose(trained(bags), trained(lambda ids: keras.ops.sum(dense(ids), axis=1)), rtol=1e-5)
    np.testing.assert_allclose(bags.table.sparse_read(range(VOCABULARY)), dense.get_weights()[0], rtol=1e-4, atol=1e-5)


def test_a_wrapper_clips_what_it_accumulates():
    table = tfplugin.get_kv_variable("clipped", embedding_dim=2, initializer=1.0)
    dense = tf.keras.Variable(np.ones([3, 2], np.float32))
    options = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.5}
    optimizers = [
        tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(1.0, **options)),
        tf.keras.optimizers.SGD(1.0, **options),
    ]
    for ids in ([0, 1, 1, 0], [2, 2, 1]):
        gradient = tf.IndexedSlices(tf.ones([len(ids), 2]), tf.constant(ids, tf.int64), tf.constant([3, 2], tf.int64))
        optimizers[0].apply_gradients([(gradient, table)])
        optimizers[1].apply_gradients([(tf.convert_to_tensor(gradient), dense)])
    np.testing.assert_allclose(table.sparse_read([0, 1, 2], training=False, missing="initial"), dense, rtol=1e-6)


def test_a_constant_loss_scale_of_keras_3():
    models = pair(tf.keras)
    models.ours.compile(tf.keras.optimizers.Adam(0.05, loss_scale_factor=64.0), "mse")
    # Keras's own cannot divide the gradient of an Embedding.
    models.dense.compile(tf.keras.optimizers.Adam(0.05), "mse")
    _assert_same_fit(models)


@pytest.mark.parametrize("option", ["use_ema", "loss scale", "clipnorm"])
def test_the_same_in_eager_mode(both_kerases, option):
    _assert_same_fit(pair(both_kerases).compile(lambda: OPTIONS[option](both_kerases), run_eagerly=True))


def test_ids_that_come_twice_are_clipped_as_keras_clips_them(both_kerases):
    keras = both_kerases
    data = batches(repeated=True)
    for clipping in ({"clipnorm": 0.1}, {"clipvalue": 0.01}, {"global_clipnorm": 0.1}):
        models = pair(keras).compile(lambda options=clipping: keras.optimizers.SGD(0.1, **options))
        ours, dense = (list(losses(model, data)) for model in models.models)
        np.testing.assert_allclose(ours, dense, rtol=1e-5)
        assert_alike(models, IDS)


def _bags(keras, layers, how, **options):
    """From ids [n, 8] to sums of rows [n, DIM] of a table, and the table."""
    if how == "collection":
        table = layers.TableConfig("item", embedding_dim=DIM, combiner="sum", initializer=1.0, **options)
        features = {name: layers.FeatureConfig(name, table) for name in ("first", "second")}
        layer = layers.EmbeddingCollection(features, name="several")
        return (
            lambda ids: keras.layers.Add()([*layer({"first": ids[:, :4], "second": ids[:, 4:]}).values()]),
            layer.tables["item"],
        )
    if how == "a layer of one's own":
        table = tfplugin.get_kv_variable("item", embedding_dim=DIM, initializer=1.0, **options)

        class Own(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.table = table

            def call(self, ids):
                halves = (tf.RaggedTensor.from_tensor(half) for half in (ids[:, :4], ids[:, 4:]))
                return sum(tf.nn.embedding_lookup_sparse(table, half, None, combiner="sum") for half in halves)

            def compute_output_shape(self, shape):
                return (None, DIM)

        return Own(), table
    layer = layers.Embedding(DIM, combiner="sum", initializer=1.0, name="item", **options)
    if how == "one lookup":
        return layer, layer.table
    return lambda ids: keras.layers.Add()([layer(ids[:, :4]), layer(ids[:, 4:])]), layer.table


@pytest.mark.parametrize("clipping", [{"clipvalue": 0.1}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}], ids=str)
@pytest.mark.parametrize(
    "how, options",
    [
        ("one lookup", {}),
        ("one lookup", {"parts": 3}),
        ("two lookups", {}),
        ("two lookups", {"parts": 3}),
        ("collection", {}),
        ("collection", {"parts": 3}),
        ("a layer of one's own", {}),
    ],
    ids=str,
)
def test_pooled_rows_are_clipped_whole_however_ids_are_grouped(both_kerases, rows_of, how, options, clipping):
    keras = both_kerases
    bags = np.array([[1, 1, 1, 2, 1, 2, 2, 2], [1, 3, 4, 4, 5, 5, 1, 1]])
    pooled, table = _bags(keras, tfplugin.tf_keras if keras is tf_keras else tfplugin.keras, how, **options)
    ids = keras.Input((8,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer="ones", trainable=False)(pooled(ids)))
    model.compile(keras.optimizers.SGD(0.1, **clipping), "mse")
    model.train_on_batch(bags, np.ones((2, 1)))
    counts = np.stack([np.bincount(bag, minlength=6) for bag in bags])
    gradient = counts.T @ (counts.sum(1, keepdims=True) * DIM - 1.0) * np.ones(DIM)  # of the mean of squares, [6, DIM]
    norm = np.linalg.norm(gradient)
    clipped = np.clip(gradient, -0.1, 0.1) if "clipvalue" in clipping else gradient * 0.1 / norm
    np.testing.assert_allclose(rows_of(table, np.arange(1, 6)), 1 - 0.1 * clipped[1:], rtol=1e-6)


def test_a_table_with_a_regularizer_is_clipped_as_a_dense_embedding_with_one(both_kerases):
    keras = both_kerases

    def twice(keras, embedding):
        """Looks each half of a batch up by itself."""
        ids = keras.Input((LENGTH,), dtype="int64")
        values = keras.layers.Concatenate(1)([embedding(ids[:, :1]), embedding(ids[:, 1:])])
        return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(values)))

    # A strength of 0: the dense layer has its penalty once, ours for each lookup.
    regularizer = keras.regularizers.L2(0.0)
    models = pair(
        keras, _embedding, twice, regularizer=regularizer, dense_options={"embeddings_regularizer": regularizer}
    ).compile(lambda: keras.optimizers.SGD(0.1, clipvalue=0.01))
    ours, dense = (list(losses(model, batches(repeated=True))) for model in models.models)
    np.testing.assert_allclose(ours, dense, rtol=1e-5)
    assert_alike(models, IDS)


def test_an_optimizer_wrapper_of_a_layer_clips_whole_rows(make, rows_of):
    layer = held(tf.keras, make(1, "only", initializer=0.0))
    for wrap, moved in ((lambda one: one, -2.0), (tfplugin.OptimizerWrapper, -1.0)):
        layer.table.upsert([7], [[0.0]])
        layer.optimizer = wrap(tf.keras.optimizers.SGD(1.0, clipvalue=1.0))
        model = tf.keras.Sequential([tf.keras.Input((2,), dtype="int64"), layer, tf.keras.layers.Flatten()])
        model.compile("sgd", "mse")
        model.train_on_batch(np.array([[7, 7]]), np.full((1, 2), -9.0))
        assert rows_of(layer.table, [7]).item() == moved


@pytest.mark.parametrize("repeated", [False, True])
def test_a_table_in_parts_is_clipped_as_a_dense_embedding(both_kerases, repeated):
    keras = both_kerases
    models = pair(keras, _embedding, initial=0.5, parts=3).compile(lambda: keras.optimizers.SGD(0.1, clipnorm=0.02))
    ours, dense = (list(losses(model, batches(repeated=repeated))) for model in models.models)
    np.testing.assert_allclose(ours, dense, rtol=1e-5)
    assert_alike(models, IDS)


@pytest.mark.parametrize("how", [{"run_eagerly": True}, {"steps_per_execution": 3}], ids=str)
def test_ways_to_run_a_step(both_kerases, how):
    _assert_same_fit(pair(both_kerases).compile(_adam(both_kerases), **how))


def test_weights_of_classes_and_samples(both_kerases):
    models = pair(both_kerases).compile(_adam(both_kerases), weighted_metrics=["mse"])
    weights = np.random.default_rng(0).uniform(0.5, 2, len(IDS)).astype(np.float32)
    _assert_same_fit(models, sample_weight=weights)
    ours, dense = (
        model.fit(IDS, (LABELS > 0).astype(int), ROWS, class_weight={0: 1.0, 1: 3.0}, shuffle=False, verbose=0).history
        for model in models.models
    )
    np.testing.assert_allclose(ours["loss"], dense["loss"], rtol=1e-5)
    assert_alike(models, IDS)


@pytest.fixture
def policy(both_kerases):
    """Sets the policy of layers that are made."""
    mixed_precision = both_kerases.mixed_precision
    name = "dtype_policy" if hasattr(mixed_precision, "dtype_policy") else "global_policy"
    before = getattr(mixed_precision, name)()
    set_policy = getattr(mixed_precision, f"set_{name}", None) or mixed_precision.set_global_policy
    yield set_policy
    set_policy(before)


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(both_kerases, policy, name):
    keras = both_kerases
    policy(name)
    models = pair(keras, _embedding).compile(_adam(keras))
    scaled = type(models.ours.optimizer).__name__.startswith("LossScale")
    assert scaled == (name == "mixed_float16")
    # Sums of 16-bit numbers: those of a batch come in one order for both.
    _assert_same_fit(models, bound=1e-3)


def _ops_that_ran(run):
    """The kinds of ops in the graphs that TensorFlow made of functions."""
    context.enable_run_metadata()
    try:
        run()
        graphs = context.export_run_metadata().function_graphs
    finally:
        context.disable_run_metadata()
    return {node.op for graph in graphs for part in graph.partition_graphs for node in part.node}


@pytest.mark.thorough
@pytest.mark.parametrize("layer", [by_hand, _embedding])
def test_jit_compile_compiles_the_dense_part(both_kerases, layer):
    models = pair(both_kerases, layer).compile(_adam(both_kerases), jit_compile=True)
    assert models.ours.jit_compile
    ops = _ops_that_ran(lambda: models.ours.train_on_batch(*DATA[0]))
    assert {"_XlaRun", "KvTableGather", "KvTableApply"} <= ops
    models.dense.train_on_batch(*DATA[0])
    _assert_same_fit(models)
    assert models.ours.jit_compile
    models.ours.evaluate(IDS, LABELS, verbose=0)


@pytest.mark.thorough
def test_jit_compile_and_an_optimizer_whose_own_ops_update_the_rows(both_kerases):
    class Own(both_kerases.optimizers.Adam):
        def update_step(self, *args):
            return super().update_step(*args)

    models = pair(both_kerases)
    models.ours.compile(Own(0.05), "mse", jit_compile=True)
    models.dense.compile(both_kerases.optimizers.Adam(0.05), "mse")
    _assert_same_fit(models)
    assert "generic" in str(tfplugin.explain(models.ours.optimizer, [models.table]))


def test_jit_compile_left_to_keras(monkeypatch):
    models = pair(tf.keras)
    # As where there is a GPU.
    monkeypatch.setattr(type(models.ours), "_resolve_auto_jit_compile", lambda model: True)
    models.ours.compile("adam", "mse")
    assert models.ours.jit_compile
    _fit(models.ours)
    models.ours.predict(IDS, verbose=0)


def test_rows_are_inserted_by_training_alone(both_kerases):
    models = pair(both_kerases, initial=0.5).compile(_adam(both_kerases))
    model, table = models.ours, models.table
    model.predict(IDS, verbose=0)
    model.evaluate(IDS, LABELS, verbose=0)
    assert int(table.size()) == 0
    model.fit(IDS, LABELS, verbose=0, validation_data=(UNSEEN, LABELS))
    assert int(table.size()) == VOCABULARY
    model.predict(UNSEEN, verbose=0)
    model.evaluate(UNSEEN, LABELS, verbose=0)
    model.test_on_batch(UNSEEN, LABELS)
    assert int(table.size()) == VOCABULARY
    model.train_on_batch(UNSEEN, LABELS)
    assert int(table.size()) == VOCABULARY + UNSEEN.size


def test_rows_that_a_step_does_not_touch_stay_as_they_are(both_kerases):
    models = pair(both_kerases).compile(_adam(both_kerases, weight_decay=0.1))
    model = models.ours
    model.train_on_batch(IDS, LABELS)
    before, _ = models.rows()
    model.train_on_batch(np.full((2, LENGTH), 5), LABELS[:2])
    after, _ = models.rows()
    moved = (after != before).any(1)
    assert moved.tolist() == [key == 5 for key in range(VOCABULARY)]


def test_tables_in_parts_in_nested_models_and_in_containers(both_kerases, make):
    keras = both_kerases
    tables = {
        "parts": make(DIM, "parts", initializer=0.5, partitioner=tf.compat.v1.fixed_size_partitioner(3)),
        "list": make(DIM, "list", initializer=0.5),
        "nested": make(DIM, "nested", initializer=0.5),
    }

    class Holds(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.whole = tables["parts"]
            self.some = {"others": [tables["list"]]}
            self.nested = held(keras, tables["nested"])

        def call(self, ids):
            return self.nested(ids) + sum(
                tf.nn.embedding_lookup(table, ids) for table in (self.whole, *self.some["others"])
            )

        def compute_output_shape(self, shape):
            return (*shape, DIM)

    inner = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), Holds()])
    model = model_of(keras, inner)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(IDS, LABELS, verbose=0)
    moved = {name: table.export()[1].numpy() - 0.5 for name, table in tables.items()}
    assert all((rows != 0).all() for rows in moved.values())
    np.testing.assert_allclose(np.sort(moved["parts"], 0), np.sort(moved["list"], 0), rtol=1e-5)


def test_a_layer_that_is_shared_and_a_model_of_tables_alone(both_kerases, make, rows_of):
    keras = both_kerases
    table = make(1, "only", initializer=0.5)
    layer = held(keras, table)
    first, second = (keras.Input((1,), dtype="int64") for _ in range(2))
    both = keras.layers.Add()([layer(first), layer(second)])
    model = keras.Model([first, second], keras.layers.Flatten()(both))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit([np.array([[1], [2]]), np.array([[1], [3]])], np.zeros((2, 1)), verbose=0)
    # d/d row of the mean of (2 a)^2 and (b + c)^2, in one step for each row.
    np.testing.assert_allclose(rows_of(table, [1, 2, 3]).ravel(), [-0.5, 0.0, 0.0], atol=1e-6)


def test_layers_that_are_frozen(both_kerases):
    models = pair(both_kerases)
    models.embedding.trainable = False
    models.dense.get_layer("embedding").trainable = False
    models.compile(_adam(both_kerases))
    before, _ = models.rows()
    _assert_same_fit(models)
    np.testing.assert_array_equal(models.rows()[0], before)
    models.embedding.trainable = True
    models.dense.get_layer("embedding").trainable = True
    models.compile(_adam(both_kerases))
    _assert_same_fit(models)
    assert (models.rows()[0] != before).all()


@pytest.mark.parametrize(
    "said",
    [
        (),
        (("first", False),),
        (("first", False), ("second", True)),  # has been so: Keras hears nothing
        (("first", False), ("second", False), ("second", True)),
        (("first", False), ("first", True)),
        (("ctr", False), ("ctr", True), ("second", False)),
    ],
    ids=str,
)
def test_a_table_of_a_frozen_layer_and_another_is_trained_as_a_variable_of_both(both_kerases, make, rows_of, said):
    keras = both_kerases
    dense = tf.Variable if keras is tf_keras else keras.Variable

    class Mean(keras.layers.Layer):
        def __init__(self, rows, name):
            super().__init__(name=name)
            self.rows = rows

        def call(self, ids):
            rows = self.rows
            looked_up = keras.ops.take(rows, ids, 0) if hasattr(rows, "path") else tf.nn.embedding_lookup(rows, ids)
            return tf.reduce_mean(looked_up, 1)

    held = (make(DIM, "shared", initializer=1.0), dense(np.ones((VOCABULARY, DIM), np.float32)))
    for rows in held:
        ids = keras.Input((2,), dtype="int64")
        both = [Mean(rows, name)(ids) for name in ("first", "second")]
        model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer="ones")(keras.layers.Add()(both)), name="ctr")
        for name, trainable in said:
            (model if name == "ctr" else model.get_layer(name)).trainable = trainable
        model.compile(keras.optimizers.SGD(0.01), "mse")
        model.fit(np.arange(VOCABULARY).reshape(-1, 2), np.zeros((VOCABULARY // 2, 1)), epochs=2, verbose=0)
    np.testing.assert_allclose(rows_of(held[0], np.arange(VOCABULARY)), np.asarray(held[1]), rtol=1e-5)


def test_a_layer_has_an_optimizer_of_its_own(both_kerases):
    keras = both_kerases
    for scaled in (False, True):
        models = pair(keras)
        models.embedding.optimizer = keras.optimizers.SGD(0.0)
        plain = keras.optimizers.Adam(0.05)
        models.ours.compile(keras.mixed_precision.LossScaleOptimizer(plain) if scaled else plain, "mse")
        before, _ = models.rows()
        _fit(models.ours)
        np.testing.assert_array_equal(models.rows()[0], before)
        assert int(models.ours.optimizer.iterations) == int(models.embedding.optimizer.iterations) == 2 * len(DATA)

        models = pair(keras)
        models.embedding.optimizer = keras.optimizers.Adam(0.05)
        plain = keras.optimizers.Adam(0.05)
        models.ours.compile(keras.mixed_precision.LossScaleOptimizer(plain) if scaled else plain, "mse")
        models.dense.compile(keras.optimizers.Adam(0.05), "mse")
        _assert_same_fit(models)


@pytest.mark.parametrize("as_wrapper", [False, True])
def test_an_optimizer_of_a_layer_that_scales_a_loss(make, as_wrapper):
    k3 = tf.keras.optimizers
    for own, way_out in (
        (k3.LossScaleOptimizer(k3.SGD(0.1)), "Give the layer the SGD that is in it"),
        (k3.SGD(0.1, loss_scale_factor=64.0), "Leave out loss_scale_factor=64.0"),
    ):
        table = make(1, "own", initializer=0.5)
        layer = held(tf.keras, table)
        layer.optimizer = tfplugin.OptimizerWrapper(own) if as_wrapper else own
        model = tf.keras.Sequential([tf.keras.Input((1,), dtype="int64"), layer, tf.keras.layers.Flatten()])
        for plain in (k3.SGD(0.1), k3.SGD(0.1, loss_scale_factor=64.0)):
            with pytest.raises(ValueError, match=f"'own:0': the optimizer of its layer, .* is never given.*{way_out}"):
                model.compile(plain, "mse")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([[1]], tf.int64)))
        gradients = tape.gradient(loss, model.trainable_variables)
        with pytest.raises(ValueError, match=f"'own:0': the optimizer of its layer, .* is never given.*{way_out}"):
            k3.SGD(0.1).apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        assert table.sparse_read([1]).numpy().tolist() == [[0.5]]


def test_an_optimizer_of_a_layer_of_tf_keras_is_given_gradients_scaled_back():
    models = pair(tf_keras).compile(lambda: tf_keras.optimizers.SGD(0.1))
    models.embedding.optimizer = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.1))
    _assert_same_fit(models)


@pytest.mark.parametrize("scaled", ["", "fixed", "dynamic", "in the model's"])
def test_a_layer_and_its_model_have_one_optimizer(scaled):
    k3 = tf.keras.optimizers
    one = k3.Adam(0.05, loss_scale_factor=64.0 if scaled == "fixed" else None)
    whole = k3.LossScaleOptimizer(one) if scaled in ("dynamic", "in the model's") else one
    models = pair(tf.keras)
    models.embedding.optimizer = one if scaled == "in the model's" else whole
    models.ours.compile(whole, "mse")
    models.dense.compile(k3.Adam(0.05), "mse")
    _assert_same_fit(models)
    assert int(one.iterations) == 2 * len(DATA)


def test_a_model_of_one_table_that_has_an_optimizer_of_its_own(both_kerases, make, rows_of):
    keras = both_kerases
    layer = held(keras, make(1, "only", initializer=0.5))
    layer.optimizer = keras.optimizers.SGD(0.5)
    model = keras.Sequential([keras.Input((1,), dtype="int64"), layer, keras.layers.Flatten()])
    model.compile("adam", "mse")
    model.fit(np.array([[1], [2]]), np.zeros((2, 1)), verbose=0)
    np.testing.assert_allclose(rows_of(layer.table, [1, 2]).ravel(), [0.25, 0.25])
    assert int(model.optimizer.iterations) == 1


def test_a_step_that_is_skipped_updates_nothing(both_kerases):
    keras = both_kerases
    for own in (False, True):
        models = pair(keras)
        if own:
            models.embedding.optimizer = keras.optimizers.SGD(0.1)
        models.ours.compile(keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(0.05)), "mse")
        before, _ = models.rows()
        models.ours.train_on_batch(IDS, np.where(LABELS[0] == LABELS, np.inf, LABELS))
        np.testing.assert_array_equal(models.rows()[0], before)
        models.ours.train_on_batch(IDS, LABELS)
        assert (models.rows()[0] != before).all()


def test_an_optimizer_of_the_table_engine_for_a_layer(both_kerases):
    models = pair(both_kerases)
    models.embedding.optimizer = tfplugin.optimizers.Adagrad(0.1)
    models.compile(_adam(both_kerases))
    before, _ = models.rows()
    _fit(models.ours)
    assert (models.rows()[0] != before).all()
    assert any("accumulator" in name for name in models.table.slot_names())


def test_what_the_user_said_of_the_optimizer_holds(both_kerases):
    models = pair(both_kerases)
    optimizer = both_kerases.optimizers.Adam(0.05)
    tfplugin.OptimizerWrapper(optimizer, fused=False)
    models.ours.compile(optimizer, "mse")
    models.dense.compile(both_kerases.optimizers.Adam(0.05), "mse")
    _assert_same_fit(models)
    assert "generic: fused=False" in str(tfplugin.explain(optimizer))


def test_regularized_tables_beside_keras_own(both_kerases, make):
    """Keras 3 makes losses of all trainable weights with a regularizer: lookups have made those of tables."""
    table = make(DIM, "r", regularizer=lambda rows: 0.1 * tf.reduce_sum(rows**2), initializer=0.5)
    model = model_of(both_kerases, held(both_kerases, table))
    model.compile("sgd", "mse")
    _fit(model)


def test_pending_gradients_are_in_a_checkpoint(tmp_path):
    keras = tf.keras

    def built():
        models = pair(keras).compile(_adam(keras, gradient_accumulation_steps=2))
        return models

    models = built()
    models.ours.train_on_batch(*DATA[0])
    path = tf.train.Checkpoint(model=models.ours).save(str(tmp_path / "c"))
    models.ours.train_on_batch(*DATA[1])
    expected = models.rows()[0]
    models = built()
    tf.train.Checkpoint(model=models.ours).restore(path)
    models.ours.train_on_batch(*DATA[1])
    np.testing.assert_allclose(models.rows()[0], expected, rtol=1e-6)
