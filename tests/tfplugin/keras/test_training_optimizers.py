"""Each optimizer of Keras under plain ``compile`` and ``fit``, beside a dense ``Embedding``."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras_pairs import DIM, VOCABULARY, assert_alike, batches, losses, pair

import tfplugin

DATA = batches(3)

OPTIMIZERS = {
    "SGD": lambda o: o.SGD(0.1),
    "momentum": lambda o: o.SGD(0.1, momentum=0.9),
    "nesterov": lambda o: o.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda o: o.Adam(0.05),
    "amsgrad": lambda o: o.Adam(0.05, amsgrad=True),
    "AdamW": lambda o: o.AdamW(0.05, weight_decay=0.05),
    "Adagrad": lambda o: o.Adagrad(0.1),
    "Adadelta": lambda o: o.Adadelta(1.0),
    "RMSprop": lambda o: o.RMSprop(0.05),
    "centered RMSprop": lambda o: o.RMSprop(0.05, momentum=0.5, centered=True),
    "Ftrl": lambda o: o.Ftrl(0.1),
    "Nadam": lambda o: o.Nadam(0.05),
    "Adamax": lambda o: o.Adamax(0.05),
    "Lion": lambda o: o.Lion(0.01),
}
LEGACY = ("SGD", "momentum", "Adam", "Adagrad", "Adadelta", "RMSprop", "Ftrl", "Adamax")


def _assert_same(keras, make, **options):
    models = pair(keras).compile(make, **options)
    ours, dense = (list(losses(model, DATA)) for model in models.models)
    np.testing.assert_allclose(ours, dense, rtol=1e-5)
    assert_alike(models, DATA[0][0])
    return models


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(both_kerases, name):
    # In a function that is traced more than once Nadam of tf_keras moves its product of momenta on too often.
    eagerly = name == "Nadam" and both_kerases is tf_keras
    models = _assert_same(both_kerases, lambda: OPTIMIZERS[name](both_kerases.optimizers), run_eagerly=eagerly)
    assert tfplugin.explain(models.ours.optimizer, [models.table]).to_dict()["pair:0"].startswith("fused: ")
    # Slots of rows are in the rows.
    assert all(tuple(v.shape) != (VOCABULARY, DIM) for v in models.ours.optimizer.variables)


@pytest.mark.thorough
@pytest.mark.parametrize("name", LEGACY)
def test_legacy_optimizers_of_tf_keras(name):
    _assert_same(tf_keras, lambda: OPTIMIZERS[name](tf_keras.optimizers.legacy))


def test_updates_are_fused_where_sok_is_imported_too():
    importlib.import_module("tfplugin.sok")
    models = pair(tf.keras).compile(lambda: tf.keras.optimizers.Adam(0.05))
    models.ours.train_on_batch(*DATA[0])
    assert tfplugin.explain(models.ours.optimizer, [models.table]).to_dict() == {"pair:0": "fused: adam"}


def test_lamb_takes_the_norm_of_a_row(both_kerases):
    if both_kerases is tf_keras:
        pytest.skip("Keras 3 has it")
    models = pair(both_kerases).compile(lambda: both_kerases.optimizers.Lamb(0.05))
    before, _ = models.rows()
    list(losses(models.ours, DATA))
    assert (models.rows()[0] != before).all()


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_that_couple_the_rows_of_a_matrix_are_refused_at_compile(both_kerases, name):
    make = getattr(both_kerases.optimizers, name, None)
    if make is None:
        pytest.skip(f"this Keras has no {name}")
    with pytest.raises(ValueError, match=rf"Model 'ctr', key-value variable 'pair:0': {name} couples the rows"):
        pair(both_kerases).ours.compile(make(0.05), "mse")


@pytest.mark.parametrize("name", ["MultiOptimizer", "ScheduleFreeAdamW"])
def test_optimizers_that_are_not_for_rows_have_the_other_weights(name):
    optimizers = tf.keras.optimizers
    if not hasattr(optimizers, name):
        pytest.skip(f"this Keras has no {name}")

    def make():
        if name == "ScheduleFreeAdamW":
            return optimizers.ScheduleFreeAdamW(0.05)
        return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.05)))

    models = pair(tf.keras)
    with pytest.raises(ValueError, match=rf"Model 'ctr', key-value variable 'pair:0': {name} cannot update"):
        models.ours.compile(make(), "mse")
    with pytest.raises(ValueError, match=rf"{name} cannot update a key-value variable.* optimizer of its own"):
        make().apply([tf.IndexedSlices(tf.ones([1, DIM]), tf.constant([5], tf.int64))], [models.table])
    models.embedding.optimizer = optimizers.Adam(0.05)
    models.ours.compile(make(), "mse")
    before, weights = models.rows()[0], models.ours.layers[-1].get_weights()[0]
    models.ours.train_on_batch(*DATA[0])
    assert (models.rows()[0] != before).all()
    assert (models.ours.layers[-1].get_weights()[0] != weights).any()


def test_slots_that_start_from_the_values_of_their_variables_are_an_error(both_kerases):
    class Anchored(both_kerases.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            for variable in variables:
                if both_kerases is tf_keras:
                    self.add_variable_from_reference(variable, "anchor", initial_value=variable)
                else:
                    self.add_variable_from_reference(variable, "anchor").assign(variable)

    models = pair(both_kerases).compile(lambda: Anchored(0.05), run_eagerly=True)
    with pytest.raises(ValueError, match=r"'pair/Anchored_rows' stands for rows.*start from a constant"):
        models.ours.train_on_batch(*DATA[0])


def test_averages_and_accumulation_at_once_are_refused_at_compile():
    keras = tf.keras
    with pytest.raises(ValueError, match=r"Model 'ctr', key-value variable 'pair:0': .*use_ema.*not both"):
        pair(keras).ours.compile(keras.optimizers.SGD(0.1, use_ema=True, gradient_accumulation_steps=2), "mse")


def test_averages_of_a_layers_own_optimizer_are_refused_at_compile(both_kerases):
    models = pair(both_kerases)
    models.embedding.optimizer = both_kerases.optimizers.SGD(0.1, use_ema=True)
    with pytest.raises(ValueError, match="the optimizer of its layer has moving averages"):
        models.ours.compile("adam", "mse")


def test_strategies_that_copy_variables_are_refused_at_compile(both_kerases, make):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        dense = both_kerases.Sequential([both_kerases.layers.Dense(1)])
    table = make(name="copied")
    layer = both_kerases.layers.Dense(1)
    layer.table = table
    dense.add(layer)
    with pytest.raises(ValueError, match="'copied:0' cannot be made under MirroredStrategy"):
        dense.compile("adam", "mse")


def test_an_optimizer_made_under_a_strategy_is_refused():
    model = pair(tf.keras).ours
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        optimizer = tf.keras.optimizers.Adam()
        with pytest.raises(ValueError, match="cannot be updated by an optimizer that was made under MirroredStrategy"):
            model.compile("adam", "mse")
    with pytest.raises(ValueError, match="cannot be updated by an optimizer that was made under MirroredStrategy"):
        model.compile(optimizer, "mse")
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model.compile("adam", "mse")


@pytest.mark.parametrize("of", ["keras.optimizers", "tf_keras.optimizers", "tf_keras.optimizers.legacy"])
def test_one_device_strategy(of):
    keras, optimizers = importlib.import_module(of.partition(".")[0]), importlib.import_module(of)

    def make():
        return optimizers.Adam(0.05)

    models = pair(keras)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = pair(keras)
        model.compile(make)
        models.dense = model.dense
    ours, dense = (list(losses(one, DATA)) for one in model.models)
    np.testing.assert_allclose(ours, dense, rtol=1e-5)
