"""Tables whose rows lie in Redis: `RedisTableCreator` and what it makes.

A table is a hash in Redis, or several, from the bytes of a key to those of its row, as TFRA lays it out; a slot is a
table of its own, ``<variable>/<optimizer>/<slot>``. An update brings the rows of its keys into a table of the engine,
which is empty but for that, has them updated there, and writes them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from kvtools.dialects.tfra_redis_layout import column_name
from tfplugin.dynamic_embedding.creators import KVCreator
from tfplugin.dynamic_embedding.redis_config import RedisTableConfig
from tfplugin.dynamic_embedding.redis_key_names import RedisKeyNames
from tfplugin.dynamic_embedding.redis_store import RedisStore
from tfplugin.dynamic_embedding.row_shape import rows_of_values
from tfplugin.dynamic_embedding.slot_variable import SlotTable
from tfplugin.dynamic_embedding.table import CuckooHashTable, check_dtypes
from tfplugin.dynamic_embedding.table_files import call
from tfplugin.dynamic_embedding.tfra_names import slot_names, status_names
from tfplugin.kv_variable import KvVariable
from tfplugin.optimizers.update_lock import locked_updates
from tfplugin.slots import SlotSpec


class RedisRows(KvVariable):
    """The rows of a `RedisTable` as optimizers update them. The engine's table is a place to work in."""

    store: RedisStore
    names: RedisKeyNames | None = None
    #: The lookups that train them, by name.
    lookups: Mapping[str, Any] = MappingProxyType({})

    def column(self, spec: SlotSpec | None) -> str:
        """What the values or a slot are called here, and in Redis unless TFRA has it there under another name."""
        if spec is None:
            return column_name(self._name)
        name = column_name(self._name, spec.name)
        self.store.other_names[name] = slot_names(self._name, self.lookups, spec.name.partition(".")[2])
        return name

    def columns(self) -> list[str]:
        """What all of them are called that are known."""
        specs = {spec.name: spec for of_optimizer in self._row_slots.of.values() for spec in of_optimizer}
        return [self.column(None), *[self.column(spec) for spec in specs.values()]]

    def _keys(self, ids: np.ndarray) -> np.ndarray:
        return ids if self.names is None else self.names.of(ids)

    def read_rows(self, keys: tf.Tensor, optimizer: Any, specs: Sequence[SlotSpec]) -> list[tf.Tensor]:
        """As of `KvVariable`, from Redis."""
        starts = super().read_rows(keys, optimizer, specs)  # What missing rows start from.
        names = [self.column(spec) for spec in (None, *specs)]

        def read(ids: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
            keys = self._keys(ids)
            return [self.store.get(name, keys, rows)[0] for name, rows in zip(names, columns, strict=True)]

        read_columns = call(read, [keys, *starts], [self.dtype] * len(starts))
        columns = [tf.convert_to_tensor(column) for column in tf.nest.flatten(read_columns)]
        for column, start in zip(columns, starts, strict=True):
            column.set_shape(start.shape)
        return columns

    def write_rows(
        self, keys: tf.Tensor, columns: Sequence[tf.Tensor], specs: Sequence[SlotSpec], *, rewrites: bool = False
    ) -> Any:
        """As of `KvVariable`, to Redis. Ends an update."""
        del rewrites  # what is there has no counts
        names = [self.column(spec) for spec in (None, *specs)]

        def write(ids: np.ndarray, *rows: np.ndarray) -> None:
            self.store.put(list(zip(names, rows, strict=True)), self._keys(ids))
            if self.names is not None:
                self.names.release(ids)

        return call(write, [keys, *columns], [])

    def apply_update(
        self,
        keys: tf.Tensor,
        gradients: tf.Tensor,
        optimizer: Any,
        specs: Sequence[SlotSpec],
        *args: Any,
        positions: tf.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As of `KvVariable`."""
        del positions
        ids, _ = tf.unique(tf.reshape(keys, [-1]))
        with locked_updates(self, after=gradients) as finish:
            staged = super().write_rows(ids, self.read_rows(ids, optimizer, specs), specs)
            with _after(staged):
                applied = super().apply_update(keys, gradients, optimizer, specs, *args, **kwargs)
            with _after(applied):
                columns = super().read_rows(ids, optimizer, specs)
            with _after(*columns):
                cleared = KvVariable.remove(self, ids)
            with _after(cleared):
                return finish(self.write_rows(ids, columns, specs))


def _after(*ops: Any) -> Any:
    return tf.control_dependencies([] if tf.executing_eagerly() else [op for op in ops if op is not None])


class RedisTable(CuckooHashTable):
    """A table in Redis.

    Args:
      key_dtype, value_dtype, default_value, name, device: as of `CuckooHashTable`.
      config: a `RedisTableConfig`.
      args, part: as of `CuckooHashTable`.

    Raises:
      ValueError: the configuration cannot be read.
      ConnectionError: of all methods: the server is not there. In a graph, a `tf.errors.OpError`.
    """

    _rows = RedisRows
    #: Not in the engine's tables: nobody may read them there, and checkpoints do not hold them.
    rows_elsewhere = True

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return {}

    def __init__(
        self,
        key_dtype: Any,
        value_dtype: Any,
        default_value: Any,
        name: str,
        config: RedisTableConfig,
        *args: Any,
        **part: Any,
    ) -> None:
        super().__init__(key_dtype, value_dtype, default_value, name, False, 1, None, *args, **part)
        self.store = RedisStore(config.parameters(), name, self.key_dtype.as_numpy_dtype)
        self.store.other_names[name] = status_names(name)
        self.kv.store = self.store
        self.kv.names = self.names

    def trained_by(self, lookups: Mapping[str, Any]) -> None:
        """Notes where the lookups of the variable are found by name, now and later: TFRA may call slots by them."""
        if self.kv is not None:
            self.kv.lookups = lookups

    def _columns(self) -> list[str]:
        """All tables in Redis that a key is in."""
        return self.kv.columns()

    def _keys(self, keys: Any) -> tf.Tensor:
        return self.kv.keys_tensor(keys) if self.names is None else tf.convert_to_tensor(keys, tf.string)

    def ids(self, keys: Any) -> tf.Tensor:
        """As of `CuckooHashTable`, for an update."""
        return self._keys(keys) if self.names is None else self.names.hold(self._keys(keys))

    def gather(self, keys: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows of keys, and 0 for each, -1 where it is missing."""
        starts, _ = super().gather(keys, name)
        return self._get(self._name, keys, starts)

    def _get(self, column: str, keys: tf.Tensor, starts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def get(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            found, there = self.store.get(column, ids.reshape(-1), rows.reshape(-1, rows.shape[-1]))
            return found.reshape(rows.shape), there.reshape(ids.shape).astype(np.int64) - 1

        got = call(get, [keys, starts], [starts.dtype, tf.int64])
        rows, positions = (tf.convert_to_tensor(x, t) for x, t in zip(got, [starts.dtype, tf.int64], strict=True))
        rows.set_shape(starts.shape)
        positions.set_shape(keys.shape)
        return rows, positions

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Writes rows, inserting keys that are not there."""
        keys = self._keys(keys)
        return self._put(self._name, keys, self._rows_of(keys, values, "insert"))

    def _rows_of(self, keys: tf.Tensor, values: Any, doing: str) -> tf.Tensor:
        values = tf.convert_to_tensor(values, self.value_dtype)
        return rows_of_values(keys, values, self._dim, f"{doing} of '{self._name}'")

    upsert = insert

    def _put(self, column: str, keys: tf.Tensor, rows: tf.Tensor) -> Any:
        return call(lambda ids, r: self.store.put([(column, r)], ids), [tf.reshape(keys, [-1]), rows], [])

    def add(self, keys: Any, deltas: Any) -> Any:
        """Adds to rows, once for each occurrence of a key; a missing key starts from its initial value."""
        keys = self._keys(keys)
        ids, where = tf.unique(tf.reshape(keys, [-1]))
        deltas = self._rows_of(keys, deltas, "add")
        total = tf.math.unsorted_segment_sum(deltas, where, tf.size(ids))
        return self.insert(ids, self.gather(ids)[0] + total)

    def contains(self, keys: Any) -> tf.Tensor:
        """Whether each key is there: bool, shape of keys."""
        return self.gather(self._keys(keys))[1] >= 0

    def accum(self, keys: Any, values_or_deltas: Any, exists: Any, name: str | None = None) -> Any:
        """As of `CuckooHashTable`."""
        keys = self._keys(keys)
        ids, rows = tf.reshape(keys, [-1]), self._rows_of(keys, values_or_deltas, "accum")
        exists = tf.reshape(tf.convert_to_tensor(exists, tf.bool), [-1])
        there = self.contains(ids)
        new, old = tf.reverse(tf.where(~(exists | there))[:, 0], [0]), tf.where(exists & there)[:, 0]
        added = self.add(tf.gather(ids, old), tf.gather(rows, old))
        with _after(added):
            return self.insert(tf.gather(ids, new), tf.gather(rows, new))

    def remove(self, keys: Any, name: str | None = None) -> Any:
        """Removes keys, with their slots. Absent ones are ignored."""
        keys = tf.reshape(self._keys(keys), [-1])
        return call(lambda keys: self.store.remove(self._columns(), keys), [keys], [])

    def clear(self, name: str | None = None) -> Any:
        """Removes all rows, with their slots."""
        return call(lambda: self.store.clear(self._columns()), [], [])

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and rows [N, dim], in no particular order."""
        return self._export(self._name, self._dim)

    def _export(self, column: str, width: int) -> tuple[tf.Tensor, tf.Tensor]:
        types = [self.key_dtype, self.value_dtype]
        value_type = self.value_dtype.as_numpy_dtype
        exported = call(lambda: self.store.export(column, value_type, width), [], types)
        keys, rows = (tf.convert_to_tensor(x, t) for x, t in zip(exported, types, strict=True))
        keys.set_shape([None])
        rows.set_shape([None, width])
        return keys, rows

    def size(self, name: str | None = None) -> tf.Tensor:
        """Number of rows: scalar int64."""
        return tf.ensure_shape(
            tf.convert_to_tensor(call(lambda: np.int64(self.store.size(self._name)), [], tf.int64)), []
        )

    def slot_table(self, spec: SlotSpec) -> RedisSlotTable:
        """A slot of it."""
        return RedisSlotTable(self, spec)


class RedisStringValueTable(RedisTable):
    """A table in Redis whose rows are strings, which nobody trains. Arguments as of `RedisTable`."""

    kv = None

    def __init__(
        self, key_dtype: Any, value_dtype: Any, default_value: Any, name: str, config: RedisTableConfig, **part: Any
    ) -> None:
        del part
        self._name = name
        self.key_dtype, self.value_dtype = tf.as_dtype(key_dtype), tf.as_dtype(value_dtype)
        check_dtypes(self.key_dtype, self.value_dtype, name)
        self.checkpoint, self.names = False, None
        self._default = np.asarray(default_value, object).reshape(-1)
        self._dim = len(self._default)
        self.store = RedisStore(config.parameters(), name, self.key_dtype.as_numpy_dtype)

    def _columns(self) -> list[str]:
        return [self._name]

    def _keys(self, keys: Any) -> tf.Tensor:
        return tf.convert_to_tensor(keys, self.key_dtype)

    def gather(self, keys: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows of keys, and 0 for each, -1 where it is missing."""
        shape = tf.concat([tf.shape(keys), [self._dim]], 0)
        starts = tf.broadcast_to(tf.constant(self._default, tf.string), shape)
        starts.set_shape(keys.shape.concatenate([self._dim]))
        return self._get(self._name, keys, starts)

    def accum(self, keys: Any, values_or_deltas: Any, exists: Any, name: str | None = None) -> Any:
        """Raises TypeError: strings are not added."""
        del keys, values_or_deltas, exists, name
        raise TypeError(f"Dynamic embedding variable '{self._name}' has string values: accum adds numbers.")


class RedisSlotTable(SlotTable):
    """A slot of a `RedisTable`."""

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return {}

    def __init__(self, table: RedisTable, spec: SlotSpec) -> None:
        self._table = table
        self._column = table.kv.column(spec)
        self._made_with = spec

    @property
    def _spec(self) -> SlotSpec:
        return self._made_with  # no restore renames what is in a server

    def gather(self, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """As of `SlotTable`."""
        keys = self._table._keys(keys)
        shape = tf.concat([tf.shape(keys), [self._spec.width]], 0)
        starts = tf.fill(shape, tf.cast(self._spec.constant, self._table.value_dtype))
        rows, positions = self._table._get(self._column, keys, starts)
        return rows, positions >= 0

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Writes the slot of keys."""
        keys = self._table._keys(keys)
        values = tf.convert_to_tensor(values, self._table.value_dtype)
        rows = rows_of_values(keys, values, self._spec.width, f"insert of '{self.name}'")
        return self._table._put(self._column, keys, rows)

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and their slot rows [N, width]."""
        return self._table._export(self._column, self._spec.width)

    def size(self, name: str | None = None) -> tf.Tensor:
        """Number of rows: scalar int64."""
        return self._table.size(name)


class RedisTableCreator(KVCreator):
    """Makes tables in a Redis server. Their rows stay there, and are not in checkpoints.

    A variable has one table, however many devices it is given, and all processes share it.

    Args:
      config: a `RedisTableConfig`.
      saver: not used.

    Raises:
      TypeError: the config is another.

    Example:
      >>> creator = de.RedisTableCreator(de.RedisTableConfig("redis.json"))
      >>> v = de.get_variable("user", dim=4, kv_creator=creator)
    """

    #: No device has the rows.
    one_table = True
    key_names = RedisKeyNames

    def __init__(self, config: RedisTableConfig | None = None, saver: Any = None) -> None:
        if config is not None and not isinstance(config, RedisTableConfig):
            raise TypeError(f"RedisTableCreator: config must be a RedisTableConfig, got {config!r}.")
        super().__init__(config or RedisTableConfig(), saver)

    def for_status(self) -> RedisTableCreator:
        """What makes the status of a restrict policy: in Redis, where all processes see it."""
        return self

    def create(
        self,
        key_dtype: Any = None,
        value_dtype: Any = None,
        default_value: Any = None,
        name: str | None = None,
        checkpoint: bool | None = None,
        init_size: int | None = 0,
        config: Any = None,
        device: str | None = None,
        shard_saveable_object_fn: Any = None,
        **part: Any,
    ) -> RedisTable:
        """A table; see `RedisTable` for the arguments."""
        del checkpoint, init_size, shard_saveable_object_fn
        arguments = (key_dtype, value_dtype, default_value, name or "RedisTable", config or self.config)
        if tf.as_dtype(value_dtype) == tf.string:
            return RedisStringValueTable(*arguments)
        return RedisTable(*arguments, device or "", **part)
