"""Tables whose rows lie in Redis: `RedisTableCreator` and what it makes.

A table is one hash for each slice, ``<model_tag_runtime>:<variable>{<tag>}``, from the bytes of a key to those of its
row; a slot is a table of its own, ``<variable>/<optimizer>/<slot>``. An update brings the rows of its keys into a table
of the engine, which is empty but for that, has them updated there, and writes them back.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin.dynamic_embedding.creators import KVCreator
from tfplugin.dynamic_embedding.slot_variable import SlotTable
from tfplugin.dynamic_embedding.table import CuckooHashTable
from tfplugin.dynamic_embedding.table_files import call
from tfplugin.kv_variable import KvVariable
from tfplugin.slots import SlotSpec

#: The environment variable with the path of the configuration.
CONFIG_VARIABLE = "TFRA_REDIS_CONFIG_PATH"
#: What a configuration may say, and what is so where it does not. Times are in milliseconds.
DEFAULTS: dict[str, Any] = {
    "redis_connection_mode": 2,  # 0: cluster, 1: sentinel, 2: one server
    "redis_master_name": "master",
    "redis_host_ip": ["127.0.0.1"],
    "redis_host_port": [6379],
    "redis_user": "default",
    "redis_password": "",
    "redis_db": 0,
    "redis_connect_keep_alive": False,
    "redis_connect_timeout": 1000,
    "redis_socket_timeout": 1000,
    "redis_conn_pool_size": 20,
    "redis_sentinel_user": "default",
    "redis_sentinel_password": "",
    "redis_sentinel_connect_timeout": 1000,
    "redis_sentinel_socket_timeout": 1000,
    "storage_slice": 1,
    "keys_sending_size": 1024,
    "model_tag_runtime": "test",
    "redis_hash_tags_runtime": [],
}


class RedisTableConfig:
    """Where a Redis server is, by a JSON file.

    Args:
      redis_config_abs_dir: path of the file.
      redis_config_abs_dir_env: name of the environment variable that has the path. Default: the variable
        ``TFRA_REDIS_CONFIG_PATH`` if it is set, before `redis_config_abs_dir`.
    """

    def __init__(self, redis_config_abs_dir: str | None = None, redis_config_abs_dir_env: str | None = None) -> None:
        self.redis_config_abs_dir = redis_config_abs_dir
        self.redis_config_abs_dir_env = redis_config_abs_dir_env

    def parameters(self) -> dict[str, Any]:
        """What the file says, with `DEFAULTS`. Without a file: a server at 127.0.0.1:6379.

        Raises:
          ValueError: there is no such file or environment variable, or it is no JSON object.
        """
        variable = self.redis_config_abs_dir_env
        if variable and variable not in os.environ:
            raise ValueError(f"RedisTableConfig: the environment variable {variable} is not set: set it to a path.")
        path = os.environ.get(variable or CONFIG_VARIABLE) or self.redis_config_abs_dir
        if path is None:
            return dict(DEFAULTS)
        try:
            given = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"RedisTableConfig: cannot read '{path}': {error}.") from error
        if not isinstance(given, dict):
            raise ValueError(f"RedisTableConfig: '{path}' must be a JSON object, got a {type(given).__name__}.")
        return DEFAULTS | given


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


class RedisStore:
    """The hashes of one server that tables are in."""

    def __init__(self, parameters: dict[str, Any], owner: str) -> None:
        try:
            self._redis = importlib.import_module("redis")
        except ImportError as error:
            raise ImportError(f"RedisTable '{owner}' needs redis-py ({error}): install kvtools[formats].") from error
        self._owner = owner
        self._batch = max(1, int(parameters["keys_sending_size"]))
        self._tag = parameters["model_tag_runtime"]
        slices = max(1, int(parameters["storage_slice"]))
        tags = _listed(parameters["redis_hash_tags_runtime"])
        self._tags = [f"{{{str(tag).strip('{}')}}}" for tag in (tags if len(tags) == slices else range(slices))]
        hosts, ports = _listed(parameters["redis_host_ip"]), _listed(parameters["redis_host_port"])
        ports = ports if len(ports) == len(hosts) else ports[:1] * len(hosts)
        self._places = [(str(host), int(port)) for host, port in zip(hosts, ports, strict=True)]
        self.shown = ", ".join(f"{host}:{port}" for host, port in self._places)
        self._parameters = parameters
        self._made: Any = None

    def _client(self) -> Any:
        if self._made is None:
            self._made = self._connected()
        return self._made

    def _connected(self) -> Any:
        p, redis = self._parameters, self._redis
        about = {
            "username": p["redis_user"] if p["redis_password"] else None,
            "password": p["redis_password"] or None,
            "socket_connect_timeout": p["redis_connect_timeout"] / 1000 or None,
            "socket_timeout": p["redis_socket_timeout"] / 1000 or None,
            "socket_keepalive": bool(p["redis_connect_keep_alive"]),
        }
        if p["redis_connection_mode"] == 0:
            nodes = [redis.cluster.ClusterNode(host, port) for host, port in self._places]
            return redis.RedisCluster(startup_nodes=nodes, **about)
        if p["redis_connection_mode"] == 1:
            sentinels = redis.Sentinel(
                self._places,
                sentinel_kwargs={
                    "username": p["redis_sentinel_user"] if p["redis_sentinel_password"] else None,
                    "password": p["redis_sentinel_password"] or None,
                    "socket_connect_timeout": p["redis_sentinel_connect_timeout"] / 1000 or None,
                    "socket_timeout": p["redis_sentinel_socket_timeout"] / 1000 or None,
                },
            )
            return sentinels.master_for(p["redis_master_name"], db=int(p["redis_db"]), **about)
        host, port = self._places[0]
        pool = int(p["redis_conn_pool_size"]) or None
        return redis.Redis(host, port, db=int(p["redis_db"]), max_connections=pool, **about)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[Any]:
        """The client; its errors name the server."""
        try:
            yield self._client()
        except (self._redis.RedisError, OSError) as error:
            # A cluster's client forgets its nodes when none answers.
            self._made = None if self._parameters["redis_connection_mode"] == 0 else self._made
            raise ConnectionError(
                f"RedisTable '{self._owner}': the Redis server at {self.shown} does not do what it is asked "
                f"({type(error).__name__}: {error}). Start it, or correct its configuration; the next call asks again."
            ) from error

    def _hashes(self, name: str) -> list[str]:
        return [f"{self._tag}:{name}{tag}" for tag in self._tags]

    def _batches(self, keys: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """(slice, where its keys are) of each command."""
        of_slice = (keys.astype(np.int64) & 0xFFFFFFFF) % len(self._tags)
        for i in range(len(self._tags)):
            places = np.flatnonzero(of_slice == i)
            for start in range(0, len(places), self._batch):
                yield i, places[start : start + self._batch]

    def get(self, name: str, keys: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of keys [n], those of `rows` [n, width] where they are missing; and which are there."""
        found, rows = np.zeros(len(keys), bool), np.array(rows)
        hashes, batches = self._hashes(name), list(self._batches(keys))
        with self._asked() as client, client.pipeline(transaction=False) as pipeline:
            for i, places in batches:
                pipeline.hmget(hashes[i], [keys[place].tobytes() for place in places])
            replies = pipeline.execute() if batches else []
        for (_, places), values in zip(batches, replies, strict=True):
            for place, value in zip(places, values, strict=True):
                if value is None:
                    continue
                if len(value) != rows.dtype.itemsize * rows.shape[1]:
                    raise ValueError(
                        f"RedisTable '{self._owner}': in {self.shown}, '{name}' has a row of {len(value)} bytes, which "
                        f"are not {rows.dtype.name}[{rows.shape[1]}]: give the variable the dtype and the width that "
                        "it was written with, or another name."
                    )
                found[place], rows[place] = True, np.frombuffer(value, rows.dtype)
        return rows, found

    def put(self, columns: Sequence[tuple[str, np.ndarray]], keys: np.ndarray) -> None:
        """Writes rows of keys; of equal keys the last wins."""
        batches = list(self._batches(keys))
        with self._asked() as client, client.pipeline(transaction=False) as pipeline:
            for name, rows in columns:
                hashes = self._hashes(name)
                for i, places in batches:
                    pipeline.hset(hashes[i], mapping={keys[at].tobytes(): rows[at].tobytes() for at in places})
            if batches:
                pipeline.execute()

    def remove(self, names: Sequence[str], keys: np.ndarray) -> None:
        """Removes keys from several tables."""
        batches = list(self._batches(keys))
        with self._asked() as client, client.pipeline(transaction=False) as pipeline:
            for name in names:
                hashes = self._hashes(name)
                for i, places in batches:
                    pipeline.hdel(hashes[i], *[keys[place].tobytes() for place in places])
            if batches:
                pipeline.execute()

    def clear(self, names: Sequence[str]) -> None:
        """Removes tables."""
        with self._asked() as client:
            for key in [key for name in names for key in self._hashes(name)]:
                client.delete(key)

    def size(self, name: str) -> int:
        """Number of rows."""
        with self._asked() as client:
            return sum(int(client.hlen(key)) for key in self._hashes(name))

    def export(self, name: str, key_dtype: Any, dtype: Any, width: int) -> tuple[np.ndarray, np.ndarray]:
        """All keys [n] and rows [n, width]."""
        with self._asked() as client:
            found: dict[bytes, bytes] = {}
            for key in self._hashes(name):
                found.update(client.hscan_iter(key, count=self._batch))
        keys = np.frombuffer(b"".join(found), key_dtype)
        return keys, np.frombuffer(b"".join(found.values()), dtype).reshape(len(keys), width)


