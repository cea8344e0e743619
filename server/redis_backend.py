"""Tables that stay in Redis: each lookup asks for its rows there, behind a snapshot that has the most of them, or none.

What lies in Redis is what `kvtools migrate ... redis://host/0` writes (`docs/dialects/redis.md`), in one server or a
cluster: a lookup is one HMGET for each bucket that its keys are in, sent together. With a snapshot in front, keys are
looked up there first, and only those that it lacks are asked of Redis; so the snapshot's rows count where both have a
key, and they are there while Redis is not.

A table that is written anew lies under another generation of keys. A lookup that misses a key looks whether that has
happened, and begins again with the new one: so rows are of one generation, and none is missing because it moved.
`kvtools follow` writes increments into the tables that there are: of these a lookup is a transaction, so that it has no
rows of before an increment beside those of after it. A cluster has no transactions.

A Redis with too little memory may evict a bucket, and every key of it would be missing. So where a bucket has none of
the keys that are asked for, and is not there at all, all rows of the table are counted: it is empty, or rows are lost,
and the lookup is an error.

Redis that does not answer is a 503 with Retry-After, at once for a second after it was noticed; connections are made
anew by themselves. With `missing_while_down`, keys that only Redis could have are missing in that time.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.dialects.dialect import Source
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.redis import open_checkpoint
from kvtools.dialects.redis_layout import NAME, as_fields, as_rows, bucket_of, read_meta, rows_lost
from kvtools.dialects.redis_server import Place, connect, is_refusal, place_of, run
from kvtools.dialects.redis_table import RedisTable
from kvtools.dialects.schema import TableSchema
from kvtools.dialects.table_record import table_schema
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, UnknownTableError
from kvtools.server.request import RequestError
from kvtools.server.store import ServedFile, TableStore

Array = npt.NDArray[Any]

_SECONDS = 1.0  # that Redis may take to connect, and as much to answer: 2 s in all
_AT_ONCE = 0.1  # s: what fails later is not tried again; an old connection that was closed shows sooner
_RESTS = 1.0  # after it did not: lookups do not wait for it in that time
_LOOKS_EVERY = 1.0  # s: so old the row counts of tables that change where they are may be
_ROUNDS = 3
_log = logging.getLogger("kvtools.server")


class RedisBackend:
    """A Redis server or cluster, and the generation of the tables in it; any thread.

    After it did not answer it is not asked before `rests_until`, of `time.monotonic`.
    """

    def __init__(self, url: str, options: OpenOptions | None) -> None:
        self.place: Place = place_of(url)
        self._url = url
        self._options = options or OpenOptions()
        self._client = connect(self.place, seconds=_SECONDS)
        self._cluster = type(self._client).__name__ == "RedisCluster"
        self._followed = False  # tables that change where they are
        self.rests_until = 0.0
        self._said = ("", 0.0)
        self._described: tuple[Any, Any] = (None, None)  # what stands in Redis: which tables, and how far they follow
        self._empty: set[str] = set()  # buckets without rows, as long as that stands there
        self._look_at = 0.0
        self.generation = ""
        self.tables: dict[str, RedisTable] = {}
        self.look_again()

    @property
    def is_look_due(self) -> bool:
        """Whether tables may have other numbers of rows since somebody looked."""
        return self._followed and time.monotonic() >= self._look_at

    def look_again(self, buckets: Sequence[str] = ()) -> tuple[bool, set[str]]:
        """Read which tables there are; return whether they were written anew, and which `buckets` are not there.

        Buckets that are known to be empty are not among these.
        """
        text, follow, *there = self.ask([*self._describing(), *(("EXISTS", name) for name in buckets)])
        gone = {name for name, exists in zip(buckets, there, strict=True) if not exists}
        self._look_at = time.monotonic() + _LOOKS_EVERY
        if text is not None and (text, follow) == self._described:
            return False, gone - self._empty
        self._followed = follow is not None
        if text is None and not self.generation:
            raise BadInputError(
                f"opening '{self.place.shown}': there is no key '{self.place.key('meta')}', so it has no tables of"
                " kvtools; name the database and the prefix, as in redis://localhost/0?prefix=ads"
            )
        if text is None:
            raise self.unavailable("it has no tables any more")
        described = read_meta(text, "reading tables in Redis")
        generation = described["generation"]
        if generation == self.generation:
            for record in described["tables"]:
                schema = table_schema(json.dumps(record), NAME, "reading tables in Redis")
                if schema.name in self.tables:
                    self.tables[schema.name].schema = schema
            self._empty = set()
            self._described = text, follow
            return False, gone
        checkpoint = open_checkpoint(Source(self._url), self._options)
        self.tables = {name: table for name, table in checkpoint.tables.items() if isinstance(table, RedisTable)}
        self.generation = generation
        self._empty = set()
        self._described = text, follow
        return True, set()

    def expect_whole(self, table: RedisTable, gone: set[str]) -> None:
        """Raise `RequestError` if a table whose buckets in `gone` are not there has lost rows with them."""
        empty = self._empty
        text, follow, *lengths = self.ask([*self._describing(), *table.layout.lengths()], of_one_moment=True)
        described = {} if text is None else read_meta(text, "reading tables in Redis")
        record = next((one for one in described.get("tables", ()) if one.get("key") == table.layout.base), None)
        if record is None:  # written anew at this moment
            raise self.unavailable("its tables are being written anew")
        schema = table_schema(json.dumps(record), NAME, "reading tables in Redis")
        if sum(lengths) != schema.rows:
            self._warn(f"looking up in '{self.place.shown}': {rows_lost(schema.name, sum(lengths), schema.rows)}")
            raise self.unavailable(f"table '{schema.name}' has lost rows there")
        if (text, follow) == self._described:
            empty |= gone

    def _describing(self) -> list[tuple[Any, ...]]:
        return [("GET", self.place.key("meta")), ("GET", self.place.key("follow"))]

    def ask(self, commands: list[tuple[Any, ...]], *, of_one_moment: bool = False) -> list[Any]:
        """Send commands that only read; once more on new connections, should the old ones have been closed.

        A Redis that does not answer is waited for once.
        """
        if time.monotonic() < self.rests_until:
            raise self.unavailable("it did not answer a moment ago")
        began = time.monotonic()
        for last in (False, True):
            try:
                whole = (of_one_moment or self._followed) and not self._cluster and len(commands) > 1
                doing = f"looking up in '{self.place.shown}'"
                return run(self._client, commands, doing, transaction=whole, wait_once=True)
            except KvtoolsError as error:
                refused = is_refusal(error)
                if not (refused or last or time.monotonic() - began > _AT_ONCE):
                    continue
                if refused:
                    self._warn(str(error))
                    raise self.unavailable("it refuses what it is asked, and the server's log says why") from error
                self.rests_until = time.monotonic() + _RESTS
                _log.warning("%s", error)
                raise self.unavailable("it does not answer") from error
        raise AssertionError("one of the two returns or raises")

    def _warn(self, what: str) -> None:
        now = time.monotonic()
        if self._said[0] != what or now >= self._said[1]:
            self._said = what, now + _RESTS
            _log.warning("%s", what)

    def unavailable(self, why: str) -> RequestError:
        """Return the error of a lookup that needs what Redis does not give."""
        return RequestError(
            503,
            "backend_unavailable",
            f"Redis, where the rows are, cannot be asked: {why}; try again",
            {"Retry-After": "1"},
        )


class BackedTable:
    """One table, as `StoredTable` is to the rest of the server; it has no compiled `table`."""

    table = None
    duplicates = 0

    def __init__(self, backend: RedisBackend, schema: TableSchema, front: Any, missing_while_down: bool) -> None:
        self._schema = schema
        self.key_limits = np.iinfo(schema.key_dtype)
        self._backend = backend
        self._front = front
        self._missing_while_down = missing_while_down
        self._dtype = backend.tables[schema.name].value_dtype

    @property
    def schema(self) -> TableSchema:
        """What is known of the table: as many rows as were written last, of the types that it had at the start."""
        table = self._table()
        return self._schema if table is None else table.schema

    def lookup(self, keys: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Look up `keys` [n] of the table's key type; see `StoredTable.lookup`.

        Raises:
            RequestError: 503, Redis does not answer and has to.
            CorruptFileError: something that is no row lies in its place.
        """
        if self._front is None:
            values = np.zeros((len(keys), self.schema.dim), self._dtype)
            found = np.zeros(len(keys), np.bool_)
        else:
            values, found = self._front.lookup(keys)
        left = np.flatnonzero(~found)
        if not len(left):
            return values, found
        try:
            wanted, places = np.unique(keys[left], return_inverse=True)
            rows, there = self._ask(wanted)
        except RequestError:
            if not self._missing_while_down:
                raise
            return values, found
        values[left], found[left] = rows[places], there[places]
        return values, found

    def _ask(self, keys: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Return the rows of distinct keys and which are there, all of one generation of the table."""
        for _ in range(_ROUNDS):
            generation = self._backend.generation
            table = self._table()
            if table is None:
                if self._backend.look_again()[0] or self._backend.generation != generation:
                    continue
                raise self._backend.unavailable(
                    f"table '{self.schema.name}' is gone or of another type: write it as it was, or restart this server"
                )
            rows, there, silent = self._ask_once(table, keys)
            if there.all() and not self._backend.is_look_due:
                return rows, there
            anew, gone = self._backend.look_again(silent)
            if not (anew or self._backend.generation != generation):
                if gone:
                    self._backend.expect_whole(table, gone)
                return rows, there
        raise self._backend.unavailable("its tables are written anew again and again")

    def _table(self) -> RedisTable | None:
        """Return the table as it is in Redis; None: it is not there, or of other types than those that are served."""
        table = self._backend.tables.get(self._schema.name)
        return None if table is None or _types(table.schema) != _types(self._schema) else table

    def _ask_once(self, table: RedisTable, keys: Array) -> tuple[Array, npt.NDArray[np.bool_], list[str]]:
        """Return the rows, which keys are there, and the buckets that have none of them."""
        buckets = bucket_of(keys, table.layout.buckets)
        order = np.argsort(buckets, kind="stable")
        ordered = buckets[order]
        cuts = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(order)]
        fields = as_fields(as_rows(keys[order]))
        commands: list[tuple[Any, ...]] = [
            ("HMGET", table.layout.values(int(ordered[start])), *fields[start:stop])
            for start, stop in itertools.pairwise(cuts)
        ]
        answers = self._backend.ask(commands)
        silent = [command[1] for command, rows in zip(commands, answers, strict=True) if not any(rows)]
        replies = [row for reply in answers for row in reply]
        size = self._dtype.itemsize * self.schema.dim
        wrong = next((row for row in replies if row is not None and len(row) != size), None)
        if wrong is not None:
            raise CorruptFileError(
                f"looking up in table '{self.schema.name}': a row in Redis has {len(wrong)} bytes, expected {size};"
                " something else wrote there"
            )
        there = np.empty(len(keys), np.bool_)
        there[order] = [row is not None for row in replies]
        rows = np.zeros((len(keys), self.schema.dim), self._dtype)
        data = np.frombuffer(b"".join(row for row in replies if row is not None), self._dtype)
        rows[order[there[order]]] = data.reshape(-1, self.schema.dim)
        return rows, there, silent


class RedisStore:
    """Tables in Redis, as `TableStore` is to the rest of the server.

    Args:
        url: a server or cluster, as `kvtools migrate` takes it.
        options: how to open what is there.
        front: tables whose rows are taken from here, where they have them; a subset of those in Redis.
        missing_while_down: whether keys that only Redis could have are missing while it does not answer, in place of an
            error.

    Raises:
        BadInputError: Redis cannot be reached, or has no tables; or the front's are of other types.

    Example:
        ```python
        store = RedisStore("redis://cache/0", front=TableStore("model.kvsnap"))
        embeddings, found = store.table("user_emb").lookup(keys)
        ```
    """

    warm = False  # A lookup may wait for Redis: it goes to a thread.

    def __init__(
        self,
        url: str,
        *,
        options: OpenOptions | None = None,
        front: TableStore | None = None,
        missing_while_down: bool = False,
    ) -> None:
        try:
            self.backend = RedisBackend(url, options)
        except RequestError as error:
            raise BadInputError(f"opening '{place_of(url).shown}': {error.message}") from error
        self.path = Path(self.backend.place.shown) if front is None else front.path
        self.dialect = "redis"
        self.front = front
        self.file = ServedFile() if front is None else front.file
        self.fingerprint = f"redis:{self.backend.generation}"
        self.tables: dict[str, BackedTable] = {}
        for name, table in self.backend.tables.items():
            before = None if front is None else front.tables.get(name)
            if before is not None:
                _check_same(name, before.schema, table.schema)
            self.tables[name] = BackedTable(self.backend, table.schema, before, missing_while_down)
        strange = set(front.tables) - set(self.tables) if front is not None else set()
        if strange:
            raise BadInputError(
                f"opening '{self.backend.place.shown}': it lacks table '{sorted(strange)[0]}', which '{self.path}' has;"
                " write it there, or serve the path without a backend"
            )

    def table(self, name: str) -> BackedTable:
        """Return the table `name`; raises `UnknownTableError`."""
        try:
            return self.tables[name]
        except KeyError:
            raise UnknownTableError(f"there is no table '{name}'; GET /v1/tables lists the tables") from None

    @property
    def front_warm(self) -> bool:
        """Whether `populate` has come to its end: there is nothing more to wait for."""
        return self.front is None or self.front.warm

    @property
    def resident(self) -> bool:
        """Whether all that is in front is in memory."""
        return self.front is None or self.front.resident

    def populate(self, stop: Any = None) -> None:
        """Read what is in front into memory."""
        if self.front is not None:
            self.front.populate(stop)

    def verify(self, go_on: Any = None) -> bool:
        """Compare what is in front with its checksums."""
        return self.front is None or self.front.verify(go_on)

    def verify_on_use(self) -> None:
        """Verify what lookups touch in front before they use it."""
        if self.front is not None:
            self.front.verify_on_use()

    @property
    def intact(self) -> bool:
        """Whether the file in front is what was opened."""
        return self.front is None or self.front.intact

    @property
    def identity(self) -> str:
        """Tells what is mapped in front from every other file; empty if nothing is."""
        return "" if self.front is None else self.front.identity

    def discard(self) -> bool:
        """Remove what was made in the cache for the front; returns whether anything was."""
        return self.front is not None and self.front.discard()

    def trust(self, identity: str) -> None:
        """Verify nothing on use any more; see `TableStore.trust`."""
        if self.front is not None:
            self.front.trust(identity)

    @property
    def verifies_on_use(self) -> bool:
        """Whether lookups verify what they touch in front."""
        return self.front is not None and self.front.verifies_on_use


def _types(schema: TableSchema) -> tuple[str, str, int]:
    return schema.key_dtype, schema.value_dtype, schema.dim


def _check_same(name: str, front: TableSchema, back: TableSchema) -> None:
    types = [_types(one) for one in (front, back)]
    if types[0] != types[1]:
        raise BadInputError(
            f"serving table '{name}': before Redis it is {types[0][0]} -> {types[0][1]}[{types[0][2]}], in Redis"
            f" {types[1][0]} -> {types[1][1]}[{types[1][2]}]; write both from one checkpoint"
        )
