"""The fields of a message, in their order, so that what is not changed is written as it was read."""

from __future__ import annotations

from kvtools.dialects.bundle.wire import WireError, put_varint, read_varint

Field = tuple[int, int, int | bytes]
"""Number, wire type, and value: a number of wire type 0, bytes of all others."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}


def split(data: bytes) -> list[Field]:
    r"""Return the fields of a message.

    >>> split(b"\x08\x01\x12\x02hi")
    [(1, 0, 1), (2, 2, b'hi')]
    """
    fields: list[Field] = []
    position, end = 0, len(data)
    while position < end:
        tag, position = read_varint(data, position)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, position = read_varint(data, position)
            fields.append((number, kind, value))
            continue
        if kind == _BYTES:
            size, position = read_varint(data, position)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise WireError(f"a field has unknown wire type {kind}")
        if position + size > end:
            raise WireError("a field runs past the end of its record")
        fields.append((number, kind, data[position : position + size]))
        position += size
    return fields


def join(fields: list[Field]) -> bytes:
    r"""Return the message of these fields.

    >>> join(split(b"\x08\x01\x12\x02hi"))
    b'\x08\x01\x12\x02hi'
    """
    parts: list[bytes] = []
    for number, kind, value in fields:
        parts.append(put_varint(number << 3 | kind))
        if isinstance(value, int):
            parts.append(put_varint(value))
        elif kind == _BYTES:
            parts += (put_varint(len(value)), value)
        else:
            parts.append(value)
    return b"".join(parts)


def texts(fields: list[Field], number: int) -> list[str]:
    """Return the strings of a repeated field."""
    return [text(value) for value in messages(fields, number)]


def messages(fields: list[Field], number: int) -> list[bytes]:
    """Return the messages, or strings as bytes, of a repeated field."""
    return [value for field, _, value in fields if field == number and isinstance(value, bytes)]


def last(fields: list[Field], number: int, default: bytes = b"") -> bytes:
    """Return a message, or a string as bytes; the last one counts."""
    return ([default, *messages(fields, number)])[-1]


def number_in(fields: list[Field], number: int, default: int = 0) -> int:
    """Return a number; the last one counts."""
    found = default
    for field, _, value in fields:
        if field == number and isinstance(value, int):
            found = value
    return found


def numbers(fields: list[Field], number: int) -> list[int]:
    """Return the numbers of a repeated field, packed or not."""
    found: list[int] = []
    for field, _, value in fields:
        if field != number:
            continue
        if isinstance(value, int):
            found.append(value)
        else:
            position = 0
            while position < len(value):
                one, position = read_varint(value, position)
                found.append(one)
    return found


def entries(fields: list[Field], number: int) -> list[tuple[str, bytes]]:
    """Return a map from strings to messages or strings."""
    pairs = [split(value) for value in messages(fields, number)]
    return [(text(last(pair, 1)), last(pair, 2)) for pair in pairs]


def number_entries(fields: list[Field], number: int) -> list[tuple[int, bytes]]:
    """Return a map from numbers to messages."""
    pairs = [split(value) for value in messages(fields, number)]
    return [(number_in(pair, 1), last(pair, 2)) for pair in pairs]


def without(fields: list[Field], *leave_out: int) -> list[Field]:
    """Return the fields but those of these numbers."""
    return [field for field in fields if field[0] not in leave_out]


def text(value: bytes) -> str:
    """Return a string, whatever its bytes: they come back by `blob`."""
    return value.decode("utf-8", "surrogateescape")


def blob(value: str) -> bytes:
    """Return the bytes of a string."""
    return value.encode("utf-8", "surrogateescape")
