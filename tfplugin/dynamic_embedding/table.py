"""One table on one device: what a dynamic embedding variable is made of."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from tfplugin.dynamic_embedding.column_saveable import SavedColumn
from tfplugin.dynamic_embedding.initial_values import InitialValues, initial_values
from tfplugin.dynamic_embedding.row_shape import rows_of_values
from tfplugin.dynamic_embedding.saves_files import TableFiles
from tfplugin.dynamic_embedding.string_keys import KeyNames
from tfplugin.keys import KEY_DTYPES
from tfplugin.kv_variable import VALUE_DTYPES, KvVariable
from tfplugin.ops import raw
from tfplugin.placement import on_device_of
from tfplugin.policies import Policies
from tfplugin.string_hash import string_keys

#: Rows that a table makes room for where nobody says.
DEFAULT_INIT_SIZE = 8192
INTEGER_DTYPES = (tf.int8, tf.int32, tf.int64, tf.bool)


class CuckooHashTable(TableFiles, SavedColumn, trackable.Trackable):
    """A table from key to row, in host memory: the whole of a `Variable` on one device.

    Its methods do what those of `Variable` do, for the keys that are its own. A class for another kind of table has
    the same attributes and methods; `kv` is what lookups and optimizers train.

    Args:
      key_dtype, value_dtype: of keys and rows.
      default_value: an array, whose width is that of a row, or what `initial_values` gives.
      name: for messages and checkpoints.
      checkpoint: whether it is saved.
      init_size: rows to make room for; 0: ``$TF_HASHTABLE_INIT_SIZE``, or 8192.
      config: not used.
      device: whose host memory it is in.
      shard_saveable_object_fn: not used.
      part, parts, whole: which part of how many it is, and of which variable, where the default partitioner rules.
      max_capacity, eviction: see `tfplugin.get_kv_variable`.
      policies: which keys get a row; see `tfplugin.policies`.
      names: the strings of string keys, which the tables of a variable share.

    Attributes:
      kv: the `tfplugin.KvVariable` that holds the rows, with the slots of optimizers beside the values.
    """

    _rows = KvVariable

    def __init__(
        self,
        key_dtype: Any,
        value_dtype: Any,
        default_value: Any,
        name: str = "CuckooHashTable",
        checkpoint: bool = True,
        init_size: int = 0,
        config: Any = None,
        device: str = "",
        shard_saveable_object_fn: Any = None,
        *,
        part: int = 0,
        parts: int = 1,
        parts_beside: int = 1,
        whole: str | None = None,
        max_capacity: int = 0,
        eviction: str = "lru",
        policies: Policies | None = None,
        names: KeyNames | None = None,
    ) -> None:
        del config, shard_saveable_object_fn
        self._name = name
        self.key_dtype = tf.as_dtype(key_dtype)
        self.value_dtype = tf.as_dtype(value_dtype)
        self.checkpoint = checkpoint
        if not isinstance(default_value, InitialValues):
            width = int(np.prod(np.shape(default_value))) or 1
            default_value = initial_values(default_value, name, width, self.value_dtype)
        self._dim = default_value.dim
        check_dtypes(self.key_dtype, self.value_dtype, name)
        self.names = names
        if self.key_dtype == tf.string and names is None:
            self.names = KeyNames(name, checkpoint)
        with tf.device(device or None):
            self.kv = self._rows(
                name,
                default_value.dim,
                tf.int64 if self.key_dtype == tf.string else self.key_dtype,
                self.value_dtype,
                default_value.initializer,
                trainable=self.value_dtype.is_floating,
                capacity_hint=init_size or int(os.environ.get("TF_HASHTABLE_INIT_SIZE") or DEFAULT_INIT_SIZE),
                max_capacity=max_capacity,
                eviction=eviction,
                policies=policies,
                part=part,
                parts=parts,
                parts_beside=parts_beside,
                partitioned_name=whole if parts > 1 else None,
                starts_initialized=True,
            )

    @property
    def name(self) -> str:
        """``<variable>_mht_<i>of<tables>``; of a table in no variable, as it was given."""
        return self.file_name or self._name

    @property
    def part(self) -> KvVariable:
        """The rows."""
        return self.kv

    @property
    def resource_handle(self) -> tf.Tensor:
        """The resource tensor of the table."""
        return self.kv.handle

    # ---- What Variable asks of a table. Keys and rows have been checked. ---------------------------------------------

    def ids(self, keys: Any) -> tf.Tensor:
        """Keys as `kv` has them: itself, or the hashes of strings."""
        if self.names is None:
            return self.kv.keys_tensor(keys)
        return string_keys(tf.convert_to_tensor(keys, tf.string))

    def note(self, ids: tf.Tensor, keys: Any) -> Any:
        """Notes the strings of `ids`, which are about to be inserted. Returns the op, if there is one (graph mode)."""
        return None if self.names is None else self.names.note(ids, tf.convert_to_tensor(keys, tf.string))

    def gather(self, keys: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows of keys, initial values where they are missing; and where each lies, -1 where it is missing."""
        with on_device_of(self.kv):
            return raw.kv_table_gather(
                self.kv.handle,
                keys if self.names is None else string_keys(keys),
                dtype=self.value_dtype,
                dim=self._dim,
                mode="initial",
                remember=True,
                name=name,
            )

    # ---- Public ------------------------------------------------------------------------------------------------------

    def lookup(
        self, keys: Any, dynamic_default_values: Any = None, return_exists: bool = False, name: str | None = None
    ) -> Any:
        """Rows of keys, keys.shape + [dim]; with `return_exists` also whether each is there.

        `dynamic_default_values` are the rows of missing keys, instead of the initial values: of any shape that
        broadcasts to the result's.
        """
        keys = tf.convert_to_tensor(keys, tf.string) if self.names is not None else self.kv.keys_tensor(keys)
        rows, positions = self.gather(keys, name)
        exists = positions >= 0
        if dynamic_default_values is not None:
            defaults = tf.cast(dynamic_default_values, self.value_dtype)
            rows = tf.where(exists[..., tf.newaxis], rows, defaults)
        return (rows, exists) if return_exists else rows

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Writes rows, inserting keys that are not there."""
        ids = self.ids(keys)
        return _both(self.note(ids, keys), self.kv.upsert(ids, values, name=name))

    upsert = insert

    def add(self, keys: Any, deltas: Any) -> Any:
        """Adds to rows, once for each occurrence of a key; a missing key starts from its initial value."""
        ids = self.ids(keys)
        with on_device_of(self.kv):
            return _both(self.note(ids, keys), self.kv.accumulate(ids, deltas))

    def contains(self, keys: Any) -> tf.Tensor:
        """Whether each key is there: bool, shape of keys."""
        return self.kv.contains(self.ids(keys))

    def accum(self, keys: Any, values_or_deltas: Any, exists: Any, name: str | None = None) -> Any:
        """By key: where `exists` and it is there, adds; where not and it is not there, inserts; else does nothing."""
        with tf.name_scope(name or "accum"):
            ids = self.ids(keys)
            rows = tf.convert_to_tensor(values_or_deltas, self.value_dtype)
            rows = rows_of_values(ids, rows, self._dim, f"accum of '{self._name}'")
            ids = tf.reshape(ids, [-1])
            exists = tf.reshape(tf.convert_to_tensor(exists, tf.bool), [-1])
            there = self.kv.contains(ids)
            # Of equal new keys the first is inserted: after it, the others meet a row that is there.
            new = tf.reverse(tf.where(~(exists | there))[:, 0], [0])
            old = tf.where(exists & there)[:, 0]
            noted = None
            if self.names is not None:
                noted = self.note(tf.gather(ids, new), tf.gather(tf.reshape(keys, [-1]), new))
            inserted = self.kv.upsert(tf.gather(ids, new), tf.gather(rows, new))
            added = self.kv.accumulate(tf.gather(ids, old), tf.gather(rows, old))
            return _both(noted, inserted, added)

    def remove(self, keys: Any, name: str | None = None) -> Any:
        """Removes keys, with their slots. Absent ones are ignored."""
        ids = self.ids(keys)
        removed = self.kv.remove(ids, name=name)
        forgotten = None if self.names is None else self.names.forget(ids)
        return None if tf.executing_eagerly() else _both(removed.op, forgotten)

    def clear(self, name: str | None = None) -> Any:
        """Removes all rows."""
        if self.names is None:
            return self.kv.clear(name=name)
        ids, _ = self.kv.export()
        with tf.control_dependencies([] if tf.executing_eagerly() else [ids]):
            return _both(self.names.forget(ids), self.kv.clear(name=name))

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and rows [N, dim], in no particular order."""
        keys, rows = self.kv.export(name=name)
        return (keys if self.names is None else self.names.of(keys)), rows

    def size(self, name: str | None = None) -> tf.Tensor:
        """Number of rows: scalar int64."""
        return self.kv.size(name=name)


