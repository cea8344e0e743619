"""What the lookups of TensorFlow Recommenders Addons become: the rows of keys, and given ones where there is none."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.lookup_model.messages import INT32, INT64, of_bool, of_number, of_type
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.given_rows import GivenTable, rows_and_found
from kvtools.stock_model.index import find, is_found
from kvtools.stock_model.plain_ops import Call
from kvtools.stock_model.rows import gather
from kvtools.stock_model.table import resources_of

_BOOL = number_named("bool")


def find_rows(body: FunctionBody, call: Call) -> None:
    """`TFRA>...Find`: keys, default values -> values: of a missing key the default value of its own, or the first."""
    _find(body, call)


def find_rows_and_tell(body: FunctionBody, call: Call) -> None:
    """`TFRA>...FindWithExists`: the same, and whether each key is there."""
    body.result(_BOOL, _find(body, call))


def partition(body: FunctionBody, call: Call) -> None:
    """`TFRA>DynamicPartition`: data, the part of each -> the data of each part, as `DynamicPartition` gives it."""
    dtype, parts = call.attrs.type("T"), call.attrs.number("num_partitions")
    data, owners = body.argument("data", dtype), body.argument("partitions", INT32)
    count = of_number(parts)
    first = body.op("DynamicPartition", [data, owners], "outputs", T=of_type(dtype), num_partitions=count)
    for part in range(parts):
        body.result(dtype, f"{first[:-1]}{part}")


def stitch(body: FunctionBody, call: Call) -> None:
    """`TFRA>DynamicStitchFast` and the like: places, and data for them -> all in one, as `DynamicStitch` gives it."""
    dtype, count = call.attrs.type("T"), call.attrs.number("N")
    places = [body.argument(f"indices_{at}", INT32) for at in range(count)]
    data = [body.argument(f"data_{at}", dtype) for at in range(count)]
    body.result(dtype, body.op("DynamicStitch", [*places, *data], "merged", T=of_type(dtype), N=of_number(count)))


def segment_sum(body: FunctionBody, call: Call) -> None:
    """`TFRA>SparseSegmentSum`: data, which rows of it, and the segment of each -> the sum of each segment."""
    _segment_sum(body, call, "SparseSegmentSum", {"Tidx": "indices", "Tsegmentids": "segment_ids"})


def segment_sum_of_count(body: FunctionBody, call: Call) -> None:
    """`TFRA>SparseSegmentSumWithNumSegments`: the same, and how many segments there are -> the sum of each."""
    taken = {"Tidx": "indices", "Tsegmentids": "segment_ids", "Tnumsegments": "num_segments"}
    _segment_sum(body, call, "SparseSegmentSumWithNumSegments", taken)


def _segment_sum(body: FunctionBody, call: Call, op: str, taken: Mapping[str, str]) -> None:
    types = {"T": call.attrs.type("T"), **{kind: call.attrs.type(kind, INT32) for kind in taken}}
    inputs = [body.argument("data", types["T"]), *(body.argument(name, types[kind]) for kind, name in taken.items())]
    body.result(types["T"], body.op(op, inputs, "output", **{kind: of_type(one) for kind, one in types.items()}))


def _find(body: FunctionBody, call: Call) -> str:
    handle, (resources,) = call.handles[0], resources_of(body, call.handles)
    table = handle.table
    keys = body.argument("keys", table.key_type)
    defaults = body.argument("default_value", table.dtype)
    zero, one = body.constant(0, np.int64), body.constant(1, np.int64)
    if isinstance(table, GivenTable):
        rows, found = rows_and_found(body, handle, keys)
    else:
        numbers = find(body, handle, resources, keys)
        found = is_found(body, numbers)
        # Those of missing keys are not looked at.
        there = body.op("SelectV2", [found, numbers, body.constant(table.zeros_row, np.int64)], T=of_type(INT64))
        rows = gather(body, table, resources, there)
    # Default values are as many as the values, or else the first row of them is that of all keys.
    size = {"out_type": of_type(INT64)}
    all_values = body.op("Size", [rows], "output", T=of_type(table.dtype), **size)
    given = body.op("Size", [defaults], "output", T=of_type(table.dtype), **size)
    full = body.op("Equal", [all_values, given], "z", T=of_type(INT64), incompatible_shape_error=of_bool(True))
    count = body.op("Size", [keys], "output", T=of_type(table.key_type), **size)
    own = body.op("Range", [zero, count, one], Tidx=of_type(INT64))
    own = body.op("Mul", [own, body.cast(full, _BOOL, INT64)], "z", T=of_type(INT64))
    wide = body.constant([-1, table.dim], np.int32)
    by_row = body.op("Reshape", [defaults, wide], T=of_type(table.dtype), Tshape=of_type(INT32))
    missing = body.take(by_row, own, table.dtype)
    shape = body.op("Shape", [rows], "output", T=of_type(table.dtype), **size)
    missing = body.op("Reshape", [missing, shape], T=of_type(table.dtype), Tshape=of_type(INT64))
    kept = body.op("ExpandDims", [found, body.constant(-1, np.int32)], T=of_type(_BOOL), Tdim=of_type(INT32))
    body.result(table.dtype, body.op("SelectV2", [kept, rows, missing], T=of_type(table.dtype)))
    return found
