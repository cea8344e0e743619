"""Models of Keras 3 and tf_keras in which layers look up tables: what they hold, predict and export.

Keras knows variables of its own kind only; what it calls inference is inference for tables, too: ``evaluate`` and
``predict`` insert no keys.

How tables are trained is in `keras_training`, and what Keras writes, reads and shows of them in `keras_files` and
`keras_weights`.

What ``export`` of a model writes has the tables of its layers, in however many parts they are.
"""

from __future__ import annotations

import collections.abc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from tfplugin import step_record
from tfplugin.keras_hooks import KerasHooks
from tfplugin.partitioned_kv_variable import put_together
from tfplugin.training_mode import inference_mode
from tfplugin.wrapped_method import defining_class, wrap_method, wrap_property, wrap_setter

#: What of a model infers, and does not train.
INFERENCE = ("evaluate", "test_on_batch", "predict", "predict_on_batch")

#: The parts of tables that the steps of a model have looked up, by their ids, each with the name of the table.
_looked_up: weakref.WeakKeyDictionary[Any, dict[int, tuple[weakref.ref[Any], str]]] = weakref.WeakKeyDictionary()

#: Whether what is being saved has signatures that somebody named, and needs none by default.
signatures_are_named: ContextVar[bool] = ContextVar("signatures_are_named", default=False)


# ---- The tables of a model -------------------------------------------------------------------------------------------


def is_table(value: Any) -> bool:
    """Whether it is a key-value variable, or stands for one."""
    return hasattr(type(value), "_kv_parts")


def is_shard(value: Any) -> bool:
    """Whether it is a `sok.Variable`."""
    return hasattr(type(value), "_is_shard")


def variables_in(value: Any, is_wanted: Callable[[Any], bool] = is_table) -> Iterator[Any]:
    """The tables, or the variables of another kind: `value` itself, or what lists and dictionaries in it hold, in their
    order.
    """
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if is_wanted(value):
            yield value
        elif isinstance(value, (dict, list, tuple, set, frozenset)) and id(value) not in seen:
            seen.add(id(value))
            waiting += [*(value.values() if isinstance(value, dict) else value)][::-1]


def held_by(layer: Any, is_wanted: Callable[[Any], bool] = is_table) -> list[Any]:
    """The tables, or the variables of another kind, that are attributes of a layer, or in a list or dictionary that is
    one; not those of its layers.
    """
    # What TensorFlow tracks is in lists of its own, once more.
    attributes = [value for name, value in vars(layer).items() if not name.startswith("_self_")]
    return [variable for value in attributes for variable in variables_in(value, is_wanted)]


