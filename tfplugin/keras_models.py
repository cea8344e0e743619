"""Models of Keras 3 and tf_keras in which layers look up tables: what they hold, predict and write.

Keras knows variables of its own kind only, so a file of Keras has no rows of a table. Where that would go unnoticed it
is an error, and what Keras calls inference is inference for tables, too:

- a file, or the best weights of ``EarlyStopping``, that would lack the rows of a table that the model has;
- ``evaluate`` and ``predict`` insert no keys.

How they are trained is in `keras_training`.

What ``export`` of a model writes has the tables of its layers, in however many parts they are.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfplugin import step_record
from tfplugin.keras_hooks import KerasHooks
from tfplugin.partitioned_kv_variable import put_together
from tfplugin.training_mode import inference_mode
from tfplugin.wrapped_method import defining_class, wrap_method

_INFERENCE = ("evaluate", "test_on_batch", "predict", "predict_on_batch")

#: The parts of tables that the steps of a model have looked up, by their ids, each with the name of the table.
_looked_up: weakref.WeakKeyDictionary[Any, dict[int, tuple[weakref.ref[Any], str]]] = weakref.WeakKeyDictionary()


# ---- The tables of a model -------------------------------------------------------------------------------------------


def is_table(value: Any) -> bool:
    """Whether it is a key-value variable, or stands for one."""
    return hasattr(type(value), "_kv_parts")


def is_shard(value: Any) -> bool:
    """Whether it is a `sok.Variable`."""
    return hasattr(type(value), "_is_shard")


def variables_in(value: Any, is_wanted: Callable[[Any], bool] = is_table) -> Iterator[Any]:
    """The tables, or the variables of another kind: `value` itself, or what lists and dictionaries in it hold."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if is_wanted(value):
            yield value
        elif isinstance(value, (dict, list, tuple, set, frozenset)) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value


def held_by(layer: Any, is_wanted: Callable[[Any], bool] = is_table) -> list[Any]:
    """The tables, or the variables of another kind, that are attributes of a layer, or in a list or dictionary that is
    one; not those of its layers.
    """
    # What TensorFlow tracks is in lists of its own, once more.
    attributes = [value for name, value in vars(layer).items() if not name.startswith("_self_")]
    return [variable for value in attributes for variable in variables_in(value, is_wanted)]


