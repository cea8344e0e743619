"""What the lookups of DeepRec become: the rows of keys, and the variable's `default_value_no_permission` where there is
none, as DeepRec answers with `INFERENCE_MODE=1`: the same operation trains there, and that variable of the environment
makes it serve.

A key that a filter has not admitted yet is answered like one that is not there; it has no row in a checkpoint.
Operations and attributes: https://github.com/DeepRec-AI/DeepRec (`kv_variable_ops.cc`).
"""

from __future__ import annotations

from kvtools.lookup_model.messages import INT32
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.plain_ops import Call
from kvtools.stock_model.rows import look_up
from kvtools.stock_model.table import resources_of


def gather(body: FunctionBody, call: Call) -> None:
    """`KvResourceGather`: keys, what training would begin a missing key with -> rows."""
    _gather(body, call)


def gather_counted(body: FunctionBody, call: Call) -> None:
    """`KvResourceGatherV1`: the same, and how often each key came, which is for training, too."""
    _gather(body, call, counted=True)


def _gather(body: FunctionBody, call: Call, counted: bool = False) -> None:
    handle, (resources,) = call.handles[0], resources_of(body, call.handles)
    ids = body.argument("indices", handle.table.key_type)
    body.argument("default_value", handle.table.dtype)
    if counted:
        body.argument("counts", call.attrs.type("counts_type", INT32))
    rows, _ = look_up(body, handle, resources, ids, initial=True)
    body.result(handle.table.dtype, rows)
