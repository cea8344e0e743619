"""The index from keys to rows, of whatever kind a table has."""

from __future__ import annotations

import numpy as np

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.lookup_model.messages import INT64, of_bool, of_type
from kvtools.stock_model import hash_index, perfect_index
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.table import Handle, Resources

_UINT64 = number_named("uint64")


def as_int64(body: FunctionBody, ids: str, key_dtype: int) -> str:
    """Return ids as the index has keys: int32 widened, uint64 bit by bit."""
    if key_dtype == _UINT64:
        return body.op("Bitcast", [ids], T=of_type(_UINT64), type=of_type(INT64))
    return body.cast(ids, key_dtype, INT64)


def find(body: FunctionBody, handle: Handle, resources: Resources, ids: str, missing: int = -1) -> str:
    """Return the number of the row of each of `ids`, `missing` where there is none: int64, of their shape."""
    nowhere = body.constant(missing, np.int64)
    if not handle.table.rows:
        size = body.op("Shape", [ids], T=of_type(handle.table.key_type), out_type=of_type(INT64))
        return body.op("Fill", [size, nowhere], T=of_type(INT64), index_type=of_type(INT64))
    keys = as_int64(body, ids, handle.table.key_type)
    if handle.table.perfect:
        found = perfect_index.find(body, handle.table.perfect, resources, keys, nowhere)
    else:
        found = hash_index.find(body, resources, keys, nowhere)
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
