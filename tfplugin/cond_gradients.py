"""Gradients of lookups in a `tf.cond` or a `tf.switch_case`.

Where a branch looks nothing up, or is not taken, TensorFlow wants a gradient of zeros, as large as the variable. For a
table it is a gradient of no rows. In TensorFlow 1's control flow the handle of a table goes into each branch by a
Switch; where TensorFlow has no zeros for the branch that is not taken, what it makes is dead with that branch, and so
is the update of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    return control_flow_ops.merge([*_guarded(op, context, taken)], name="cond_grad")[0], None


def make_outputs_match(original: Callable[..., Any], op_type: int, graphs: Sequence[Any]) -> None:
    """``_make_output_composite_tensors_match``, the gradients of branches in one form: of tables, slices."""
    for i, outputs in enumerate(zip(*[graph.structured_outputs for graph in graphs], strict=True)):
        slices = next((one for one in outputs if isinstance(one, tf.IndexedSlices) and one.dense_shape is None), None)
        if slices is None:
            continue
        for graph, output in zip(graphs, outputs, strict=True):
            if isinstance(output, tf.Tensor):  # of a branch without lookups: zeros of no rows
                with graph.as_default():
                    rows, keys = tf.cast(output, slices.values.dtype), tf.zeros([0], slices.indices.dtype)
                graph.structured_outputs[i] = tf.IndexedSlices(rows, keys, dense_shape=None)
    original(op_type, graphs)


def make_indices_match(original: Callable[..., Any], op_type: int, graphs: Sequence[Any]) -> None:
    """``_make_indexed_slices_indices_types_match``, which wants int32 or int64 also where there is nothing to match."""
    dtypes = [
        [one.indices.dtype for one in tf.nest.flatten(graph.structured_outputs) if isinstance(one, tf.IndexedSlices)]
        for graph in graphs
    ]
    if any(of_graph != dtypes[0] for of_graph in dtypes):
        original(op_type, graphs)


def _is_of_table(op: Any) -> bool:
    if op.type not in ("Switch", "RefSwitch") or op.outputs[0].dtype != tf.resource:
        return False
    while op.type in _PASSES_ON:
        op = op.inputs[0].op
    return bool(op.type == "KvTableHandle")


def _guarded(op: Any, context: Any, taken: tf.IndexedSlices) -> tuple[tf.IndexedSlices, tf.IndexedSlices]:
    """Slices that are alive where the branch of `op` is taken, and slices of no rows that are where it is not."""
    branch = context.branch
    width = taken.values.shape[1:]
    now = tf_ops.get_default_graph()._get_control_flow_context()
    loop = getattr(now, "grad_state", None)
    predicate = None if loop is None else loop.history_map.get(context.pred.name)
    if predicate is None:
        # Constants by themselves are alive always.
        pivot = tf.identity(control_flow_ops.switch(op.inputs[0], context.pred)[1 - branch])
        with tf.control_dependencies([pivot]):
            none = tf.zeros([0, *width], taken.values.dtype), tf.zeros([0], taken.indices.dtype)
        return taken, tf.IndexedSlices(*none, dense_shape=None)

    def switched(tensor: tf.Tensor, side: int) -> tf.Tensor:
        return control_flow_ops.switch(tensor, predicate)[side]

    # Keys that the loop does not change are alive in each of its turns.
    rows, keys = switched(taken.values, branch), switched(taken.indices, branch)
    no_rows = switched(tf.zeros([0, *width], taken.values.dtype), 1 - branch)
    no_keys = switched(tf.zeros([0], taken.indices.dtype), 1 - branch)
    return tf.IndexedSlices(rows, keys, dense_shape=None), tf.IndexedSlices(no_rows, no_keys, dense_shape=None)