class RedisRows(KvVariable):
    """The rows of a `RedisTable` as optimizers update them. The engine's table is a place to work in."""

    store: RedisStore

    def column(self, spec: SlotSpec | None) -> str:
        """What the values or a slot are called in Redis."""
        return self._name if spec is None else f"{self._name}/{spec.name.replace('.', '/', 1)}"

    def columns(self) -> list[str]:
        """What all of them are called that are known."""
        specs = {spec.name: spec for of_optimizer in self._slots_of.values() for spec in of_optimizer}
        return [self.column(None), *[self.column(spec) for spec in specs.values()]]

    def read_rows(self, keys: tf.Tensor, optimizer: Any, specs: Sequence[SlotSpec]) -> list[tf.Tensor]:
        """As of `KvVariable`, from Redis."""
        starts = super().read_rows(keys, optimizer, specs)  # What missing rows start from.
        names = [self.column(spec) for spec in (None, *specs)]

        def read(ids: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
            return [self.store.get(name, ids, rows)[0] for name, rows in zip(names, columns, strict=True)]

        read_columns = call(read, [keys, *starts], [self.dtype] * len(starts))
        columns = [tf.convert_to_tensor(column) for column in tf.nest.flatten(read_columns)]
        for column, start in zip(columns, starts, strict=True):
            column.set_shape(start.shape)
        return columns

    def write_rows(self, keys: tf.Tensor, columns: Sequence[tf.Tensor], specs: Sequence[SlotSpec]) -> Any:
        """As of `KvVariable`, to Redis."""
        names = [self.column(spec) for spec in (None, *specs)]

        def write(ids: np.ndarray, *rows: np.ndarray) -> None:
            self.store.put(list(zip(names, rows, strict=True)), ids)

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
        staged = super().write_rows(ids, self.read_rows(ids, optimizer, specs), specs)
        with _after(staged):
            applied = super().apply_update(keys, gradients, optimizer, specs, *args, **kwargs)
        with _after(applied):
            columns = super().read_rows(ids, optimizer, specs)
        with _after(*columns):
            cleared = KvVariable.remove(self, ids)
        with _after(cleared):
            return self.write_rows(ids, columns, specs)


def _after(*ops: Any) -> Any:
    return tf.control_dependencies([] if tf.executing_eagerly() else [op for op in ops if op is not None])


class RedisTable(CuckooHashTable):
    """A table in Redis.

    Args:
      key_dtype, value_dtype, default_value, name, device: as of `CuckooHashTable`; no strings.
      config: a `RedisTableConfig`.
      args, part: as of `CuckooHashTable`.

    Raises:
      TypeError: strings.
      ValueError: the configuration cannot be read.
      ConnectionError: of all methods: the server is not there. In a graph, a `tf.errors.OpError`.
    """

    _rows = RedisRows
    #: Not in the engine's tables: nobody may read them there, and checkpoints do not hold them.
    rows_elsewhere = True

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
        for dtype in (key_dtype, value_dtype):
            if tf.as_dtype(dtype) == tf.string:
                raise TypeError(f"Dynamic embedding variable '{name}': tables in Redis hold numbers, got strings.")
        self.store = RedisStore(config.parameters(), name)
        super().__init__(key_dtype, value_dtype, default_value, name, False, 1, None, *args, **part)
        self.kv.store = self.store

    def gather(self, keys: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows of keys, and 0 for each, -1 where it is missing."""
        starts, _ = super().gather(keys, name)
        return self._get(self._name, keys, starts)

    def _get(self, column: str, keys: tf.Tensor, starts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def get(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            found, there = self.store.get(column, ids.reshape(-1), rows.reshape(-1, rows.shape[-1]))
            return found.reshape(rows.shape), there.reshape(ids.shape).astype(np.int64) - 1

        rows, positions = (tf.convert_to_tensor(x) for x in call(get, [keys, starts], [starts.dtype, tf.int64]))
        rows.set_shape(starts.shape)
        positions.set_shape(keys.shape)
        return rows, positions

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Writes rows, inserting keys that are not there."""
        values = tf.reshape(tf.convert_to_tensor(values, self.value_dtype), [-1, self._dim])
        return self._put(self._name, self.ids(keys), values)

    upsert = insert

    def _put(self, column: str, keys: tf.Tensor, rows: tf.Tensor) -> Any:
        return call(lambda ids, r: self.store.put([(column, r)], ids), [tf.reshape(keys, [-1]), rows], [])

    def add(self, keys: Any, deltas: Any) -> Any:
        """Adds to rows, once for each occurrence of a key; a missing key starts from its initial value."""
        ids, where = tf.unique(tf.reshape(self.ids(keys), [-1]))
        deltas = tf.reshape(tf.convert_to_tensor(deltas, self.value_dtype), [-1, self._dim])
        total = tf.math.unsorted_segment_sum(deltas, where, tf.size(ids))
        return self.insert(ids, self.gather(ids)[0] + total)

    def contains(self, keys: Any) -> tf.Tensor:
        """Whether each key is there: bool, shape of keys."""
        return self.gather(self.ids(keys))[1] >= 0

    def accum(self, keys: Any, values_or_deltas: Any, exists: Any, name: str | None = None) -> Any:
        """As of `CuckooHashTable`."""
        ids = tf.reshape(self.ids(keys), [-1])
        rows = tf.reshape(tf.convert_to_tensor(values_or_deltas, self.value_dtype), [-1, self._dim])
        exists = tf.reshape(tf.convert_to_tensor(exists, tf.bool), [-1])
        there = self.contains(ids)
        new, old = tf.reverse(tf.where(~(exists | there))[:, 0], [0]), tf.where(exists & there)[:, 0]
        added = self.add(tf.gather(ids, old), tf.gather(rows, old))
        with _after(added):
            return self.insert(tf.gather(ids, new), tf.gather(rows, new))

    def remove(self, keys: Any, name: str | None = None) -> Any:
        """Removes keys, with their slots. Absent ones are ignored."""
        ids = tf.reshape(self.ids(keys), [-1])
        return call(lambda ids: self.store.remove(self.kv.columns(), ids), [ids], [])

    def clear(self, name: str | None = None) -> Any:
        """Removes all rows, with their slots."""
        return call(lambda: self.store.clear(self.kv.columns()), [], [])

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and rows [N, dim], in no particular order."""
        return self._export(self._name, self._dim)

    def _export(self, column: str, width: int) -> tuple[tf.Tensor, tf.Tensor]:
        types = [self.key_dtype, self.value_dtype]
        key_type, value_type = (np.dtype(dtype.as_numpy_dtype) for dtype in types)
        exported = call(lambda: self.store.export(column, key_type, value_type, width), [], types)
        keys, rows = (tf.convert_to_tensor(x) for x in exported)
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


class RedisSlotTable(SlotTable):
    """A slot of a `RedisTable`."""

    def __init__(self, table: RedisTable, spec: SlotSpec) -> None:
        self._table = table
        self._column = table.kv.column(spec)
        self._spec = spec

    def gather(self, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """As of `SlotTable`."""
        keys = self._table.ids(keys)
        shape = tf.concat([tf.shape(keys), [self._spec.width]], 0)
        starts = tf.fill(shape, tf.cast(self._spec.constant, self._table.value_dtype))
        rows, positions = self._table._get(self._column, keys, starts)
        return rows, positions >= 0

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Writes the slot of keys."""
        values = tf.reshape(tf.convert_to_tensor(values, self._table.value_dtype), [-1, self._spec.width])
        return self._table._put(self._column, self._table.ids(keys), values)

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and their slot rows [N, width]."""
        return self._table._export(self._column, self._spec.width)

    def size(self, name: str | None = None) -> tf.Tensor:
        """Number of rows: scalar int64."""
        return self._table.size(name)


class RedisTableCreator(KVCreator):
    """Makes tables in a Redis server. Their rows stay there, and are not in checkpoints.

    Args:
      config: a `RedisTableConfig`.
      saver: not used.

    Raises:
      TypeError: the config is another.

    Example:
      >>> creator = de.RedisTableCreator(de.RedisTableConfig("redis.json"))
      >>> v = de.get_variable("user", dim=4, kv_creator=creator)
    """

    def __init__(self, config: RedisTableConfig | None = None, saver: Any = None) -> None:
        if config is not None and not isinstance(config, RedisTableConfig):
            raise TypeError(f"RedisTableCreator: config must be a RedisTableConfig, got {config!r}.")
        super().__init__(config or RedisTableConfig(), saver)

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
        return RedisTable(
            key_dtype, value_dtype, default_value, name or "RedisTable", config or self.config, device or "", **part
        )
