"""The objects that a table is below the one that has it: its variables, its index, and the index's functions."""

from __future__ import annotations

from collections.abc import Mapping

from kvtools.lookup_model.messages import INT32, RESOURCE, message, shape
from kvtools.lookup_model.structures import dict_value, function_spec, list_value, tensor_spec, tuple_value
from kvtools.stock_model.fields import Field
from kvtools.stock_model.hash_index import INDEX_FUNCTIONS, is_hashed
from kvtools.stock_model.table import RESOURCES, StockTable

_CHILD, _FUNCTION, _VARIABLE, _RESOURCE = 1, 6, 7, 10
_ATTRIBUTE, _HAS_VALUES = 2, 5


def object_names(table: StockTable) -> tuple[str, ...]:
    """Return what there is of a table: its resources, and the functions below the index."""
    names = tuple(variable.resource for variable in table.variables)
    return (*names, "index", *INDEX_FUNCTIONS) if is_hashed(table) else names


def table_objects(table: StockTable, number_of: Mapping[str, int]) -> list[list[Field]]:
    """Return the fields of each `SavedObject`, in the order of `object_names`.

    Args:
        table: the table.
        number_of: the number of each of these objects.
    """
    objects: list[list[Field]] = []
    for variable in table.variables:
        described = message((1, variable.dtype), (2, variable.shape), (6, table.node(variable.resource)))
        objects.append([(_VARIABLE, 2, described)])
    if not is_hashed(table):
        return objects
    objects.append([*(below(number_of[name], name) for name in INDEX_FUNCTIONS), (_RESOURCE, 2, b"")])
    nothing = function_spec(kwonlyargs=list_value(), signature=tuple_value())
    for does in INDEX_FUNCTIONS.values():
        objects.append([(_FUNCTION, 2, message((1, table.function(does)), (2, nothing)))])
    return objects


def resource_children(number_of: Mapping[str, int]) -> list[Field]:
    """Return the resources as children of the object that has the table."""
    return [below(number_of[resource], resource) for resource in RESOURCES]


def concrete_functions(table: StockTable, number_of: Mapping[str, int]) -> list[tuple[str, bytes]]:
    """Return the name of each function of the index, with what it captures, takes and gives."""
    if not is_hashed(table):
        return []
    nothing = tuple_value(tuple_value(), dict_value())
    captured = {"initializer": ("keys", "index")}
    gives = {"creator": RESOURCE, "initializer": INT32, "destroyer": INT32}
    return [
        (
            table.function(does),
            message(
                *((2, number_of[what]) for what in captured.get(does, ())),
                (3, nothing),
                (4, tensor_spec("unknown", shape(), dtype)),
            ),
        )
        for does, dtype in gives.items()
    ]


def tracked_objects(table: StockTable, number_of: Mapping[str, int]) -> list[list[Field]]:
    """Return the fields of each `TrackableObject` of the checkpoint; arguments and order as in `table_objects`."""
    objects: list[list[Field]] = []
    for variable in table.variables:
        resource = variable.resource
        attribute = message((1, "VARIABLE_VALUE"), (2, table.node(resource)), (3, table.tensor(resource)))
        objects.append([(_ATTRIBUTE, 2, attribute), HAS_VALUES])
    if not is_hashed(table):
        return objects
    objects.append([*(below(number_of[name], name) for name in INDEX_FUNCTIONS), HAS_VALUES])
    return objects + [[(_HAS_VALUES, 2, b"")] for _ in INDEX_FUNCTIONS]


HAS_VALUES: Field = (_HAS_VALUES, 2, message((1, 1)))
"""What a `TrackableObject` has for which, or below which, there are tensors."""


def below(number: int, name: str) -> Field:
    """Return a child of an object."""
    return _CHILD, 2, message((1, number), (2, name))
