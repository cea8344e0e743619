"""The index from keys to rows: a `StaticHashTable` that is filled when a model is loaded; and the reading of rows.

Another index has the same functions: `find` in lookups, `index_node`, and those that make, fill and give it up.
"""

from __future__ import annotations

import numpy as np

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.lookup_model.messages import INT32, INT64, RESOURCE, of_bool, of_text, of_type
from kvtools.stock_model import given_rows
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.graph_def import Function, Node
from kvtools.stock_model.initial_rows import drawn_rows, stored_row
from kvtools.stock_model.table import Handle, Resources, StockTable

_UINT64 = number_named("uint64")
INDEX_FUNCTIONS = {"_create_resource": "creator", "_initialize": "initializer", "_destroy_resource": "destroyer"}
"""What a resource of TensorFlow calls its functions -> what these do."""


def index_node(name: str, table: StockTable) -> Node:
    """Return the node that is the index."""
    attributes = {
        "container": of_text(""),
        "shared_name": of_text(table.index_name),
        "use_node_name_sharing": of_bool(False),
        "key_dtype": of_type(INT64),
        "value_dtype": of_type(INT64),
    }
    return Node(name, "HashTableV2", [], attributes)


def index_functions(table: StockTable) -> list[Function]:
    """Return the functions that make the index, fill it from the variable `keys`, and give it up."""
    creator = FunctionBody(table.function("creator"))
    made = index_node("", table)
    creator.result(RESOURCE, creator.op(made.op, [], "table_handle", **made.attributes))

    initializer = FunctionBody(table.function("initializer"))
    keys = initializer.argument("keys", RESOURCE)
    index = initializer.argument("index", RESOURCE)
    read = initializer.op("ReadVariableOp", [keys], "value", dtype=of_type(INT64))
    count = initializer.op("Size", [read], T=of_type(INT64), out_type=of_type(INT64))
    start, delta = (initializer.constant(number, np.int64) for number in (0, 1))
    rows = initializer.op("Range", [start, count, delta], Tidx=of_type(INT64))
    initializer.op("InitializeTableV2", [index, read, rows], "", Tkey=of_type(INT64), Tval=of_type(INT64))
    initializer.result(INT32, initializer.constant(1, np.int32))

    destroyer = FunctionBody(table.function("destroyer"))
    destroyer.result(INT32, destroyer.constant(1, np.int32))
    return [creator.function(), initializer.function(), destroyer.function()]


def as_int64(body: FunctionBody, ids: str, key_dtype: int) -> str:
    """Return ids as the index has keys: int32 widened, uint64 bit by bit."""
    if key_dtype == _UINT64:
        return body.op("Bitcast", [ids], T=of_type(_UINT64), type=of_type(INT64))
    return body.cast(ids, key_dtype, INT64)


def find(body: FunctionBody, handle: Handle, resources: Resources, ids: str, missing: int = -1) -> str:
    """Return the number of the row of each of `ids`, `missing` where there is none: int64, of their shape."""
    nowhere = body.constant(missing, np.int64)
    found = body.op(
        "LookupTableFindV2",
        [resources.index, as_int64(body, ids, handle.table.key_type), nowhere],
        "values",
        Tin=of_type(INT64),
        Tout=of_type(INT64),
    )
    parts = len(handle.table.part_rows)
    if handle.part < 0 or parts == 1:
        return found
    # A part has no keys of others.
    key_type = of_type(handle.table.key_type)
    divisor, own = (body.constant(number, handle.table.key_dtype) for number in (parts, handle.part))
    owner = body.op("FloorMod", [ids, divisor], "z", T=key_type)
    is_own = body.op("Equal", [owner, own], "z", T=key_type, incompatible_shape_error=of_bool(True))
    return body.op("SelectV2", [is_own, found, nowhere], T=of_type(INT64))


def is_found(body: FunctionBody, numbers: str) -> str:
    """Return whether `find` found a row: bool."""
    return body.op("GreaterEqual", [numbers, body.constant(0, np.int64)], "z", T=of_type(INT64))


def look_up(
    body: FunctionBody, handle: Handle, resources: Resources, ids: str, *, initial: bool, remember: bool = False
) -> tuple[str, str]:
    """Return the rows of ids, [*ids.shape, dim], and where each lies, -1 where there is none: int64, of their shape.

    Args:
        body: the function.
        handle, resources: the table, or a part of one.
        ids: of the table's key type, of any shape.
        initial: where there is none, give the row that the key begins with, and not zeros.
        remember: tell where rows lie; an empty tensor otherwise.
    """
    table = handle.table
    if isinstance(table, given_rows.GivenTable):
        return given_rows.look_up(body, handle, ids, initial=initial, remember=remember)
    if not (initial or remember):
        numbers = find(body, handle, resources, ids, missing=table.rows)
        return gather(body, table, resources, numbers), body.constant(np.zeros(0, np.int64))
    numbers = find(body, handle, resources, ids)
    found = is_found(body, numbers)
    drawn = initial and table.initial.stored == 0
    if initial and not drawn:
        missing = stored_row(body, as_int64(body, ids, table.key_type), table.rows, table.initial)
    else:
        missing = body.constant(table.rows, np.int64)
    rows = gather(body, table, resources, body.op("SelectV2", [found, numbers, missing], T=of_type(INT64)))
    if drawn:
        last = body.constant(-1, np.int32)
        kept = body.op("ExpandDims", [found, last], T=of_type(number_named("bool")), Tdim=of_type(INT32))
        begun = drawn_rows(body, as_int64(body, ids, table.key_type), table.dim, table.dtype, table.initial)
        rows = body.op("SelectV2", [kept, rows, begun], T=of_type(table.dtype))
    return rows, numbers if remember else body.constant(np.zeros(0, np.int64))


def gather(body: FunctionBody, table: StockTable, resources: Resources, numbers: str) -> str:
    """Return the rows of these numbers, as they are stored."""
    return body.op("ResourceGather", [resources.values, numbers], dtype=of_type(table.dtype), Tindices=of_type(INT64))
