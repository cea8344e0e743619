"""One table, or one slot of its rows, in the list of a ``tf.compat.v1.train.Saver``: keys and rows as two tensors.

They have the names that TFRA gives them, ``<table>-keys`` and ``<table>-values``, so that either restores the other's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.training.saving import saveable_object

from tfplugin.checkpoint import BesideSaveable, check_whole
from tfplugin.dynamic_embedding.python_ops import python_op
from tfplugin.kv_variable import KvVariable

#: Keys and rows as arrays.
Arrays = tuple[np.ndarray, np.ndarray]


class SavedColumn:
    """The part of a table, or of a slot's table, that saves and restores it by itself."""

    #: The name of its files, and of its tensors: ``<variable>_mht_<i>of<tables>``.
    file_name: str | None = None
    #: Gives what a checkpoint without those tensors has of this table, given its path and the column's name.
    read_other: Callable[[str, str], Arrays] | None = None
    #: Gives what is saved instead, where the table goes to files beside the checkpoint.
    saved_beside: Callable[[], list[Any]] | None = None
    #: The rows.
    part: KvVariable | None = None
    #: The name of the slot; empty for the values.
    column = ""

    name: str
    key_dtype: tf.DType
    value_dtype: tf.DType
    export: Callable[..., tuple[tf.Tensor, tf.Tensor]]
    insert: Callable[..., Any]
    remove: Callable[..., Any]

    def replace(self, keys: tf.Tensor, rows: tf.Tensor) -> Any:
        """Has these keys and rows, and no other keys. Rows that were there keep their slots. Returns the op (graph)."""
        graph = not tf.executing_eagerly()
        gone = tf.raw_ops.ListDiff(x=self.export()[0], y=keys).out
        removed = self.remove(gone)
        with tf.control_dependencies([removed] if graph and removed is not None else []):
            return self.insert(keys, rows)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        if self.saved_beside is not None:
            return {f"beside_{i}": saveable for i, saveable in enumerate(self.saved_beside())}
        own = self.file_name or self.name.replace("/", "_")
        return {"table": lambda name=None, **kwargs: ColumnSaveable(self, name or own)}


class ColumnSaveable(BesideSaveable):
    """A `SavedColumn` under a name.

    Raises:
      ValueError: other processes have rows of it, too.
    """

    def __init__(self, column: SavedColumn, name: str) -> None:
        if column.part is not None:
            check_whole(column.part)
        self._column = column
        self.rows = column if column.part is None else column.part
        self._exported: tf.Tensor | None = None
        specs = [
            saveable_object.SaveSpec(self._keys, "", f"{name}-keys", column.key_dtype, "CPU:0"),
            saveable_object.SaveSpec(self._rows, "", f"{name}-values", column.value_dtype, "CPU:0"),
        ]
        super().__init__(None, specs, name)

    def _keys(self) -> tf.Tensor:
        keys, self._exported = self._column.export()
        return keys

    def _rows(self) -> tf.Tensor:
        """Those of the keys that were asked for just before."""
        rows, self._exported = self._exported, None
        return self._column.export()[1] if rows is None else rows

    def save_beside(self, filename: tf.Tensor) -> Any:
        """Nothing: the tensors are in the checkpoint."""
        del filename

    def restore_op(self, filename: tf.Tensor) -> Any:
        """Restores keys and rows from a checkpoint. Returns the op (graph mode)."""
        column = self._column
        if tf.executing_eagerly():
            keys, rows = self._read(filename.numpy())
            return column.replace(tf.constant(keys, column.key_dtype), tf.constant(rows, column.value_dtype))
        keys, rows = python_op(self._read, [filename], [column.key_dtype, column.value_dtype])
        keys.set_shape([None])
        rows.set_shape([None, None])
        return column.replace(keys, rows)

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        """The same from tensors: for `tf.train.Checkpoint`."""
        del restored_shapes
        keys, rows = restored_tensors
        return self._column.replace(keys, rows)

    def _read(self, path: Any) -> Arrays:
        path = str(tf.compat.as_str(path))
        reader = tf.train.load_checkpoint(path)
        # TFRA puts the name scope before the name.
        names = [n for n in reader.get_variable_to_shape_map() if f"/{n}".endswith(f"/{self.name}-keys")]
        if names:
            base = min(names, key=len).removesuffix("-keys")
            return reader.get_tensor(f"{base}-keys"), reader.get_tensor(f"{base}-values")
        if self._column.read_other is None:
            raise ValueError(f"Restoring table '{self.name}': '{path}' has no tensor '{self.name}-keys'.")
        return self._column.read_other(path, self._column.column)
