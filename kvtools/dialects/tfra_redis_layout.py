"""How TFRA lays a table out in Redis: names of hashes, fields and values, as bytes.

A table is one hash for each storage slice, ``<model tag>:<name with / as _>{<hash tag>}``, from the bytes of a key to
those of its row. Numbers lie as in memory, strings of keys as they are, strings of rows as ``<length, uint32><bytes>``
each. The key modulo the number of slices, or its CRC-32C, says in which slice it is. Slots of optimizers are tables of
their own. Nothing says what dtypes and width there are. Specified in `docs/dialects/tfra.md`.

Source: https://github.com/tensorflow/recommenders-addons, core/kernels/redis_impl/ (redis_table_op_util.hpp,
redis_connection_util.hpp).
"""

from __future__ import annotations

import binascii
import hashlib
import itertools
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import google_crc32c
import numpy as np

Array = np.ndarray[Any, Any]

#: Of a Redis cluster.
HASH_SLOTS = 16384
#: What an object of TensorFlow's that holds a short string has room for.
_SHORT_STRING = 22
_NO_FINAL_XOR = 0xFFFFFFFF


def table_prefix(model_tag: str, name: str, md5: bool = False) -> bytes:
    """What the names of a table's hashes begin with; `md5`: as the digest of it.

    >>> table_prefix("test", "tower/user")
    b'test:tower_user'
    """
    prefix = f"{model_tag}:{name.replace('/', '_')}".encode()
    return hashlib.md5(prefix, usedforsecurity=False).digest() if md5 else prefix


def column_name(table: str, slot: str | None = None) -> str:
    """What the table of the values, or of a slot such as "Adam.m", is called.

    >>> column_name("tower/user", "Adam.m")
    'tower/user/Adam/m'
    """
    return table if slot is None else f"{table}/{slot.replace('.', '/', 1)}"


@cache
def _tags() -> list[str]:
    """The least number whose digits Redis puts into each hash slot: about 110,000 are tried."""
    tags: dict[int, str] = {}
    for text in map(str, itertools.count()):
        tags.setdefault(binascii.crc_hqx(text.encode(), 0) % HASH_SLOTS, text)
        if len(tags) == HASH_SLOTS:
            return [tags[slot] for slot in range(HASH_SLOTS)]
    raise AssertionError("numbers do not end")


def tag_in_slot(slot: int) -> str:
    """The least number whose digits Redis puts into this hash slot.

    >>> tag_in_slot(0)
    '3560'
    """
    return _tags()[slot]


def hash_tags(slices: int, given: Sequence[str] = ()) -> list[str]:
    """The tag of each slice, in braces: those that were given if there are as many, else spread over all hash slots.

    >>> hash_tags(2, ["a", "{b}"]), hash_tags(1)
    (['{a}', '{b}'], ['{3560}'])
    """
    if len(given) == slices:
        return [f"{{{tag.removeprefix('{').removesuffix('}')}}}" for tag in given]
    return [f"{{{tag_in_slot(HASH_SLOTS // slices * i + HASH_SLOTS % slices)}}}" for i in range(slices)]


def fields_of(keys: Array) -> list[bytes]:
    """The fields of keys [n]: numbers, or strings as objects."""
    if keys.dtype.kind == "O":
        return [key if isinstance(key, bytes) else str(key).encode() for key in keys.tolist()]
    keys = np.ascontiguousarray(keys)
    return _pieces(keys.tobytes(), keys.itemsize, len(keys))


def keys_of(fields: Sequence[bytes], dtype: Any) -> Array:
    """Keys [n] of fields; `dtype` object: strings. All fields must be of a key's size."""
    if np.dtype(dtype).kind == "O":
        return _objects(fields)
    return np.frombuffer(b"".join(fields), dtype)


def values_of(rows: Array) -> list[bytes]:
    """The values of rows [n, width]: numbers, or strings as objects."""
    if rows.dtype.kind == "O":
        texts = [[x if isinstance(x, bytes) else str(x).encode() for x in row] for row in rows.tolist()]
        return [b"".join(struct.pack("<I", len(text)) + text for text in row) for row in texts]
    rows = np.ascontiguousarray(rows)
    return _pieces(rows.tobytes(), rows.itemsize * rows.shape[1], len(rows))


def rows_of(values: Sequence[bytes], dtype: Any, width: int) -> Array:
    """Rows [n, width] of values; `dtype` object: strings.

    Raises:
        ValueError: the size of one is that of no such row.
    """
    dtype = np.dtype(dtype)
    if dtype.kind == "O":
        rows = np.empty((len(values), width), object)
        for i, value in enumerate(values):
            rows[i] = _strings_of(value, width)
        return rows
    wrong = next((value for value in values if len(value) != dtype.itemsize * width), None)
    if wrong is not None:
        raise ValueError(f"a row of {len(wrong)} bytes, which are not {dtype.name}[{width}]")
    return np.frombuffer(b"".join(values), dtype).reshape(len(values), width)


def _strings_of(value: bytes, width: int) -> list[bytes]:
    texts: list[bytes] = []
    at = 0
    while at + 4 <= len(value) and len(texts) < width:
        end = at + 4 + struct.unpack_from("<I", value, at)[0]
        texts.append(value[at + 4 : end])
        at = end
    if len(texts) != width or at != len(value):
        raise ValueError(f"a row of {len(value)} bytes, which are not string[{width}]")
    return texts


def slices_of(keys: Array, slices: int, by_crc: bool = False) -> Array:
    """In which slice each of keys [n] is; `by_crc`: by the CRC-32C of its bytes, as that of strings always is.

    TFRA takes the CRC of the object that holds a string. Of more than 22 bytes that is an address, another in every
    run; here it is the text.

    >>> slices_of(np.array([5, -1, 12]), 4).tolist()
    [1, 3, 0]
    """
    if slices == 1:
        return np.zeros(len(keys), np.int64)
    if keys.dtype.kind == "O":
        crcs = [google_crc32c.value(_as_in_memory(key)) ^ _NO_FINAL_XOR for key in fields_of(keys)]
    elif by_crc:
        crcs = [google_crc32c.value(field) ^ _NO_FINAL_XOR for field in fields_of(keys)]
    else:
        return (keys.astype(np.uint64 if keys.dtype.kind == "u" else np.int64).view(np.int64) & 0xFFFFFFFF) % slices
    return np.array(crcs, np.int64) % slices


def literally(text: bytes) -> bytes:
    """A pattern of Redis that this text matches, and no other.

    >>> literally(b"a*b")
    b'a\\\\*b'
    """
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]\\^-" else bytes([c]) for c in text)


def _as_in_memory(text: bytes) -> bytes:
    """As many of the first bytes of the object that holds a string as the string has."""
    return text if len(text) > _SHORT_STRING else (bytes([len(text) << 2]) + text)[: len(text)]


def _pieces(data: bytes, size: int, count: int) -> list[bytes]:
    return [data[i * size : (i + 1) * size] for i in range(count)]


def _objects(items: Sequence[bytes]) -> Array:
    array = np.empty(len(items), object)
    array[:] = items
    return array
