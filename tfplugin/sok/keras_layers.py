"""Has Keras know the variables of sok that layers hold.

Keras 3 lists variables of its own kind only, and tf_keras ``tf.Variable`` s. So a variable of sok that a layer has as
an attribute, or in a list or dictionary that is one, would be missing in ``trainable_variables``, and what trains by
that list would never train it. Here the properties that list variables get it, and what of Keras cannot train it says
so.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import wrapt

from tfplugin.kv_variable import KvVariable
from tfplugin.sok.placement import ModelParallel

#: Of containers in containers.
_DEPTH = 4


def held_by(layer: Any) -> Iterator[ModelParallel]:
    """The variables of sok that are attributes of a layer, or in containers that are. Not those of its layers."""
    for value in list(vars(layer).values()):
        yield from _inside(value, 0)


def _inside(value: Any, depth: int) -> Iterator[ModelParallel]:
    if isinstance(value, ModelParallel):
        yield value
    elif depth < _DEPTH and isinstance(value, (list, tuple, set, frozenset)):
        for one in list(value):
            yield from _inside(one, depth + 1)
    elif depth < _DEPTH and isinstance(value, dict):
        for one in list(value.values()):
            yield from _inside(one, depth + 1)


# ---- What takes the place of Keras's ---------------------------------------------------------------------------------


def _variables(original: Callable[[Any], list[Any]], layer: Any) -> list[Any]:
    """``Layer.variables`` of Keras 3, which the two after it go by."""
    return _with(original(layer), held_by(layer))


def _trainable_variables(original: Callable[[Any], list[Any]], layer: Any) -> list[Any]:
    """``Layer.trainable_variables`` of Keras 3. Freezing a layer freezes its own variables only."""
    frozen = _frozen(layer)
    return [variable for variable in original(layer) if id(variable) not in frozen]


def _non_trainable_variables(original: Callable[[Any], list[Any]], layer: Any) -> list[Any]:
    """``Layer.non_trainable_variables`` of Keras 3."""
    return _with(original(layer), iter(_frozen(layer).values()))


def _frozen(layer: Any) -> dict[int, ModelParallel]:
    """The variables of sok that only layers hold that are not trained."""
    held: dict[bool, dict[int, ModelParallel]] = {True: {}, False: {}}
    for one in layer._flatten_layers():
        held[bool(one.trainable)].update((id(variable), variable) for variable in held_by(one))
    return {key: variable for key, variable in held[False].items() if key not in held[True]}


def _trainable_weights(original: Callable[[Any], list[Any]], layer: Any) -> list[Any]:
    """``trainable_weights`` of tf_keras."""
    listed = original(layer)
    return _with(listed, (v for v in held_by(layer) if v.trainable)) if layer.trainable else listed


def _with(listed: list[Any], held: Iterator[Any]) -> list[Any]:
    # Not what gradients of lookups update: no optimizer has to.
    known = {id(variable) for variable in listed}
    added = {id(v): v for v in held if id(v) not in known and getattr(v, "_in_backward", None) is None}
    return [*listed, *added.values()]


def _is_table(variable: Any) -> bool:
    return isinstance(variable, ModelParallel) and isinstance(variable, KvVariable)


def _compile(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """``Model.compile`` of Keras 3, whose optimizer makes what it keeps for all ``trainable_variables``."""
    result = original(model, *args, **kwargs)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and "build" not in vars(optimizer):
        stock = type(optimizer).build

        def build(self: Any, variables: Any) -> Any:
            return stock(self, [v for v in variables if not _is_table(v)])

        object.__setattr__(optimizer, "build", types.MethodType(build, optimizer))
    return result


def _apply(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """``Optimizer.apply`` of Keras 3. `sok.OptimizerWrapper` shows it no tables."""
    _check_pairs(optimizer, zip(grads, trainable_variables or (), strict=False))
    return original(optimizer, grads, trainable_variables)


def _apply_gradients(
    original: Callable[..., Any], optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any
) -> Any:
    """That of tf_keras."""
    pairs = list(grads_and_vars)
    _check_pairs(optimizer, pairs)
    return original(optimizer, pairs, *args, **kwargs)


def _check_pairs(optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
    for gradient, variable in pairs:
        if gradient is not None and _is_table(variable):
            raise ValueError(
                f"{type(optimizer).__name__} of Keras cannot update sok.DynamicVariable '{variable.name}' by itself: "
                "apply its gradient with sok.OptimizerWrapper(optimizer), in a train_step or loop of your own; "
                "sok.filter_variables tells such variables from others."
            )


def _make_train_function(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``fit`` and ``train_on_batch`` of Keras 3 train by: its own step trains variables of its own kind."""
    step = next(cls for cls in type(model).__mro__ if "train_step" in vars(cls))
    ours = [variable for variable in model.trainable_variables if isinstance(variable, ModelParallel)]
    if ours and step.__module__.startswith("keras."):
        kind = "DynamicVariable" if _is_table(ours[0]) else "Variable"
        raise ValueError(
            f"`fit` of model '{model.name}' cannot train sok.{kind} '{ours[0].name}': Keras 3 trains variables of its "
            "own kind only, and its rows would stay as they are. Write the training loop, or the model's train_step, "
            "with sok.OptimizerWrapper(optimizer); or make it with trainable=False."
        )
    return original(model, *args, **kwargs)


