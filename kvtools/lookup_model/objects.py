"""The objects that `tf.saved_model.load` builds, and those by which it finds their variables in the checkpoint.

root.tables[i].keys, .values     variables
root.tables[i].index             a resource, with functions that make, fill and give up the index
root.signatures[name]            a function
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtools.lookup_model.functions import INDEX_FUNCTIONS, KEYS_SHAPE, Lookup
from kvtools.lookup_model.messages import INT32, INT64, RESOURCE, UNKNOWN_RANK, entry, message, shape
from kvtools.lookup_model.structures import (
    NONE,
    dict_value,
    function_spec,
    list_value,
    tensor_spec,
    text_value,
    tuple_value,
)

_OF_TABLE = ("table", "keys", "values", "index", *INDEX_FUNCTIONS)


@dataclass(frozen=True)
class _Object:
    """An object: a kind of the message `SavedObject`, and its children, by number and name; of a variable, what it is
    called, and its tensor. `restored` says whether the checkpoint has something for it, or below it."""

    kind: tuple[int, bytes]
    children: tuple[tuple[int, str], ...] = ()
    variable: tuple[str, str] | None = None
    restored: bool = False


def object_graphs(lookups: Sequence[Lookup], signatures: Mapping[str, tuple[Lookup, str]]) -> tuple[bytes, bytes]:
    """Return the objects as a `SavedObjectGraph`, and as the `TrackableObjectGraph` of the checkpoint.

    Args:
        lookups: the tables, by their numbers from 0.
        signatures: the signatures, each with its table and function.
    """
    objects = list(_objects(lookups, signatures))
    first = 3 + len(signatures)
    saved = [(1, _saved(one)) for one in objects]
    functions = [(2, entry(name, value)) for name, value in _concrete_functions(lookups, signatures, first)]
    return message(*saved, *functions), message(*((1, _tracked(one)) for one in objects))


def _objects(lookups: Sequence[Lookup], signatures: Mapping[str, tuple[Lookup, str]]) -> Iterator[_Object]:
    first = 3 + len(signatures)
    yield _Object(_user_object("_generic_user_object"), ((1, "tables"), (2, "signatures")), restored=True)
    tables = tuple((_number(first, lookup, "table"), str(lookup.number)) for lookup in lookups)
    yield _Object(_user_object("trackable_list_wrapper"), tables, restored=True)
    yield _Object(_user_object("signature_map"), tuple((3 + at, name) for at, name in enumerate(signatures)))
    for _, function in signatures.values():
        called = function_spec(kwonlyargs=list_value(text_value("ids")), signature=NONE)
        yield _Object((8, message((1, function), (2, "ids"), (3, 1), (4, called))))
    nothing = function_spec(kwonlyargs=list_value(), signature=tuple_value())
    for lookup in lookups:
        below = tuple((_number(first, lookup, what), what) for what in ("keys", "values", "index"))
        yield _Object(_user_object("_generic_user_object"), below, restored=True)
        for variable, dtype, of_rows in (
            ("keys", INT64, KEYS_SHAPE),
            ("values", lookup.dtype, lookup.values_shape),
        ):
            name = lookup.variable(variable)
            kind = 7, message((1, dtype), (2, of_rows), (6, name))
            yield _Object(kind, variable=(name, lookup.tensor(variable)), restored=True)
        yield _Object((10, b""), tuple((_number(first, lookup, name), name) for name in INDEX_FUNCTIONS))
        for does in INDEX_FUNCTIONS.values():
            yield _Object((6, message((1, lookup.function(does)), (2, nothing))))


def _number(first: int, lookup: Lookup, what: str) -> int:
    return first + lookup.number * len(_OF_TABLE) + _OF_TABLE.index(what)


def _user_object(identifier: str) -> tuple[int, bytes]:
    return 4, message((1, identifier), (2, message((1, 1), (2, 1))))


def _children(one: _Object) -> Iterator[tuple[int, bytes]]:
    for number, name in one.children:
        yield 1, message((1, number), (2, name))


def _saved(one: _Object) -> bytes:
    return message(*_children(one), one.kind)


def _tracked(one: _Object) -> bytes:
    attributes = []
    if one.variable is not None:
        name, tensor = one.variable
        attributes.append((2, message((1, "VARIABLE_VALUE"), (2, name), (3, tensor))))
    return message(*_children(one), *attributes, (5, message((1, 1)) if one.restored else b""))


def _concrete_functions(
    lookups: Sequence[Lookup], signatures: Mapping[str, tuple[Lookup, str]], first: int
) -> Iterator[tuple[str, bytes]]:
    """Yield each function's name, with what it captures, takes and gives."""
    nothing = tuple_value(tuple_value(), dict_value())

    def signed(captured: Sequence[int], takes: bytes, gives: bytes) -> bytes:
        return message(*((2, number) for number in captured), (3, takes), (4, gives))

    for lookup, function in signatures.values():
        captured = [_number(first, lookup, what) for what in ("index", "values")]
        takes = tuple_value(tuple_value(), dict_value(ids=tensor_spec("ids", UNKNOWN_RANK, INT64)))
        gives = dict_value(embeddings=tensor_spec("embeddings", UNKNOWN_RANK, lookup.answer_dtype))
        yield function, signed(captured, takes, gives)
    for lookup in lookups:
        captured = [_number(first, lookup, what) for what in ("keys", "index")]
        yield lookup.function("_creator"), signed([], nothing, tensor_spec("unknown", shape(), RESOURCE))
        yield lookup.function("_initializer"), signed(captured, nothing, tensor_spec("unknown", shape(), INT32))
        yield lookup.function("_destroyer"), signed([], nothing, tensor_spec("unknown", shape(), INT32))
