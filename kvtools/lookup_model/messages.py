"""The messages of TensorFlow's graphs, encoded: attributes and shapes."""

from __future__ import annotations

from collections.abc import Iterable

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.dialects.bundle.wire import put_bytes, put_varint

BOOL, INT32, INT64, STRING, RESOURCE = map(number_named, ("bool", "int32", "int64", "string", "resource"))
"""Types by their numbers."""


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    r"""Encode a message of (field number, value): numbers, zero too, texts, and bytes or other messages.

    >>> message((1, 300), (2, "hi"))
    b'\x08\xac\x02\x12\x02hi'
    """
    encoded = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            encoded += put_varint(number << 3) + put_varint(value & 0xFFFFFFFFFFFFFFFF)
        else:
            encoded += put_bytes(number, value.encode() if isinstance(value, str) else value)
    return bytes(encoded)


def entry(key: str | int, value: bytes | str) -> bytes:
    """Encode an entry of a map."""
    return message((1, key), (2, value))


UNKNOWN_RANK = message((3, 1))
"""A shape of any rank."""


def shape(*sizes: int) -> bytes:
    """Encode a shape; a size is -1 where it is not known."""
    return message(*((2, message((1, size))) for size in sizes))


def of_type(dtype: int) -> bytes:
    """Encode an attribute that is a type."""
    return message((6, dtype))


def of_types(dtypes: Iterable[int]) -> bytes:
    """Encode an attribute that is a list of types."""
    return message((1, message(*((6, dtype) for dtype in dtypes))))


def of_shape(encoded: bytes) -> bytes:
    """Encode an attribute that is a shape."""
    return message((7, encoded))


def of_shapes(encoded: Iterable[bytes]) -> bytes:
    """Encode an attribute that is a list of shapes."""
    return message((1, message(*((7, one) for one in encoded))))


def of_text(text: str) -> bytes:
    """Encode an attribute that is a string."""
    return message((2, text))


def of_bool(value: bool) -> bytes:
    """Encode an attribute that is true or false."""
    return message((5, int(value)))


def of_number(number: int) -> bytes:
    """Encode an attribute that is a number."""
    return message((3, number))


def of_function(name: str) -> bytes:
    """Encode an attribute that is a function."""
    return message((10, message((1, name))))
