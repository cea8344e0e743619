"""The rows of tables where Keras shows or hands over the weights of layers and models.

- ``get_weights`` gives, behind the dense arrays, keys [n] and rows [n, dim] of each table, and ``set_weights`` takes
  them: ``set_weights(get_weights())`` changes nothing, and rows born in between are gone. Slots are the optimizer's,
  as those of dense weights are: keys that stay keep theirs. So ``EarlyStopping(restore_best_weights=True)`` works.
- A state tree of Keras 3, and with it a checkpoint of Orbax, has a place for variables of Keras alone: an error.
- ``count_params`` and ``summary`` count rows; ``summary`` says what each table takes.
- ``TensorBoard(histogram_freq=1)`` has the values of rows.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import wrapt

from tfplugin import telemetry
from tfplugin.held_tables import HeldTable, held_tables, keeps_rows_itself, names_of
from tfplugin.keras_files import refuse_not_held, shards_left_out
from tfplugin.keras_hooks import KerasHooks
from tfplugin.keras_models import is_table, quoted
from tfplugin.ops import raw
from tfplugin.wrapped_method import defining_class, wrap_method

#: Rows of a table, at most, whose values are in a histogram.
HISTOGRAM_ROWS = 1 << 16


def _tables(layer: Any) -> list[HeldTable]:
    """The tables whose rows are not among the weights of a layer, or of a model."""
    held = held_tables(layer) if hasattr(layer, "_flatten_layers") else []
    return [one for one in held if not keeps_rows_itself(one.layer)]


def _is_dense(weight: Any) -> bool:
    """Whether a weight is an array to Keras. `tfplugin.sok` has tables among them."""
    return not is_table(weight) or hasattr(type(weight), "numpy")


def _without_tables(weights: Sequence[Any]) -> list[Any]:
    return [weight for weight in weights if _is_dense(weight)]


# ---- get_weights and set_weights -------------------------------------------------------------------------------------


def _get_weights(original: Callable[..., Any], layer: Any) -> Any:
    tables = _tables(layer)
    if not tables:
        return original(layer)
    dense = _without_tables(layer.weights)
    arrays = original(layer) if len(dense) == len(layer.weights) else [weight.numpy() for weight in dense]
    for one in tables:
        _check_eager(one, layer)
        arrays += one.read()
    return arrays


def _set_weights(original: Callable[..., Any], layer: Any, weights: Any) -> Any:
    tables = _tables(layer)
    if not tables:
        return original(layer, weights)
    weights = list(weights)
    first = len(weights) - 2 * len(tables)
    of_tables = weights[max(first, 0) :]
    for one in tables:
        _check_eager(one, layer)
    pairs = [
        _keys_and_rows(one, *of_tables[2 * i : 2 * i + 2]) if len(of_tables) == 2 * len(tables) else None
        for i, one in enumerate(tables)
    ]
    if first < 0 or any(pair is None for pair in pairs):
        raise ValueError(
            f"set_weights of '{layer.name}' takes what its get_weights gives: the arrays of {len(layer.weights)} dense "
            "weights, and then for each table its keys [n], each once, and its rows [n, dim]: "
            f"{', '.join(one.describe() for one in tables)}. Got arrays of {_shapes(weights)}. Nothing was set. To "
            "write single rows, table.upsert(keys, rows)."
        )
    if len(_without_tables(layer.weights)) == len(layer.weights):
        original(layer, weights[:first])
    else:
        _assign(layer, weights[:first])
    for one, pair in zip(tables, pairs, strict=True):
        assert pair is not None
        one.replace(*pair)
    return None


def _keys_and_rows(one: HeldTable, keys: Any, rows: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """What is given for a table; None where it cannot be that."""
    keys, rows = np.asarray(keys), np.asarray(rows)
    fits = keys.ndim == 1 and keys.dtype.kind in "iu" and rows.shape == (len(keys), one.dim)
    if not fits or rows.dtype.kind not in "fiuV":
        return None
    limits = np.iinfo(one.key_dtype.as_numpy_dtype)
    if len(keys) and not limits.min <= int(keys.min()) <= int(keys.max()) <= limits.max:
        return None
    own = keys.astype(one.key_dtype.as_numpy_dtype)
    if len(np.unique(own)) != len(own):
        return None
    return own, rows.astype(one.dtype.as_numpy_dtype)


def _assign(layer: Any, arrays: Sequence[Any]) -> None:
    dense = _without_tables(layer.weights)
    if len(dense) != len(arrays):
        raise ValueError(f"set_weights of '{layer.name}': got {len(arrays)} dense arrays, expected {len(dense)}.")
    for weight, array in zip(dense, arrays, strict=True):
        weight.assign(array)


def _shapes(arrays: Sequence[Any]) -> str:
    return "[" + ", ".join(f"{np.asarray(a).dtype.name}{list(np.shape(a))}" for a in arrays) + "]"


def _check_eager(one: HeldTable, layer: Any) -> None:
    if not one.eager:
        raise ValueError(
            f"The weights of '{layer.name}' are asked for, and key-value variable '{one.name}' is one of a graph: take "
            "its rows by session.run(table.export())."
        )


def _stop_early(original: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any) -> Any:
    """``on_epoch_end`` of ``EarlyStopping``, which keeps the weights of the best epoch to put them back."""
    model = callback.model
    if callback.restore_best_weights and hasattr(model, "_flatten_layers"):
        refuse_not_held(model, "What EarlyStopping(restore_best_weights=True) puts back")
        names = shards_left_out(model)
        if names:
            raise ValueError(
                f"EarlyStopping(restore_best_weights=True) would put the weights of model '{model.name}' back, and "
                f"leave the rows of sok.Variable {quoted(names)} as the last epoch made them. Save a checkpoint after "
                "each epoch instead, sok.Checkpoint(model=model), and restore that of the best one."
            )
    return original(callback, *args, **kwargs)


def _state_tree(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """``get_state_tree`` and ``set_state_tree`` of Keras 3, which know variables of Keras alone."""
    tables = _tables(model)
    if tables:
        raise ValueError(
            f"A state tree of model '{model.name}', which keras.callbacks.OrbaxCheckpoint saves, has no rows of "
            f"key-value variable {quoted(names_of(tables))}, and none of their slots. Save the model by model.save or "
            "keras.callbacks.ModelCheckpoint; model.get_weights() gives rows as arrays, and model.set_weights takes "
            "them."
        )
    return original(model, *args, **kwargs)


# ---- count_params and summary ----------------------------------------------------------------------------------------


def _count_params(original: Callable[..., Any], layer: Any) -> Any:
    tables = _tables(layer)
    if not tables:
        return original(layer)
    dense = _without_tables(layer.weights)
    all_dense = len(dense) == len(layer.weights)
    counted = original(layer) if all_dense else sum(math.prod(weight.shape) for weight in dense)
    return counted + sum(one.rows() * one.dim for one in tables)


class _Rows:
    """Stands for the rows of a table where weights are counted."""

    def __init__(self, one: HeldTable) -> None:
        self.shape = tf.TensorShape([one.rows(), one.dim])
        self.dtype = one.dtype
        self.name = self.path = one.name


class _WithTables(wrapt.ObjectProxy):  # type: ignore[misc]
    """A model to which the rows of its tables are weights."""

    @property
    def trainable_weights(self) -> list[Any]:
        return [*_without_tables(self.__wrapped__.trainable_weights), *self._self_rows(True)]

    @property
    def _collected_trainable_weights(self) -> list[Any]:
        return [*_without_tables(self.__wrapped__._collected_trainable_weights), *self._self_rows(True)]

    @property
    def non_trainable_weights(self) -> list[Any]:
        return [*_without_tables(self.__wrapped__.non_trainable_weights), *self._self_rows(False)]

    def _self_rows(self, trainable: bool) -> list[_Rows]:
        return [_Rows(one) for one in _tables(self.__wrapped__) if one.trainable == trainable]


def _print_summary(
    keras: Any, original: Callable[..., Any], model: Any, *args: Any, print_fn: Any = None, **kwargs: Any
) -> Any:
    tables = _tables(model)
    if not tables:
        return original(model, *args, print_fn=print_fn, **kwargs)
    returned = original(_WithTables(model), *args, print_fn=print_fn, **kwargs)
    say = print_fn or importlib.import_module(f"{keras.__name__}.src.utils.io_utils").print_msg
    say(" Tables:")
    for one, name in zip(tables, names_of(tables), strict=True):
        say(f"  {name} ({one.layer.name}): {_told(one)}")
    return returned


def _told(one: HeldTable) -> str:
    kind = f"{one.dim} {one.dtype.name}, {one.key_dtype.name} keys"
    if not one.eager:
        return f"rows of {kind}, in the session"
    counts = telemetry.summary(one.table)
    told = f"{counts.rows:,} rows of {kind}: {_size(counts.bytes)} in memory, {_size(counts.row_bytes)} of it rows"
    if counts.file_bytes:
        told += f"; {counts.file_rows:,} rows in a file of {_size(counts.file_bytes)}"
    return told


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:,.2f} {unit}"
        count /= 1024
    return f"{count:,.2f} TB"


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def _log_weights(original: Callable[..., Any], callback: Any, epoch: int) -> Any:
    """Writes, beside the histograms of weights, those of rows, and how many there are."""
    returned = original(callback, epoch)
    tables = _tables(callback.model)
    if tables:
        with callback._train_writer.as_default(), tf.summary.record_if(True):
            for one, name in zip(tables, names_of(tables), strict=True):
                tf.summary.histogram(f"{name}/rows/histogram", _some_rows(one), step=epoch)
                tf.summary.scalar(f"{name}/rows/count", one.rows(), step=epoch)
            callback._train_writer.flush()
    return returned


def _some_rows(one: HeldTable) -> tf.Tensor:
    """All rows [n, dim]; of a table with more than `HISTOGRAM_ROWS`, some that lie apart."""
    read = []
    for part in one.parts:
        keys = raw.kv_table_keys(part.handle, Tkeys=part.key_dtype)
        apart = max(1, math.ceil(len(keys) * len(one.parts) / HISTOGRAM_ROWS))
        read.append(raw.kv_table_read_column(part.handle, keys[::apart], dtype=part.dtype, width=part.dim))
    return tf.cast(tf.concat(read, 0), tf.float32)


# ---- Installing ------------------------------------------------------------------------------------------------------

_SUMMARY = {"keras": "keras.src.utils.summary_utils", "tf_keras": "tf_keras.src.utils.layer_utils"}


def _changes(keras: Any) -> Iterator[Callable[[], None]]:
    """Wraps what a Keras has."""
    layer = keras.layers.Layer
    methods = (("get_weights", _get_weights), ("set_weights", _set_weights), ("count_params", _count_params))
    for method, replacement in methods:
        yield wrap_method(defining_class(layer, method), method, replacement)
    for method in ("get_state_tree", "set_state_tree"):
        owner = defining_class(keras.Model, method)
        if owner is not None:
            yield wrap_method(owner, method, _state_tree)
    summary = importlib.import_module(_SUMMARY[keras.__name__])
    yield wrap_method(summary, "print_summary", functools.partial(_print_summary, keras))
    yield wrap_method(keras.callbacks.EarlyStopping, "on_epoch_end", _stop_early)
    yield wrap_method(keras.callbacks.TensorBoard, "_log_weights", _log_weights)


_hooks = KerasHooks(_changes)
install, uninstall = _hooks.install, _hooks.uninstall
