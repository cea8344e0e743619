"""Keras 3 and parameter servers: it trains on none, and says so in words of TensorFlow's datasets.

A model of Keras 3 that holds tables and was made in the scope of a `tf.distribute.ParameterServerStrategy` is refused
before its first step, with what to do instead. tf_keras trains there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfplugin import keras_models
from tfplugin.keras_hooks import KerasHooks
from tfplugin.wrapped_method import defining_class, wrap_method


def _train(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = getattr(model, "distribute_strategy", None)
    if isinstance(strategy, tf.distribute.ParameterServerStrategy) and any(keras_models.table_holders(model)):
        raise NotImplementedError(
            f"Model '{model.name}' of Keras 3 has tables on parameter servers, and Keras 3 does not train under "
            "tf.distribute.ParameterServerStrategy: make the model with tf_keras, whose fit does, or train it in a "
            "loop of a tf.distribute.coordinator.ClusterCoordinator; in both update the tables by "
            "tfplugin.apply_in_backward(table, optimizer)."
        )
    return original(model, *args, **kwargs)


def _changes(keras: Any) -> Iterator[Callable[[], None]]:
    if keras.__name__ != "keras":
        return
    for method in ("fit", "train_on_batch"):
        owner = defining_class(keras.Model, method)
        assert owner is not None
        yield wrap_method(owner, method, _train)


_hooks = KerasHooks(_changes)
install, uninstall = _hooks.install, _hooks.uninstall
