"""What pooled lookups become: the rows of each bag's ids, added up in their order, as `KvTablePool` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtools.dialects.bundle.dtypes import dtype_name, number_named
from kvtools.lookup_model.messages import INT32, INT64, message, of_bool, of_number, of_type
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.plain_ops import Call, shares, starts_new_rows
from kvtools.stock_model.rows import look_up
from kvtools.stock_model.table import resources_of

_BOOL = number_named("bool")
_FLOAT32, _FLOAT64 = number_named("float32"), number_named("float64")
_HALVES = (number_named("float16"), number_named("bfloat16"))
_RAGGED = -1


@dataclass(frozen=True)
class Bags:
    """Ids [n], the bag of each [n] (int64), their weights [n] or none, and how many bags there are."""

    ids: str
    bags: str
    weights: str | None
    count: str


@dataclass(frozen=True)
class BagInputs:
    """How ids of one table are put into bags: `KvTablePool`'s attributes and inputs of that table."""

    segments: str
    shape: str | None
    outer: int
    weights: str | None
    positive: bool = False
    fill: str | None = None


def compute_type(dtype: int) -> int:
    """Return the type in which rows are added up."""
    return _FLOAT64 if dtype == _FLOAT64 else _FLOAT32


def pool(body: FunctionBody, call: Call) -> None:
    """`KvTablePool`: ids of several tables, in bags -> for each table a row for each bag."""
    initial = starts_new_rows(call)
    attrs = call.attrs
    tables = shares(call)
    all_resources = resources_of(body, call.handles)
    ids = [body.argument(f"keys_{at}", whole.table.key_type) for at, (_, _, whole) in enumerate(tables)]
    inputs = bag_inputs(body, call, weights_type=attrs.type("Tweights", _FLOAT32), key_type=attrs.type("Tkeys"))
    for (first, _, whole), own, one, combiner in zip(tables, ids, inputs, attrs.texts("combiners"), strict=True):
        table, resources = whole.table, all_resources[first]
        bags = put_into_bags(body, own, table.key_type, one, compute_type(table.dtype))
        rows, _ = look_up(body, whole, resources, bags.ids, initial=initial)
        body.result(table.dtype, combine(body, rows, table.dtype, bags, combiner))


def bag_inputs(body: FunctionBody, call: Call, *, weights_type: int, key_type: int) -> list[BagInputs]:
    """Add the arguments for segments, shapes, weights and filling keys; return them for each table."""
    attrs = call.attrs
    outer, weighted = attrs.numbers("outer"), attrs.booleans("weighted")
    nothing = [False] * len(outer)
    positive, filled = attrs.booleans("positive") or nothing, attrs.booleans("filled") or nothing
    segments = [body.argument(f"segments_{at}", INT64) for at in range(len(outer))]
    shapes = {at: body.argument(f"shape_{at}", INT64) for at, columns in enumerate(outer) if columns != _RAGGED}
    weights = {at: body.argument(f"weights_{at}", weights_type) for at, there in enumerate(weighted) if there}
    fills = {at: body.argument(f"fill_{at}", key_type) for at, there in enumerate(filled) if there}
    return [
        BagInputs(segments[at], shapes.get(at), outer[at], weights.get(at), positive[at], fills.get(at))
        for at in range(len(outer))
    ]


def put_into_bags(body: FunctionBody, ids: str, key_type: int, inputs: BagInputs, real: int) -> Bags:
    """Return ids with the bag of each; some may be left out, and some added."""
    weights = inputs.weights
    if inputs.shape is None:
        bags, count = _of_splits(body, ids, key_type, inputs.segments)
    else:
        bags, count = _of_indices(body, inputs.segments, inputs.shape, inputs.outer)
    if weights is not None and inputs.positive:
        zero = body.constant(0, dtype_name(real))
        kept = body.op("Where", [body.op("Greater", [weights, zero], "z", T=of_type(real))], "index", T=of_type(_BOOL))
        kept = body.op("Squeeze", [kept], T=of_type(INT64), squeeze_dims=_numbers([1]))
        ids, bags, weights = (
            body.take(tensor, kept, dtype) for tensor, dtype in ((ids, key_type), (bags, INT64), (weights, real))
        )
    if inputs.fill is not None:
        sizes = segment_sum(body, _ones_like(body, bags, INT32), INT32, bags, count)
        empty = body.op(
            "Equal", [sizes, body.constant(0, np.int32)], "z", T=of_type(INT32), incompatible_shape_error=of_bool(True)
        )
        empty = body.op("Where", [empty], "index", T=of_type(_BOOL))
        empty = body.op("Squeeze", [empty], T=of_type(INT64), squeeze_dims=_numbers([1]))
        wanted = body.op("Shape", [empty], T=of_type(INT64), out_type=of_type(INT64))
        # One key, of whatever shape.
        scalar = body.constant(np.zeros(0, np.int32))
        fill = body.op("Reshape", [inputs.fill, scalar], T=of_type(key_type), Tshape=of_type(INT32))
        fills = body.op("Fill", [wanted, fill], T=of_type(key_type), index_type=of_type(INT64))
        ids = _joined(body, ids, fills, key_type)
        bags = _joined(body, bags, empty, INT64)
        if weights is not None:
            one = body.op(
                "Fill", [wanted, body.constant(1, dtype_name(real))], T=of_type(real), index_type=of_type(INT64)
            )
            weights = _joined(body, weights, one, real)
    return Bags(ids, bags, weights, count)


