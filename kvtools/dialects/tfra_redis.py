"""Tables that TFRA's `RedisTableCreator`, or this project's, keeps in Redis: a hash for each slice of each table.

What is named is a database and a model tag, as in `redis://localhost/0?model_tag=test`. Types and widths are recorded
only of what kvtools writes; otherwise widths follow from sizes. Slots and status are tables of their own, as in TFRA's
other formats. The layout is in `tfra_redis_layout.py`, and specified in `docs/dialects/tfra.md`.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from kvtools.dialects import redis, redis_layout, redis_server
from kvtools.dialects import tfra_redis_layout as layout
from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import TableSchema, numpy_dtype
from kvtools.dialects.tfra import (
    KEY_DTYPES,
    VALUE_DTYPES,
    Places,
    StoredTable,
    check_types,
    column_type,
    join_tables,
    table_columns,
)
from kvtools.dialects.tfra_files import Entry, entries_of, record_of
from kvtools.dialects.tfra_names import of_file, of_path, status_of
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter, WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, OutputError, UsageError

NAME = "tfra_redis"
OPTION = "model_tag"
_SAMPLE = 64
_COUNT = 4096


def sniff(source: Source) -> bool:
    """Tell whether a source is a Redis URL that names a model tag."""
    return redis.sniff(source) and _option(source.text) is not None


def _option(url: str) -> str | None:
    # By hand: of a URL that is none, the dialect that it goes to says what is wrong.
    query = url.partition("?")[2].partition("#")[0]
    return dict(urllib.parse.parse_qsl(query, keep_blank_values=True)).get(OPTION)


def _place_of(url: str) -> tuple[redis_server.Place, str]:
    """Return the database and the model tag that a URL means."""
    tag = _option(url)
    if not tag:
        raise UsageError(
            f"reading a Redis URL: got no {OPTION}, expected the model_tag_runtime of the tables, as in"
            f" redis://localhost/0?{OPTION}=test"
        )
    parts = urllib.parse.urlsplit(url)
    rest = [(name, value) for name, value in urllib.parse.parse_qsl(parts.query) if name != OPTION]
    place = redis_server.place_of(urllib.parse.urlunsplit(parts._replace(query=urllib.parse.urlencode(rest))))
    shown = f"{place.shown}{'&' if '?' in place.shown else '?'}{OPTION}={tag}"
    return dataclasses.replace(place, shown=shown), tag


class _Slice:
    """One hash: all of it is read when its rows are wanted, and stands in the order of its keys."""

    def __init__(self, client: Any, name: bytes, doing: str, rows: int) -> None:
        self.client, self.name, self.doing, self.rows = client, name, doing, rows
        self.sizes = (0, 0)
        self._lock = threading.Lock()
        self._read: tuple[Array, Array] | None = None

    def columns(self) -> tuple[Array, Array]:
        """Return the bytes of all keys and rows, uint8 [rows, size], sorted."""
        with self._lock:
            if self._read is None:
                found: dict[bytes, bytes] = {}
                with redis_server.redis_errors(self.doing):
                    found.update(self.client.hscan_iter(self.name, count=_COUNT))
                if len(found) != self.rows:
                    raise CorruptFileError(
                        f"{self.doing}: got {len(found)} rows, expected {self.rows}; somebody trains it: read it again"
                        " when nobody does"
                    )
                fields = sorted(found)
                self._read = (
                    redis_layout.joined(fields, self.sizes[0], self.doing),
                    redis_layout.joined([found[field] for field in fields], self.sizes[1], self.doing),
                )
            return self._read


class _SliceColumn:
    """The keys or the rows of a slice."""

    def __init__(self, source: _Slice, which: int, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> None:
        self._source, self._which = source, which
        self.name, self.dtype, self.row_shape, self.rows = (
            source.name.decode(errors="replace"),
            dtype,
            row_shape,
            source.rows,
        )

    def read(self) -> Array:
        """Return all rows."""
        data = np.ascontiguousarray(self._source.columns()[self._which])
        array: Array = data.reshape(-1).view(self.dtype).reshape(self.rows, *self.row_shape)
        return array

    def take(self, rows: Array) -> Array:
        """Copy the rows of these numbers."""
        return self.read()[rows]

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield all rows; see `Column.chunks`."""
        array = self.read()
        for start in range(0, self.rows, chunk_rows):
            yield array[start : start + chunk_rows].copy()


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables of a model tag.

    Raises:
        BadInputError: the server cannot be reached, or has no tables of the model tag.
        CorruptFileError: rows are not as long as each other, or as the options say.
        UsageError: the URL makes no sense.
    """
    place, tag = _place_of(source.text)
    doing = f"opening '{place.shown}'"
    client = redis_server.connect(place)
    recorded = _recorded(client, tag, doing)
    # Redis has no hashes without fields: a table that kvtools wrote may be empty.
    slices: dict[str, list[bytes]] = {base: [] for base in recorded} | _slices(client, tag, doing)
    if not slices:
        raise BadInputError(
            f"{doing}: there is no key '{tag}:<table>{{<tag>}}', so no tables of TFRA; name the database and the"
            f" model_tag_runtime, as in redis://localhost/0?{OPTION}=test"
        )
    stored: list[StoredTable] = []
    broken: dict[str, KvtoolsError] = {}
    for base, names in slices.items():
        known, entry = options, recorded.get(base)
        if entry is not None and entry.agrees(options):
            known = OpenOptions(key_dtype=entry.key_dtype, value_dtype=entry.value_dtype, dim=entry.dim)
        elif status_of(base, slices) is not None:
            known = dataclasses.replace(options, value_dtype="int32", dim=1)
        try:
            stored.append(_open_stored(client, base, names, known, f"opening table '{base}' of '{place.shown}'"))
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[base] = error
    joining = OpenOptions(memory=options.memory, lenient=options.lenient)
    columns = {base: (entry.table, entry.column) for base, entry in recorded.items()}
    tables = join_tables(NAME, stored, joining, broken, columns)
    return Checkpoint(place.shown, NAME, dict(sorted(tables.items())), broken=broken)


def _record_key(tag: str) -> str:
    """Return the key of what kvtools records of a model tag, and TFRA does not read: names, types and widths."""
    return f"kvtools-record:{tag}"


def _recorded(client: Any, tag: str, doing: str) -> dict[str, Entry]:
    (text,) = redis_server.run(client, [("GET", _record_key(tag))], doing)
    return {} if text is None else entries_of(text, f"{doing}: key '{_record_key(tag)}'")


def _slices(client: Any, tag: str, doing: str) -> dict[str, list[bytes]]:
    """Return the hashes of each table of a model tag, by the table's name."""
    pattern = re.compile(re.escape(f"{tag}:".encode()) + rb"(.+)\{[^{}]*\}", re.S)
    found: dict[str, list[bytes]] = {}
    with redis_server.redis_errors(doing):
        for key in sorted(set(client.scan_iter(match=layout.literally(f"{tag}:".encode()) + b"*{*}", count=_COUNT))):
            match = pattern.fullmatch(key)
            if match and client.type(key) == b"hash":
                found.setdefault(match[1].decode("utf-8", "surrogateescape"), []).append(key)
    return found


