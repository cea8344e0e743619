"""The hashes in Redis that tables are in, as bytes: connecting, asking, and errors that name the server."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from kvtools.dialects import tfra_redis_layout as layout
from tfplugin.dynamic_embedding.redis_config import CLUSTER, ONE_SERVER, SENTINEL

_log = logging.getLogger("tfplugin")
#: Commands that are sent at once.
_PIPELINE = 64
_Reply = TypeVar("_Reply")


class RedisConnection:
    """A client of a server, of a cluster or of what sentinels guard, made when it is asked first.

    Args:
      parameters: of a `RedisTableConfig`.
      owner: for messages.
    """

    def __init__(self, parameters: Mapping[str, Any], owner: str) -> None:
        try:
            self._redis = importlib.import_module("redis")
        except ImportError as error:
            raise ImportError(f"RedisTable '{owner}' needs redis-py ({error}): install kvtools[formats].") from error
        self._owner = owner
        self._parameters = parameters
        self._places = list(zip(parameters["redis_host_ip"], parameters["redis_host_port"], strict=True))
        self._lock = threading.Lock()
        self._made: Any = None
        self.mode: int = parameters["redis_connection_mode"]
        self.shown = ", ".join(f"{host}:{port}" for host, port in self._places)

    def ask(self, question: Callable[[Any], _Reply]) -> _Reply:
        """What `question` makes of the client.

        It may be asked twice, and must do the same then: a connection may have been cut off, or another server may be
        the primary now.

        Raises:
          ConnectionError: the server does not do what it is asked. The message names it.
        """
        redis = self._redis
        for _ in range(2):
            try:
                return question(self._client())
            except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
                failed = error
                with self._lock:  # A cluster's client forgets its nodes when none answers.
                    self._made = None if self.mode == CLUSTER else self._made
                if isinstance(error, redis.AuthenticationError):
                    break
        raise ConnectionError(
            f"RedisTable '{self._owner}': {self._what()} at {self.shown} does not do what it is asked "
            f"({type(failed).__name__}: {failed}). {self._advice(failed)}; the next call asks again."
        ) from failed

    def _what(self) -> str:
        return {
            CLUSTER: "the Redis cluster",
            SENTINEL: f"what the Redis sentinels know as '{self._parameters['redis_master_name']}'",
        }.get(self.mode, "the Redis server")

    def _advice(self, error: Exception) -> str:
        text = str(error)
        if isinstance(error, (self._redis.AuthenticationError, self._redis.exceptions.NoPermissionError)) or any(
            word in text for word in ("NOAUTH", "WRONGPASS")
        ):
            return "Correct redis_user and redis_password in its configuration, or those of the sentinels"
        if isinstance(error, self._redis.exceptions.MovedError) or "cluster mode" in text:
            return "It is a node of a cluster: set redis_connection_mode to 0"
        if "Cluster mode is not enabled" in text or "cluster support disabled" in text:
            return "It is no cluster: set redis_connection_mode to 2"
        if isinstance(error, self._redis.exceptions.OutOfMemoryError):
            return "Raise its maxmemory, or hold less"
        return "Start it, or correct its configuration"

    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._connected()
            return self._made

    def _settings(self) -> dict[str, Any]:
        """`ask` asks again: the client is not to wait and do so too. A server that wants a password says so itself."""
        return {"retry": self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0), "protocol": 2}

    def _connected(self) -> Any:
        p, redis = self._parameters, self._redis
        about = {
            **self._settings(),
            "username": p["redis_user"] if p["redis_password"] else None,
            "password": p["redis_password"] or None,
            "socket_connect_timeout": p["redis_connect_timeout"] / 1000 or None,
            "socket_timeout": p["redis_socket_timeout"] / 1000 or None,
            "socket_keepalive": bool(p["redis_connect_keep_alive"]),
        }
        if self.mode == CLUSTER:
            nodes = [redis.cluster.ClusterNode(host, port) for host, port in self._places]
            return redis.RedisCluster(startup_nodes=nodes, **about)
        if self.mode == SENTINEL:
            sentinels = redis.Sentinel(
                self._places,
                sentinel_kwargs={
                    **self._settings(),
                    "username": p["redis_sentinel_user"] if p["redis_sentinel_password"] else None,
                    "password": p["redis_sentinel_password"] or None,
                    "socket_connect_timeout": p["redis_sentinel_connect_timeout"] / 1000 or None,
                    "socket_timeout": p["redis_sentinel_socket_timeout"] / 1000 or None,
                },
            )
            if self._are_sentinels(sentinels):
                return sentinels.master_for(p["redis_master_name"], db=p["redis_db"], **about)
            self.mode = ONE_SERVER
        host, port = self._places[0]
        pool = redis.BlockingConnectionPool(
            host=host,
            port=port,
            db=p["redis_db"],
            max_connections=max(1, p["redis_conn_pool_size"]),
            timeout=p["redis_wait_timeout"] / 1000 or None,
            **about,
        )
        return redis.Redis.from_pool(pool)

    def _are_sentinels(self, sentinels: Any) -> bool:
        """Whether a place is a sentinel; false where one answers that it is none. Raises what the last one did."""
        failed: Exception | None = None
        for sentinel in sentinels.sentinels:
            try:
                sentinel.execute_command("SENTINEL", "MYID")
                return True
            except self._redis.AuthenticationError:
                if self._parameters["redis_sentinel_password"]:
                    raise
                return False  # If this is a sentinel after all, it refuses what comes next.
            except self._redis.ResponseError as error:
                if "unknown command" not in str(error).lower():
                    return True
                _log.info("RedisTable '%s': %s is no sentinel: it is used itself.", self._owner, self.shown)
                return False
            except (self._redis.RedisError, OSError) as error:
                failed = error
        assert failed is not None
        raise failed


class RedisStore:
    """The hashes of one variable: of its values and of the slots of its optimizers.

    Args:
      parameters: of a `RedisTableConfig`.
      owner: for messages.
      key_dtype: of keys, a NumPy dtype; object: strings.
    """

    def __init__(self, parameters: Mapping[str, Any], owner: str, key_dtype: Any) -> None:
        self._owner = owner
        self._parameters = parameters
        self._key_dtype = np.dtype(key_dtype)
        self._batch: int = parameters["keys_sending_size"]
        self._connection = RedisConnection(parameters, owner)
        self._lock = threading.Lock()
        #: What else a column may be called in Redis, where there is none of its name: a regular expression.
        self.other_names: dict[str, str] = {}
        #: The hashes of the columns that were asked for.
        self._hashes: dict[str, list[bytes]] = {}
        seconds = parameters["expire_model_tag_in_seconds"]
        if seconds > 0:
            weakref.finalize(self, _expire, self._connection, self._hashes, seconds)

    @property
    def shown(self) -> str:
        """Where the server is, for messages."""
        return self._connection.shown

    # ---- Which hashes ------------------------------------------------------------------------------------------------

    def hashes(self, name: str) -> list[bytes]:
        """The hashes of a column, one for each slice. The first call sees to it that they do not expire."""
        with self._lock:
            if name not in self._hashes:
                found = self._connection.ask(lambda client: self._find(client, name))
                self._connection.ask(lambda client: [client.persist(key) for key in found])
                self._hashes[name] = found
            return self._hashes[name]

    def _find(self, client: Any, name: str) -> list[bytes]:
        """Hashes with tags of ours; where they are not there, those of whoever wrote the table.

        TFRA chooses tags by which node of a cluster has which slots, so that they change with the cluster.
        """
        p = self._parameters
        tags = layout.hash_tags(p["storage_slice"], p["redis_hash_tags_runtime"])
        if self._connection.mode != CLUSTER:
            tags = tags[:1]  # There is one place to put rows in.

        def own(name: str) -> tuple[bytes, list[bytes], bool]:
            prefix = layout.table_prefix(p["model_tag_runtime"], name, p["using_md5_prefix_name"])
            hashes = [prefix + tag.encode() for tag in tags]
            return prefix, hashes, all(client.exists(key) for key in hashes)

        prefix, ours, there = own(name)
        known = name if there else self._name_in(client, name)
        if known != name:
            prefix, ours, there = own(known)
        if p["redis_hash_tags_runtime"] or there:
            return ours
        theirs: dict[int, bytes] = {}
        for key in client.scan_iter(match=layout.literally(prefix) + b"{*}", count=10000):
            field = client.hrandfield(key)
            if field is None:  # It has just gone.
                continue
            if self._key_dtype.kind != "O" and len(field) != self._key_dtype.itemsize:
                raise ValueError(
                    f"RedisTable '{self._owner}': in {self.shown}, {key!r} has keys of {len(field)} bytes, which are "
                    f"not {self._key_dtype.name}: give the variable the dtype that it was written with, or another "
                    "name."
                )
            number = int(self._slices_of(layout.keys_of([field], self._key_dtype), len(ours))[0])
            if number in theirs:
                raise ValueError(
                    f"RedisTable '{self._owner}': {self.shown} has '{name}' in {theirs[number]!r} and in {key!r}, "
                    f"which are not {len(ours)} slices: give the storage_slice and the redis_hash_tags_runtime that "
                    "it was written with."
                )
            theirs[number] = key
        taken = set(theirs.values())
        spare = (prefix + f"{{{layout.tag_in_slot(slot)}}}".encode() for slot in range(layout.HASH_SLOTS))
        for i, key in enumerate(ours):
            if i not in theirs:
                theirs[i] = key if key not in taken else next(key for key in spare if key not in {*taken, *ours})
                taken.add(theirs[i])
        return [theirs[i] for i in range(len(ours))]

    def _name_in(self, client: Any, name: str) -> str:
        """What a column is called in Redis: its name, unless there are tables of its other names alone.

        Raises:
          ValueError: there are several of those.
        """
        others = self.other_names.get(name)
        if not others or self._parameters["using_md5_prefix_name"]:  # Digests do not tell names.
            return name
        tag = layout.table_prefix(self._parameters["model_tag_runtime"], "")
        keys = client.scan_iter(match=layout.literally(tag) + b"*{*}", count=10000)
        there = {key[len(tag) :].rpartition(b"{")[0].decode(errors="replace") for key in keys}
        found = sorted(other for other in there if re.fullmatch(others, other))
        own = name.replace("/", "_")
        if own in there or not found:
            return name
        if len(found) > 1:
            raise ValueError(
                f"RedisTable '{self._owner}': {self.shown} has no '{own}', and several that TFRA may have called so, "
                f"one for each lookup: {', '.join(found)}. RENAME the one to go on with to '{own}', with the hash tag "
                "that it has."
            )
        return found[0]

    def _slices_of(self, keys: np.ndarray, slices: int) -> np.ndarray:
        return layout.slices_of(keys, slices, self._parameters["using_hash_storage_slice"])

    def _batches(self, keys: np.ndarray, slices: int) -> list[tuple[int, np.ndarray]]:
        """(slice, where its keys are) of each command."""
        of_slice = self._slices_of(keys, slices)
        return [
            (i, places[start : start + self._batch])
            for i in range(slices)
            for places in [np.flatnonzero(of_slice == i)]
            for start in range(0, len(places), self._batch)
        ]

    # ---- What is asked -----------------------------------------------------------------------------------------------

    def _send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The replies of commands, which are sent many at a time."""

        def send(client: Any, some: Sequence[tuple[Any, ...]]) -> list[Any]:
            with client.pipeline(transaction=False) as pipeline:
                for command in some:
                    pipeline.execute_command(*command)
                return list(pipeline.execute())

        replies: list[Any] = []
        for start in range(0, len(commands), _PIPELINE):
            some = commands[start : start + _PIPELINE]
            replies += self._connection.ask(lambda client, some=some: send(client, some))
        return replies

    def get(self, name: str, keys: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of keys [n], those of `rows` [n, width] where they are missing; and which are there.

        Raises:
          ValueError: there is a row of another dtype or width.
        """
        found, rows = np.zeros(len(keys), bool), np.array(rows)
        hashes, fields = self.hashes(name), layout.fields_of(keys)
        batches = self._batches(keys, len(hashes))
        replies = self._send([("HMGET", hashes[i], *[fields[at] for at in places]) for i, places in batches])
        places = [at for _, some in batches for at in some.tolist()]
        there = [(at, row) for at, row in zip(places, itertools.chain(*replies), strict=True) if row is not None]
        if there:
            at = [place for place, _ in there]
            found[at], rows[at] = True, self._rows(name, [row for _, row in there], rows.dtype, rows.shape[1])
        return rows, found

    def _rows(self, name: str, values: Sequence[bytes], dtype: Any, width: int) -> np.ndarray:
        try:
            return layout.rows_of(values, dtype, width)
        except ValueError as error:
            raise ValueError(
                f"RedisTable '{self._owner}': in {self.shown}, '{name}' has {error}: give the variable the dtype and "
                "the width that it was written with, or another name."
            ) from error

    def put(self, columns: Sequence[tuple[str, np.ndarray]], keys: np.ndarray) -> None:
        """Writes rows of keys; of equal keys the last wins."""
        fields = layout.fields_of(keys)
        commands = []
        for name, rows in columns:
            hashes, values = self.hashes(name), layout.values_of(rows)
            for i, places in self._batches(keys, len(hashes)):
                commands.append(("HSET", hashes[i], *[x for at in places for x in (fields[at], values[at])]))
        self._send(commands)

    def remove(self, names: Sequence[str], keys: np.ndarray) -> None:
        """Removes keys from several tables."""
        fields = layout.fields_of(keys)
        commands = []
        for name in names:
            hashes = self.hashes(name)
            for i, places in self._batches(keys, len(hashes)):
                commands.append(("HDEL", hashes[i], *[fields[at] for at in places]))
        self._send(commands)

    def clear(self, names: Sequence[str]) -> None:
        """Removes tables."""
        self._send([("UNLINK", key) for name in names for key in self.hashes(name)])

    def size(self, name: str) -> int:
        """Number of rows."""
        return sum(map(int, self._send([("HLEN", key) for key in self.hashes(name)])))

    def export(self, name: str, dtype: Any, width: int) -> tuple[np.ndarray, np.ndarray]:
        """All keys [n] and rows [n, width].

        Raises:
          ValueError: there is a row of another dtype or width, or a key of another dtype.
        """
        found: dict[bytes, bytes] = {}
        for key in self.hashes(name):
            found.update(self._connection.ask(lambda client, key=key: dict(client.hscan_iter(key, count=self._batch))))
        wrong = next((f for f in found if self._key_dtype.kind != "O" and len(f) != self._key_dtype.itemsize), None)
        if wrong is not None:
            raise ValueError(
                f"RedisTable '{self._owner}': in {self.shown}, '{name}' has a key of {len(wrong)} bytes, which is not "
                f"{self._key_dtype.name}: give the variable the dtype that it was written with, or another name."
            )
        return layout.keys_of(list(found), self._key_dtype), self._rows(name, list(found.values()), dtype, width)


def _expire(connection: RedisConnection, hashes: Mapping[str, Sequence[bytes]], seconds: int) -> None:
    """Has hashes go after a time that nobody uses them in."""
    with contextlib.suppress(ConnectionError):
        connection.ask(lambda client: [client.expire(key, seconds) for keys in hashes.values() for key in keys])
