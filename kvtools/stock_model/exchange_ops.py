"""What the lookups of `sok` over all ranks become, where one rank has all rows.

Four operations pass messages on, which are of nobody else's concern: what one writes here, the next one reads. A
message of keys is the number of keys of each table, then the keys; one of rows is the rows of each table, in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.lookup_model.messages import INT32, INT64, of_number, of_type
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.index import as_int64
from kvtools.stock_model.plain_ops import Call, NotRewritable, check
from kvtools.stock_model.pooled_ops import bag_inputs, combine, compute_type, put_into_bags, segment_sum

_UINT64 = number_named("uint64")


def request(body: FunctionBody, call: Call) -> None:
    """`KvExchangeRequest`: ids of each table -> a message of keys, its size, the place of each id in it."""
    attrs = call.attrs
    if attrs.number("ranks") != 1:
        raise NotRewritable(
            f"it asks {attrs.number('ranks')} ranks for rows, and one process serves: build what is served on one rank"
        )
    types = attrs.types("Tids")
    ids = [body.argument(f"ids_{at}", dtype) for at, dtype in enumerate(types)]
    inputs = bag_inputs(body, call, weights_type=attrs.type("Tweights", number_named("float32")), key_type=INT64)
    for at in range(attrs.number("V")):  # nothing in a stock graph compares them with those of the ids
        body.argument(f"weight_segments_{at}", INT64)
    for one, own, dtype, most, name in zip(
        inputs, ids, types, attrs.numbers("hotness"), attrs.texts("names"), strict=True
    ):
        if most >= 0:
            bags = put_into_bags(body, own, dtype, one, number_named("float32"))
            ones = body.op("OnesLike", [bags.bags], "y", T=of_type(INT64))
            counted = segment_sum(body, ones, INT64, bags.bags, bags.count)
            _check(body, counted, most, f"a row has more ids of '{name}' than its hotness, {most}")
    sizes = [
        body.op("Size", [own], T=of_type(dtype), out_type=of_type(INT64)) for own, dtype in zip(ids, types, strict=True)
    ]
    counts = body.op("Pack", sizes, N=of_number(len(sizes)), T=of_type(INT64), axis=of_number(0))
    wide = [as_int64(body, own, dtype) for own, dtype in zip(ids, types, strict=True)]
    message = _concat(body, [counts, *wide], INT64)
    body.result(INT64, message)
    body.result(INT32, _size(body, message, INT64))
    zero, one_step = body.constant(0, np.int64), body.constant(1, np.int64)
    for size in sizes:
        body.result(INT64, body.op("Range", [zero, size, one_step], Tidx=of_type(INT64)))


def serve(body: FunctionBody, call: Call) -> None:
    """`KvExchangeServe`: a message of keys, its size -> the keys of each table, and how many these are."""
    message = body.argument("message", INT64)
    body.argument("splits", INT32)
    types = call.attrs.types("Tout")
    header, keys = _split(body, message, [body.constant(len(types), np.int64), body.constant(-1, np.int64)], INT64)
    counts = _unpacked(body, header, len(types))
    for own, dtype in zip(_split(body, keys, counts, INT64), types, strict=True):
        if dtype == _UINT64:
            body.result(dtype, body.op("Bitcast", [own], T=of_type(INT64), type=of_type(dtype)))
        else:
            body.result(dtype, body.cast(own, INT64, dtype))
    body.result(INT64, header)


def reply(body: FunctionBody, call: Call) -> None:
    """`KvExchangeReply`: the rows of each table, how many they are -> a message of rows, its size."""
    dtype = call.attrs.type("dtype")
    rows = [body.argument(f"rows_{at}", dtype) for at in range(call.attrs.number("T"))]
    body.argument("counts", INT64)
    flat = body.constant([-1], np.int32)
    message = _concat(
        body, [body.op("Reshape", [own, flat], T=of_type(dtype), Tshape=of_type(INT32)) for own in rows], dtype
    )
    body.result(dtype, message)
    body.result(INT32, _size(body, message, dtype))


def pool(body: FunctionBody, call: Call) -> None:
    """`KvExchangePool`: a message of rows, the place of each id in it, and its bag -> a row for each bag."""
    attrs = call.attrs
    dtype, dims = attrs.type("dtype"), attrs.numbers("dims")
    message = body.argument("flat", dtype)
    places = [body.argument(f"places_{at}", INT64) for at in range(len(dims))]
    weights_type = attrs.type("Tweights", number_named("float32"))
    inputs = bag_inputs(body, call, weights_type=weights_type, key_type=INT64)
    sizes = [
        body.op(
            "Mul",
            [body.op("Size", [own], T=of_type(INT64), out_type=of_type(INT64)), body.constant(dim, np.int64)],
            "z",
            T=of_type(INT64),
        )
        for own, dim in zip(places, dims, strict=True)
    ]
    parts = _split(body, message, sizes, dtype)
    for part, own, dim, one, combiner in zip(parts, places, dims, inputs, attrs.texts("combiners"), strict=True):
        wanted = body.constant([-1, dim], np.int32)
        rows = body.op("Reshape", [part, wanted], T=of_type(dtype), Tshape=of_type(INT32))
        bags = put_into_bags(body, own, INT64, one, compute_type(dtype))
        body.result(dtype, combine(body, rows, dtype, bags, combiner))


def _check(body: FunctionBody, sizes: str, most: int, message: str) -> None:
    within = body.op("LessEqual", [sizes, body.constant(most, np.int64)], "z", T=of_type(INT64))
    check(body, within, message)


def _concat(body: FunctionBody, tensors: Sequence[str], dtype: int) -> str:
    if len(tensors) == 1:
        return tensors[0]
    axis = body.constant(0, np.int32)
    count = of_number(len(tensors))
    return body.op("ConcatV2", [*tensors, axis], N=count, T=of_type(dtype), Tidx=of_type(INT32))


def _split(body: FunctionBody, tensor: str, sizes: Sequence[str], dtype: int) -> list[str]:
    count = of_number(len(sizes))
    packed = body.op("Pack", sizes, N=count, T=of_type(INT64), axis=of_number(0))
    axis = body.constant(0, np.int32)
    first = body.op("SplitV", [tensor, packed, axis], num_split=count, T=of_type(dtype), Tlen=of_type(INT64))
    return [f"{first[:-1]}{at}" for at in range(len(sizes))]


def _unpacked(body: FunctionBody, tensor: str, count: int) -> list[str]:
    first = body.op("Unpack", [tensor], num=of_number(count), T=of_type(INT64), axis=of_number(0))
    return [f"{first[:-1]}{at}" for at in range(count)]


def _size(body: FunctionBody, tensor: str, dtype: int) -> str:
    size = body.op("Size", [tensor], T=of_type(dtype), out_type=of_type(INT32))
    return body.op("Pack", [size], N=of_number(1), T=of_type(INT32), axis=of_number(0))
