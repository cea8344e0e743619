"""What lookups of rows, and questions about tables, become."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtools.dialects.bundle.dtypes import dtype_name, number_named
from kvtools.lookup_model.messages import INT32, INT64, STRING, message, of_bool, of_number, of_type, of_types, shape
from kvtools.stock_model.attributes import Attributes
from kvtools.stock_model.fields import blob
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.given_rows import GivenTable, rows_and_found
from kvtools.stock_model.index import find, is_found
from kvtools.stock_model.rows import look_up
from kvtools.stock_model.table import Handle, Resources, resources_of

_BOOL = number_named("bool")


class NotRewritable(Exception):
    """An operation does what stock operations over exported tables cannot: the reason."""


@dataclass(frozen=True)
class Call:
    """A node to rewrite: its attributes, and the tables among its inputs, in order."""

    attrs: Attributes
    handles: tuple[Handle, ...]


def starts_new_rows(call: Call) -> bool:
    """Tell whether a lookup gives initial values for missing keys; raises `NotRewritable` if it inserts them."""
    mode = call.attrs.text("mode", "train")
    for handle in call.handles:
        if mode == "train" and not handle.read_only:
            raise NotRewritable(
                f"it inserts missing keys into table '{handle.table.name}' while it serves: build what is served with"
                " training=False, or inside tfplugin.inference_mode(); of a .meta, --read-only answers them with zeros"
            )
    return mode == "initial"


def check_whole(handles: tuple[Handle, ...]) -> Handle:
    """Return the table that these are all parts of, in their order."""
    first = handles[0]
    parts = len(first.table.part_rows)
    if any(handle.table is not first.table for handle in handles) or [h.part for h in handles] != list(range(parts)):
        raise NotRewritable(f"it looks up some parts of table '{first.table.name}' only, or in another order")
    return Handle(first.table, -1, first.read_only)


def shares(call: Call) -> list[tuple[int, int, Handle]]:
    """Return for each table of a lookup of several: its first handle, its number of them, and the whole."""
    found, at = [], 0
    for parts in call.attrs.numbers("parts"):
        found.append((at, parts, check_whole(call.handles[at : at + parts])))
        at += parts
    return found


def gather(body: FunctionBody, call: Call) -> None:
    """`KvTableGather`: keys -> rows, positions."""
    initial, remember = starts_new_rows(call), call.attrs.boolean("remember")
    handle, (resources,) = call.handles[0], resources_of(body, call.handles)
    ids = body.argument("keys", handle.table.key_type)
    rows, positions = look_up(body, handle, resources, ids, initial=initial, remember=remember)
    _give_rows(body, call, handle, rows)
    body.result(INT64, positions)


def gather_many(body: FunctionBody, call: Call) -> None:
    """`KvTableGatherMany`: the keys of several tables -> the rows of each, the positions of each."""
    initial, remember = starts_new_rows(call), call.attrs.boolean("remember")
    tables = shares(call)
    all_resources = resources_of(body, call.handles)
    all_ids = [body.argument(f"keys_{at}", whole.table.key_type) for at, (_, _, whole) in enumerate(tables)]
    all_positions = []
    for (first, _, whole), ids in zip(tables, all_ids, strict=True):
        rows, positions = look_up(body, whole, all_resources[first], ids, initial=initial, remember=remember)
        all_positions.append(positions)
        _give_rows(body, call, whole, rows)
    for positions in all_positions:
        body.result(INT64, positions)


def _give_rows(body: FunctionBody, call: Call, handle: Handle, rows: str) -> None:
    """Have the function return rows as the lookup does: of the table's type, or widened."""
    wanted, held = call.attrs.type("dtype"), handle.table.dtype
    body.result(wanted, body.cast(rows, held, wanted))


def trainable(body: FunctionBody, call: Call) -> None:
    """`KvTableTrainable`: rows that were looked up -> the same."""
    resources_of(body, call.handles)
    body.argument("keys", call.attrs.type("Tkeys"))
    body.argument("positions", INT64)
    dtype = call.attrs.type("dtype")
    body.result(dtype, body.argument("looked_up", dtype))


