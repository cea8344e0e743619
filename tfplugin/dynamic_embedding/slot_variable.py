"""Optimizer slots as variables of their own, though they lie in the rows of the variable that is trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.trackable import base as trackable

from tfplugin.dynamic_embedding.column_saveable import SavedColumn
from tfplugin.dynamic_embedding.row_shape import rows_of_values
from tfplugin.dynamic_embedding.saves_files import VariableFiles
from tfplugin.dynamic_embedding.sharded_table import ShardedTable
from tfplugin.dynamic_embedding.table import table_name
from tfplugin.dynamic_embedding.tfra_names import slot_names
from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw
from tfplugin.optimizers.update_lock import locked_updates
from tfplugin.slots import SlotSpec


class SlotTable(SavedColumn, trackable.Trackable):
    """One table of a `SlotVariable`."""

    def __init__(self, table: Any, optimizer: Any, spec: SlotSpec) -> None:
        self._table = table
        self.key_dtype = table.key_dtype
        self.value_dtype = table.value_dtype
        self.read_other = table.read_other
        self.saved_beside = table.saved_beside
        self.part: KvVariable = table.kv
        self._optimizer = optimizer
        self._made_with = spec

    @property
    def name(self) -> str:
        """``<variable>_<optimizer>_<slot>_mht_<i>of<tables>``."""
        return self.file_name or f"{self._table.name}/{self._made_with.name}"

    @property
    def _spec(self) -> SlotSpec:
        # Not the one that it was made with: a restore gives an optimizer's slots the names that they were saved under.
        slot = self._made_with.name.partition(".")[2]
        return next(spec for spec in self._specs() if spec.name.partition(".")[2] == slot)

    @property
    def column(self) -> str:  # type: ignore[override]
        """The name of the slot in the rows."""
        return self._spec.name

    def replace(self, keys: tf.Tensor, rows: tf.Tensor) -> Any:
        """Writes the slot of these keys: rows come and go with the table that is trained."""
        return self.insert(keys, rows)

    def _specs(self) -> tuple[SlotSpec, ...]:
        """All slots of the optimizer, which a write goes to together."""
        specs = self.part.slots_of(self._optimizer)
        if specs is None:
            raise ValueError(
                f"'{self.name}': the rows have no slots of its optimizer now, since another optimizer was restored "
                "with them. It gets new ones with its next step."
            )
        return specs

    def gather(self, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Slot rows of keys, what the slot starts from where they are missing; and whether each is there."""
        ids = self._table.ids(keys)
        flat = tf.reshape(ids, [-1])
        with tf_ops.device(self.part._op_device()):
            rows = raw.kv_table_read_column(
                self.part.handle, flat, dtype=self.part.dtype, column=self._spec.name, width=self._spec.width
            )
        shape = tf.concat([tf.shape(keys), [self._spec.width]], 0)
        return tf.reshape(rows, shape), self.part.contains(ids)

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Writes the slot of keys. A key that is not there comes with its initial value."""
        ids = self._table.ids(keys)
        values = rows_of_values(
            ids, tf.convert_to_tensor(values, self.part.dtype), self._spec.width, f"insert of '{self.name}'"
        )
        ids = tf.reshape(ids, [-1])
        specs, at = self._specs(), 1 + self._specs().index(self._spec)
        with tf.name_scope(name or "insert"):
            noted = self._table.note(ids, keys)
            with locked_updates(self.part, after=values) as finish:
                columns = self.part.read_rows(ids, self._optimizer, specs)
                columns[at] = values
                written = finish(self.part.write_rows(ids, columns, specs))
            return written if noted is None or tf.executing_eagerly() else tf.group(noted, written)

    def lookup(
        self, keys: Any, dynamic_default_values: Any = None, return_exists: bool = False, name: str | None = None
    ) -> Any:
        """As of `CuckooHashTable`."""
        del name
        rows, exists = self.gather(keys)
        if dynamic_default_values is not None:
            rows = tf.where(exists[..., tf.newaxis], rows, tf.cast(dynamic_default_values, rows.dtype))
        return (rows, exists) if return_exists else rows

    def remove(self, keys: Any, name: str | None = None) -> Any:
        """Does nothing: a slot goes with its row."""
        del keys
        return None if tf.executing_eagerly() else tf.no_op(name=name)

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and their slot rows [N, width]."""
        ids, rows = self.part.export(self.column, name=name)
        return (ids if self._table.names is None else self._table.names.of(ids)), rows

    def size(self, name: str | None = None) -> tf.Tensor:
        """Number of rows: scalar int64."""
        return self.part.size(name=name)


