"""What the lookups of TFPlus become: the rows of keys, and zeros where there is none.

Operations and attributes: https://github.com/intelligent-machine-learning/tfplus (`kv_variable_ops.cc`).
"""

from __future__ import annotations

from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.plain_ops import Call, NotRewritable
from kvtools.stock_model.rows import look_up
from kvtools.stock_model.table import resources_of


def gather(body: FunctionBody, call: Call) -> None:
    """`KvVariableGatherOrZerosV2`: keys -> rows."""
    gather_batch(body, call)


def gather_batch(body: FunctionBody, call: Call) -> None:
    """`BatchKvVariableGatherOrZerosV2`: the keys of several tables -> the rows of each."""
    all_resources = resources_of(body, call.handles)
    ids = [body.argument(f"indices_{at}", handle.table.key_type) for at, handle in enumerate(call.handles)]
    for handle, resources, own in zip(call.handles, all_resources, ids, strict=True):
        rows, _ = look_up(body, handle, resources, own, initial=False)
        body.result(handle.table.dtype, rows)


def insert(body: FunctionBody, call: Call) -> None:
    """`KvVariableGatherOrInsertV2`: cannot be."""
    raise NotRewritable(
        f"it inserts missing keys into table '{call.handles[0].table.name}' while it serves: build what is served for"
        " prediction, which looks up by KvVariableGatherOrZerosV2; of a .meta, --read-only does as much"
    )