def contains(body: FunctionBody, call: Call) -> None:
    """`KvTableContains`: keys -> whether each is there."""
    handle, (resources,) = call.handles[0], resources_of(body, call.handles)
    ids = body.argument("keys", handle.table.key_type)
    if isinstance(handle.table, GivenTable):
        body.result(_BOOL, rows_and_found(body, handle, ids)[1])
        return
    body.result(_BOOL, is_found(body, find(body, handle, resources, ids)))


def size(body: FunctionBody, call: Call) -> None:
    """`KvTableSize`: -> the number of rows."""
    handle, _ = call.handles[0], resources_of(body, call.handles)
    body.result(INT64, body.constant(handle.table.part_rows[handle.part], np.int64))


def is_initialized(body: FunctionBody, call: Call) -> None:
    """`KvTableIsInitialized`: -> true."""
    resources_of(body, call.handles)
    body.result(_BOOL, body.constant(True))


def partition(body: FunctionBody, call: Call) -> None:
    """`KvTablePartition`: keys -> the part of each."""
    key_type = call.attrs.type("Tkeys")
    ids = body.argument("keys", key_type)
    parts = body.constant(call.attrs.number("parts"), dtype_name(key_type))
    owner = body.op("FloorMod", [ids, parts], "z", T=of_type(key_type))
    body.result(INT32, body.cast(owner, key_type, INT32))


def save(body: FunctionBody, call: Call) -> None:
    """`KvTableSave`: writes keys and values of each table, whatever its parts, under the names that they have here."""
    prefix = body.argument("prefix", STRING)
    tables: dict[int, tuple[Handle, Resources]] = {}
    for handle, resources in zip(call.handles, resources_of(body, call.handles), strict=True):
        tables.setdefault(handle.table.number, (handle, resources))
    names, types, tensors = [], [], []
    for handle, resources in tables.values():
        for variable in handle.table.variables:
            names.append(handle.table.tensor(variable.resource))
            types.append(variable.dtype)
            resource = getattr(resources, variable.resource)
            tensors.append(body.op("ReadVariableOp", [resource], "value", dtype=of_type(variable.dtype)))
    listed = (body.op("Const", [], "output", **strings(texts)) for texts in (names, [""] * len(names)))
    body.op("SaveV2", [prefix, *listed, *tensors], "", dtypes=of_types(types))


def same_places(body: FunctionBody, call: Call) -> None:
    """`KvSamePlaces`: weights, where ids lie, where the weights lie -> the weights, or an error."""
    attrs = call.attrs
    dtype, pairs = attrs.type("T"), attrs.number("N")
    weights = body.argument("weights", dtype)
    of_ids = [body.argument(f"of_ids_{at}", INT64) for at in range(pairs)]
    of_weights = [body.argument(f"of_weights_{at}", INT64) for at in range(pairs)]
    for one, other in zip(of_ids, of_weights, strict=True):
        # Of other shapes it is one false.
        same = body.op("Equal", [one, other], "z", T=of_type(INT64), incompatible_shape_error=of_bool(False))
        flat = body.op("Reshape", [same, body.constant([-1], np.int32)], T=of_type(_BOOL), Tshape=of_type(INT32))
        check(body, flat, attrs.text("message"))
    body.result(dtype, weights)


def check(body: FunctionBody, conditions: str, error: str) -> None:
    """Have the function fail with an error where not all of the conditions [n] are true."""
    all_of_it = body.constant([0], np.int32)
    fine = body.op("All", [conditions, all_of_it], Tidx=of_type(INT32), keep_dims=of_bool(False))
    text = body.op("Const", [], "output", **strings([error]))
    body.op("Assert", [fine, text], "", T=of_types([STRING]), summarize=of_number(1))


def strings(texts: list[str]) -> dict[str, bytes]:
    """Return the attributes of a node that is strings [n]."""
    tensor = message((1, STRING), (2, shape(len(texts))), *((8, blob(text)) for text in texts))
    return {"dtype": of_type(STRING), "value": message((8, tensor))}
