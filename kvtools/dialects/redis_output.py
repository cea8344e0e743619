"""Tables written to Redis: rows under keys that nobody reads yet, and the one key that makes them count."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from kvtools.dialects.bundle_output import plain_columns
from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.redis_layout import (
    EXTRA_BYTES,
    FORMAT,
    NAME,
    TableKeys,
    as_rows,
    bucket_count,
    bucket_of,
    read_meta,
    state_dtypes,
)
from kvtools.dialects.redis_server import WRITE, Place, batches, connect, place_of, run
from kvtools.dialects.schema import TableSchema, numpy_dtype, row_bytes
from kvtools.dialects.table_record import is_count, json_object, table_json, table_schema
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter, WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, OutputError

_BUFFER_BYTES = 32 << 20  # rows held back until there are some for each bucket
_LOCK_SECONDS = 60


class RedisShard(ShardWriter):
    """Writes rows of a table, in any order; holds them back until there are some for each bucket."""

    def __init__(self, place: Place, schema: TableSchema, keys: TableKeys, batch_rows: int | None) -> None:
        self._place = place
        self._schema = schema
        self._keys = keys
        self._batch_rows = batch_rows or max(1, _BUFFER_BYTES // row_bytes(schema))
        self._client: Any = None
        self._held: list[tuple[Array, Array, Array]] = []
        self._held_rows = 0
        self._added = 0

    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Write a chunk; see `ShardWriter.write`."""
        columns = {name: as_rows(column) for name, column in plain_columns(chunk).items()}
        states = [columns[name] for name, _, _ in state_dtypes(self._schema)]
        rows = np.concatenate([columns["keys"], columns["values"]], axis=1)
        state = np.concatenate([columns["keys"], *states], axis=1) if states else rows[:, :0]
        buckets = bucket_of(chunk.keys, self._keys.buckets)
        for first in range(0, len(chunk), self._batch_rows):
            here = slice(first, first + self._batch_rows)
            self._held.append((buckets[here], rows[here], state[here]))
            self._held_rows += len(buckets[here])
            if self._held_rows >= self._batch_rows:
                self._flush()

    def _flush(self) -> None:
        if self._client is None:
            self._client = connect(self._place)
        buckets, rows, state = (np.concatenate(held) for held in zip(*self._held, strict=True))
        self._held, self._held_rows = [], 0
        order = np.argsort(buckets, kind="stable")
        buckets = buckets[order]
        cuts = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(buckets)]
        runs = [(int(buckets[a]), slice(a, b)) for a, b in itertools.pairwise(cuts)]
        self._added += self._send(self._keys.values, runs, rows[order])
        if state.shape[1]:
            self._send(self._keys.state, runs, state[order])

    def _send(self, name: Callable[[int], str], runs: Sequence[tuple[int, slice]], rows: Array) -> int:
        """Add rows, uint8 [n, bytes of key and row], to the hashes of their buckets; return how many keys were new."""
        field = numpy_dtype(self._schema.key_dtype).itemsize
        sizes = (field, rows.shape[1] - field)
        doing = f"writing table '{self._schema.name}' to '{self._place.shown}'"
        added = 0
        for batch in batches(len(runs)):
            some = runs[batch.start : batch.stop]
            commands = [("EVALSHA", WRITE, 1, name(b), rows[here].tobytes(), *sizes) for b, here in some]
            added += sum(run(self._client, commands, doing, OutputError))
        return added

    def finish(self) -> int:
        """Write what is held back; return how many rows were added that were not there before."""
        if self._held:
            self._flush()
        if self._client is not None:
            self._client.close()
            self._client = None
        return self._added