#: Values by dtype of keys.
SUPPORTED = {
    tf.int64: (*VALUE_DTYPES, *INTEGER_DTYPES, tf.string),
    tf.int32: (*VALUE_DTYPES, *INTEGER_DTYPES),
    tf.uint64: (*VALUE_DTYPES, *INTEGER_DTYPES),
    tf.string: (*VALUE_DTYPES, *INTEGER_DTYPES),
}
assert set(SUPPORTED) == {*KEY_DTYPES, tf.string}


def table_name(variable: str, index: int, tables: int) -> str:
    """What TFRA calls table `index` of a variable, in files, checkpoints and to its users."""
    return f"{variable.replace('/', '_')}_mht_{index + 1}of{tables}"


def _both(*ops: Any) -> Any:
    """Several ops as one (graph mode)."""
    made = [op for op in ops if isinstance(op, (tf.Operation, tf.Tensor)) and not tf.executing_eagerly()]
    if len(made) < 2:
        return made[0] if made else None
    return tf.group(*made)


def check_dtypes(key_dtype: tf.DType, value_dtype: tf.DType, name: str) -> None:
    """Raises TypeError for dtypes that tables do not have."""
    if value_dtype in SUPPORTED.get(key_dtype, ()):
        return
    pairs = "; ".join(f"{key.name} keys with {', '.join(v.name for v in values)}" for key, values in SUPPORTED.items())
    raise TypeError(
        f"Dynamic embedding variable '{name}': {key_dtype.name} keys with {value_dtype.name} values are not supported. "
        f"There are {pairs}."
    )
