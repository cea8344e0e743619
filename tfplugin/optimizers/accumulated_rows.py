"""Gradient accumulation of Keras 3 (``gradient_accumulation_steps``) over the rows that steps touch."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable import autotrackable, data_structures

from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw
from tfplugin.optimizers.fused import compute_dtype
from tfplugin.optimizers.generic_update import RowUpdate, sum_equal_keys
from tfplugin.own_keys import own_keys

_OTHER_PARTS = (
    "They come from a checkpoint of another number of parts, between two updates: restore it into that number, or one "
    "that was saved after an update."
)


class AccumulatedRows(autotrackable.AutoTrackable):
    """The gradients of a table since the optimizer's last update, in the place of the accumulator of a dense variable.

    It holds a row for each key that came, not one for each of the table. A checkpoint of the optimizer has it.

    Attributes:
      keys: [n].
      rows: [n, dim], the sum of the gradients of each: float32 where those of the table are of 16 bits, in which a
        sum of many small numbers stops growing.
    """

    def __init__(self, update: RowUpdate, optimizer: Any) -> None:
        variable = update.variable
        self._update = data_structures.NoDependency(update)
        #: The keys of this step's gradient.
        self.came: tf.Tensor | None = None
        with tf.init_scope(), tf.device("CPU:0"):
            self.keys = tf.Variable(tf.zeros([0], variable.key_dtype), shape=[None], trainable=False)
            self.rows = tf.Variable(
                tf.zeros([0, variable.dim], compute_dtype(variable.dtype)), shape=[None, variable.dim], trainable=False
            )
        # Checkpoints of earlier versions have the sums as the table has its rows.
        self.rows._kv_takes_any_dtype = True
        name = f"kv_accumulated/{variable.name}".replace("/", ".").removesuffix(":0")
        optimizer._maybe_initialize_trackable()
        optimizer._track_trackable(self, name, overwrite=True)
        optimizer._handle_deferred_dependencies(name, self)
        _of.setdefault(optimizer, {})[_name(variable)] = self
        brought = _brought.get(optimizer, {}).pop(_name(variable), None)
        if brought is not None:
            self.put(*brought)

    def put(self, keys: Any, rows: Any) -> None:
        """Has it hold these keys and the sums of their gradients."""
        with tf.init_scope():
            self.keys.assign(tf.cast(keys, self.keys.dtype))
            self.rows.assign(tf.cast(rows, self.rows.dtype))

    @property
    def variable(self) -> KvVariable:
        """The table."""
        return self._update.variable

    def held(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Keys and rows of this rank. A checkpoint of several ranks brings those of all."""
        keys, rows = self.keys.read_value(), self.rows.read_value()
        if self.variable.ranks == 1:
            return keys, rows
        if self.variable.owner is None:
            mine = raw.kv_table_partition(keys, parts=self.variable.parts) == self.variable.part
        else:
            mine = tf.fill(tf.shape(keys), self.variable.holds_rows)
        return tf.boolean_mask(keys, mine), tf.boolean_mask(rows, mine)

    def _gathered(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Keys and rows with those of this step, whose gradient is `rows`."""
        held, sums = self.held()
        if self.variable.ranks == 1:
            held = own_keys(self.variable, held, "waiting gradients (gradient_accumulation_steps)", _OTHER_PARTS)
        keys = tf.concat([held, self.came], 0)
        return sum_equal_keys(keys, tf.concat([sums, tf.cast(rows, self.rows.dtype)], 0))

    def __radd__(self, rows: tf.Tensor) -> tf.Tensor:
        """``gradient + accumulator``: the rows of all keys, which become those of the update."""
        self._update.keys, rows = self._gathered(rows)
        self._update.unique = True
        return rows

    def gather(self, rows: tf.Tensor) -> None:
        """Adds the gradient of a step that updates nothing."""
        keys, rows = self._gathered(rows)
        self.keys.assign(keys, read_value=False)
        self.rows.assign(rows, read_value=False)

    # ---- What an optimizer asks of an accumulator that it empties ----------------------------------------------------

    @property
    def shape(self) -> tf.TensorShape:
        """Of the empty accumulator."""
        return tf.TensorShape([0, self._update.variable.dim])

    @property
    def dtype(self) -> str:
        """Name of that of the rows."""
        return str(self.rows.dtype.name)

    def assign(self, zeros: Any) -> None:
        """Empties it."""
        self.keys.assign(tf.zeros([0], self.keys.dtype), read_value=False)
        self.rows.assign(tf.cast(zeros, self.rows.dtype), read_value=False)


# ---- Files of Keras, in which an optimizer has its dense accumulators ----------------------------------------------

#: Those of each optimizer, by variable; and what a file has brought before they were made.
_of: weakref.WeakKeyDictionary[Any, dict[str, AccumulatedRows]] = weakref.WeakKeyDictionary()
_brought: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def _name(part: Any) -> str:
    return f"{part.partitioned_name or part._name}/{part.part}"


def pending(optimizer: Any, part: Any) -> tuple[Any, Any] | None:
    """Keys [n] and sums of gradients [n, dim] of a part, as arrays, that no update has taken yet; None of none."""
    found = _of.get(optimizer, {}).get(_name(part))
    keys = np.zeros(0) if found is None else found.keys.numpy()
    if found is None or not len(keys):
        return None
    return keys, found.rows.numpy()


def bring(optimizer: Any, part: Any, keys: Any, rows: Any) -> None:
    """Gives an optimizer what `pending` gave of another one."""
    found = _of.get(optimizer, {}).get(_name(part))
    if found is not None:
        found.put(keys, rows)
    else:
        _brought.setdefault(optimizer, {})[_name(part)] = (keys, rows)
