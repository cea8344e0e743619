"""Gradients of lookups in a `tf.cond` of TensorFlow 1's control flow.

There the handle of a table goes into each branch by a Switch. Of the branch that is not taken TensorFlow wants a
gradient of zeros, as large as the variable; where it has none, what it makes is dead with that branch, and so is the
update of all rows. For a table it is a gradient of no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import control_flow_ops

_PASSES_ON = ("Switch", "RefSwitch", "Enter", "Identity")


def zeros_in_loop(original: Callable[..., Any], state: Any, op: Any, index: int) -> Any:
    """`ZerosLikeV1WhileLoop`, what TensorFlow asks in a graph with loops: `switch_gradient` says what is not taken."""
    return None if _is_of_table(op) else original(state, op, index)


def switch_gradient(original: Callable[..., Any], op: Any, *grads: Any) -> Any:
    """The gradient of a Switch: of a table's, the slices of the branch that is taken, none where that is the other."""
    context = op._get_control_flow_context()
    if not isinstance(context, control_flow_ops.CondContext) or not _is_of_table(op):
        return original(op, *grads)
    taken = grads[context.branch]
    if not isinstance(taken, tf.IndexedSlices) or grads[1 - context.branch] is not None:
        return original(op, *grads)
    return control_flow_ops.merge([taken, _no_rows(op, context, taken)], name="cond_grad")[0], None


def _is_of_table(op: Any) -> bool:
    if op.type not in ("Switch", "RefSwitch") or op.outputs[0].dtype != tf.resource:
        return False
    while op.type in _PASSES_ON:
        op = op.inputs[0].op
    return bool(op.type == "KvTableHandle")


def _no_rows(op: Any, context: Any, like: tf.IndexedSlices) -> tf.IndexedSlices:
    """Slices of no rows, which are alive where the branch of `op` is not taken."""
    other = 1 - context.branch
    width = like.values.shape[1:]
    now = tf_ops.get_default_graph()._get_control_flow_context()
    loop = getattr(now, "grad_state", None)
    predicate = None if loop is None else loop.history_map.get(context.pred.name)
    if predicate is None:
        # Constants by themselves are alive always.
        pivot = tf.identity(control_flow_ops.switch(op.inputs[0], context.pred)[other])
        with tf.control_dependencies([pivot]):
            rows, keys = tf.zeros([0, *width], like.values.dtype), tf.zeros([0], like.indices.dtype)
    else:
        rows, keys = (
            control_flow_ops.switch(tf.zeros(shape, dtype), predicate)[other]
            for shape, dtype in (([0, *width], like.values.dtype), ([0], like.indices.dtype))
        )
    return tf.IndexedSlices(rows, keys, dense_shape=None)