def _of_splits(body: FunctionBody, ids: str, key_type: int, splits: str) -> tuple[str, str]:
    """The bag of each id by row splits, and how many bags: an id's bag is the number of bags that end at or before.

    `UpperBound` would tell it, which neither TFLite nor ONNX has.
    """
    ends = _slice(body, splits, 1, None)
    count = body.op("Size", [ends], T=of_type(INT64), out_type=of_type(INT64))
    n = body.op("Size", [ids], T=of_type(key_type), out_type=of_type(INT64))
    # The last bags end behind all ids.
    places = body.op("AddV2", [n, body.constant(1, np.int64)], "z", T=of_type(INT64))
    ended = _slice(body, segment_sum(body, _ones_like(body, ends, INT32), INT32, ends, places), 0, -1, INT32)
    return body.cast(_running(body, "Cumsum", ended, INT32), INT32, INT64), count


def _of_indices(body: FunctionBody, indices: str, shape: str, outer: int) -> tuple[str, str]:
    """The bag of each id by indices [n, rank] into an array of `shape`, and how many bags."""
    end = outer or -1
    extents = _slice(body, shape, 0, end)
    axis = body.constant(np.array([0], np.int32))
    count = body.op("Prod", [extents, axis], T=of_type(INT64), Tidx=of_type(INT32), keep_dims=of_bool(False))
    columns = body.op(
        "StridedSlice",
        [indices, *(body.constant(each, np.int32) for each in ([0, 0], [0, end], [1, 1]))],
        T=of_type(INT64),
        Index=of_type(INT32),
        begin_mask=of_number(3),
        end_mask=of_number(1),
        ellipsis_mask=of_number(0),
        new_axis_mask=of_number(0),
        shrink_axis_mask=of_number(0),
    )
    if outer == 1:
        return body.op("Squeeze", [columns], T=of_type(INT64), squeeze_dims=_numbers([1])), count
    strides = _running(body, "Cumprod", extents, INT64, of_those_behind=True)
    scaled = body.op("Mul", [columns, strides], "z", T=of_type(INT64))
    along = body.constant(np.array([1], np.int32))
    bags = body.op("Sum", [scaled, along], T=of_type(INT64), Tidx=of_type(INT32), keep_dims=of_bool(False))
    return bags, count


def combine(body: FunctionBody, rows: str, dtype: int, bags: Bags, combiner: str) -> str:
    """Return the rows [n, dim] of ids as one row for each bag: [bags, dim]; zeros where there are none."""
    real = compute_type(dtype)
    rows = body.cast(rows, dtype, real)
    weights = bags.weights
    last = body.constant(-1, np.int32)

    def column(tensor: str) -> str:
        return body.op("ExpandDims", [tensor, last], T=of_type(real), Tdim=of_type(INT32))

    if weights is not None:
        rows = body.op("Mul", [rows, column(weights)], "z", T=of_type(real))
    total = segment_sum(body, rows, real, bags.bags, bags.count)
    if combiner != "sum":
        if weights is None:
            power = _ones_like(body, bags.bags, real)
        elif combiner == "mean":
            power = weights
        else:
            power = body.op("Mul", [weights, weights], "z", T=of_type(real))
        divisor = segment_sum(body, power, real, bags.bags, bags.count)
        if combiner == "sqrtn":
            divisor = body.op("Sqrt", [divisor], "y", T=of_type(real))
        total = body.op("DivNoNan", [total, column(divisor)], "z", T=of_type(real))
    return body.cast(total, real, dtype)


def segment_sum(body: FunctionBody, tensor: str, dtype: int, bags: str, count: str) -> str:
    """Return the sums of what belongs to each bag."""
    return body.op(
        "UnsortedSegmentSum",
        [tensor, bags, count],
        T=of_type(dtype),
        Tindices=of_type(INT64),
        Tnumsegments=of_type(INT64),
    )


def _ones_like(body: FunctionBody, tensor: str, dtype: int) -> str:
    """Ones for int64 [n]. TFLite has sums of int32, and none of int64."""
    return body.cast(body.op("OnesLike", [tensor], "y", T=of_type(INT64)), INT64, dtype)


def _running(body: FunctionBody, op: str, tensor: str, dtype: int, *, of_those_behind: bool = False) -> str:
    """`Cumsum` or `Cumprod` of [n]: of each and those before it, or only of those behind it."""
    return body.op(
        op,
        [tensor, body.constant(0, np.int32)],
        "out",
        T=of_type(dtype),
        Tidx=of_type(INT32),
        exclusive=of_bool(of_those_behind),
        reverse=of_bool(of_those_behind),
    )


def _slice(body: FunctionBody, tensor: str, begin: int, end: int | None, dtype: int = INT64) -> str:
    """Part of [n]."""
    return body.op(
        "StridedSlice",
        [tensor, *(body.constant([each], np.int32) for each in (begin, end or 0, 1))],
        T=of_type(dtype),
        Index=of_type(INT32),
        begin_mask=of_number(0),
        end_mask=of_number(1 if end is None else 0),
        ellipsis_mask=of_number(0),
        new_axis_mask=of_number(0),
        shrink_axis_mask=of_number(0),
    )


def _joined(body: FunctionBody, a: str, b: str, dtype: int) -> str:
    return body.op(
        "ConcatV2", [a, b, body.constant(0, np.int32)], N=of_number(2), T=of_type(dtype), Tidx=of_type(INT32)
    )


def _numbers(values: Sequence[int]) -> bytes:
    return message((1, message(*((3, value) for value in values))))