#: By the name of a Keras: module, class, what of it is wrapped, and by what.
_WRAPPED: dict[str, tuple[tuple[str, str, str, Callable[..., Any]], ...]] = {
    "keras": (
        ("keras.src.layers.layer", "Layer", "variables", _variables),
        ("keras.src.layers.layer", "Layer", "trainable_variables", _trainable_variables),
        ("keras.src.layers.layer", "Layer", "non_trainable_variables", _non_trainable_variables),
        ("keras.src.optimizers.base_optimizer", "BaseOptimizer", "apply", _apply),
        ("keras.src.trainers.trainer", "Trainer", "compile", _compile),
        ("keras.src.backend.tensorflow.trainer", "TensorFlowTrainer", "make_train_function", _make_train_function),
    ),
    "tf_keras": (
        ("tf_keras.src.engine.base_layer", "Layer", "trainable_weights", _trainable_weights),
        ("tf_keras.src.engine.training", "Model", "trainable_weights", _trainable_weights),
        ("tf_keras.src.optimizers.optimizer", "_BaseOptimizer", "apply_gradients", _apply_gradients),
        ("tf_keras.src.optimizers.legacy.optimizer_v2", "OptimizerV2", "apply_gradients", _apply_gradients),
    ),
}
_undo: dict[str, list[Callable[[], None]]] = {}
_wanted = False


def install() -> None:
    """Makes the changes to the Kerases that are imported, and to others when they are."""
    global _wanted
    _wanted = True
    for name in _WRAPPED:
        if name in sys.modules:
            _wrap(sys.modules[name])
        else:
            wrapt.register_post_import_hook(_wrap, name)


def uninstall() -> None:
    """Leaves Keras as it was."""
    global _wanted
    _wanted = False
    while _undo:
        for undo in _undo.popitem()[1]:
            undo()


def _wrap(keras: Any) -> None:
    name = keras.__name__
    if not _wanted or name in _undo:
        return
    _undo[name] = []
    for module, owner, attribute, replacement in _WRAPPED[name]:
        _undo[name].append(_replace(getattr(importlib.import_module(module), owner), attribute, replacement))


def _replace(owner: type, attribute: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    original = vars(owner)[attribute]
    if isinstance(original, property):
        assert original.fget is not None
        getter = original.fget
        setattr(owner, attribute, property(lambda self: replacement(getter, self), doc=original.__doc__))
    else:

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return replacement(original, self, *args, **kwargs)

        method.__doc__ = original.__doc__
        setattr(owner, attribute, method)
    return lambda: setattr(owner, attribute, original)