class RedisTableWriter(TableWriter):
    """One table being written under keys that nobody reads yet."""

    random_access: ClassVar[bool] = True
    distributable: ClassVar[bool] = True

    def __init__(self, place: Place, client: Any, schema: TableSchema, keys: TableKeys, batch_rows: int | None) -> None:
        self._place = place
        self._client = client
        self._schema = schema
        self._keys = keys
        self._batch_rows = batch_rows
        self._added = 0
        self._doing = f"writing table '{schema.name}' to '{place.shown}'"

    def shard(self) -> RedisShard:
        """Return a writer for one task."""
        return RedisShard(self._place, self._schema, self._keys, self._batch_rows)

    def absorb(self, result: Any) -> None:
        """Count the rows that a shard added."""
        self._added += result

    def extra(self, name: str, array: Array) -> None:
        """Write an extra array, in pieces."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for number, start in enumerate(range(0, len(data), EXTRA_BYTES)):
            piece = data[start : start + EXTRA_BYTES].tobytes()
            run(self._client, [("HSET", self._keys.extra(name), str(number), piece)], self._doing, OutputError)

    def close(self) -> None:
        """End the table: every row is there, each under a key of its own."""
        if self._added < self._schema.rows:
            raise BadInputError(
                f"{self._doing}: {self._schema.rows - self._added} of {self._schema.rows} rows have the key of another"
                " row, and Redis holds each key once; remove the duplicates first, see `kvtools verify`"
            )
        held = 0
        for batch in batches(self._keys.buckets):
            held += sum(run(self._client, [("HLEN", self._keys.values(b)) for b in batch], self._doing, OutputError))
        if held != self._schema.rows:
            raise OutputError(
                f"{self._doing}: {held} of {self._schema.rows} rows are there after writing; the server evicts keys,"
                " see its maxmemory and maxmemory-policy"
            )


class Writer(CheckpointWriter):
    """Writes tables under a new generation of keys, and makes them the ones that count when all are there."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        self._place = place_of(staging)
        self._options = options
        self._client = connect(self._place)
        self._generation = secrets.token_hex(4)
        self._doing = f"writing to '{self._place.shown}'"
        self._records: list[dict[str, Any]] = []
        self._mine = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "generation": self._generation})
        self._ended = threading.Event()
        self._lock()
        try:
            if self._current() is not None and not options.force:
                raise OutputError(
                    f"{self._doing}: there are tables already; name another prefix, as in ?prefix=new, or add --force"
                    " to replace them"
                )
            self._remove_leftovers()
        except BaseException:
            self._unlock()
            raise
        threading.Thread(target=self._keep_lock, daemon=True).start()

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> RedisTableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        base = f"{self._place.prefix}:{self._generation}:{len(self._records)}"
        where = TableKeys(base, bucket_count(schema))
        self._records.append({**json.loads(table_json(schema)), "key": where.base, "buckets": where.buckets})
        # Before the first row, so that whoever comes after a run that was killed knows what to remove.
        self._do("HSET", self._place.key("generations"), self._generation, json.dumps(self._records))
        return RedisTableWriter(self._place, self._client, schema, where, self._options.batch_rows)

    def close(self) -> None:
        """Make the new tables the ones that count, and remove the old ones."""
        if not self._is_mine():
            raise OutputError(
                f"{self._doing}: another run took over, as this one was silent for too long; run it again"
            )
        self._do("HSET", self._place.key("generations"), self._generation, json.dumps(self._records))
        meta = {"format": FORMAT, "generation": self._generation, "tables": self._records}
        self._do("SET", self._place.key("meta"), json.dumps(meta))
        self._remove_leftovers()
        self._unlock()

    def abort(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(KvtoolsError):
            if self._is_mine():
                self._remove_leftovers()
        self._unlock()

    def _do(self, *command: Any) -> Any:
        return run(self._client, [command], self._doing, OutputError)[0]

    def _current(self) -> str | None:
        """Return the generation that counts, None if there is none."""
        text = self._do("GET", self._place.key("meta"))
        try:
            return None if text is None else str(read_meta(text, self._doing)["generation"])
        except CorruptFileError:
            if not self._options.force:
                raise
            return None

    def _remove_leftovers(self) -> None:
        """Remove all generations but the one that counts."""
        current = self._current()
        generations = self._do("HGETALL", self._place.key("generations"))
        for name, text in generations.items():
            generation = name.decode()
            if generation == current:
                continue
            for record in self._begun(text):
                keys = TableKeys(record["key"], record["buckets"])
                for batch in batches(keys.buckets):
                    commands = [("UNLINK", key) for b in batch for key in (keys.values(b), keys.state(b))]
                    run(self._client, commands, self._doing, OutputError)
                for extra in record["extras"]:
                    self._do("UNLINK", keys.extra(extra["name"]))
            self._do("HDEL", self._place.key("generations"), generation)

    def _begun(self, text: bytes) -> list[dict[str, Any]]:
        """Return the tables of a generation; raises `OutputError` if that is not what stands there."""
        try:
            records: list[dict[str, Any]] = json.loads(text)
            for record in records:
                table_schema(json.dumps(record), NAME, self._doing)
                if not isinstance(record["key"], str) or not is_count(record["buckets"]):
                    raise ValueError("no key")
        except (ValueError, KeyError, TypeError, RecursionError, KvtoolsError) as error:
            raise OutputError(
                f"{self._doing}: key '{self._place.key('generations')}' is damaged, so what earlier runs left there is"
                " not known; delete the key, and name another prefix"
            ) from error
        return records

    def _lock(self) -> None:
        key = self._place.key("lock")
        if self._do("SET", key, self._mine, "NX", "EX", _LOCK_SECONDS):
            return
        try:
            holder = json_object(self._do("GET", key) or b"{}", self._doing)
        except CorruptFileError:
            holder = {}
        if holder.get("host") == socket.gethostname() and not _is_alive(holder.get("pid")):
            self._do("SET", key, self._mine, "EX", _LOCK_SECONDS)
            return
        raise OutputError(
            f"{self._doing}: process {holder.get('pid', '?')} of host {holder.get('host', '?')} is writing there; wait"
            f" until it has ended, or {_LOCK_SECONDS} seconds if it was killed"
        )

    def _keep_lock(self) -> None:
        while not self._ended.wait(_LOCK_SECONDS / 3):
            with contextlib.suppress(KvtoolsError):
                if self._is_mine():  # and not of a run that took over
                    self._do("EXPIRE", self._place.key("lock"), _LOCK_SECONDS)

    def _is_mine(self) -> bool:
        return bool(self._do("GET", self._place.key("lock")) == self._mine.encode())

    def _unlock(self) -> None:
        self._ended.set()
        with contextlib.suppress(KvtoolsError):
            if self._is_mine():
                self._do("DEL", self._place.key("lock"))
        self._client.close()


def _is_alive(pid: Any) -> bool:
    if not is_count(pid) or not 0 < pid < 1 << 31:
        return True  # nobody knows
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
