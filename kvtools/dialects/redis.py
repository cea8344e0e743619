"""Tables in Redis, laid out for lookups: a row is a field of a hash, found by the bytes of its key.

A table's rows are spread over hashes ("buckets") of about a quarter of a mebibyte. The bucket of a key is a fixed
function of it (`bucket_of`); in the bucket, the key's bytes are the field and the row's bytes the value, so one HMGET
answers a lookup. Slots, frequencies and versions are in a second hash beside it. One key, `<prefix>:meta`, says which
tables there are and under which generation of keys they lie: a table that is written appears when that key is set, and
not before. The layout is specified in `docs/dialects/redis.md`. Commands: https://redis.io/docs/latest/commands/.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import secrets
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtools.dialects.bundle_output import plain_columns
from kvtools.dialects.chunk import KEYS, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint, Finding, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import TableSchema, numpy_dtype, row_bytes
from kvtools.dialects.table_record import (
    COUNTER_DTYPES,
    KEY_DTYPES,
    VALUE_DTYPES,
    is_count,
    json_object,
    table_json,
    table_schema,
)
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter, WriteOptions
from kvtools.errors import (
    BadInputError,
    CorruptFileError,
    KvtoolsError,
    MissingDependencyError,
    OutputError,
    UsageError,
)
from kvtools.url_password import without_password

NAME = "redis"
FORMAT = 1
DEFAULT_PREFIX = "kvtools"

_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
_BUCKET_BYTES = 1 << 20
_BUCKET_ROWS = 8192
_BUFFER_BYTES = 32 << 20  # rows held back until there are some for each bucket
_PIPELINE = 512  # commands sent at once where they are small
_EXTRA_BYTES = 1 << 20
_LOCK_SECONDS = 60
_SOCKET_SECONDS = 60

# Fields and values of a hash are as long as each other, so a bucket travels as one string, not as thousands.
_READ_SCRIPT = "local r = redis.call(ARGV[1], KEYS[1]) return {#r, table.concat(r)}"
_WRITE_SCRIPT = """
local rows, field, value, args, added = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), {}, 0
for i = 1, #rows, field + value do
  args[#args + 1] = string.sub(rows, i, i + field - 1)
  args[#args + 1] = string.sub(rows, i + field, i + field + value - 1)
  if #args >= 4000 then
    added = added + redis.call('HSET', KEYS[1], unpack(args))
    args = {}
  end
end
return added + (#args > 0 and redis.call('HSET', KEYS[1], unpack(args)) or 0)
"""
_READ, _WRITE = (hashlib.sha1(script.encode()).hexdigest() for script in (_READ_SCRIPT, _WRITE_SCRIPT))


@dataclass(frozen=True)
class Place:
    """A database and a prefix of its keys; `shown` is the URL without a password, for messages."""

    url: str
    prefix: str
    cluster: bool
    shown: str

    def key(self, name: str) -> str:
        """Return one of the keys that there is one of."""
        return f"{self.prefix}:{name}"


@dataclass(frozen=True)
class TableKeys:
    """Where the rows of one table lie: `base` is "<prefix>:<generation>:<number>"."""

    base: str
    buckets: int

    def values(self, bucket: int) -> str:
        """Return the hash of key bytes to value bytes; what stands in braces decides the node of a cluster."""
        return f"{{{self.base}:{bucket}}}"

    def state(self, bucket: int) -> str:
        """Return the hash of key bytes to the bytes of slots, frequency and version."""
        return f"{{{self.base}:{bucket}}}:state"

    def extra(self, name: str) -> str:
        """Return the hash of piece numbers to the bytes of an extra array."""
        return f"{{{self.base}}}:{name}"


def place_of(text: str) -> Place:
    """Return what a URL means.

    Args:
        text: `redis://[user:password@]host[:port][/database]`, `rediss://` for TLS, `unix:///path/to/socket`, and with
            `+cluster` for a cluster, which is found out anyway. `?prefix=NAME` names the keys; the other options are
            those of redis-py.

    Raises:
        UsageError: it is no such URL.

    Example:
        >>> place_of("redis://:secret@cache:6379/2?prefix=ads").shown
        'redis://cache:6379/2?prefix=ads'
    """
    doing = "reading a Redis URL"
    try:
        parts = urllib.parse.urlsplit(text)
    except ValueError as error:
        raise UsageError(f"{doing} '{without_password(text)}': {error}; expected redis://host:port/database") from error
    scheme, plus, _ = parts.scheme.partition("+")
    options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    prefix = options.pop("prefix", DEFAULT_PREFIX)
    try:
        port = parts.port
    except ValueError as error:
        # What is taken for the port may be part of a password.
        raise UsageError(
            f"{doing}: its port is no number up to 65535; expected redis://host:port/database; in a password"
            " before the host, write / ? # @ as %2F %3F %23 %40"
        ) from error
    where = (
        parts.path if scheme == "unix" else f"{parts.hostname or 'localhost'}{f':{port}' if port else ''}{parts.path}"
    )
    shown = f"{parts.scheme}://{where}" + (f"?prefix={prefix}" if prefix != DEFAULT_PREFIX else "")
    database = options.get("db", parts.path.strip("/") if scheme != "unix" else "")
    if database and not database.isdecimal():
        raise UsageError(f"{doing} '{shown}': got database '{database}', expected a number, as in redis://localhost/0")
    if not prefix or set("{}") & set(prefix):
        raise UsageError(f"{doing} '{shown}': got prefix '{prefix}', expected a name without braces")
    query = f"?{urllib.parse.urlencode(options)}" if options else ""
    return Place(f"{scheme}://{parts.netloc}{parts.path}{query}", prefix, bool(plus), shown)


def connect(place: Place) -> Any:
    """Return a client of the server, or of the cluster that it is part of.

    Raises:
        MissingDependencyError: redis-py is not installed.
        UsageError: the URL has an option that redis-py does not know.
        BadInputError: the server cannot be reached, or refuses the user.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.exceptions import NoPermissionError
        from redis.retry import Retry
    except ImportError as error:
        raise MissingDependencyError(
            f"connecting to '{place.shown}': redis-py is not installed; run pip install 'kvtools[formats]'"
        ) from error
    # Nothing is sent twice: what a command returns says whether a row was there before.
    settings: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_connect_timeout": 10}
    if "socket_timeout" not in place.url:
        settings["socket_timeout"] = _SOCKET_SECONDS
    with redis_errors(f"connecting to '{place.shown}'"):
        try:
            client: Any = redis.Redis.from_url(place.url, **settings)
            client.ping()
        except TypeError as error:
            raise UsageError(f"connecting to '{place.shown}': {error}; leave the option out of the URL") from error
        cluster = place.cluster
        if not cluster:
            with contextlib.suppress(NoPermissionError):
                cluster = bool(client.info("cluster").get("cluster_enabled"))
        if cluster:
            client.close()
            client = redis.RedisCluster.from_url(place.url, **settings)
        for script in (_READ_SCRIPT, _WRITE_SCRIPT):
            client.script_load(script)
        return client


@contextlib.contextmanager
def redis_errors(doing: str, kind: type[KvtoolsError] = BadInputError) -> Iterator[None]:
    """Turn what redis-py raises into errors of ours."""
    import redis.exceptions

    try:
        yield
    except redis.exceptions.AuthenticationError as error:
        raise kind(f"{doing}: {error}; put user:password@ before the host in the URL") from error
    except redis.exceptions.NoPermissionError as error:
        raise kind(f"{doing}: {error}; name a user who may run the command") from error
    except redis.exceptions.OutOfMemoryError as error:
        raise kind(f"{doing}: the server is out of memory ({error}); raise its maxmemory, or write less") from error
    except redis.exceptions.ReadOnlyError as error:
        raise kind(f"{doing}: {error}; name the primary, not a replica") from error
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        raise kind(f"{doing}: {error}; check that the server runs, and the URL") from error
    except redis.exceptions.ResponseError as error:
        advice = "something else has this key: name another prefix" if "WRONGTYPE" in str(error) else "see its log"
        raise kind(f"{doing}: the server answered: {error}; {advice}") from error
    except (redis.exceptions.RedisError, redis.exceptions.RedisClusterException) as error:
        raise kind(f"{doing}: {error}; check that all nodes of the cluster run") from error


def run(
    client: Any, commands: Iterable[Sequence[Any]], doing: str, kind: type[KvtoolsError] = BadInputError
) -> list[Any]:
    """Send commands at once and return their replies, in order."""
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    with redis_errors(doing, kind):
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
    return replies


def _batches(count: int) -> Iterator[range]:
    for start in range(0, count, _PIPELINE):
        yield range(start, min(start + _PIPELINE, count))


def bucket_of(keys: Array, buckets: int) -> Array:
    """Return the bucket of each of `keys` [n], any integer type, as int64 [n]; `buckets` is a power of two.

    The key as 64 bits (two's complement), mixed by the finalizer of SplitMix64, modulo the number of buckets. Method:
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    >>> bucket_of(np.array([0, 1, -1]), 16).tolist()
    [0, 5, 11]
    """
    mixed = keys.astype(np.int64 if keys.dtype.kind == "i" else np.uint64).view(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    bucket: Array = (mixed & np.uint64(buckets - 1)).astype(np.int64)
    return bucket


def bucket_count(schema: TableSchema) -> int:
    """Return over how many buckets a table is spread: a power of two."""
    rows = max(1, min(_BUCKET_ROWS, _BUCKET_BYTES // row_bytes(schema)))
    return 1 << (max(1, -(-schema.rows // rows)) - 1).bit_length()


def _state_dtypes(schema: TableSchema) -> list[tuple[str, np.dtype[Any], int]]:
    """Return the columns of a row of state, in their order: name as in `plain_columns`, type and width."""
    columns = [(f"slot:{slot.name}", numpy_dtype(slot.dtype), slot.width) for slot in schema.slots]
    if schema.freq_dtype:
        columns.append(("freqs", numpy_dtype(schema.freq_dtype), 1))
    if schema.version_dtype:
        columns.append(("versions", numpy_dtype(schema.version_dtype), 1))
    return columns


def _as_rows(column: Array) -> Array:
    """Return a column's bytes, uint8 [n, bytes of a row]."""
    column = np.ascontiguousarray(column)
    width = column.dtype.itemsize * math.prod(column.shape[1:])
    return column.reshape(-1).view(np.uint8).reshape(len(column), width)


def _as_fields(rows: Array) -> list[bytes]:
    """Return rows of bytes, uint8 [n, bytes of a row], as n strings."""
    fields: list[bytes] = np.ascontiguousarray(rows).reshape(-1).view(f"V{rows.shape[1]}").tolist()
    return fields


def joined(replies: Sequence[bytes | None], size: int, doing: str) -> Array:
    """Return strings of `size` bytes as rows, uint8 [n, size]; raises if one is missing or of another length."""
    if None in replies:
        raise CorruptFileError(
            f"{doing}: a row vanished while it was read; the table was replaced, or the server evicts keys: read it"
            " again"
        )
    lengths = set(map(len, replies))  # type: ignore[arg-type]
    if lengths - {size}:
        raise CorruptFileError(
            f"{doing}: got a field of {(lengths - {size}).pop()} bytes, expected {size}; something else wrote there,"
            " write the table again"
        )
    return np.frombuffer(b"".join(replies), np.uint8).reshape(len(replies), size)  # type: ignore[arg-type]


class RedisTable(TableReader):
    """A table in Redis. Its rows stand in the order of its buckets, and by key within a bucket."""

    def __init__(self, place: Place, client: Any, schema: TableSchema, keys: TableKeys) -> None:
        self.schema = schema
        self._client = client
        self._keys = keys
        self._doing = f"reading table '{schema.name}' of '{place.shown}'"
        self._sized = threading.Lock()
        self._ends: Array | None = None

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows in order; see `TableReader.read_part`."""
        ends = self._bucket_ends()
        bucket = 0
        while bucket < self._keys.buckets:
            # As many buckets as a chunk takes, at least one: their keys are known before their rows are read.
            begun = int(ends[bucket - 1]) if bucket else 0
            stop = max(bucket + 1, int(np.searchsorted(ends, begun + rows, side="right")))
            stop = min(stop, bucket + _PIPELINE, self._keys.buckets)
            if int(ends[stop - 1]) > begun:
                whole = self._buckets(np.arange(bucket, stop), columns)
                for start in range(0, len(whole), rows):
                    yield whole.take(slice(start, start + rows))
            bucket = stop

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; reads the keys of their buckets for it."""
        rows = np.asarray(rows, np.int64)
        ends = self._bucket_ends()
        which = np.searchsorted(ends, rows, side="right")
        keys = np.empty(len(rows), self.key_dtype)
        needed = np.unique(which)
        for batch in _batches(len(needed)):
            some = needed[batch.start : batch.stop]
            sorted_keys, buckets = self._sorted_keys(some)
            here = np.flatnonzero((which >= some[0]) & (which <= some[-1]))
            begins = ends[which[here]] - self._size_of(which[here])
            keys[here] = sorted_keys[np.searchsorted(buckets, which[here]) + rows[here] - begins]
        order = np.argsort(which, kind="stable")
        chunk = self._chunk(keys[order], which[order], columns)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return chunk.take(back)

    def extra(self, name: str) -> Array:
        """Return an extra array; see `TableReader.extra`."""
        extra = next((extra for extra in self.schema.extras if extra.name == name), None)
        if extra is None:
            raise KeyError(name)
        dtype = numpy_dtype(extra.dtype)
        size = math.prod(extra.shape) * dtype.itemsize
        pieces: list[bytes] = []
        for number in range(-(-size // _EXTRA_BYTES)):
            (piece,) = run(self._client, [("HGET", self._keys.extra(name), str(number))], self._doing)
            pieces.append(piece or b"")
        data = b"".join(pieces)
        if len(data) != size:
            raise CorruptFileError(
                f"{self._doing}: '{name}' has {len(data)} bytes, expected {size}; a part of it vanished, write it again"
            )
        return np.frombuffer(data, dtype).reshape(extra.shape)

    def check(self) -> Iterator[Finding]:
        """Yield how many keys lie in a bucket in which no lookup finds them."""
        wrong = 0
        for batch in _batches(self._keys.buckets):
            keys, buckets = self._sorted_keys(np.arange(batch.start, batch.stop))
            wrong += int(np.count_nonzero(bucket_of(keys, self._keys.buckets) != buckets))
        if wrong:
            yield Finding(
                "error",
                "wrong-bucket",
                self.schema.name,
                f"{wrong} keys lie in another bucket than theirs: lookups miss them; write the table again",
            )

    def _bucket_ends(self) -> Array:
        """Return the row after the last one of each bucket; raises `CorruptFileError` if rows are missing."""
        with self._sized:
            if self._ends is None:
                sizes: list[int] = []
                for batch in _batches(self._keys.buckets):
                    sizes += run(self._client, [("HLEN", self._keys.values(b)) for b in batch], self._doing)
                ends = np.cumsum(np.array(sizes, np.int64))
                if ends[-1] != self.rows:
                    raise CorruptFileError(
                        f"{self._doing}: got {ends[-1]} rows, expected {self.rows}; it was replaced while it was open,"
                        " or the server evicts keys: see its maxmemory-policy"
                    )
                self._ends = ends
            return self._ends

    def _size_of(self, buckets: Array) -> Array:
        sizes: Array = np.diff(self._bucket_ends(), prepend=0)[buckets]
        return sizes

    def _sorted_keys(self, buckets: Array) -> tuple[Array, Array]:
        """Return the keys of these buckets, sorted in each, and the bucket of each key."""
        return self._buckets(buckets, KEYS).keys, np.repeat(buckets, self._size_of(buckets))

    def _buckets(self, buckets: Array, columns: Columns) -> Chunk:
        """Return all rows of these buckets, sorted by key in each."""
        states = _state_dtypes(self.schema)
        size = self.value_dtype.itemsize * self.dim if columns.values else 0
        keys, rows = self._hashes(self._keys.values, buckets, size)
        values = rows.reshape(-1).view(self.value_dtype).reshape(len(keys), self.dim) if columns.values else None
        if not any(_is_wanted(name, columns) for name, _, _ in states):
            return Chunk(keys, values)
        size = sum(dtype.itemsize * width for _, dtype, width in states)
        state_keys, rows = self._hashes(self._keys.state, buckets, size)
        if not np.array_equal(keys, state_keys):
            raise CorruptFileError(
                f"{self._doing}: rows and their slots are of different keys; it was replaced while it was read: read it"
                " again, or write it again"
            )
        return self._with_state(Chunk(keys, values), rows, columns)

    def _hashes(self, name: Callable[[int], str], buckets: Array, size: int) -> tuple[Array, Array]:
        """Return the keys of these buckets' hashes, sorted in each bucket, and what follows each key: `size` bytes."""
        command = "HGETALL" if size else "HKEYS"
        commands = [("EVALSHA", _READ, 1, name(bucket), command) for bucket in buckets.tolist()]
        replies = run(self._client, commands, self._doing)
        counts, width = self._size_of(buckets), self.key_dtype.itemsize
        for (strings, data), count in zip(replies, counts.tolist(), strict=True):
            if strings != count * (2 if size else 1):
                raise CorruptFileError(
                    f"{self._doing}: rows came or went while it was read; the table was replaced, or the server evicts"
                    " keys: read it again"
                )
            if len(data) != count * (width + size):
                raise CorruptFileError(
                    f"{self._doing}: {count} rows have {len(data)} bytes, expected {width + size} each; something else"
                    " wrote there, write the table again"
                )
        rows = np.frombuffer(b"".join(data for _, data in replies), np.uint8).reshape(-1, width + size)
        keys = np.ascontiguousarray(rows[:, :width]).reshape(-1).view(self.key_dtype)
        order = np.lexsort((keys, np.repeat(buckets, counts)))
        return keys[order], rows[order, width:]

    def _chunk(self, keys: Array, buckets: Array, columns: Columns) -> Chunk:
        """Return the rows of these keys, which are grouped by bucket."""
        states = _state_dtypes(self.schema)
        cuts = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(keys)]
        fields = _as_fields(_as_rows(keys))
        runs = [(int(buckets[a]), fields[a:b]) for a, b in itertools.pairwise(cuts) if a < b]

        def rows_of(name: Callable[[int], str], size: int) -> Array:
            replies = run(self._client, [("HMGET", name(bucket), *some) for bucket, some in runs], self._doing)
            return joined([row for reply in replies for row in reply], size, self._doing)

        values: Array | None = None
        if columns.values:
            rows = rows_of(self._keys.values, self.value_dtype.itemsize * self.dim)
            values = rows.reshape(-1).view(self.value_dtype).reshape(len(keys), self.dim)
        if not any(_is_wanted(name, columns) for name, _, _ in states):
            return Chunk(keys, values)
        size = sum(dtype.itemsize * width for _, dtype, width in states)
        return self._with_state(Chunk(keys, values), rows_of(self._keys.state, size), columns)

    def _with_state(self, chunk: Chunk, rows: Array, columns: Columns) -> Chunk:
        """Return a chunk with the columns that are wanted of its rows' state, uint8 [n, bytes of a row]."""
        arrays: dict[str, Array] = {}
        at = 0
        for name, dtype, width in _state_dtypes(self.schema):
            end = at + dtype.itemsize * width
            if _is_wanted(name, columns):
                column = np.ascontiguousarray(rows[:, at:end]).reshape(-1).view(dtype)
                arrays[name] = column.reshape(len(chunk), width) if name.startswith("slot:") else column
            at = end
        slots = {name.removeprefix("slot:"): rows for name, rows in arrays.items() if name.startswith("slot:")}
        return Chunk(chunk.keys, chunk.values, slots, arrays.get("freqs"), arrays.get("versions"))


def _is_wanted(name: str, columns: Columns) -> bool:
    return (
        (columns.slots and name.startswith("slot:"))
        or (columns.freqs and name == "freqs")
        or (columns.versions and name == "versions")
    )


def sniff(source: Source) -> bool:
    """Tell whether a source is a Redis URL."""
    return source.is_url and source.text.partition("://")[0] in _SCHEMES


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables under a prefix of a database.

    Raises:
        BadInputError: the server cannot be reached, or has no tables there.
        CorruptFileError: what describes the tables is damaged.
        UsageError: the URL makes no sense, or an option contradicts the tables.
    """
    place = place_of(source.text)
    doing = f"opening '{place.shown}'"
    client = connect(place)
    (text,) = run(client, [("GET", place.key("meta"))], doing)
    if text is None:
        raise BadInputError(
            f"{doing}: there is no key '{place.key('meta')}', so no tables of kvtools; name the database and the"
            " prefix, as in redis://localhost/0?prefix=ads"
        )
    description = _read_meta(text, doing)
    with redis_errors(doing):
        held = _database_size(client)
    tables: dict[str, TableReader] = {}
    broken: dict[str, KvtoolsError] = {}
    for number, record in enumerate(description["tables"]):
        name = record.get("name") if isinstance(record.get("name"), str) else f"number {number}"
        try:
            table = _open_table(place, client, record, options, held, f"opening table '{name}' of '{place.shown}'")
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[str(name)] = error
            continue
        tables[table.schema.name] = table
    return Checkpoint(place.shown, NAME, dict(sorted(tables.items())), broken=broken)


def _read_meta(text: bytes, doing: str) -> dict[str, Any]:
    meta = json_object(text, doing)
    number, tables = meta.get("format"), meta.get("tables")
    if is_count(number) and number > FORMAT:
        raise BadInputError(f"{doing}: got format {number}, expected at most {FORMAT}; update kvtools")
    listed = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if number != FORMAT or not listed or not isinstance(meta.get("generation"), str):
        raise CorruptFileError(f"{doing}: its meta key is damaged, expected format {FORMAT}; write it again")
    return meta


def _database_size(client: Any) -> int:
    size = client.dbsize()
    return sum(size.values()) if isinstance(size, dict) else int(size)


def _open_table(
    place: Place, client: Any, record: dict[str, Any], options: OpenOptions, held: int, doing: str
) -> RedisTable:
    schema = table_schema(json.dumps(record), NAME, doing)
    base, buckets = record.get("key"), record.get("buckets")
    # Few buckets are empty, so there are not many more of them than keys in the database.
    if not is_count(buckets) or buckets < 1 or buckets & (buckets - 1) or buckets > 4 * held + 64:
        raise CorruptFileError(
            f"{doing}: got {json.dumps(buckets)[:20]} buckets in a database of {held} keys, expected a power of two,"
            " and most of them there; write it again"
        )
    if not isinstance(base, str) or schema.parts != 1:
        raise CorruptFileError(f"{doing}: its description has no key, or many parts; write it again")
    return RedisTable(place, client, schema, TableKeys(base, buckets))


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
        columns = {name: _as_rows(column) for name, column in plain_columns(chunk).items()}
        states = [columns[name] for name, _, _ in _state_dtypes(self._schema)]
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
        for batch in _batches(len(runs)):
            some = runs[batch.start : batch.stop]
            commands = [("EVALSHA", _WRITE, 1, name(b), rows[here].tobytes(), *sizes) for b, here in some]
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
        for number, start in enumerate(range(0, len(data), _EXTRA_BYTES)):
            piece = data[start : start + _EXTRA_BYTES].tobytes()
            run(self._client, [("HSET", self._keys.extra(name), str(number), piece)], self._doing, OutputError)

    def close(self) -> None:
        """End the table: every row is there, each under a key of its own."""
        if self._added < self._schema.rows:
            raise BadInputError(
                f"{self._doing}: {self._schema.rows - self._added} of {self._schema.rows} rows have the key of another"
                " row, and Redis holds each key once; remove the duplicates first, see `kvtools verify`"
            )
        held = 0
        for batch in _batches(self._keys.buckets):
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
            return None if text is None else str(_read_meta(text, self._doing)["generation"])
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
                for batch in _batches(keys.buckets):
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


DIALECT = Dialect(
    name=NAME,
    title="tables in Redis, under a URL such as redis://localhost/0",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="url",
    holds=Holds(
        key_dtypes=KEY_DTYPES,
        value_dtypes=VALUE_DTYPES,
        freq_dtypes=COUNTER_DTYPES,
        version_dtypes=COUNTER_DTYPES,
        many_parts=False,
        extras=None,
        metadata=None,
    ),
)
