"""Frames: the binary form of a lookup in one or several tables, and of its answer (docs/serve.md has the bytes).

Everything is little-endian and aligned to 8 bytes, so arrays are read where they lie. Request and answer start
with 16 bytes of head, then have a head of 32 bytes and its arrays for each table. A frame ends where its last array
does; padding is zeros.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MEDIA_TYPE = "application/x-kvtools-lookup"
COMBINERS = ("sum", "mean", "sqrtn")
MISSING = ("zeros", "default", "error")

_REQUEST, _ANSWER = b"KVQ1", b"KVA1"
_REQUEST_HEAD = struct.Struct("<4sIII")
_TABLE_HEAD = struct.Struct("<IIIIQQ")
_ANSWER_HEAD = struct.Struct("<4sIQ")
_WEIGHTED = 1
_OWN_TYPE = 2
_VALUE_TYPES = ("<f4", "<f8", "<i4", "<i8")
OWN_TYPES = frozenset({"float64", "int32", "int64"})
"""The types of tables whose rows float32 does not hold: a request may ask for them as they are."""


class FrameError(ValueError):
    """Bytes that are no frame: cut off, or with something in them that no frame has."""


@dataclass(frozen=True, eq=False)
class TableKeys:
    """What is looked up in one table: a row for each key, or with a `combiner` one for each bag of keys.

    `keys` int64 [n] (of a table of uint64 keys: their bits). Bag b has the keys [row_splits[b], row_splits[b + 1]);
    `row_splits` int64 [bags + 1]; `weights` float32 [n], or None: all are 1. With `own_type` rows that are not pooled
    come in the table's type, if that is of `OWN_TYPES`, and not in float32.
    """

    table: str
    keys: npt.NDArray[np.int64]
    combiner: str | None = None
    row_splits: npt.NDArray[np.int64] | None = None
    weights: npt.NDArray[np.float32] | None = None
    own_type: bool = False

    @property
    def bags(self) -> int:
        """How many bags there are; 0 where keys are looked up one by one."""
        return 0 if self.row_splits is None else len(self.row_splits) - 1


@dataclass(frozen=True, eq=False)
class TableRows:
    """What was found in one table.

    `embeddings` [keys or bags, dim]; `found` bool [keys], None where keys were pooled; `missing` is how many keys have
    no row.
    """

    embeddings: npt.NDArray[Any]
    found: npt.NDArray[np.bool_] | None
    missing: int


def encode_request(lookups: Sequence[TableKeys], missing: str | None = None) -> bytes:
    """Write a request; `missing` ("zeros", "default", "error") says what a key without a row gets, None: what the
    server was set to.

    Example:
        >>> decode_request(encode_request([TableKeys("ads", np.array([17, -3]))]))[0][0].keys.tolist()
        [17, -3]
    """
    parts = [_REQUEST_HEAD.pack(_REQUEST, len(lookups), 0 if missing is None else MISSING.index(missing) + 1, 0)]
    for lookup in lookups:
        name = lookup.table.encode()
        pooled = lookup.combiner is not None
        parts += [
            _TABLE_HEAD.pack(
                len(name),
                COMBINERS.index(lookup.combiner) + 1 if lookup.combiner is not None else 0,
                (0 if lookup.weights is None else _WEIGHTED) | (_OWN_TYPE if lookup.own_type else 0),
                0,
                len(lookup.keys),
                lookup.bags if pooled else 0,
            ),
            _padded(name),
            np.asarray(lookup.keys).astype("<i8", copy=False).tobytes(),
        ]
        if lookup.row_splits is not None:
            parts.append(lookup.row_splits.astype("<i8", copy=False).tobytes())
        if lookup.weights is not None:
            parts.append(_padded(lookup.weights.astype("<f4", copy=False).tobytes()))
    return b"".join(parts)


def decode_request(body: bytes) -> tuple[list[TableKeys], str | None]:
    """Read a request: its lookups and what missing keys get. Raises `FrameError`; does not look into row_splits."""
    reader = _Reader(body)
    magic, tables, missing, zero = reader.head(_REQUEST_HEAD, "the head")
    if magic != _REQUEST:
        raise FrameError(f"the first bytes are {magic!r}, expected {_REQUEST!r}")
    if missing > len(MISSING) or zero:
        raise FrameError(f"the head says {missing} and {zero} for missing keys, expected 0 to {len(MISSING)} and 0")
    lookups = []
    for number in range(tables):
        what = f"table {number} of {tables}"
        name_bytes, combiner, flags, zero, keys, bags = reader.head(_TABLE_HEAD, what)
        known = _WEIGHTED if combiner else _OWN_TYPE
        if combiner > len(COMBINERS) or flags & ~known or zero or (not combiner and bags):
            raise FrameError(f"{what}: got combiner {combiner}, flags {flags}, {bags} bags; no such lookup")
        try:
            name = reader.take(name_bytes, what).decode()
        except UnicodeDecodeError:
            raise FrameError(f"{what}: its name is not UTF-8") from None
        lookups.append(
            TableKeys(
                name,
                reader.array("<i8", keys, what),
                COMBINERS[combiner - 1] if combiner else None,
                reader.array("<i8", bags + 1, what) if combiner else None,
                reader.array("<f4", keys, what) if flags & _WEIGHTED else None,
                bool(flags & _OWN_TYPE),
            )
        )
    reader.end()
    return lookups, MISSING[missing - 1] if missing else None


def encode_answer(tables: Sequence[TableRows], version: int = 0, own_types: Sequence[bool] = ()) -> bytes:
    """Write an answer: float32 rows, whatever the type of the table's, but those of `own_types` as `OWN_TYPES` says."""
    return b"".join(_answer_parts(tables, version, own_types or [False] * len(tables)))


