"""Gradient accumulation of Keras 3 (``gradient_accumulation_steps``) over the rows that steps touch."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable import autotrackable, data_structures

from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw
from tfplugin.optimizers.fused import compute_dtype
from tfplugin.optimizers.generic_update import RowUpdate, sum_equal_keys


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
        name = _tracked(variable.name)
        self.prepare_restore(_saved.get(optimizer, {}))
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

    def prepare_restore(self, saved: Mapping[str, int]) -> None:
        """Sees to it that the sums in a checkpoint can be restored: each part takes its own.

        Where they are those of another number of parts, and none are waiting, none are here either.

        Args:
          saved: what `about_to_be_restored` found in the checkpoint.

        Raises:
          ValueError: they are those of another number of parts, and some are waiting.
        """
        variable = self.variable
        whole = variable.partitioned_name or variable.name
        names = [_tracked(whole)]
        theirs = [name for name in saved if re.fullmatch(rf"{re.escape(names[0])}(\.part_\d+)?", name)]
        if variable.partitioned_name:
            names = [f"{names[0]}.part_{part}" for part in range(variable.parts)]
        if not theirs or sorted(theirs) == sorted(names):
            return
        if any(saved[name] for name in theirs):
            raise ValueError(
                f"Gradients of key-value variable '{whole.removesuffix(':0')}' are waiting in the checkpoint "
                f"(gradient_accumulation_steps), in {len(theirs)} parts, and it has {len(names)} here. Restore it into "
                f"{len(theirs)} parts, or restore a checkpoint that was saved after an update, when none are waiting."
            )
        self.put(tf.zeros([0], self.keys.dtype), tf.zeros([0, variable.dim], self.rows.dtype))

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


# ---- Checkpoints -----------------------------------------------------------------------------------------------------

#: How many gradients wait in the checkpoint that an optimizer was restored from, by what they are tracked as.
_saved: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def _tracked(name: str) -> str:
    """What the optimizer tracks the sums of a variable, or part, as."""
    return f"kv_accumulated/{name}".replace("/", ".").removesuffix(":0")


def about_to_be_restored(optimizer: Any, position: Any) -> None:
    """Notes what a checkpoint has for an optimizer, which may make its variables later.

    Args:
      optimizer: or any other object, of which nothing is noted.
      position: its `CheckpointPosition`.

    Raises:
      ValueError: see `AccumulatedRows.prepare_restore`.
    """
    if not getattr(optimizer, "gradient_accumulation_steps", None):
        return
    saved, nodes = {}, position.checkpoint.object_graph_proto.nodes
    for child in position.object_proto.children:
        if child.local_name.startswith(_tracked("")):
            (keys,) = (nodes[one.node_id] for one in nodes[child.node_id].children if one.local_name == "keys")
            saved[child.local_name] = position.checkpoint.shape_map[keys.attributes[0].checkpoint_key][0]
    _saved[optimizer] = saved
    for one in _of.get(optimizer, {}).values():
        one.prepare_restore(saved)


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
