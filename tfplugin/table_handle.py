"""What TensorFlow is told of the handle of a table, and how the handle is known again.

Of the handle of a variable TensorFlow knows the shape and the dtype of the variable, also where a function, a loop or a
branch has a tensor of its own for it. It makes gradients of zeros by them. The gradient of a table has the rows that
were looked up, so one of zeros has none: a handle says that it is of ``[0, dim]``. In graphs ``KvTableHandle`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import cond_v2, handle_data_util


def describe(handle: tf.Tensor, dim: int, dtype: tf.DType) -> None:
    """Tells TensorFlow what the handle of a table is of, in eager code."""
    handle_data_util.set_handle_data(handle, handle_data_util.create_handle_data(tf.TensorShape([0, dim]), dtype))


def is_of_table(tensor: tf.Tensor) -> bool:
    """Whether a tensor is the handle of a table; so is that of a dense variable without rows, which has no gradient."""
    return tensor.dtype == tf.resource and _shape(tensor)[:1] == [0]


def no_gradient(handle: tf.Tensor) -> tf.Tensor:
    """Dense zeros, [0, dim], as TensorFlow makes them of the handle of a table."""
    return tf.zeros(_shape(handle), handle_data_util.get_handle_data(handle).shape_and_type[0].dtype)


def aggregate(original: Callable[..., Any], grads: Sequence[Any]) -> Any:
    """``AggregateIndexedSlicesGradients``, the sum of gradients: zeros of no rows add nothing to slices of a table."""
    if any(isinstance(grad, tf.IndexedSlices) and grad.dense_shape is None for grad in grads):
        grads = [grad for grad in grads if not (isinstance(grad, tf.Tensor) and grad.shape[:1] == [0])]
    return original(grads)


def origin(handle: tf.Tensor) -> tf.Tensor:
    """The handle that one in a function, a loop or a branch stands for, as far as the graphs tell.

    Handles are passed on as they are, by whatever passes them on.
    """
    before = None
    while handle is not before and not isinstance(handle, tf_ops.EagerTensor):
        before, handle = handle, _passed_on(handle)
    return handle


def _passed_on(handle: tf.Tensor) -> tf.Tensor:
    op, output = handle.op, handle.value_index
    if op.type in ("Identity", "Switch", "RefSwitch", "Enter"):
        return op.inputs[0]
    if op.type in ("While", "StatelessWhile"):
        return op.inputs[output]
    if op.type in ("If", "StatelessIf", "Case", "StatelessCase"):
        branch = cond_v2.get_func_graphs(op)[0]
        return _given(branch, branch.outputs[output], list(op.inputs)[1:], handle)
    if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
        function = op.graph._get_function(op.get_attr("f").name)
        return handle if function is None else _given(function.graph, function.graph.outputs[output], op.inputs, handle)
    if op.type == "Placeholder" and isinstance(op.graph, func_graph.FuncGraph):
        return next((external for external, inner in op.graph.captures if inner is handle), handle)
    return handle


def _given(graph: Any, output: tf.Tensor, inputs: Sequence[tf.Tensor], unknown: tf.Tensor) -> tf.Tensor:
    """What a function is given for the input that it gives back as `output`; `unknown` if that is not seen."""
    before = None
    while output is not before and output.op.type != "Placeholder":
        before, output = output, _passed_on(output)
    return next((given for given, inner in zip(inputs, graph.inputs, strict=False) if inner is output), unknown)


def _shape(handle: tf.Tensor) -> list[int]:
    """The shape that the handle says it is of; [] if it says none. What calls a function may forget it."""
    for one in (handle, origin(handle)):
        found = handle_data_util.get_handle_data(one)
        if found is not None and found.is_set and len(found.shape_and_type) == 1:
            shape = found.shape_and_type[0].shape
            if not shape.unknown_rank:
                return [dim.size for dim in shape.dim]
    return []