def _answer_parts(tables: Sequence[TableRows], version: int, own_types: Sequence[bool]) -> Iterator[bytes]:
    yield _ANSWER_HEAD.pack(_ANSWER, len(tables), version)
    for rows, own_type in zip(tables, own_types, strict=True):
        count, dim = rows.embeddings.shape
        found = b"" if rows.found is None else rows.found.tobytes()
        own = own_type and rows.embeddings.dtype.name in OWN_TYPES
        value_type = rows.embeddings.dtype.newbyteorder("<").str if own else _VALUE_TYPES[0]
        number = _VALUE_TYPES.index(value_type)
        yield _TABLE_HEAD.pack(count, dim, number, int(rows.found is None), rows.missing, len(found))
        yield _padded(found)
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinity, as it would anywhere
            yield _padded(rows.embeddings.astype(value_type, copy=False).tobytes())


def decode_answer(body: bytes) -> tuple[list[TableRows], int]:
    """Read an answer: the rows of each table in the order of the request, and the number of the version that gave
    them. The arrays are views of `body`. Raises `FrameError`.

    Example:
        >>> rows = TableRows(np.ones((1, 2), np.float32), np.array([True]), 0)
        >>> decode_answer(encode_answer([rows], version=3))[0][0].embeddings.tolist()
        [[1.0, 1.0]]
    """
    reader = _Reader(body)
    magic, tables, version = reader.head(_ANSWER_HEAD, "the head")
    if magic != _ANSWER:
        raise FrameError(f"the first bytes are {magic!r}, expected {_ANSWER!r}")
    answers = []
    for number in range(tables):
        what = f"table {number} of {tables}"
        rows, dim, value_type, pooled, missing, found_bytes = reader.head(_TABLE_HEAD, what)
        if value_type >= len(_VALUE_TYPES) or pooled > 1:
            raise FrameError(f"{what}: got rows of type {value_type}, expected 0 to {len(_VALUE_TYPES) - 1}")
        found = reader.array("?", found_bytes, what)
        values = reader.array(_VALUE_TYPES[value_type], rows * dim, what).reshape(rows, dim)
        answers.append(TableRows(values, None if pooled else found, missing))
    reader.end()
    return answers, version


class _Reader:
    """Takes heads and arrays from a frame, one after the other."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def head(self, form: struct.Struct, what: str) -> tuple[Any, ...]:
        self._expect(form.size, what)
        values = form.unpack_from(self._body, self._at)
        self._at += form.size
        return values

    def take(self, size: int, what: str) -> bytes:
        self._expect(_aligned(size), what)
        taken = self._body[self._at : self._at + size]
        self._at += _aligned(size)
        return taken

    def array(self, dtype: str, count: int, what: str) -> npt.NDArray[Any]:
        size = count * np.dtype(dtype).itemsize
        self._expect(_aligned(size), what)
        values: npt.NDArray[Any] = np.frombuffer(self._body, dtype, count, self._at)
        self._at += _aligned(size)
        return values

    def end(self) -> None:
        if self._at != len(self._body):
            raise FrameError(f"the frame ends after {self._at} bytes, got {len(self._body)}")

    def _expect(self, size: int, what: str) -> None:
        if len(self._body) - self._at < size:
            raise FrameError(f"{what} is cut off: it takes {size} bytes more, got {len(self._body) - self._at}")


def _aligned(size: int) -> int:
    return (size + 7) & ~7


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)
