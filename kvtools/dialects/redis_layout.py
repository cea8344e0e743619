"""How a table lies in Redis: the keys of its hashes, the bucket of a key, the bytes of a row, what describes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.schema import TableSchema, numpy_dtype, row_bytes
from kvtools.dialects.table_record import is_count, json_object
from kvtools.errors import BadInputError, CorruptFileError

NAME = "redis"
FORMAT = 1
_BUCKET_BYTES = 1 << 20
_BUCKET_ROWS = 8192
EXTRA_BYTES = 1 << 20


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

    def lengths(self) -> list[tuple[Any, ...]]:
        """Return commands whose replies add up to the rows of the table."""
        return [("HLEN", self.values(bucket)) for bucket in range(self.buckets)]

    def extra(self, name: str) -> str:
        """Return the hash of piece numbers to the bytes of an extra array."""
        return f"{{{self.base}}}:{name}"


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


def state_dtypes(schema: TableSchema) -> list[tuple[str, np.dtype[Any], int]]:
    """Return the columns of a row of state, in their order: name as in `plain_columns`, type and width."""
    columns = [(f"slot:{slot.name}", numpy_dtype(slot.dtype), slot.width) for slot in schema.slots]
    if schema.freq_dtype:
        columns.append(("freqs", numpy_dtype(schema.freq_dtype), 1))
    if schema.version_dtype:
        columns.append(("versions", numpy_dtype(schema.version_dtype), 1))
    return columns


def as_rows(column: Array) -> Array:
    """Return a column's bytes, uint8 [n, bytes of a row]."""
    column = np.ascontiguousarray(column)
    width = column.dtype.itemsize * math.prod(column.shape[1:])
    return column.reshape(-1).view(np.uint8).reshape(len(column), width)


def as_fields(rows: Array) -> list[bytes]:
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


def rows_lost(name: str, held: int, rows: int) -> str:
    """Return what is wrong with a table that has not the rows that its description says."""
    return (
        f"table '{name}' has {held} of {rows} rows: Redis has evicted keys, see its maxmemory and maxmemory-policy, or"
        " something else wrote there; write the tables anew"
    )


def read_meta(text: bytes, doing: str) -> dict[str, Any]:
    """Return what the meta key says; raises if it is of a later format, or damaged."""
    meta = json_object(text, doing)
    number, tables = meta.get("format"), meta.get("tables")
    if is_count(number) and number > FORMAT:
        raise BadInputError(f"{doing}: got format {number}, expected at most {FORMAT}; update kvtools")
    listed = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if number != FORMAT or not listed or not isinstance(meta.get("generation"), str):
        raise CorruptFileError(f"{doing}: its meta key is damaged, expected format {FORMAT}; write it again")
    return meta
