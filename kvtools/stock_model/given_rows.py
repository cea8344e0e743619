"""Lookups in tables that are not in the model: the rows of ids, and whether each was found, are given from outside.

Where a model is rewritten for that, each lookup ends in a node of the operation `GIVEN_ROWS`: ids of any shape ->
rows [*ids.shape, dim], zeros of ids that are in no row, and found. It is none of TensorFlow's: `cut_model.py` makes
inputs of these nodes' outputs, and gives the ids to who looks them up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.dialects.chunk import Array
from kvtools.dialects.schema import numpy_dtype
from kvtools.lookup_model.messages import INT32, INT64, of_bool, of_number, of_type
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.index import as_int64
from kvtools.stock_model.initial_rows import drawn_rows, stored_row
from kvtools.stock_model.table import Handle, StockTable

GIVEN_ROWS = "KvTableGivenRows"
"""The operation that is cut out."""

_BOOL, _UINT64 = number_named("bool"), number_named("uint64")


@dataclass(frozen=True)
class GivenTable(StockTable):
    """A table whose rows are given; `begins` [stored, dim] are the rows that keys begin with, where they are stored."""

    begins: Array = field(default_factory=lambda: np.zeros((1, 1), np.float32), compare=False)


def rows_and_found(body: FunctionBody, handle: Handle, ids: str) -> tuple[str, str]:
    """Return the rows of ids, zeros where there is none, and whether there is one."""
    table = handle.table
    attributes = {"table": of_number(table.number), "Tkeys": of_type(table.key_type), "dtype": of_type(table.dtype)}
    rows = body.op(GIVEN_ROWS, [ids], "rows", **attributes)
    found = rows.replace(":rows:", ":found:")
    parts = len(table.part_rows)
    if handle.part < 0 or parts == 1:
        return rows, found
    # A part has no keys of others.
    key_type = of_type(table.key_type)
    divisor, own = (body.constant(number, table.key_dtype) for number in (parts, handle.part))
    owner = body.op("FloorMod", [ids, divisor], "z", T=key_type)
    is_own = body.op("Equal", [owner, own], "z", T=key_type, incompatible_shape_error=of_bool(True))
    nothing = body.constant(np.zeros(table.dim), numpy_dtype(table.value_dtype))
    return (
        choose(body, is_own, rows, nothing, table.dtype),
        body.op("LogicalAnd", [found, is_own], "z"),
    )


def choose(body: FunctionBody, found: str, rows: str, others: str, dtype: int) -> str:
    """Return `rows` [*found.shape, dim] where `found`, and `others`, of that shape or [dim], where not."""
    column = body.op("ExpandDims", [found, body.constant(-1, np.int32)], T=of_type(_BOOL), Tdim=of_type(INT32))
    return body.op("SelectV2", [column, rows, others], T=of_type(dtype))


def look_up(body: FunctionBody, handle: Handle, ids: str, *, initial: bool, remember: bool = False) -> tuple[str, str]:
    """Return the rows of ids, and whether there is one (0, or -1 where not) where this is to be remembered: as
    `look_up` of tables that the model holds."""
    table = handle.table
    assert isinstance(table, GivenTable)
    rows, found = rows_and_found(body, handle, ids)
    if initial:
        rows = choose(body, found, rows, _beginnings(body, table, ids), table.dtype)
    if not remember:
        return rows, body.constant(np.zeros(0, np.int64))
    one = body.constant(1, np.int64)
    return rows, body.op("Sub", [body.cast(found, _BOOL, INT64), one], "z", T=of_type(INT64))


def _beginnings(body: FunctionBody, table: GivenTable, ids: str) -> str:
    """The rows that ids begin with."""
    ids = as_int64(body, ids, table.key_type)
    if table.initial.stored == 0:
        return drawn_rows(body, ids, table.dim, table.dtype, table.initial)
    stored = body.constant(table.begins, numpy_dtype(table.value_dtype))
    # The first stored row stands behind that of zeros, which is none here.
    number = stored_row(body, ids, -1, table.initial)
    return body.take(stored, number, table.dtype)