def _open_stored(client: Any, base: str, names: Sequence[bytes], options: OpenOptions, doing: str) -> StoredTable:
    slices: list[_Slice] = []
    key_sizes, sizes = set(), set()
    for name in names:
        with redis_server.redis_errors(doing):
            slices.append(_Slice(client, name, doing, int(client.hlen(name))))
            sampled = client.execute_command("HRANDFIELD", name, _SAMPLE)
            rows = client.hmget(name, sampled) if sampled else []
        key_sizes |= {len(field) for field in sampled}
        sizes |= {len(row) for row in rows if row is not None}
    key_dtype = options.key_dtype or {frozenset({8}): "int64", frozenset({4}): "int32"}.get(frozenset(key_sizes))
    value_dtype = options.value_dtype or "float32"
    part_rows = tuple(one.rows for one in slices) or (0,)
    if key_dtype is None or key_dtype == "string":
        note = "keys are strings" if len(key_sizes) > 1 else f"keys of {', '.join(map(str, key_sizes))} bytes"
        return StoredTable(of_file(base), "string", value_dtype, 1, part_rows, notes=(note,), routed=False)
    if key_dtype not in KEY_DTYPES or value_dtype not in VALUE_DTYPES:
        raise BadInputError(
            f"{doing}: keys of {key_dtype} and values of {value_dtype} were asked for, expected"
            f" {' or '.join(KEY_DTYPES)} and {' or '.join(VALUE_DTYPES)}; see --key-dtype and --value-dtype"
        )
    types = numpy_dtype(key_dtype), numpy_dtype(value_dtype)
    wrong = next((size for size in key_sizes if size != types[0].itemsize), None)
    if wrong is not None:
        raise CorruptFileError(f"{doing}: got keys of {wrong} bytes, expected {key_dtype}; give another --key-dtype")
    dim, odd = divmod(min(sizes, default=(options.dim or 1) * types[1].itemsize), types[1].itemsize)
    if len(sizes) > 1 or odd or not dim or options.dim not in (None, dim):
        told = " and ".join(map(str, sorted(sizes)))
        expected = (
            f"{options.dim} numbers of {value_dtype}" if options.dim else f"one size, a multiple of {value_dtype}"
        )
        raise CorruptFileError(
            f"{doing}: got rows of {told} bytes, expected {expected}; give another --value-dtype or --dim, or leave"
            " tables of strings out"
        )
    nothing = _Slice(client, base.encode("utf-8", "surrogateescape"), doing, 0)
    for one in (*slices, nothing):
        one.sizes = types[0].itemsize, types[1].itemsize * dim
    assumed = [f"keys are taken as {key_dtype}"] if options.key_dtype is None else []
    assumed += [f"values are taken as {value_dtype}"] if options.value_dtype is None else []
    return StoredTable(
        of_file(base),
        key_dtype,
        value_dtype,
        dim,
        part_rows,
        [_SliceColumn(one, 0, types[0], ()) for one in slices or [nothing]],
        [_SliceColumn(one, 1, types[1], (dim,)) for one in slices or [nothing]],
        sum(part_rows) * (types[0].itemsize + types[1].itemsize * dim),
        (f"{' and '.join(assumed)}: the server records no types",) if assumed else (),
        routed=False,
    )


