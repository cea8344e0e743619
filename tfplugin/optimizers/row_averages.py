"""Moving averages of rows, for optimizers of Keras with ``use_ema``.

A row's average moves on in the steps that touch the row. What lies beside it is the average less the value, which is
zero for a row that has not been touched: its average is what it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfplugin.optimizers.generic_update import RowUpdate, StepVariable
from tfplugin.optimizers.patch_lock import patch_lock
from tfplugin.slots import SlotSpec
from tfplugin.wrapped_method import replaced

#: Rows that are read and written at a time.
_CHUNK = 1 << 18


class RowAverages:
    """The averages of the rows of one table, of one optimizer.

    Attributes:
      place: stands for them in the optimizer's list.
    """

    def __init__(self, update: RowUpdate, optimizer: Any) -> None:
        self._update = update
        self._optimizer = optimizer
        self.place = StepVariable(f"{update.prefix}_averages", update.variable.dim, update.variable.dtype)

    @property
    def _self_update_uid(self) -> int:
        """The last restore; see `slot_binding`."""
        return int(getattr(self._optimizer, "_self_update_uid", -1))

    @property
    def _specs(self) -> list[SlotSpec]:
        return [SlotSpec(f"{self._update.prefix}.average_offset", self._update.variable.dim, "constant", 0.0)]

    def _read(self, keys: tf.Tensor) -> list[tf.Tensor]:
        return self._update.variable.read_rows(keys, self, self._specs)

    def _write(self, keys: tf.Tensor, columns: list[tf.Tensor]) -> Any:
        return self._update.variable.write_rows(keys, columns, self._specs, rewrites=True)

    def _momentum(self, dtype: tf.DType) -> tf.Tensor:
        momentum = tf.constant(self._optimizer.ema_momentum, dtype)
        if hasattr(self._optimizer, "_check_variables_are_known"):  # Keras 3, whose first step sets the average
            momentum *= tf.cast(tf.not_equal(tf.convert_to_tensor(self._optimizer.iterations), 0), dtype)
        return momentum

    def around(self, keys: tf.Tensor, move: Callable[[], Any]) -> Any:
        """Moves the averages of `keys` on with their rows, which `move` updates. Returns the op (graph mode)."""
        keys, _ = tf.unique(keys)
        value, offset = self._read(keys)
        with _after(value, offset):
            moved = move()
        with _after(moved):
            after, _ = self._read(keys)
        exact = tf.float64 if after.dtype == tf.float64 else tf.float32
        value, offset, new = (tf.cast(tensor, exact) for tensor in (value, offset, after))
        offset = self._momentum(exact) * (value + offset - new)
        return self._write(keys, [after, tf.cast(offset, after.dtype)])

    def overwrite(self) -> None:
        """Has each row be its average: within a step, or some rows at a time in eager mode."""
        for keys in self._chunks():
            value, offset = self._read(keys)
            self._write(keys, [value + offset, tf.zeros_like(offset)])

    def swap(self) -> Iterator[tf.Tensor]:
        """Has rows and averages change places, some at a time, and gives the keys of those; in eager mode."""
        for keys in self._chunks():
            self.swap_rows(keys)
            yield keys

    def swap_rows(self, keys: tf.Tensor) -> None:
        """Has the rows of `keys` and their averages change places. To do so twice gives back what was."""
        keys, value, offset = self._apart(keys)
        exact = tf.float64 if value.dtype == tf.float64 else tf.float32
        average = tf.cast(tf.cast(value, exact) + tf.cast(offset, exact), value.dtype)
        offset = tf.cast(tf.cast(value, exact) - tf.cast(average, exact), value.dtype)
        self._write(keys, [average, offset])

    def settle(self) -> None:
        """Has each average be its row; in eager mode."""
        for keys in self._chunks():
            keys, value, offset = self._apart(keys)
            self._write(keys, [value, tf.zeros_like(offset)])

    def _chunks(self) -> Iterator[tf.Tensor]:
        keys, _ = self._update.variable.export()
        if not tf.executing_eagerly():
            yield keys
            return
        for start in range(0, int(tf.size(keys)), _CHUNK):
            yield keys[start : start + _CHUNK]

    def _apart(self, keys: tf.Tensor) -> list[tf.Tensor]:
        """Those of the keys whose averages are not their rows, with rows and offsets."""
        value, offset = self._read(keys)
        apart = tf.reduce_any(offset != 0, 1)
        return [tf.boolean_mask(column, apart) for column in (keys, value, offset)]


def _after(*done: Any) -> Any:
    ops = [] if tf.executing_eagerly() else [op for op in done if isinstance(op, (tf.Operation, tf.Tensor))]
    return tf.control_dependencies(ops)


def overwrite(optimizer: Any) -> None:
    """Has the rows of the tables that an optimizer with ``use_ema`` has trained be their averages."""
    for averages in vars(optimizer).get("_kv_averages", ()):
        averages.overwrite()


def swap(optimizer: Any) -> None:
    """Has the rows of those tables and their averages change places: of all, or, where that fails, of none."""
    done: list[tuple[RowAverages, tf.Tensor]] = []
    try:
        for averages in vars(optimizer).get("_kv_averages", ()):
            for keys in averages.swap():
                done.append((averages, keys))
    except BaseException:
        for averages, keys in done:
            averages.swap_rows(keys)
        raise


def settle(optimizer: Any) -> None:
    """Has the averages be what the rows are."""
    for averages in vars(optimizer).get("_kv_averages", ()):
        averages.settle()


_MOVE, _TAKE = "_update_model_variables_moving_average", "_overwrite_model_variables_with_average_value"


@contextlib.contextmanager
def apart(optimizer: Any) -> Iterator[None]:
    """Has an optimizer of Keras that applies gradients meanwhile move the averages of its dense variables alone, of
    which those of rows come after in its list. Rows become their averages when weights do.

    It may know tables of which a step has no gradient.
    """
    if not vars(optimizer).get("_kv_averages") or not hasattr(optimizer, _MOVE):
        yield
        return

    def only_dense(variables: Iterable[Any]) -> list[Any]:
        return [variable for variable in variables if not isinstance(variable, StepVariable)]

    with patch_lock(optimizer):
        if _MOVE in vars(optimizer):  # around this call is another
            yield
            return
        move, take = getattr(optimizer, _MOVE), getattr(optimizer, _TAKE)

        def overwrite_all(variables: Iterable[Any]) -> None:
            take(only_dense(variables))
            overwrite(optimizer)

        with (
            replaced(optimizer, _MOVE, lambda variables: move(only_dense(variables))),
            replaced(optimizer, _TAKE, overwrite_all),
        ):
            yield


def note(optimizer: Any, averages: RowAverages) -> None:
    """Notes for `overwrite` that an optimizer has averages."""
    if "_kv_averages" not in vars(optimizer):
        # Past what Keras makes of attributes: it is no part of the optimizer.
        object.__setattr__(optimizer, "_kv_averages", [])
    vars(optimizer)["_kv_averages"].append(averages)
