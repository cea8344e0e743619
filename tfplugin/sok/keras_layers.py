"""Has Keras know the variables of sok that layers hold.

Keras 3 lists variables of its own kind only, and tf_keras ``tf.Variable`` s. So a variable of sok that a layer has as
an attribute, or in a list or dictionary that is one, would be missing in ``trainable_variables``, and what trains by
that list would never train it. Here the properties that list variables get it. Of tables that Keras cannot train
`tfplugin.keras_models` and `tfplugin.not_dense` tell; of the static variables, which Keras 3 does not train, this does.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfplugin.keras_hooks import KerasHooks
from tfplugin.keras_models import held_by, is_shard, is_table
from tfplugin.sok.variables import is_model_parallel
from tfplugin.wrapped_method import wrap_method, wrap_property


def _variables(original: Callable[[Any], list[Any]], layer: Any) -> list[Any]:
    """``Layer.variables`` of Keras 3, which the two after it go by."""
    return _with(original(layer), held_by(layer, is_model_parallel))


def _trainable_variables(original: Callable[[Any], list[Any]], layer: Any) -> list[Any]:
    """``Layer.trainable_variables`` of Keras 3. Freezing a layer freezes its own variables only."""
    frozen = _frozen(layer)
    return [variable for variable in original(layer) if id(variable) not in frozen]


def _non_trainable_variables(original: Callable[[Any], list[Any]], layer: Any) -> list[Any]:
    """``Layer.non_trainable_variables`` of Keras 3."""
    return _with(original(layer), _frozen(layer).values())


def _frozen(layer: Any) -> dict[int, Any]:
    """The variables of sok that only layers hold that are not trained."""
    held: dict[bool, dict[int, Any]] = {True: {}, False: {}}
    for one in layer._flatten_layers():
        held[bool(one.trainable)].update((id(variable), variable) for variable in held_by(one, is_model_parallel))
    return {key: variable for key, variable in held[False].items() if key not in held[True]}


def _trainable_weights(original: Callable[[Any], list[Any]], layer: Any) -> list[Any]:
    """``trainable_weights`` of tf_keras."""
    listed = original(layer)
    return _with(listed, (v for v in held_by(layer, is_model_parallel) if v.trainable)) if layer.trainable else listed


def _with(listed: list[Any], held: Iterable[Any]) -> list[Any]:
    # Not what gradients of lookups update: no optimizer has to.
    known = {id(variable) for variable in listed}
    added = {id(v): v for v in held if id(v) not in known and getattr(v, "_in_backward", None) is None}
    return [*listed, *added.values()]


def _compile(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """``Model.compile`` of Keras 3, whose optimizer makes what it keeps for all ``trainable_variables``."""
    result = original(model, *args, **kwargs)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and "build" not in vars(optimizer):
        stock = type(optimizer).build

        def build(self: Any, variables: Any) -> Any:
            return stock(self, [v for v in variables if not (is_table(v) and is_model_parallel(v))])

        build.keeps_update = True  # type: ignore[attr-defined]  # for `fused_rule_of`

        object.__setattr__(optimizer, "build", types.MethodType(build, optimizer))
    return result


def _make_train_function(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``fit`` and ``train_on_batch`` of Keras 3 train by: its own step trains variables of its own kind."""
    step = next(cls for cls in type(model).__mro__ if "train_step" in vars(cls))
    shards = [variable for variable in model.trainable_variables if is_shard(variable)]
    if shards and step.__module__.startswith("keras."):
        raise ValueError(
            f"`fit` of model '{model.name}' cannot train sok.Variable '{shards[0].name}': Keras 3 trains variables of "
            "its own kind only, and its rows would stay as they are. Write the training loop, or the model's "
            "train_step, with sok.OptimizerWrapper(optimizer); or make it with trainable=False."
        )
    return original(model, *args, **kwargs)


#: By the name of a Keras: module, class, what of it is wrapped, and by what.
_PROPERTIES: dict[str, tuple[tuple[str, str, str, Callable[..., Any]], ...]] = {
    "keras": (
        ("keras.src.layers.layer", "Layer", "variables", _variables),
        ("keras.src.layers.layer", "Layer", "trainable_variables", _trainable_variables),
        ("keras.src.layers.layer", "Layer", "non_trainable_variables", _non_trainable_variables),
    ),
    "tf_keras": (
        ("tf_keras.src.engine.base_layer", "Layer", "trainable_weights", _trainable_weights),
        ("tf_keras.src.engine.training", "Model", "trainable_weights", _trainable_weights),
    ),
}
_METHODS: dict[str, tuple[tuple[str, str, str, Callable[..., Any]], ...]] = {
    "keras": (
        ("keras.src.trainers.trainer", "Trainer", "compile", _compile),
        ("keras.src.backend.tensorflow.trainer", "TensorFlowTrainer", "make_train_function", _make_train_function),
    ),
    "tf_keras": (),
}


def _changes(keras: Any) -> Iterator[Callable[[], None]]:
    for wrap, wrapped in ((wrap_property, _PROPERTIES), (wrap_method, _METHODS)):
        for module, owner, attribute, replacement in wrapped[keras.__name__]:
            yield wrap(getattr(importlib.import_module(module), owner), attribute, replacement)


_hooks = KerasHooks(_changes)
install, uninstall = _hooks.install, _hooks.uninstall