class RedisShard(ShardWriter):
    """Writes rows of a table, in any order, to the hashes of its columns."""

    def __init__(self, place: redis_server.Place, names: dict[str, bytes], doing: str) -> None:
        self._place, self._names, self._doing = place, names, doing
        self._client: Any = None

    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Write a chunk; see `ShardWriter.write`."""
        if self._client is None:
            self._client = redis_server.connect(self._place)
        columns = dict(table_columns(chunk))
        fields = layout.fields_of(columns.pop("keys"))
        commands = []
        for column, rows in columns.items():
            values = layout.values_of(rows.reshape(len(rows), -1))
            for first in range(0, len(fields), _COUNT):
                some = zip(fields[first : first + _COUNT], values[first : first + _COUNT], strict=True)
                commands.append(("HSET", self._names[column], *[x for pair in some for x in pair]))
        redis_server.run(self._client, commands, self._doing, OutputError)

    def finish(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None


class RedisTableWriter(TableWriter):
    """One table being written under names that nobody reads."""

    random_access: ClassVar[bool] = True
    distributable: ClassVar[bool] = True

    def __init__(self, place: redis_server.Place, schema: TableSchema, names: dict[str, bytes], client: Any) -> None:
        self._place, self._schema, self._names, self._client = place, schema, names, client
        self._doing = f"writing table '{schema.name}' to '{place.shown}'"

    def shard(self) -> RedisShard:
        """Return a writer for one task."""
        return RedisShard(self._place, self._names, self._doing)

    def close(self) -> None:
        """End the table: every row is there, each under a key of its own."""
        (held,) = redis_server.run(self._client, [("HLEN", self._names["values"])], self._doing, OutputError)
        if held != self._schema.rows:
            raise BadInputError(
                f"{self._doing}: {held} of {self._schema.rows} rows are there after writing; Redis holds each key once:"
                " remove duplicates first, see `kvtools verify`, and see the server's maxmemory-policy"
            )


class Writer(CheckpointWriter):
    """Writes tables that `RedisTableCreator` reads, one hash for each column; they appear when all are there."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        self._place, self._tag = _place_of(staging)
        self._doing = f"writing to '{self._place.shown}'"
        self._force = options.force
        self._client = redis_server.connect(self._place)
        self._there = _slices(self._client, self._tag, self._doing)
        self._recorded = _recorded(self._client, self._tag, self._doing)
        self._entries: dict[str, Entry] = {}
        self._places = Places()
        self._beside = secrets.token_hex(4)
        self._staged: dict[bytes, bytes] = {}
        self._replaced: list[bytes] = []

    def plan(self, schemas: Sequence[TableSchema]) -> None:
        """Note which tables are status of which; see `CheckpointWriter.plan`."""
        self._places = Places(schema.name for schema in schemas)

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> RedisTableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        check_types(schema)
        names: dict[str, bytes] = {}
        (tag,) = layout.hash_tags(1)
        for column, place in self._places.of(schema).items():
            base = of_path(place).base if "tables_of_" in place.split("/")[-1] else place.split("/")[-1]
            final = layout.table_prefix(self._tag, base) + tag.encode()
            if base in self._entries:
                raise BadInputError(
                    f"writing table '{schema.name}' as {NAME}: its name makes key '{final.decode()}', as table"
                    f" '{self._entries[base].table}' does; rename one, see `kvtools rename`"
                )
            if (base in self._there or base in self._recorded) and not self._force:
                raise OutputError(
                    f"{self._doing}: there is a table '{base}' already; name another {OPTION}, or add --force to"
                    " replace it"
                )
            dtype, width = column_type(schema, column)
            self._entries[base] = Entry(schema.name, column, schema.key_dtype, dtype.name, width)
            self._replaced += self._there.get(base, [])
            # The braces decide the node of a cluster, and a key is renamed on its node.
            names[column] = f"kvtools-writing-{self._beside}:{base}{tag}".encode()
            self._staged[names[column]] = final
        return RedisTableWriter(self._place, schema, names, self._client)

    def close(self) -> None:
        """Put the new tables in the place of the old ones."""
        for key in self._replaced:
            redis_server.run(self._client, [("UNLINK", key)], self._doing, OutputError)
        for staged, final in self._staged.items():
            (there,) = redis_server.run(self._client, [("EXISTS", staged)], self._doing, OutputError)
            if there:
                redis_server.run(self._client, [("RENAME", staged, final)], self._doing, OutputError)
        record = record_of({**self._recorded, **self._entries})
        redis_server.run(self._client, [("SET", _record_key(self._tag), record)], self._doing, OutputError)
        self._client.close()

    def abort(self) -> None:
        """Remove what was written."""
        try:
            for staged in self._staged:
                redis_server.run(self._client, [("UNLINK", staged)], self._doing, OutputError)
        except KvtoolsError:
            pass  # What made the writer stop is told.
        self._client.close()


DIALECT = Dialect(
    name=NAME,
    title=f"TensorFlow Recommenders Addons: tables in Redis, under a URL such as redis://localhost/0?{OPTION}=test",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="url",
    holds=Holds(
        key_dtypes=KEY_DTYPES,
        value_dtypes=VALUE_DTYPES,
        slot_width_is_dim=True,
        slot_dtype_is_value=True,
        freq_dtypes=("int32",),
        version_dtypes=("int32",),
        version_units=("seconds",),
        many_parts=False,
        metadata=frozenset({"tfra"}),
        status_tables=True,
    ),
)
