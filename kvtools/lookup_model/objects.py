"""The objects that `tf.saved_model.load` builds, and those by which it finds their variables in the checkpoint.

root.tables[i]               what `kvtools.stock_model.table_objects` says
root.signatures[name]        a function
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtools.lookup_model.messages import INT64, UNKNOWN_RANK, entry, message
from kvtools.lookup_model.signatures import Signature
from kvtools.lookup_model.structures import (
    NONE,
    dict_value,
    function_spec,
    list_value,
    tensor_spec,
    text_value,
    tuple_value,
)
from kvtools.stock_model.fields import Field, join
from kvtools.stock_model.table import RESOURCES, StockTable
from kvtools.stock_model.table_objects import (
    HAS_VALUES,
    below,
    concrete_functions,
    object_names,
    resource_children,
    table_objects,
    tracked_objects,
)

_USER_OBJECT, _BARE_FUNCTION = 4, 8


def object_graphs(tables: Sequence[StockTable], signatures: Sequence[Signature]) -> tuple[bytes, bytes]:
    """Return the objects as a `SavedObjectGraph`, and as the `TrackableObjectGraph` of the checkpoint.

    Args:
        tables: the tables, by their numbers from 0.
        signatures: the signatures.
    """
    numbers: list[dict[str, int]] = []
    at = 3 + len(signatures)
    for table in tables:
        names = ("table", *object_names(table))
        numbers.append({name: at + place for place, name in enumerate(names)})
        at += len(names)
    root = [below(1, "tables"), below(2, "signatures")]
    listed = [below(number_of["table"], str(place)) for place, number_of in enumerate(numbers)]
    named = [below(3 + place, signature.name) for place, signature in enumerate(signatures)]
    saved = [
        [*root, _user_object("_generic_user_object")],
        [*listed, _user_object("trackable_list_wrapper")],
        [*named, _user_object("signature_map")],
        *([_bare_function(signature)] for signature in signatures),
    ]
    nothing: Field = (5, 2, b"")
    tracked = [[*root, HAS_VALUES], [*listed, HAS_VALUES], [*named, nothing], *([nothing] for _ in signatures)]
    functions = [_concrete_function(signature, numbers) for signature in signatures]
    for table, number_of in zip(tables, numbers, strict=True):
        children = resource_children(number_of)
        saved += [[*children, _user_object("_generic_user_object")], *table_objects(table, number_of)]
        tracked += [[*children, HAS_VALUES], *tracked_objects(table, number_of)]
        functions += concrete_functions(table, number_of)
    return (
        message(*((1, join(one)) for one in saved), *((2, entry(name, signed)) for name, signed in functions)),
        message(*((1, join(one)) for one in tracked)),
    )


def _user_object(identifier: str) -> Field:
    return _USER_OBJECT, 2, message((1, identifier), (2, message((1, 1), (2, 1))))


def _bare_function(signature: Signature) -> Field:
    names = [lookup.ids for lookup in signature.inputs()]
    called = function_spec(kwonlyargs=list_value(*map(text_value, names)), signature=NONE)
    # TensorFlow lets the input of a function of one be given without its name.
    positional = int(len(names) == 1)
    return (
        _BARE_FUNCTION,
        2,
        message((1, signature.function), *((2, name) for name in names), (3, positional), (4, called)),
    )


def _concrete_function(signature: Signature, numbers: Sequence[Mapping[str, int]]) -> tuple[str, bytes]:
    """The name of a signature's function, with what it captures, takes and gives."""
    inputs = signature.inputs()
    captured = [numbers[lookup.table.number][resource] for lookup in inputs for resource in RESOURCES]
    takes = dict_value(**{lookup.ids: tensor_spec(lookup.ids, UNKNOWN_RANK, INT64) for lookup in inputs})
    gives = dict_value(**{name: tensor_spec(name, UNKNOWN_RANK, dtype) for name, dtype in signature.outputs()})
    signed = message(*((2, number) for number in captured), (3, tuple_value(tuple_value(), takes)), (4, gives))
    return signature.function, signed
