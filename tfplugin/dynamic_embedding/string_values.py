"""Tables of strings: looked up and written, and trained by nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from tfplugin.dynamic_embedding.column_saveable import SavedColumn
from tfplugin.dynamic_embedding.row_shape import rows_of_values


class StringValueTable(SavedColumn, trackable.Trackable):
    """A table from an int64 key to a row of strings, with the methods of `CuckooHashTable`.

    Args:
      default_value: the row of missing keys: [dim] strings.
      name, checkpoint, device: as of `CuckooHashTable`.
    """

    #: What optimizers train: nothing here.
    kv = None
    names = None

    def __init__(self, default_value: Any, name: str, checkpoint: bool = True, device: str = "") -> None:
        self.name = name
        self.key_dtype, self.value_dtype, self.checkpoint = tf.int64, tf.string, checkpoint
        default = np.asarray(default_value, object).reshape(-1)
        self._dim = len(default)
        with tf.device(device or None):
            self.table = tf.lookup.experimental.MutableHashTable(
                tf.int64, tf.string, tf.constant(default, tf.string), name=name.replace("/", "_"), checkpoint=checkpoint
            )
        if checkpoint:
            self._track_trackable(self.table, "table")

    def ids(self, keys: Any) -> tf.Tensor:
        """The keys."""
        return tf.convert_to_tensor(keys, tf.int64)

    def gather(self, keys: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows of keys, and 0 for each, -1 where it is missing."""
        flat = tf.reshape(keys, [-1])
        rows = self.table.lookup(flat, name=name)
        # A row that depends on the default is none.
        one, other = (self.table.lookup(flat, tf.fill([tf.size(flat), self._dim], text)) for text in ("", "-"))
        positions = tf.cast(tf.reduce_all(tf.equal(one, other), axis=-1), tf.int64) - 1
        rows = tf.reshape(rows, tf.concat([tf.shape(keys), [self._dim]], 0))
        rows.set_shape(keys.shape.concatenate([self._dim]))
        return rows, tf.reshape(positions, tf.shape(keys))

    def lookup(
        self, keys: Any, dynamic_default_values: Any = None, return_exists: bool = False, name: str | None = None
    ) -> Any:
        """As of `CuckooHashTable`."""
        rows, positions = self.gather(self.ids(keys), name)
        exists = positions >= 0
        if dynamic_default_values is not None:
            rows = tf.where(exists[..., tf.newaxis], rows, dynamic_default_values)
        return (rows, exists) if return_exists else rows

    def contains(self, keys: Any) -> tf.Tensor:
        """Whether each key is there: bool, shape of keys."""
        return self.gather(self.ids(keys))[1] >= 0

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Writes rows, inserting keys that are not there."""
        keys = self.ids(keys)
        values = tf.convert_to_tensor(values, tf.string)
        rows = rows_of_values(keys, values, self._dim, f"insert into '{self.name}'")
        return self.table.insert(tf.reshape(keys, [-1]), rows, name=name)

    upsert = insert

    def accum(self, keys: Any, values_or_deltas: Any, exists: Any, name: str | None = None) -> Any:
        """Raises TypeError: strings are not added."""
        del keys, values_or_deltas, exists, name
        raise TypeError(f"Dynamic embedding variable '{self.name}' has string values: accum adds numbers.")

    def remove(self, keys: Any, name: str | None = None) -> Any:
        """Removes keys. Absent ones are ignored."""
        return self.table.remove(tf.reshape(self.ids(keys), [-1]), name=name)

    def clear(self, name: str | None = None) -> Any:
        """Removes all rows."""
        return self.table.remove(self.table.export()[0], name=name)

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and rows [N, dim], in no particular order."""
        keys, rows = self.table.export(name=name)
        return keys, tf.reshape(rows, [-1, self._dim])

    def size(self, name: str | None = None) -> tf.Tensor:
        """Number of rows: scalar int64."""
        return self.table.size(name=name)

    # A `tf.train.Checkpoint` saves `table`, its child.

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        return None
