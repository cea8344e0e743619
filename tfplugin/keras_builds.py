"""Models of one's own class, whose layers a file has Keras build of nothing but the shapes of their inputs.

It calls them on floats to find what weights they have. Ids are none, and layers of ours take them for once. Where a
model cannot be built so, because it does with strings or ragged ids what floats do not bear, Keras 3 warns and goes on
without the weights: with tables that is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tfplugin.embedding_layers.built_by_shape import building
from tfplugin.held_tables import held_tables
from tfplugin.keras_hooks import KerasHooks
from tfplugin.wrapped_method import defining_class, wrap_method

#: Models of Keras 3 that could not be built of shapes, and why.
_failed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _built_by_run(original: Callable[..., Any], layer: Any, shapes: Any) -> Any:
    """Of Keras 3: gives whether the layer's call could be traced."""
    call, told = layer.call, []

    def heard(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
            raise

    with building():
        built = original(_WithCall(layer, heard), shapes)
    _failed.pop(layer, None)
    if not built:
        _failed[layer] = told[0] if told else "its inputs are nested arguments"
    return built


class _WithCall:
    """A layer whose call is another one."""

    def __init__(self, layer: Any, call: Callable[..., Any]) -> None:
        self._layer, self.call = layer, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _build_from_config_3(original: Callable[..., Any], model: Any, config: Any) -> Any:
    """Of Keras 3, which swallows what the model's own ``build`` raises."""
    returned = original(model, config)
    own_build = not getattr(model.build, "_is_default", False)
    if config and own_build and not model.built:
        _failed[model] = "its method build failed"
    return returned


def _build_from_config(original: Callable[..., Any], layer: Any, config: Any) -> Any:
    """Of tf_keras."""
    try:
        return original(layer, config)
    except Exception as error:
        if not hasattr(layer, "_flatten_layers") or not held_tables(layer):
            raise
        raise _cannot_be_built(layer, str(error)) from error


def _build(original: Callable[..., Any], model: Any, input_shape: Any) -> Any:
    """Of tf_keras."""
    with building():
        return original(model, input_shape)


def _infer(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Of a `Sequential` without an ``Input``: it makes one of what it is called on, and later casts ids to that."""
    with building(False):
        return original(model, *args, **kwargs)


def check_built(model: Any) -> None:
    """Raises ValueError for a model from a file that has a part which should have been built, and was not."""
    if not hasattr(model, "_flatten_layers"):
        return
    for layer in model._flatten_layers():
        if layer in _failed and any(not one.built for one in layer._flatten_layers()):
            raise _cannot_be_built(layer, _failed[layer])


def _cannot_be_built(layer: Any, why: str) -> ValueError:
    unbuilt = [f"'{one.name}'" for one in layer._flatten_layers() if one is not layer and not one.built]
    without = f" ({', '.join(unbuilt)} would have no weights)" if unbuilt else ""
    name = f"'{layer.name}' ({type(layer).__name__})"
    return ValueError(
        f"{name} cannot be built of the shapes of its inputs, of which Keras takes all for floats{without}: {why}\n"
        f"Nothing was loaded. Make the model, call it on some ids, and load the file by model.load_weights; or give "
        f"{type(layer).__name__} a method build_from_config(self, config) that calls it on ids."
    )


# ---- Installing ------------------------------------------------------------------------------------------------------


def _changes(keras: Any) -> Iterator[Callable[[], None]]:
    """Wraps what a Keras has."""
    model = keras.Model
    if keras.__name__ == "tf_keras":
        yield wrap_method(defining_class(model, "build"), "build", _build)
        yield wrap_method(keras.Sequential, "_build_graph_network_for_inferred_shape", _infer)
        yield wrap_method(defining_class(model, "build_from_config"), "build_from_config", _build_from_config)
        return
    for method in ("_build_by_run_for_single_pos_arg", "_build_by_run_for_kwargs"):
        owner = defining_class(model, method)
        if owner is not None:
            yield wrap_method(owner, method, _built_by_run)
    yield wrap_method(defining_class(model, "build_from_config"), "build_from_config", _build_from_config_3)


_hooks = KerasHooks(_changes)
install, uninstall = _hooks.install, _hooks.uninstall
