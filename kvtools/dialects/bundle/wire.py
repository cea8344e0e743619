"""Protocol-buffer wire format, as much of it as a checkpoint index needs: varints, fixed32, nested messages.

Format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct

_VARINT, _BYTES, _FIXED32 = 0, 2, 5
_FIXED_BYTES = {1: 8, _FIXED32: 4}


class WireError(ValueError):
    """Bytes that are no well-formed message; the caller adds which file they came from."""


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    r"""Decode the varint at `position`; return it and the position after it.

    >>> read_varint(b"\xac\x02", 0)
    (300, 2)
    """
    try:
        byte = data[position]
        if byte < 0x80:
            return byte, position + 1
        result, shift = byte & 0x7F, 7
        while True:
            position += 1
            byte = data[position]
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result & 0xFFFFFFFFFFFFFFFF, position + 1
            shift += 7
            if shift > 63:
                raise WireError("a number is longer than 64 bits")
    except IndexError:
        raise WireError("a number runs past the end of its record") from None


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


def read_fields(data: bytes) -> list[tuple[int, int | bytes]]:
    r"""Return (field number, value) for each field of a message: ints for numbers, bytes for the rest.

    >>> read_fields(b"\x08\x01\x12\x02hi")
    [(1, 1), (2, b'hi')]
    """
    fields: list[tuple[int, int | bytes]] = []
    position, end = 0, len(data)
    while position < end:
        tag, position = read_varint(data, position)
        kind = tag & 7
        value: int | bytes
        if kind == _VARINT:
            value, position = read_varint(data, position)
        elif kind in _FIXED_BYTES or kind == _BYTES:
            if kind == _BYTES:
                size, position = read_varint(data, position)
            else:
                size = _FIXED_BYTES[kind]
            if position + size > end:
                raise WireError("a field runs past the end of its record")
            value = data[position : position + size]
            position += size
            if kind != _BYTES:
                value = int.from_bytes(value, "little")
        else:
            raise WireError(f"a field has unknown wire type {kind}")
        fields.append((tag >> 3, value))
    return fields


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
