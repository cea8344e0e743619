"""A table in Redis, read: whole buckets in order, or the rows of a few keys."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvtools.dialects.chunk import KEYS, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import Finding, TableReader
from kvtools.dialects.redis_layout import (
    EXTRA_BYTES,
    TableKeys,
    as_fields,
    as_rows,
    bucket_of,
    joined,
    state_dtypes,
)
from kvtools.dialects.redis_server import PIPELINE, READ, Place, batches, run
from kvtools.dialects.schema import TableSchema, numpy_dtype
from kvtools.errors import CorruptFileError


class RedisTable(TableReader):
    """A table in Redis. Its rows stand in the order of its buckets, and by key within a bucket. `layout` says where."""

    def __init__(self, place: Place, client: Any, schema: TableSchema, keys: TableKeys) -> None:
        self.schema = schema
        self.layout = keys
        self._client = client
        self._doing = f"reading table '{schema.name}' of '{place.shown}'"
        self._sized = threading.Lock()
        self._ends: Array | None = None

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows in order; see `TableReader.read_part`."""
        ends = self._bucket_ends()
        bucket = 0
        while bucket < self.layout.buckets:
            # As many buckets as a chunk takes, at least one: their keys are known before their rows are read.
            begun = int(ends[bucket - 1]) if bucket else 0
            stop = max(bucket + 1, int(np.searchsorted(ends, begun + rows, side="right")))
            stop = min(stop, bucket + PIPELINE, self.layout.buckets)
            if int(ends[stop - 1]) > begun:
                whole = self._buckets(np.arange(bucket, stop), columns)
                for start in range(0, len(whole), rows):
                    yield whole.take(slice(start, start + rows))
            bucket = stop

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; reads the keys of their buckets for it."""
        rows = self.row_numbers(rows)
        ends = self._bucket_ends()
        which = np.searchsorted(ends, rows, side="right")
        keys = np.empty(len(rows), self.key_dtype)
        needed = np.unique(which)
        for batch in batches(len(needed)):
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
        for number in range(-(-size // EXTRA_BYTES)):
            (piece,) = run(self._client, [("HGET", self.layout.extra(name), str(number))], self._doing)
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
        for batch in batches(self.layout.buckets):
            keys, buckets = self._sorted_keys(np.arange(batch.start, batch.stop))
            wrong += int(np.count_nonzero(bucket_of(keys, self.layout.buckets) != buckets))
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
                for batch in batches(self.layout.buckets):
                    sizes += run(self._client, [("HLEN", self.layout.values(b)) for b in batch], self._doing)
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
        states = state_dtypes(self.schema)
        size = self.value_dtype.itemsize * self.dim if columns.values else 0
        keys, rows = self._hashes(self.layout.values, buckets, size)
        values = rows.reshape(-1).view(self.value_dtype).reshape(len(keys), self.dim) if columns.values else None
        if not any(_is_wanted(name, columns) for name, _, _ in states):
            return Chunk(keys, values)
        size = sum(dtype.itemsize * width for _, dtype, width in states)
        state_keys, rows = self._hashes(self.layout.state, buckets, size)
        if not np.array_equal(keys, state_keys):
            raise CorruptFileError(
                f"{self._doing}: rows and their slots are of different keys; it was replaced while it was read: read it"
                " again, or write it again"
            )
        return self._with_state(Chunk(keys, values), rows, columns)

    def _hashes(self, name: Callable[[int], str], buckets: Array, size: int) -> tuple[Array, Array]:
        """Return the keys of these buckets' hashes, sorted in each bucket, and what follows each key: `size` bytes."""
        command = "HGETALL" if size else "HKEYS"
        commands = [("EVALSHA", READ, 1, name(bucket), command) for bucket in buckets.tolist()]
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
        states = state_dtypes(self.schema)
        cuts = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(keys)]
        fields = as_fields(as_rows(keys))
        runs = [(int(buckets[a]), fields[a:b]) for a, b in itertools.pairwise(cuts) if a < b]

        def rows_of(name: Callable[[int], str], size: int) -> Array:
            replies = run(self._client, [("HMGET", name(bucket), *some) for bucket, some in runs], self._doing)
            return joined([row for reply in replies for row in reply], size, self._doing)

        values: Array | None = None
        if columns.values:
            rows = rows_of(self.layout.values, self.value_dtype.itemsize * self.dim)
            values = rows.reshape(-1).view(self.value_dtype).reshape(len(keys), self.dim)
        if not any(_is_wanted(name, columns) for name, _, _ in states):
            return Chunk(keys, values)
        size = sum(dtype.itemsize * width for _, dtype, width in states)
        return self._with_state(Chunk(keys, values), rows_of(self.layout.state, size), columns)

    def _with_state(self, chunk: Chunk, rows: Array, columns: Columns) -> Chunk:
        """Return a chunk with the columns that are wanted of its rows' state, uint8 [n, bytes of a row]."""
        arrays: dict[str, Array] = {}
        at = 0
        for name, dtype, width in state_dtypes(self.schema):
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
