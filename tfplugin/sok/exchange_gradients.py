"""Gradients of the ops of an exchange. That of Horovod's alltoall is its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

from tfplugin import composed_pool
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
        )
    return [*rows, None]


@tf_ops.RegisterGradient("KvExchangeReplyGradient")
def _reply_gradient_gradient(op: tf.Operation, *grads: tf.Tensor) -> list[tf.Tensor | None]:
    with tf.device("CPU:0"):
        return [
            raw.kv_exchange_reply(list(grads), op.inputs[1], dims=op.get_attr("dims"), Tflat=_wire(op)).flat,
            None,
        ]


@tf_ops.RegisterGradient("KvExchangeTell")
def _tell_gradient(op: tf.Operation, grad: tf.Tensor, _: Any) -> list[tf.Tensor | None]:
    return [grad, *[None] * (len(op.inputs) - 1)]


def _wire(op: tf.Operation) -> tf.DType:
    flat: tf.DType = op.get_attr("Tflat")
    return op.get_attr("Twire") if flat == tf.variant else flat


def _pool_attrs(op: tf.Operation) -> dict[str, Any]:
    return {name: op.get_attr(name) for name in ("dims", "combiners", "outer", "weighted")}


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


@tf_ops.RegisterGradient("KvExchangePoolWeightsGradient")
def _pool_weights_gradient_gradient(op: tf.Operation, *grads: tf.Tensor) -> list[tf.Tensor | None]:
    """Second derivatives. Those by the pooled rows are among those by what they were pooled from."""
    tables, flat = op.get_attr("T"), op.inputs[0]
    gradients = op.inputs[1 + tables : 1 + 2 * tables]
    places, segments, shapes, weights = _id_inputs(op, op.inputs[1 + 2 * tables :])
    weighted = [t for t in range(tables) if op.get_attr("weighted")[t]]
    shapes_left = iter(shapes)
    shape_of = [next(shapes_left) if outer >= 0 else None for outer in op.get_attr("outer")]
    with tf.device("CPU:0"):
        # Each id in a row of its own.
        one_by_one = {
            "dims": [op.get_attr("dims")[t] for t in weighted],
            "combiners": ["sum"] * len(weighted),
            "outer": [-1] * len(weighted),
            "weighted": [False] * len(weighted),
        }
        ids = [places[t] for t in weighted], [tf.range(tf.size(places[t], tf.int64) + 1) for t in weighted], [], []
        rows = raw.kv_exchange_pool(flat, *ids, dtype=op.get_attr("dtype"), Twire=_wire(op), **one_by_one)
        of_rows, of_weights = [], []
        of_gradients: list[tf.Tensor | None] = [None] * tables
        for w, t in enumerate(weighted):
            pooled = composed_pool.PooledIds(
                places[t], segments[t], shape_of[t], op.get_attr("outer")[t], weights[w], False, None
            )
            combiner = tf.compat.as_str(op.get_attr("combiners")[t])
            _, by_rows, of_gradients[t], by_weights = composed_pool.weights_gradient_gradient(
                lambda _, found=rows[w]: found, pooled, combiner, gradients[t], grads[w]
            )
            of_rows.append(by_rows)
            of_weights.append(by_weights)
        size = raw.kv_shared_exchange_size(flat) if flat.dtype == tf.variant else tf.size(flat, out_type=tf.int64)
        of_flat = raw.kv_exchange_pool_gradient(size, of_rows, *ids, Tflat=_wire(op), **one_by_one)
    of_ids = [None] * (len(op.inputs) - 1 - 2 * tables - len(weights))
    return [of_flat, *[None] * tables, *of_gradients, *of_ids, *of_weights]


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


for _name in (
    "KvExchangeRequest",
    "KvExchangeServe",
    "KvExchangeCheck",
    "KvSharedExchangeConnect",
    "KvSharedExchangeSize",
):
    tf_ops.NotDifferentiable(_name)
