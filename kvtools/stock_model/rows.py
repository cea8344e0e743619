"""The reading of rows: those of keys that are there, and what the others are given."""

from __future__ import annotations

import numpy as np

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.lookup_model.messages import INT32, INT64, of_type
from kvtools.stock_model import given_rows
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.index import as_int64, find, is_found
from kvtools.stock_model.initial_rows import drawn_rows, stored_row
from kvtools.stock_model.stored_rows import as_numbers, stored_type
from kvtools.stock_model.table import Handle, Resources, StockTable


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
        numbers = find(body, handle, resources, ids, missing=table.zeros_row)
        return gather(body, table, resources, numbers), body.constant(np.zeros(0, np.int64))
    numbers = find(body, handle, resources, ids)
    found = is_found(body, numbers)
    drawn = initial and table.initial.stored == 0
    if initial and not drawn:
        missing = stored_row(body, as_int64(body, ids, table.key_type), table.zeros_row, table.initial)
    else:
        missing = body.constant(table.zeros_row, np.int64)
    rows = gather(body, table, resources, body.op("SelectV2", [found, numbers, missing], T=of_type(INT64)))
    if drawn:
        last = body.constant(-1, np.int32)
        kept = body.op("ExpandDims", [found, last], T=of_type(number_named("bool")), Tdim=of_type(INT32))
        begun = drawn_rows(body, as_int64(body, ids, table.key_type), table.dim, table.dtype, table.initial)
        rows = body.op("SelectV2", [kept, rows, begun], T=of_type(table.dtype))
    return rows, numbers if remember else body.constant(np.zeros(0, np.int64))


def gather(body: FunctionBody, table: StockTable, resources: Resources, numbers: str) -> str:
    """Return the rows of these numbers, of the type of the table's values."""
    stored, _ = stored_type(table.value_dtype, table.rows_as, table.dim)
    dtype = of_type(number_named(stored))
    rows = body.op("ResourceGather", [resources.values, numbers], dtype=dtype, Tindices=of_type(INT64))
    return as_numbers(body, rows, table.value_dtype, table.rows_as, table.dim)