def table_holders(model: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(part, table, layer) for each part of each table that a layer of the model, or the model, holds."""
    for layer in model._flatten_layers():
        for table in held_by(layer):
            for part in table._kv_parts:
                yield part, table, layer


def is_trained(part: Any, layer: Any) -> bool:
    """Whether a layer that holds the table of a part has it be trained.

    The variables of Keras 3 are themselves trainable or not, and a layer says so when its own ``trainable`` changes: of
    layers that share a table, the last to say anything decides. In tf_keras one that is trainable is enough.
    """
    return bool(layer.trainable and part.trainable and not getattr(part, "_frozen_by_keras", False))


def _set_trainable(original: Callable[..., None], layer: Any, value: Any) -> None:
    """Setting ``trainable`` of a layer of Keras 3."""
    original(layer, value)
    for table in held_by(layer):
        for part in table._kv_parts:
            part._frozen_by_keras = not layer.trainable


def note_looked_up(model: Any, step: step_record.StepRecord) -> None:
    """Notes the tables that a step of a model has looked up, for `looked_up_elsewhere`."""
    noted = _looked_up.setdefault(model, {})
    for key, (part, table) in step.looked_up.items():
        # A partitioned variable that was put together for a lookup would go at once: its parts stay.
        noted[key] = (weakref.ref(part), table_name(part, table))


def table_name(part: Any, table: Any) -> str:
    """What a user calls the table."""
    if hasattr(table, "params"):
        return str(table.params.name)
    return str(getattr(part, "partitioned_name", None) or part.name)


def quoted(names: Iterable[str]) -> str:
    """Names as messages list them: each once, in order."""
    return ", ".join(f"'{name}'" for name in sorted(set(names)))


# ---- Inference -------------------------------------------------------------------------------------------------------


def _infer(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a method of a model that does not train."""
    with inference_mode(), step_record.recording() as found:
        outputs = original(model, *args, **kwargs)
    note_looked_up(model, found)
    return outputs


# ---- Files -----------------------------------------------------------------------------------------------------------


def is_elsewhere(table: Any) -> bool:
    """Whether the rows are in a server of their own."""
    return bool(getattr(getattr(table, "params", table), "rows_elsewhere", False))


def looked_up_elsewhere(model: Any) -> dict[str, Any]:
    """The parts of tables that a model has looked up and no layer of it holds, by the names of the tables."""
    held = {id(part) for part, _, _ in table_holders(model)}
    noted = _looked_up.get(model, {}) if isinstance(model, collections.abc.Hashable) else {}
    found = {name: reference() for key, (reference, name) in noted.items() if key not in held}
    return {name: part for name, part in found.items() if part is not None}


# ---- Checkpoints of Keras 3 ------------------------------------------------------------------------------------------


_CONTAINERS = (list, tuple, dict)


def _in_containers(name: str, value: Any, within: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The tables, `sok.Variable` s and layers in an attribute that is a list or dictionary: ``name_<index or key>``."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if is_kept(item) or _is_layer(item):
            yield f"{name}_{key}", item
        elif isinstance(item, _CONTAINERS) and not any(item is one for one in (*within, value)):  # else a circle
            yield from _in_containers(f"{name}_{key}", item, (*within, value))


def _is_layer(value: Any) -> bool:
    return hasattr(type(value), "_flatten_layers")


def is_kept(value: Any) -> bool:
    """Whether it is a table or a shard of a variable."""
    return is_table(value) or is_shard(value)


def _listed(children: dict[str, Any]) -> set[int]:
    """The children of an object that TensorFlow tracks, by their ids, and what is in those that are lists."""
    lists = [child for child in children.values() if isinstance(child, (list, tuple))]
    return {id(child) for child in [*children.values(), *(item for one in lists for item in one)]}


def _children(original: Callable[..., Any], layer: Any, save_type: str = "checkpoint", **kwargs: Any) -> Any:
    """What a checkpoint has of a layer: also the tables in lists and dictionaries, which Keras 3 leaves out; and, in a
    model with tables, the layers in them, among which are those of a ``Sequential`` without an ``Input``.
    """
    children = dict(original(layer, save_type, **kwargs))
    if save_type == "checkpoint":
        there = _listed(children)
        if "_functional" in children:  # of a Sequential: it has the same layers
            there |= _listed(children["_functional"]._trackable_children(save_type))
        with_layers = any(held_by(one, is_kept) for one in layer._flatten_layers())
        # What begins so is TensorFlow's own, of what it tracks.
        attributes = {name: value for name, value in vars(layer).items() if not name.startswith("_self_")}
        # Last, as it has once more what other attributes have; without what a Sequential puts first as it is built.
        attributes["_layers"] = [one for one in attributes.pop("_layers", ()) if type(one).__name__ != "InputLayer"]
        for attribute, value in attributes.items():
            if isinstance(value, _CONTAINERS):  # most are none, and there are thousands of layers
                for name, one in _in_containers(attribute, value):
                    if _is_layer(one) and (not with_layers or id(one) in there):
                        continue
                    while name in children:
                        name += "_"
                    children[name] = one
                    there.add(id(one))
    return children


def _default_signature(getter: Callable[[Any], Any], layer: Any) -> Any:
    """``_default_save_signature`` of Keras 3, which takes the inputs of a model of a class of one's own for floats."""
    return None if signatures_are_named.get() else getter(layer)


# ---- SavedModels of Keras: `export` and `ExportArchive` --------------------------------------------------------------


def _track_wholes(original: Callable[..., Any], archive: Any, *args: Any, **kwargs: Any) -> Any:
    """``_filter_and_track_resources`` of an `ExportArchive`, which saves the variables that its endpoints use: of a
    table in parts those parts, which are saved by the whole.
    """
    returned = original(archive, *args, **kwargs)
    saved = getattr(archive, "_tf_trackable", archive)
    used = [variable for variable in saved._all_variables if getattr(variable, "partitioned_name", None) is not None]
    roots = getattr(archive, "_tracked", ())
    held = [table for root in roots for table in tf.train.TrackableView(root).descendants() if is_table(table)]
    wholes = {id(table): table for table in held if any(part is one for part in table._kv_parts for one in used)}
    taken = {id(part) for whole in wholes.values() if whole._kv_parts != (whole,) for part in whole._kv_parts}
    saved._kv_tables = [whole for whole in wholes.values() if whole._kv_parts != (whole,)]
    saved._kv_tables += put_together([part for part in used if id(part) not in taken])
    return returned


def _export(
    original: Callable[..., Any], model: Any, filepath: Any, format: str = "tf_saved_model", *args: Any, **kwargs: Any
) -> Any:
    """``export`` of a model of Keras 3: a SavedModel has tables, and other formats have no operation for them.

    Raises:
      ValueError: it is to be another format.
    """
    if format != "tf_saved_model" and (names := dict.fromkeys(table_name(p, t) for p, t, _ in table_holders(model))):
        raise ValueError(
            f"model.export: format '{format}' has no operation for the lookups of model '{model.name}' in key-value "
            f"variable {quoted(names)}. Write the model in stock operations first, tfplugin.export_saved_model(model, "
            "path, index='perfect'), and convert that: tf.lite.TFLiteConverter.from_saved_model(path).convert() makes "
            "LiteRT, tf2onnx makes ONNX."
        )
    return original(model, filepath, format, *args, **kwargs)


#: What `_wholes` gives of the SavedModel of a `TFSMLayer`.
_wholes_of: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()


def _wholes(loaded: Any) -> dict[int, Any]:
    """The tables of a SavedModel, by the ids of what its functions read: of one in parts the whole, which is saved."""
    tables = [one for one in tf.train.TrackableView(loaded).descendants() if is_table(one)]
    return {id(part): one for one in sorted(tables, key=lambda one: len(one._kv_parts)) for part in one._kv_parts}


def _hold(original: Callable[..., None], layer: Any, weight: Any) -> None:
    """``_add_existing_weight`` of a `TFSMLayer`: it holds the tables of its SavedModel, as any layer does."""
    if not is_table(weight):
        original(layer, weight)
        return
    if layer not in _wholes_of:
        _wholes_of[layer] = _wholes(layer._reloaded_obj)
        layer.tables = []
    whole = _wholes_of[layer].get(id(weight), weight)
    if all(table is not whole for table in layer.tables):
        layer.tables.append(whole)
    weight._frozen_by_keras = not layer.trainable


# ---- Installing ------------------------------------------------------------------------------------------------------


def _changes(keras: Any) -> Iterator[Callable[[], None]]:
    """Wraps what a Keras has."""
    for method in INFERENCE:
        owner = defining_class(keras.Model, method)
        if owner is not None:
            yield wrap_method(owner, method, _infer)
    if keras.__name__ == "keras":
        yield wrap_setter(keras.layers.Layer, "trainable", _set_trainable)
        yield wrap_method(keras.Model, "export", _export)
        owner = defining_class(keras.layers.Layer, "_trackable_children")
        if owner is not None and owner.__module__.startswith("keras."):
            yield wrap_method(owner, "_trackable_children", _children)
        owner = defining_class(keras.layers.Layer, "_default_save_signature")
        if owner is not None:
            yield wrap_property(owner, "_default_save_signature", _default_signature)
    reloaded = getattr(keras.layers, "TFSMLayer", None)
    if reloaded is not None:
        yield wrap_method(reloaded, "_add_existing_weight", _hold)
    archive = getattr(getattr(keras, "export", None), "ExportArchive", None)
    if archive is not None:
        # That of Keras 3 makes an object of another class.
        owner = defining_class(type(archive()), "_filter_and_track_resources")
        if owner is not None:
            yield wrap_method(owner, "_filter_and_track_resources", _track_wholes)


_hooks = KerasHooks(_changes)
install, uninstall = _hooks.install, _hooks.uninstall
