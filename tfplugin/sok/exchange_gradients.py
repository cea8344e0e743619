"""Gradients of the ops of an exchange. That of Horovod's alltoall is its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

from tfplugin.ops import raw


@tf_ops.RegisterGradient("KvExchangeReply")
def _reply_gradient(op: tf.Operation, grad: tf.Tensor, _: Any) -> list[tf.Tensor | None]:
    with tf.device("CPU:0"):
        rows = raw.kv_exchange_reply_gradient(
            grad,
            op.inputs[-1],
            dtype=op.get_attr("dtype"),
            Twire=op.get_attr("Tflat"),
            T=op.get_attr("T"),
            dims=op.get_attr("dims"),
            bfloat16_bits=op.get_attr("bfloat16_bits"),
        )
    return [*rows, None]


@tf_ops.RegisterGradient("KvExchangeReplyGradient")
def _reply_gradient_gradient(op: tf.Operation, *grads: tf.Tensor) -> list[tf.Tensor | None]:
    with tf.device("CPU:0"):
        return [
            raw.kv_exchange_reply(list(grads), op.inputs[1], dims=op.get_attr("dims"), **_flat_attrs(op)).flat,
            None,
        ]


@tf_ops.RegisterGradient("KvExchangeTell")
def _tell_gradient(op: tf.Operation, grad: tf.Tensor, _: Any) -> list[tf.Tensor | None]:
    return [grad, *[None] * (len(op.inputs) - 1)]


def _flat_attrs(op: tf.Operation) -> dict[str, Any]:
    """In what the rows travel."""
    return {"Tflat": _wire(op), "bfloat16_bits": op.get_attr("bfloat16_bits")}


def _wire(op: tf.Operation) -> tf.DType:
    flat: tf.DType = op.get_attr("Tflat")
    return op.get_attr("Twire") if flat == tf.variant else flat


def _pool_attrs(op: tf.Operation) -> dict[str, Any]:
    return {name: op.get_attr(name) for name in ("dims", "combiners", "outer", "weighted", "bfloat16_bits")}


def _id_inputs(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """The inputs that say which rows are pooled: places, segments, shapes, weights."""
    lists, at = [], 0
    for count in ("T", "T", "S", "W"):
        lists.append(list(inputs[at : at + op.get_attr(count)]))
        at += op.get_attr(count)
    return lists


def _weights_gradient(
    op: tf.Operation,
    flat: tf.Tensor,
    rows: Sequence[tf.Tensor],
    grads: Sequence[tf.Tensor],
    ids: list[list[tf.Tensor]],
) -> list[tf.Tensor | None]:
    weights = op.get_attr("W")
    first = len(op.inputs) - weights
    # A tape says which inputs nobody wants the gradient of. A graph does not: there what is not asked for is not run.
    skipped = getattr(op, "skip_input_indices", None) or ()
    if all(first + w in skipped for w in range(weights)):
        return [None] * weights
    found: list[tf.Tensor | None] = raw.kv_exchange_pool_weights_gradient(
        flat, list(rows), list(grads), *ids, Twire=_wire(op), **_pool_attrs(op)
    )
    return found


@tf_ops.RegisterGradient("KvExchangePool")
def _pool_gradient(op: tf.Operation, *grads: tf.Tensor) -> list[tf.Tensor | None]:
    flat, ids = op.inputs[0], _id_inputs(op, op.inputs[1:])
    with tf.device("CPU:0"):
        in_place = flat.dtype == tf.variant
        size = raw.kv_shared_exchange_size(flat) if in_place else tf.size(flat, out_type=tf.int64)
        of_rows = raw.kv_exchange_pool_gradient(size, list(grads), *ids, Tflat=_wire(op), **_pool_attrs(op))
        of_weights = _weights_gradient(op, flat, op.outputs, grads, ids)
    return [of_rows, *[None] * (len(op.inputs) - 1 - len(of_weights)), *of_weights]


@tf_ops.RegisterGradient("KvExchangePoolGradient")
def _pool_gradient_gradient(op: tf.Operation, grad: tf.Tensor) -> list[tf.Tensor | None]:
    """Second derivatives. What is differentiated is bilinear in gradients and rows, so the same ops do it."""
    tables = op.get_attr("T")
    grads, ids = list(op.inputs[1 : 1 + tables]), _id_inputs(op, op.inputs[1 + tables :])
    with tf.device("CPU:0"):
        pooled = raw.kv_exchange_pool(grad, *ids, dtype=op.get_attr("dtype"), **_pool_attrs(op))
        of_weights = _weights_gradient(op, grad, pooled, grads, ids)
    return [None, *pooled, *[None] * (len(op.inputs) - 1 - tables - len(of_weights)), *of_weights]


@tf_ops.RegisterGradient("KvSharedAlltoall")
def _alltoall_gradient(op: tf.Operation, grad: tf.Tensor, _: Any) -> list[tf.Tensor | None]:
    return _sent_back(op, grad, raw.kv_shared_alltoall)


@tf_ops.RegisterGradient("KvSharedExchange")
def _shared_exchange_gradient(op: tf.Operation, grad: tf.Tensor, _: Any) -> list[tf.Tensor | None]:
    """Left where it lies, too: what takes it are the gradients of the ops that made the rows."""
    return _sent_back(op, grad, raw.kv_shared_exchange)


def _sent_back(op: tf.Operation, grad: tf.Tensor, alltoall: Callable[..., Any]) -> list[tf.Tensor | None]:
    """What was received from a rank goes back to it."""
    with tf.device("CPU:0"):
        back, _ = alltoall(
            grad,
            op.outputs[1],
            exchange=f"{tf.compat.as_str(op.get_attr('exchange'))}.gradient",
            ranks=op.get_attr("ranks"),
        )
    return [back, None]


for _name in ("KvExchangeRequest", "KvExchangeServe", "KvExchangeCheck", "KvSharedExchangeSize"):
    tf_ops.NotDifferentiable(_name)
