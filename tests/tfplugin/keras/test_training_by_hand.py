"""Loops by hand, as Keras's guides show them: the trainable weights of a model have the tables of its layers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras_pairs import DIM, assert_alike, batches, by_hand, pair

import tfplugin
import tfplugin.keras
import tfplugin.tf_keras

DATA = batches()

OPTIMIZERS = {
    "Adam": lambda keras: keras.optimizers.Adam(0.05),
    "clipped": lambda keras: keras.optimizers.SGD(0.1, global_clipnorm=0.2),
    "wrapped": lambda keras: tfplugin.OptimizerWrapper(keras.optimizers.Adam(0.05)),
    "loss scale": lambda keras: keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(0.05)),
}


def _embedding(keras, **options):
    layers = tfplugin.tf_keras if keras is tf_keras else tfplugin.keras
    return layers.Embedding(DIM, name="embedding", **options)


def _step(model, optimizer):
    """A step that is as in the guides of either Keras."""

    def step(ids, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids, training=True) - labels) ** 2)
            scaled = loss
            if hasattr(optimizer, "scale_loss"):
                scaled = optimizer.scale_loss(loss)
            elif hasattr(optimizer, "get_scaled_loss"):
                scaled = optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        if hasattr(optimizer, "get_unscaled_gradients"):
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


@pytest.mark.parametrize("layer", [_embedding, by_hand])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_by_hand_is_that_of_a_dense_embedding(both_kerases, optimizer, traced, layer):
    models = pair(both_kerases, layer, initial=0.5)
    steps = [_step(model, OPTIMIZERS[optimizer](both_kerases)) for model in models.models]
    if traced:
        steps = [tf.function(step) for step in steps]
    for ids, labels in DATA:
        ours, dense = (float(step(tf.constant(ids), tf.constant(labels))) for step in steps)
        np.testing.assert_allclose(ours, dense, rtol=1e-5)
    assert_alike(models, DATA[0][0])


def test_what_keras_itself_asks_for_has_no_tables(both_kerases):
    import tfplugin.sok  # noqa: F401  # which puts wrappers of its own around the same properties

    models = pair(both_kerases, _embedding)
    assert models.ours.trainable_variables[-1] is models.table
    assert len(models.ours.trainable_weights) == len(models.ours.weights) + 1
    assert len(models.ours.get_weights()) == len(models.ours.weights) + 2, "keys and rows"
    optimizer = both_kerases.optimizers.Adam(0.1)
    optimizer.build(models.ours.trainable_variables)
    models.ours.compile(optimizer, "mse")
    models.ours.fit(*DATA[0], verbose=0)
    tuner = {"__name__": "keras_tuner.src.engine.tuner"}
    exec("def count(model):\n    return len(model.trainable_weights)", tuner)
    assert tuner["count"](models.ours) == len(models.ours.weights)


@pytest.mark.parametrize("scales", [False, True])
def test_apply_without_variables_takes_those_of_build(scales):
    keras = tf.keras
    models = pair(keras, _embedding)
    for model in models.models:
        optimizer = keras.optimizers.Adam(0.05)
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if scales else optimizer
        optimizer.build(model.trainable_variables)
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean((model(DATA[0][0], training=True) - DATA[0][1]) ** 2))
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
    assert_alike(models, DATA[0][0])


def test_a_stateless_call_takes_the_trainable_variables():
    model = pair(tf.keras, _embedding).ours
    outputs, _ = model.stateless_call(model.trainable_variables, model.non_trainable_variables, DATA[0][0])
    np.testing.assert_array_equal(outputs, model(DATA[0][0]))
    layer = tfplugin.keras.Embedding(2, combiner="sum", initializer=1.0, name="stateless")
    layer.build((None, 3))
    rows, _ = layer.stateless_call(layer.trainable_variables, [], np.array([[7, 8]]), training=True)
    assert rows.numpy().tolist() == [[2.0, 2.0]]


def test_frozen_layers_and_those_with_an_optimizer_of_their_own(both_kerases):
    layers = tfplugin.tf_keras if both_kerases is tf_keras else tfplugin.keras
    frozen = layers.Embedding(2, trainable=False, name="frozen")
    assert frozen.trainable_variables == []
    own = layers.Embedding(2, initializer=1.0, optimizer=both_kerases.optimizers.SGD(0.25), name="own")
    other = layers.Embedding(2, initializer=1.0, name="other")
    optimizer = both_kerases.optimizers.SGD(0.5)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(own(tf.constant([7]), training=True) + other(tf.constant([7]), training=True))
    variables = own.trainable_variables + other.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    assert own(tf.constant([7])).numpy().tolist() == [[0.75, 0.75]]
    assert other(tf.constant([7])).numpy().tolist() == [[0.5, 0.5]]


def test_a_table_that_comes_twice_is_updated_once(both_kerases):
    layers = tfplugin.tf_keras if both_kerases is tf_keras else tfplugin.keras
    layer = layers.Embedding(2, initializer=1.0, name="twice")
    for optimizer in (both_kerases.optimizers.SGD(0.5), tfplugin.OptimizerWrapper(both_kerases.optimizers.SGD(0.5))):
        before = layer(tf.constant([7]), training=True).numpy()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([7]), training=True))
        variables = [*layer.trainable_variables, layer.table]
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        assert (layer(tf.constant([7])).numpy() == before - 0.5).all()
        other = tf.IndexedSlices(gradients[0].values * 2, gradients[0].indices)
        with pytest.raises(ValueError, match=r"twice:0 comes twice, with two gradients"):
            optimizer.apply_gradients([(gradients[0], layer.table), (other, layer.table)])


def test_averages_take_the_place_of_rows(both_kerases):
    layers = tfplugin.tf_keras if both_kerases is tf_keras else tfplugin.keras
    layer = layers.Embedding(2, initializer=1.0, name="averaged")
    optimizer = both_kerases.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([7]), training=True))
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    live = layer(tf.constant([7])).numpy()
    optimizer.finalize_variable_values(layer.trainable_variables)
    assert (layer(tf.constant([7])).numpy() > live).all()


def test_averages_of_weights_in_steps_without_the_table(both_kerases):
    layers = tfplugin.tf_keras if both_kerases is tf_keras else tfplugin.keras
    layer = layers.Embedding(2, initializer=1.0, name="averaged")
    weight, plain = (tf.Variable([1.0, 1.0]) for _ in range(2))
    if both_kerases is not tf_keras:
        weight, plain = (both_kerases.Variable([1.0, 1.0]) for _ in range(2))

    def optimizer():
        return both_kerases.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)

    ours, stock = optimizer(), optimizer()
    for step in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([7]), training=True) * tf.convert_to_tensor(weight))
        of_row, of_weight = tape.gradient(loss, [layer.table, weight if both_kerases is tf_keras else weight.value])
        if step % 2:
            ours.apply_gradients([(of_weight, weight)])
        else:
            ours.apply_gradients([(of_weight, weight), (of_row, layer.table)])
        stock.apply_gradients([(of_weight, plain)])
        np.testing.assert_allclose(weight.numpy(), plain.numpy(), rtol=1e-6)
    assert not np.allclose(weight.numpy(), 1.0)


@pytest.mark.parametrize("by", ["fit", "hand"])
def test_the_optimizer_of_a_layer_is_told(both_kerases, by):
    own, optimizer = both_kerases.optimizers.SGD(0.25), both_kerases.optimizers.Adam(0.05)
    models = pair(both_kerases, lambda keras: _embedding(keras, optimizer=own))
    table, model = models.table, models.ours
    told = "by the optimizer of its layer: " + tfplugin.explain(own, [table]).to_dict()["embedding:0"]
    if by == "fit":
        model.compile(optimizer, "mse")
        assert tfplugin.explain(model.optimizer, [table]).to_dict() == {"embedding:0": told}
        model.fit(*DATA[0], verbose=0)
    else:
        _step(model, optimizer)(*map(tf.constant, DATA[0]))
    for asked in (optimizer, both_kerases.mixed_precision.LossScaleOptimizer(optimizer)):
        assert tfplugin.explain(asked, [table]).to_dict() == {"embedding:0": told}
    # Those that are given the table itself update it.
    assert tfplugin.explain(own, [table]).to_dict() == {"embedding:0": told.rpartition("layer: ")[2]}
    for asked in (tf.compat.v1.train.AdamOptimizer(0.1), tfplugin.OptimizerWrapper(both_kerases.optimizers.Adam(0.1))):
        assert tfplugin.explain(asked, [table]).to_dict() == {"embedding:0": "fused: adam"}
    models.embedding.optimizer = None
    model.compile(optimizer, "mse")
    assert tfplugin.explain(optimizer, [table]).to_dict() == {"embedding:0": "fused: adam"}