class SlotVariable(VariableFiles, trackable.Trackable):
    """One slot of an optimizer for a `Variable`, read and written like a variable of its own.

    It has the keys of the variable: removing and clearing are done there, and saving with it. In the list of a
    ``tf.compat.v1.train.Saver`` it saves its `tables`. A `tf.train.Checkpoint`, which asks optimizers for their slots,
    finds nothing to save in it.

    Attributes:
      name: ``<variable>/<optimizer>/<slot>``.
      key_dtype, value_dtype, dim, devices, shard_num, tables: as of `Variable`.
      params: itself.
    """

    trainable = False

    def __init__(self, variable: ShardedTable, optimizer: Any, spec: SlotSpec) -> None:
        op_name, _, slot = spec.name.partition(".")
        self.variable = variable
        self.name = f"{variable.name}/{slot}" if variable.short_file_name else f"{variable.name}/{op_name}/{slot}"
        self.slot_name = slot
        self.optimizer_name = op_name
        self.key_dtype = variable.key_dtype
        self.value_dtype = variable.value_dtype
        self.dim = spec.width
        self.devices = variable.devices
        self.shard_num = variable.shard_num
        self.partition_fn = variable.partition_fn
        self.tables = [
            table.slot_table(spec) if hasattr(table, "slot_table") else SlotTable(table, optimizer, spec)
            for table in variable.tables
        ]
        for i, table in enumerate(self.tables):
            table.file_name = table_name(self.name, i, self.shard_num)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        # Checkpoints ask in the same words as Savers do.
        if not sys._getframe(1).f_locals.get("tf1_saver"):
            return {}
        if self.tables[0].saved_beside is not None:  # of any table it gives those of the whole variable
            return self.tables[0]._gather_saveables_for_checkpoint()
        # Tables in Redis have none.
        found = [saveable for table in self.tables for saveable in table._gather_saveables_for_checkpoint().values()]
        if len(found) == 1:
            return {trackable.VARIABLE_VALUE_KEY: found[0]}
        return {f"part_{i}": saveable for i, saveable in enumerate(found)}

    def _tfra_files(self) -> str:
        return slot_names(self.variable.name, self.variable.trainable_store, self.slot_name)

    @property
    def params(self) -> SlotVariable:
        """Itself."""
        return self

    def lookup(self, keys: Any, return_exists: bool = False, name: str | None = None) -> Any:
        """As `Variable.lookup`; what the slot starts from where a key is missing."""
        del name
        keys = self.variable.keys_tensor(keys)
        if len(self.tables) == 1:
            rows, exists = self.tables[0].gather(keys)
        else:
            found = [(t.gather(k), at) for t, (k, at) in zip(self.tables, self.variable.split(keys), strict=True)]
            places = [at for _, at in found]
            rows = tf.dynamic_stitch(places, [part_rows for (part_rows, _), _ in found])
            exists = tf.dynamic_stitch(places, [part_exists for (_, part_exists), _ in found])
            rows = tf.reshape(rows, tf.concat([tf.shape(keys), [self.dim]], 0))
            exists = tf.reshape(exists, tf.shape(keys))
        return (rows, exists) if return_exists else rows

    def upsert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Writes the slot of keys [n]. A key that is not there comes with its initial value."""
        keys, values = self.variable.keys_tensor(keys), self.variable.values_tensor(values)
        if len(self.tables) == 1:
            return self.tables[0].insert(keys, values, name=name)
        rows = rows_of_values(keys, values, self.dim, f"upsert of {self!r}")
        parts = zip(self.tables, self.variable.split(keys, rows), strict=True)
        written = [table.insert(part_keys, rows) for table, (part_keys, rows, _) in parts]
        return tf.group(*[op for op in written if op is not None])

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and their slot rows [N, dim]."""
        exported = [table.export(name=name) for table in self.tables]
        return tf.concat([keys for keys, _ in exported], 0), tf.concat([rows for _, rows in exported], 0)

    def size(self, index: int | None = None, name: str | None = None) -> tf.Tensor:
        """As `Variable.size`."""
        return self.variable.size(index, name)

    def __repr__(self) -> str:
        return f"<dynamic_embedding.SlotVariable '{self.name}'>"


def slot_variables(variable: ShardedTable, optimizer: Any) -> Iterator[SlotVariable]:
    """The slots that `optimizer`, the innermost one, keeps for `variable`."""
    for spec in variable.parts[0].slots_of(optimizer) or ():
        yield SlotVariable(variable, optimizer, spec)
