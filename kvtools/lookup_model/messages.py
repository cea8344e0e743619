"""The messages of TensorFlow's graphs, encoded: attributes, shapes, constants, nodes, functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


def node(name: str, op: str, inputs: Sequence[str] = (), **attributes: bytes) -> bytes:
    """Encode a node of a graph or function; inputs are `node:0` in a graph, `node:<output>:0` in a function."""
    return message(
        (1, name),
        (2, op),
        *((3, source) for source in inputs),
        *((5, entry(key, value)) for key, value in attributes.items()),
    )


def constant(name: str, dtype: int, value: int) -> bytes:
    """Encode a node that is an int32 or int64."""
    tensor = message((1, dtype), (2, shape()), (10 if dtype == INT64 else 7, value))
    return node(name, "Const", dtype=of_type(dtype), value=message((8, tensor)))


def texts(name: str, values: Sequence[str | bytes], *, scalar: bool = False) -> bytes:
    """Encode a node that is strings [n], or one string."""
    tensor = message((1, STRING), (2, shape() if scalar else shape(len(values))), *((8, value) for value in values))
    return node(name, "Const", dtype=of_type(STRING), value=message((8, tensor)))


@dataclass(frozen=True)
class Argument:
    """An argument of a function: of a variable's handle, also the type and shape of the variable."""

    name: str
    dtype: int
    called: str
    shape: bytes = shape()
    variable: tuple[int, bytes] | None = None


def function(
    name: str,
    arguments: Sequence[Argument],
    dtype: int,
    result: str,
    nodes: Sequence[bytes],
    stateful: Sequence[str] = (),
) -> bytes:
    """Encode a function of one result.

    Args:
        name: what it is called.
        arguments: what it takes.
        dtype: the type of its result.
        result: which output of which node is its result, `node:<output>:0`.
        nodes: what it does.
        stateful: the names of the nodes that have effects, or see those of others.
    """
    signature = message(
        (1, name),
        *((2, _argument(argument)) for argument in arguments),
        (3, message((1, "identity"), (3, dtype))),
        *([(17, 1)] if stateful else []),
        *((20, each) for each in stateful),
    )
    attributes = {
        "_construction_context": of_text("kEagerRuntime"),
        "_input_shapes": of_shapes(argument.shape for argument in arguments),
    }
    return message(
        (1, signature),
        *((3, each) for each in nodes),
        (4, entry("identity", result)),
        *((5, entry(key, value)) for key, value in attributes.items()),
        *((6, entry(each, each)) for each in stateful),
        *(
            (7, entry(number, message((1, entry("_user_specified_name", of_text(argument.called))))))
            for number, argument in enumerate(arguments)
        ),
    )


def _argument(argument: Argument) -> bytes:
    fields: list[tuple[int, int | str | bytes]] = [(1, argument.name), (3, argument.dtype)]
    if argument.variable is not None:
        dtype, of_rows = argument.variable
        fields.append((7, message((1, dtype), (2, of_rows))))
    return message(*fields)