def _holders(model: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(part, table, layer) for each part of each table that a layer of the model, or the model, holds."""
    for layer in model._flatten_layers():
        for table in held_by(layer):
            for part in table._kv_parts:
                yield part, table, layer


def _note_looked_up(model: Any, step: step_record.StepRecord) -> None:
    noted = _looked_up.setdefault(model, {})
    for key, (part, table) in step.looked_up.items():
        # A partitioned variable that was put together for a lookup would go at once: its parts stay.
        noted[key] = (weakref.ref(part), _name(part, table))


def _name(part: Any, table: Any) -> str:
    """What a user calls the table."""
    if hasattr(table, "params"):
        return str(table.params.name)
    return str(getattr(part, "partitioned_name", None) or part.name)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(set(names)))


# ---- Inference -------------------------------------------------------------------------------------------------------


def _infer(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a method of a model that does not train."""
    with inference_mode(), step_record.recording() as found:
        outputs = original(model, *args, **kwargs)
    _note_looked_up(model, found)
    return outputs


# ---- Files -----------------------------------------------------------------------------------------------------------


def _elsewhere(table: Any) -> bool:
    """Whether the rows are in a server of their own."""
    return bool(getattr(getattr(table, "params", table), "rows_elsewhere", False))


def _parts_of(model: Any) -> dict[int, tuple[Any, str]]:
    """The parts of the tables that a model holds or has looked up, by their ids, each with the name of its table."""
    parts = {}
    for key, (reference, name) in _looked_up.get(model, {}).items():
        part = reference()
        if part is not None:
            parts[key] = (part, name)
    elsewhere = set()
    for part, table, _ in _holders(model):
        parts[id(part)] = (part, _name(part, table))
        if _elsewhere(table):
            elsewhere.add(id(part))
    return {key: part for key, part in parts.items() if key not in elsewhere}


def _saves_its_own(layer: Any) -> bool:
    """Whether the layer says by itself what it saves: a class that is not Keras's has the method."""
    owner = defining_class(type(layer), "save_own_variables")
    return owner is not None and owner.__module__.partition(".")[0] not in ("keras", "tf_keras")


def _refuse(model: Any, parts: Iterable[tuple[Any, str]], what: str) -> None:
    parts = list(parts)
    if parts:
        raise ValueError(
            f"{what} of model '{model.name}' would lack the rows of key-value variable "
            f"{_listed(name for _, name in parts)}. Save them in a checkpoint, {_checkpoint(parts)}, from which "
            "training goes on; or, to serve the model, by tf.saved_model.save(model, path) with the table an attribute "
            "of a layer."
        )


def _name_of_shard(shard: Any) -> str:
    return str(shard.name).partition(":")[0]


def _shards_left_out(model: Any) -> set[str]:
    """The names of the `sok.Variable` s of which a file of Keras would lack rows.

    Those are all in layers of Keras 3, which has variables of its own kind only. tf_keras has what this rank holds.
    """
    return {
        _name_of_shard(shard)
        for layer in model._flatten_layers()
        if not _saves_its_own(layer)
        for shard in held_by(layer, is_shard)
        if shard.num_gpus > 1 or not any(weight is shard for weight in layer.weights)
    }


def _refuse_shards(model: Any, what: str) -> None:
    names = _shards_left_out(model)
    if names:
        raise ValueError(
            f"{what} of model '{model.name}' would lack rows of sok.Variable {_listed(names)}. Save them in a "
            "checkpoint: sok.Checkpoint(model=model), which any number of ranks restores, or on one rank "
            "tf.train.Checkpoint(model=model)."
        )


def _checkpoint(parts: Iterable[tuple[Any, str]]) -> str:
    """What to save for training to go on as if it had not stopped."""
    if all(getattr(part, "_in_backward", None) is None for part, _ in parts):
        return "tf.train.Checkpoint(model=model, table=table)"
    return (
        "tf.train.Checkpoint(model=model, table=table, updates=updates) with what tfplugin.apply_in_backward(table, "
        "...) returned as updates, which counts the steps"
    )


def _save_keras_file(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``.keras`` or ``.weights.h5`` file: each layer puts into it what its ``save_own_variables`` does."""
    if hasattr(model, "_flatten_layers"):
        _refuse_shards(model, "A file of Keras's format")
        saved = {id(part) for part, _, layer in _holders(model) if _saves_its_own(layer)}
        _refuse(model, (part for key, part in _parts_of(model).items() if key not in saved), "A file of Keras's format")
    return original(model, *args, **kwargs)


def _save_hdf5_file(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An ``.h5`` file, which has variables of Keras's kind and nothing else."""
    for model in (*args, *kwargs.values()):
        if hasattr(model, "_flatten_layers"):
            _refuse_shards(model, "An HDF5 file")
            _refuse(model, _parts_of(model).values(), "An HDF5 file")
    return original(*args, **kwargs)


def _save_weights(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """``save_weights`` of tf_keras, which may write a checkpoint of what is tracked from the model."""
    tracked = {
        id(part) for table in tf.train.TrackableView(model).descendants() if is_table(table) for part in table._kv_parts
    }
    _refuse(model, (part for key, part in _parts_of(model).items() if key not in tracked), "The weights file")
    return original(model, *args, **kwargs)


def _stop_early(original: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any) -> Any:
    """``on_epoch_end`` of ``EarlyStopping``, which keeps the weights of the best epoch to put them back."""
    model = callback.model
    if callback.restore_best_weights and hasattr(model, "_flatten_layers"):
        kept = {id(part) for weight in model.weights for part in getattr(weight, "_kv_parts", ())}
        parts = [part for key, part in _parts_of(model).items() if key not in kept]
        _refuse_best(model, "key-value variable", [name for _, name in parts], _checkpoint(parts))
        listed = {id(weight) for weight in model.weights}
        shards = (v for layer in model._flatten_layers() for v in held_by(layer, is_shard))
        names = [_name_of_shard(v) for v in shards if v.trainable and id(v) not in listed]
        _refuse_best(model, "sok.Variable", names, "sok.Checkpoint(model=model)")
    return original(callback, *args, **kwargs)


def _refuse_best(model: Any, kind: str, names: list[str], checkpoint: str) -> None:
    if names:
        raise ValueError(
            f"EarlyStopping(restore_best_weights=True) would put the weights of model '{model.name}' back, and "
            f"leave the rows of {kind} {_listed(names)} as the last epoch made them. Save a checkpoint after each "
            f"epoch instead, {checkpoint}, and restore that of the best one."
        )


# ---- Checkpoints of Keras 3 ------------------------------------------------------------------------------------------


def _in_containers(name: str, value: Any, within: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The tables, and `sok.Variable` s, in an attribute that is a list or dictionary, as ``name_<index or key>``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        if is_table(item) or is_shard(item):
            yield f"{name}_{key}", item
        elif not any(item is one for one in (*within, value)):  # else a circle
            yield from _in_containers(f"{name}_{key}", item, (*within, value))


def _children(original: Callable[..., Any], layer: Any, save_type: str = "checkpoint", **kwargs: Any) -> Any:
    """What a checkpoint has of a layer: also the tables in lists and dictionaries, which Keras 3 leaves out."""
    children = dict(original(layer, save_type, **kwargs))
    if save_type == "checkpoint":
        for attribute, value in list(vars(layer).items()):
            if not attribute.startswith("_self_"):  # TensorFlow's own lists of what it tracks
                for name, table in _in_containers(attribute, value):
                    while name in children:
                        name += "_"
                    children[name] = table
    return children


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


# ---- Installing ------------------------------------------------------------------------------------------------------

#: By the name of a Keras: its functions that write files, each with what looks at the model first.
_WRITERS: dict[str, list[tuple[str, str, Callable[..., Any]]]] = {
    "keras": [
        ("keras.src.saving.saving_lib", "save_model", _save_keras_file),
        ("keras.src.saving.saving_lib", "save_weights_only", _save_keras_file),
        ("keras.src.legacy.saving.legacy_h5_format", "save_model_to_hdf5", _save_hdf5_file),
        ("keras.src.legacy.saving.legacy_h5_format", "save_weights_to_hdf5_group", _save_hdf5_file),
    ],
    "tf_keras": [
        ("tf_keras.src.saving.saving_lib", "save_model", _save_keras_file),
        ("tf_keras.src.saving.saving_lib", "save_weights_only", _save_keras_file),
        ("tf_keras.src.saving.legacy.hdf5_format", "save_model_to_hdf5", _save_hdf5_file),
        ("tf_keras.src.saving.legacy.hdf5_format", "save_weights_to_hdf5_group", _save_hdf5_file),
        ("tf_keras.src.saving.legacy.save", "save_weights", _save_weights),
    ],
}


def _changes(keras: Any) -> Iterator[Callable[[], None]]:
    """Wraps what a Keras has."""
    for method in _INFERENCE:
        owner = defining_class(keras.Model, method)
        if owner is not None:
            yield wrap_method(owner, method, _infer)
    yield wrap_method(keras.callbacks.EarlyStopping, "on_epoch_end", _stop_early)
    if keras.__name__ == "keras":
        owner = defining_class(keras.layers.Layer, "_trackable_children")
        if owner is not None and owner.__module__.startswith("keras."):
            yield wrap_method(owner, "_trackable_children", _children)
    archive = getattr(getattr(keras, "export", None), "ExportArchive", None)
    if archive is not None:
        # That of Keras 3 makes an object of another class.
        owner = defining_class(type(archive()), "_filter_and_track_resources")
        if owner is not None:
            yield wrap_method(owner, "_filter_and_track_resources", _track_wholes)
    for module, function, replacement in _WRITERS[keras.__name__]:
        with contextlib.suppress(ImportError, KeyError):
            yield wrap_method(importlib.import_module(module), function, replacement)


_hooks = KerasHooks(_changes)
install, uninstall = _hooks.install, _hooks.uninstall
