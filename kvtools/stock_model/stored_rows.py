"""Rows as they lie in a variable, and as the model wants them: narrower numbers are widened, bytes are decoded.

Rows of int8 and int4 are bytes, as `kvtools.quantized_rows` makes them and docs/dialects/snapshot.md describes. One
gather reads all there is of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.lookup_model.messages import INT32, of_number, of_type
from kvtools.quantized_rows import QUANTIZED, bytes_of_row
from kvtools.stock_model.function_body import FunctionBody

_UINT8, _FLOAT32, _BFLOAT16 = (number_named(name) for name in ("uint8", "float32", "bfloat16"))
_OFFSET, _SCALE, _CODES = 0, 4, 6
"""Where in the bytes of a row its parts begin."""


def stored_type(value_dtype: str, rows_as: str, dim: int) -> tuple[str, int]:
    """Return of which type the variable of rows [n, dim] is, and how many numbers its rows have.

    >>> stored_type("float32", "", 8), stored_type("float32", "bfloat16", 8), stored_type("float32", "int4", 8)
    (('float32', 8), ('bfloat16', 8), ('uint8', 10))
    """
    if rows_as in QUANTIZED:
        return "uint8", bytes_of_row(rows_as, dim)
    return rows_as or value_dtype, dim


def as_numbers(body: FunctionBody, stored: str, value_dtype: str, rows_as: str, dim: int) -> str:
    """Return rows [..., dim] of `value_dtype`, given what the variable has of them."""
    wanted = number_named(value_dtype)
    if rows_as not in QUANTIZED:
        return body.cast(stored, number_named(rows_as or value_dtype), wanted)
    offset = _bitcast(body, _columns(body, stored, _OFFSET, _SCALE), _FLOAT32)
    scale = body.cast(_bitcast(body, _columns(body, stored, _SCALE, _CODES), _BFLOAT16), _BFLOAT16, _FLOAT32)
    codes = _columns(body, stored, _CODES, bytes_of_row(rows_as, dim))
    if rows_as == "int4":
        codes = _halves(body, codes, dim)
    # The product is exact: whether a compiler fuses it with the sum changes no bit.
    product = body.op("Mul", [body.cast(codes, _UINT8, _FLOAT32), _column(body, scale)], "z", T=of_type(_FLOAT32))
    numbers = body.op("AddV2", [_column(body, offset), product], "z", T=of_type(_FLOAT32))
    return body.cast(numbers, _FLOAT32, wanted)


def _halves(body: FunctionBody, codes: str, dim: int) -> str:
    """Codes [..., dim] of bytes with two each: the low ones are the first half of the row."""
    fifteen, four = (body.constant(number, np.uint8) for number in (15, 4))
    low = body.op("BitwiseAnd", [codes, fifteen], "z", T=of_type(_UINT8))
    if dim == 1:
        return low
    high = body.op("RightShift", [codes, four], "z", T=of_type(_UINT8))
    if dim % 2:
        high = _columns(body, high, 0, dim // 2)
    last = body.constant(-1, np.int32)
    return body.op("ConcatV2", [low, high, last], N=of_number(2), T=of_type(_UINT8), Tidx=of_type(INT32))


def _columns(body: FunctionBody, rows: str, begin: int, end: int) -> str:
    """Columns `begin` to `end` of rows [..., n] of bytes."""
    places: Sequence[Sequence[int]] = ([0, begin], [0, end], [1, 1])
    return body.op(
        "StridedSlice",
        [rows, *(body.constant(place, np.int32) for place in places)],
        T=of_type(_UINT8),
        Index=of_type(INT32),
        begin_mask=of_number(0),
        end_mask=of_number(0),
        ellipsis_mask=of_number(1),
        new_axis_mask=of_number(0),
        shrink_axis_mask=of_number(0),
    )


def _bitcast(body: FunctionBody, rows: str, dtype: int) -> str:
    """The number [...] that the bytes [..., n] of each row are."""
    return body.op("Bitcast", [rows], T=of_type(_UINT8), type=of_type(dtype))


def _column(body: FunctionBody, numbers: str) -> str:
    """Numbers [...] as [..., 1]."""
    last = body.constant(-1, np.int32)
    return body.op("ExpandDims", [numbers, last], T=of_type(_FLOAT32), Tdim=of_type(INT32))
