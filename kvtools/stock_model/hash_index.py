"""The index from keys to rows that is a `StaticHashTable`, which is filled when a model is loaded."""

from __future__ import annotations

import numpy as np

from kvtools.lookup_model.messages import INT32, INT64, RESOURCE, of_bool, of_text, of_type
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.graph_def import Function, Node
from kvtools.stock_model.table import Resources, StockTable

INDEX_FUNCTIONS = {"_create_resource": "creator", "_initialize": "initializer", "_destroy_resource": "destroyer"}
"""What a resource of TensorFlow calls its functions -> what these do."""


def is_hashed(table: StockTable) -> bool:
    """Tell whether a table has such an index."""
    return table.perfect is None


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
    """Return the functions that make the index, fill it from the variable `keys`, and give it up: if it is such one."""
    if not is_hashed(table):
        return []
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


def find(body: FunctionBody, resources: Resources, keys: str, missing: str) -> str:
    """Return the number of the row of each of `keys` (int64), `missing` where there is none: int64, of their shape."""
    types = {"Tin": of_type(INT64), "Tout": of_type(INT64)}
    return body.op("LookupTableFindV2", [resources.index, keys, missing], "values", **types)
