"""One table on each device, and the rule that shares keys out: the rows of a `Variable`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.trackable import base as trackable

from kvtools.string_hash import HASHES
from tfplugin.dynamic_embedding.dtype_error import DtypeError
from tfplugin.dynamic_embedding.initial_values import initial_values
from tfplugin.dynamic_embedding.partition import default_partition_fn, owners_of
from tfplugin.dynamic_embedding.row_shape import rows_of_values
from tfplugin.dynamic_embedding.string_keys import KeyNames
from tfplugin.dynamic_embedding.table import check_dtypes, table_name
from tfplugin.keys import constant_keys, refuse_keras_input
from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw
from tfplugin.policies import Policies


class ShardedTable(trackable.Trackable):
    """Reads and writes of a `Variable`: each key goes to the table that the partitioner says.

    Args:
      key_dtype, value_dtype, dim, devices, partitioner, name, initializer, checkpoint, init_size, kv_creator: as of
        `Variable`.

    Attributes:
      tables: one for each device.
      parts: the rows as key-value variables: what lookups and optimizers train.
      names: the strings of string keys, or None.
      trainable_store: what lookups have made that optimizers can train, by the name of the lookup.
      restrict_policy: the policy that `restrict` goes by, or None.
      status_of: the variable of which this one is the status, or None.
      rows_elsewhere: whether the rows are in no table of the engine, and so in no checkpoint.

    Raises:
      TypeError: dtypes that tables do not have.
    """

    trainable = True
    restrict_policy: Any = None

    @property
    def _kv_parts(self) -> tuple[KvVariable, ...]:
        return tuple(self.parts)

    def __init__(
        self,
        key_dtype: Any,
        value_dtype: Any,
        dim: int,
        devices: Any,
        partitioner: Callable[[Any, int], tf.Tensor],
        name: str,
        initializer: Any,
        checkpoint: bool,
        init_size: int,
        kv_creator: Any,
        policies: Policies | None = None,
    ) -> None:
        self.key_dtype = tf.as_dtype(key_dtype)
        self.value_dtype = tf.as_dtype(value_dtype)
        self.dim = int(dim)
        self.kv_creator = kv_creator
        self.devices = list(devices) if isinstance(devices, (list, tuple)) and devices else [devices or "/CPU:0"]
        if getattr(kv_creator, "one_table", False):
            self.devices = self.devices[:1]
        self.shard_num = len(self.devices)
        self.partition_fn = partitioner
        self.name = name
        self.initializer = initializer
        self.checkpoint = bool(checkpoint)
        self.init_size = int(init_size)
        self.trainable_store: dict[str, Any] = {}
        self.status_of: ShardedTable | None = None
        # Of a graph; see `size`.
        self._sizes: dict[int | None, tf.Tensor] = {}
        check_dtypes(self.key_dtype, self.value_dtype, name)
        #: Whether keys go to tables by the rule that the table engine itself has.
        self._by_modulo = self.shard_num == 1 or partitioner is default_partition_fn
        if self.key_dtype == tf.string and HASHES % self.shard_num:
            self._by_modulo = False
        if self.value_dtype == tf.string:
            values: Any = np.broadcast_to(np.asarray("" if initializer is None else initializer, object), [self.dim])
        else:
            values = initial_values(initializer, name, self.dim, self.value_dtype)
        with tf_ops.init_scope():
            key_names = getattr(self.kv_creator, "key_names", KeyNames)
            self.names = key_names(name, self.checkpoint) if self.key_dtype == tf.string else None
            self._tables = [
                self.kv_creator.create(
                    self.key_dtype,
                    self.value_dtype,
                    values,
                    name if self.shard_num == 1 else f"{name}/part_{i}",
                    self.checkpoint,
                    self.init_size // self.shard_num,
                    self.kv_creator.config,
                    device,
                    **(self._part(i, name) if self._by_modulo else {}),
                    **({} if self.names is None else {"names": self.names}),
                    **({"policies": policies} if policies else {}),
                )
                for i, device in enumerate(self.devices)
            ]
        for i, table in enumerate(self._tables):
            table.file_name = table_name(name, i, self.shard_num)
        self.parts: list[KvVariable] = [table.kv for table in self._tables if table.kv is not None]
        for part in self.parts[1:]:
            part._table = self.parts[0]._table
        self._one = self.parts[0] if self.parts and self.shard_num == 1 and self.names is None else None
        #: Whether one op looks up in all tables.
        one_place = bool(self.parts) and (self.parts[0]._eager or len({part.device for part in self.parts}) == 1)
        self._many = self._by_modulo and self.names is None and one_place
        self.rows_elsewhere = any(getattr(table, "rows_elsewhere", False) for table in self._tables)
        if self.rows_elsewhere:
            self._one, self._many, self.checkpoint = None, False, False
            for table in self._tables:
                table.trained_by(self.trainable_store)

    def _part(self, i: int, name: str) -> dict[str, Any]:
        """Which part of what table `i` is."""
        beside = self.devices.count(self.devices[i])
        return {"part": i, "parts": self.shard_num, "parts_beside": beside, "whole": name}

    @property
    def tables(self) -> list[Any]:
        """The tables, one for each device."""
        return self._tables

    # ---- Arguments ---------------------------------------------------------------------------------------------------

    def keys_tensor(self, keys: Any) -> tf.Tensor:
        """Keys as a Tensor of `key_dtype`, any shape.

        Raises:
          DtypeError: a tensor or array of another dtype: a TypeError and a ValueError.
        """
        refuse_keras_input(keys, repr(self))
        dtype = getattr(keys, "dtype", None)
        if dtype is None:
            try:
                return constant_keys(keys, self.key_dtype)
            except (TypeError, ValueError, OverflowError) as error:
                raise DtypeError(f"{self!r} does not take {keys!r:.80} as keys: {error}") from error
        if tf.as_dtype(dtype) != self.key_dtype:
            raise DtypeError(f"{self!r} takes {self.key_dtype.name} keys, got {tf.as_dtype(dtype).name}: cast them.")
        return tf.convert_to_tensor(keys)

    def values_tensor(self, values: Any) -> tf.Tensor:
        """Rows as a Tensor of `value_dtype`, any shape.

        Raises:
          DtypeError: a tensor or array of another dtype; an array of floats is rounded to floats.
        """
        dtype = getattr(values, "dtype", None)
        if isinstance(values, np.ndarray) and values.dtype.kind in "OSU":
            dtype = None
        if dtype is None or (isinstance(values, np.ndarray) and values.dtype == float and self.value_dtype.is_floating):
            try:
                return tf.convert_to_tensor(values, self.value_dtype)
            except (TypeError, ValueError) as error:
                raise DtypeError(f"{self!r} does not take {values!r:.80} as values: {error}") from error
        if tf.as_dtype(dtype) != self.value_dtype:
            raise DtypeError(
                f"{self!r} takes {self.value_dtype.name} values, got {tf.as_dtype(dtype).name}: cast them."
            )
        return tf.convert_to_tensor(values)

    def split(self, keys: tf.Tensor, *columns: tf.Tensor) -> list[list[tf.Tensor]]:
        """For each table its keys, its share of each column, and the places of both in the flat batch.

        Args:
          keys: any shape.
          columns: keys.shape + anything, or flat.
        """
        keys = tf.reshape(keys, [-1])
        owner = owners_of(self, keys)
        places = tf.range(tf.size(keys))
        split = [tf.dynamic_partition(column, owner, self.shard_num) for column in (keys, *columns, places)]
        return [list(part) for part in zip(*split, strict=True)]

    # ---- Reads -------------------------------------------------------------------------------------------------------

    def gather(self, keys: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows of keys, keys.shape + [dim], initial values where they are missing; and where each lies in its table, -1
        where it is missing.
        """
        if self.shard_num == 1:
            return self._tables[0].gather(keys, name)
        if self._many:
            with tf_ops.device(self.parts[0]._op_device()):
                rows, positions = raw.kv_table_gather_many(
                    [part.handle for part in self.parts],
                    [keys],
                    dtype=self.value_dtype,
                    parts=[self.shard_num],
                    dims=[self.dim],
                    mode="initial",
                    remember=True,
                    name=name,
                )
            return rows[0], positions[0]
        with tf.name_scope(name or "lookup"):
            read = []
            places = []
            for table, (part_keys, part_places) in zip(self._tables, self.split(keys), strict=True):
                read.append(table.gather(part_keys))
                places.append(part_places)
            rows = tf.dynamic_stitch(places, [part_rows for part_rows, _ in read])
            positions = tf.dynamic_stitch(places, [part_positions for _, part_positions in read])
            rows = tf.reshape(rows, tf.concat([tf.shape(keys), [self.dim]], 0))
            rows.set_shape(keys.shape.concatenate([self.dim]))
            return rows, tf.reshape(positions, tf.shape(keys))

    @tf.autograph.experimental.do_not_convert
    def lookup(self, keys: Any, return_exists: bool = False, name: str | None = None) -> Any:
        """Rows of keys; the initial value of those that are missing. Inserts nothing.

        Args:
          keys: any shape, of `key_dtype`.
          return_exists: whether to return also which keys are there.
          name: of the op.

        Returns:
          Rows, keys.shape + [dim]; with `return_exists` also a bool tensor, keys.shape.

        Raises:
          TypeError: keys of another dtype.
        """
        rows, positions = self.gather(self.keys_tensor(keys), name)
        return (rows, positions >= 0) if return_exists else rows

    @tf.autograph.experimental.do_not_convert
    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and their rows [N, dim], table after table, in no particular order."""
        exported = [table.export(name=name) for table in self._tables]
        if len(exported) == 1:
            return exported[0]
        return tf.concat([keys for keys, _ in exported], 0), tf.concat([rows for _, rows in exported], 0)

    @tf.autograph.experimental.do_not_convert
    def export_keys_and_scores(self, split_size: int, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and what eviction goes by, int64 [N], of tables that an `HkvHashTableCreator` made.

        Args:
          split_size: see `HkvHashTable.export_keys_and_scores`.
          name: of the op.

        Raises:
          TypeError: the tables are others.
          ValueError: `split_size` is no number of 1 or more.
        """
        if not all(hasattr(table, "export_keys_and_scores") for table in self._tables):
            raise TypeError(f"{self!r} has no scores: give it kv_creator=HkvHashTableCreator(...).")
        exported = [table.export_keys_and_scores(split_size, name=name) for table in self._tables]
        return tf.concat([keys for keys, _ in exported], 0), tf.concat([scores for _, scores in exported], 0)

    def size(self, index: int | None = None, name: str | None = None) -> tf.Tensor:
        """Number of rows, of all tables or of table `index`: scalar int64.

        A graph has one op for it, which a graph that is finalized gives again; one that is to run after others, or in a
        branch, has its own.
        """
        graph = tf_ops.get_default_graph()
        if tf.executing_eagerly() or tf_ops.inside_function():
            return self._size(index, name)
        again = self._sizes.get(index)
        if again is not None and graph.finalized:
            return again
        free = not graph._control_dependencies_for_inputs([]) and graph._get_control_flow_context() is None
        if not free or name is not None:
            return self._size(index, name)
        if again is None:
            again = self._sizes[index] = self._size(index, name)
        return again

    def _size(self, index: int | None, name: str | None) -> tf.Tensor:
        if index is not None:
            return self._tables[index].size(name=name)
        return tf.add_n([table.size() for table in self._tables], name=name)

    # ---- Writes ------------------------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def upsert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Writes rows, inserting keys that are not there. Of equal keys the last wins.

        Args:
          keys: any shape.
          values: keys.shape + [dim].
          name: of the op.

        Returns:
          The op (graph mode).

        Raises:
          TypeError: keys or values of another dtype.
        """
        keys, values = self.keys_tensor(keys), self.values_tensor(values)
        if len(self._tables) == 1:
            return self._tables[0].insert(keys, values, name=name)
        with tf.name_scope(name or "upsert"):
            rows = rows_of_values(keys, values, self.dim, f"upsert of {self!r}")
            parts = zip(self._tables, self.split(keys, rows), strict=True)
            return _group([table.insert(part_keys, part_rows) for table, (part_keys, part_rows, _) in parts])

    @tf.autograph.experimental.do_not_convert
    def accum(self, keys: Any, old_values: Any, new_values: Any, exists: Any, name: str | None = None) -> Any:
        """Adds ``new_values - old_values`` to keys that are there, or inserts `new_values` for keys that are not.

        `exists` says which of both was true when the old values were read. Where it does not hold any more, the key is
        left alone.

        Args:
          keys: any shape.
          old_values, new_values: keys.shape + [dim].
          exists: bool, keys.shape.
          name: of the op.

        Returns:
          The op (graph mode).

        Raises:
          TypeError: keys or values of another dtype.
        """
        if self.value_dtype in (tf.string, tf.bool):
            raise TypeError(f"{self!r} has {self.value_dtype.name} values: accum adds numbers.")
        keys = self.keys_tensor(keys)
        old_rows, new_rows = (
            rows_of_values(keys, self.values_tensor(values), self.dim, f"accum of {self!r}")
            for values in (old_values, new_values)
        )
        keys = tf.reshape(keys, [-1])
        exists = tf.reshape(tf.convert_to_tensor(exists, tf.bool), [-1])
        with tf.name_scope(name or "accum"):
            rows = tf.where(exists[:, tf.newaxis], new_rows - old_rows, new_rows)
            if len(self._tables) == 1:
                return self._tables[0].accum(keys, rows, exists)
            return _group(
                [
                    table.accum(part_keys, part_rows, part_exists)
                    for table, (part_keys, part_rows, part_exists, _) in zip(
                        self._tables, self.split(keys, rows, exists), strict=True
                    )
                ]
            )

    @tf.autograph.experimental.do_not_convert
    def remove(self, keys: Any, name: str | None = None) -> Any:
        """Removes keys with their slots. Absent ones are ignored.

        Args:
          keys: any shape.
          name: of the op.

        Returns:
          The op (graph mode).

        Raises:
          TypeError: keys of another dtype.
        """
        keys = self.keys_tensor(keys)
        if len(self._tables) == 1:
            return self._tables[0].remove(keys, name=name)
        with tf.name_scope(name or "remove"):
            parts = zip(self._tables, self.split(keys), strict=True)
            return _group([table.remove(part_keys) for table, (part_keys, _) in parts])

    def replace(self, keys: tf.Tensor, values: tf.Tensor) -> Any:
        """Has these keys [n] and rows [n, dim] and no others. Rows that were there keep their slots."""
        parts = zip(self._tables, self.split(keys, values), strict=True)
        return _group([table.replace(part_keys, part_rows) for table, (part_keys, part_rows, _) in parts])

    def clear(self, name: str | None = None) -> Any:
        """Removes all rows. Returns the op (graph mode)."""
        return _group([table.clear(name=name) for table in self._tables])


def _group(ops: Sequence[Any]) -> Any:
    made = [op for op in ops if op is not None]
    return tf.group(*made) if made else None
