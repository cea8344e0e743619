"""Protocol-buffer wire format, as much of it as a checkpoint index needs: varints, fixed32, nested messages.

Format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """Bytes that are no well-formed message; the caller adds which file they came from."""


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    r"""Decode the varint at `position`; return it and the position after it.

    >>> read_varint(b"\xac\x02", 0)
    (300, 2)
    """
    result = shift = 0
    while True:
        if position >= len(data):
            raise WireError("a number runs past the end of its record")
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise WireError("a number is longer than 64 bits")
    return result & 0xFFFFFFFFFFFFFFFF, position


def put_varint(value: int) -> bytes:
    r"""Encode a number in [0, 2^64) as a varint.

    >>> put_varint(300)
    b'\xac\x02'
    """
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    r"""Yield (field number, value) for each field of a message: ints for numbers, bytes for the rest.

    >>> list(read_fields(b"\x08\x01\x12\x02hi"))
    [(1, 1), (2, b'hi')]
    """
    position = 0
    while position < len(data):
        tag, position = read_varint(data, position)
        kind = tag & 7
        value: int | bytes
        if kind == _VARINT:
            value, position = read_varint(data, position)
        elif kind == _BYTES:
            size, position = read_varint(data, position)
            if position + size > len(data):
                raise WireError("a field runs past the end of its record")
            value = data[position : position + size]
            position += size
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
            if position + size > len(data):
                raise WireError("a field runs past the end of its record")
            value = int.from_bytes(data[position : position + size], "little")
            position += size
        else:
            raise WireError(f"a field has unknown wire type {kind}")
        yield tag >> 3, value


def as_int(value: int | bytes) -> int:
    """Return a numeric field as a signed 64-bit number, or raise `WireError` for any other kind of field.

    >>> as_int(2**64 - 1)
    -1
    """
    if isinstance(value, bytes):
        raise WireError("a number was expected, a string of bytes was found")
    return value - (1 << 64) if value >> 63 else value


def as_bytes(value: int | bytes) -> bytes:
    """Return a length-delimited field, or raise `WireError` for any other kind of field."""
    if isinstance(value, int):
        raise WireError("a string of bytes was expected, a number was found")
    return value


def put_int(field: int, value: int) -> bytes:
    """Encode a numeric field; zero, the default, takes no bytes."""
    return put_varint(field << 3 | _VARINT) + put_varint(value & 0xFFFFFFFFFFFFFFFF) if value else b""


def put_fixed32(field: int, value: int) -> bytes:
    """Encode a 4-byte field."""
    return put_varint(field << 3 | _FIXED32) + struct.pack("<I", value)


def put_bytes(field: int, value: bytes) -> bytes:
    """Encode a length-delimited field: a string, bytes or a nested message."""
    return put_varint(field << 3 | _BYTES) + put_varint(len(value)) + value
