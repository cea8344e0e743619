"""Gradients of lookups in the loops of TensorFlow 2: `tf.while_loop`, and `tf.map_fn`, `tf.scan` and RNNs, made of it.

The gradient of a loop is a loop: from turn to turn it carries the gradient of each tensor that the forward loop has, of
a dense variable a sum of its size. For a table each turn has slices of its own, whose rows and keys are added to two
lists; behind the loop these are put together. The control flow of TensorFlow 1 adds slices up itself, and begins with
zeros for row 0, which would be a key of a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import array_ops, cond_v2, handle_data_util, list_ops, while_v2

from tfplugin import table_handle

_ATTRIBUTE = "_kv_slices_of_turns"


@dataclasses.dataclass
class _Carried:
    """What the loop of the gradient carries for a table.

    Attributes:
      rows, keys: lists with the slices of the turns so far, as outputs of its body; `keys` is None where no lookup of
        the table has a gradient, and then there are none.
      turn: the slices of a turn.
      width: of a row.
    """

    rows: tf.Tensor
    keys: tf.Tensor | None
    turn: Any
    width: int | None

    def together(self, graph: Any, outputs: Sequence[tf.Tensor]) -> tf.IndexedSlices | None:
        """The slices of all turns. `outputs` are the loop's, one for each output of its body, which `graph` is."""
        if self.keys is None:
            return None
        rows, keys = (
            next(output for output, inner in zip(outputs, graph.outputs, strict=True) if inner is list_)
            for list_ in (self.rows, self.keys)
        )
        rows = list_ops.tensor_list_concat(rows, self.turn.values.dtype, [None, self.width])
        keys = list_ops.tensor_list_concat(keys, self.turn.indices.dtype, [None])
        return tf.IndexedSlices(rows, keys, dense_shape=None)


def zeros_like(original: Callable[..., Any], handle: Any, output: Any) -> Any:
    """``_zeros_like``, the gradient of what comes out of a loop: of a table nobody asks for its size."""
    return table_handle.no_gradient(handle) if table_handle.is_of_table(handle) else original(handle, output)


def zeros_like_output(original: Callable[..., Any], op: Any, index: int) -> Any:
    """``ZerosLike``, the gradient of an output that nothing depends on: `zeros_like`. `switch_gradient` needs none."""
    handle = op.outputs[index]
    if not table_handle.is_of_table(handle):
        return original(op, index)
    return None if op.type in ("Switch", "RefSwitch") else table_handle.no_gradient(handle)


def slices_of_v1_loop(original: Callable[..., Any], loop: Any, op: Any, grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """``AddBackpropIndexedSlicesAccumulator``, the slices of all turns, less the row of zeros that comes first."""
    slices = original(loop, op, grad)
    if not table_handle.is_of_table(op.inputs[0]):
        return slices
    outer = loop.outer_context
    loop.Exit()  # what comes out of the loop is sliced behind it
    if outer is not None:
        outer.Enter()
    slices = tf.IndexedSlices(slices.values[1:], slices.indices[1:], dense_shape=None)
    if outer is not None:
        outer.Exit()
    loop.Enter()
    return slices


def create_grad_func(
    original: Callable[..., Any],
    ys: Sequence[tf.Tensor],
    xs: Sequence[tf.Tensor],
    grads: Sequence[tf.Tensor],
    cond_graph: Any,
    body_graph: Any,
    name: str,
    op: Any,
    *args: Any,
) -> tuple[Any, list[tf.Tensor]]:
    """``_create_grad_func``, the body of the gradient's loop and what the loop begins with: lists, for each table."""
    entered = op.outputs[0].op.inputs  # the loop's own; a body that was loaded knows less of what it is given
    handles = [entered[next(i for i, inner in enumerate(body_graph.inputs) if inner is x)] for x in xs]
    tables = [i for i, handle in enumerate(handles) if table_handle.is_of_table(handle)]
    others = [i for i in range(len(xs)) if i not in tables]
    ys, grads = [ys[i] for i in others], [grads[i] for i in others]
    graph, loop_vars = original(ys, xs, grads, cond_graph, body_graph, name, op, *args)
    carried = []
    for i in tables:
        at = 3 + i  # behind the counter, the most turns there may be and how many there were
        begin, turn, of_table = _carry(graph, at, handles[i])
        loop_vars.insert(at, begin)
        graph.inputs.insert(at, turn)
        carried.append(of_table)
    setattr(graph, _ATTRIBUTE, carried)
    return graph, loop_vars


def _carry(graph: Any, at: int, handle: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, _Carried]:
    """Has the body carry a table's slices instead of its gradient: a list of rows in its place, one of keys behind all.

    Returns:
      What the loop begins with in that place, the body's input for it, and what is carried.
    """
    slices = graph.structured_outputs[at]
    zeros = table_handle.no_gradient(handle)
    if isinstance(slices, tf.IndexedSlices):
        begin = list_ops.empty_tensor_list([None, zeros.shape[1]], slices.values.dtype)
        no_keys = list_ops.empty_tensor_list([None], slices.indices.dtype)
        with graph.as_default():
            turn = array_ops.placeholder(tf.variant, [])
            handle_data_util.copy_handle_data(begin, turn)
            rows = list_ops.tensor_list_push_back(turn, slices.values)
            keys = list_ops.tensor_list_push_back(graph.capture(no_keys), slices.indices)
        graph.structured_outputs.append(keys)
    else:
        begin = zeros
        with graph.as_default():
            rows = turn = array_ops.placeholder(zeros.dtype, zeros.shape)
            keys = None
    graph.structured_outputs[at] = rows
    graph.outputs = func_graph.flatten(graph.structured_outputs)
    return begin, turn, _Carried(rows, keys, slices, zeros.shape[1])


def structured_output(original: Callable[..., Any], outputs: Any, grads: Any, graph: Any) -> list[Any]:
    """``_get_structured_grad_output``, the gradients that the gradient's loop gives: of tables, slices of all turns."""
    found = original(outputs, grads, graph)
    carried = {id(one.rows): one for one in getattr(graph, _ATTRIBUTE, ())}
    given = [i for i, grad in enumerate(grads) if grad is not None]
    for i, output in zip(given, graph.structured_outputs[3:], strict=False):
        if id(output) in carried:
            found[i] = carried[id(output)].together(graph, outputs)
    return found


def capture(original: Callable[..., Any], graph: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """``FuncGraph.capture``, where gradients of loops and branches read variables: updates in the backward pass do.

    TensorFlow has such a gradient know only what the graph around it has.
    """
    if (
        isinstance(graph, (while_v2._WhileBodyGradFuncGraph, cond_v2._CondGradFuncGraph))
        and isinstance(tensor, tf_ops.EagerTensor)
        and tensor.dtype == tf.resource
        and graph.outer_graph.building_function
    ):
        tensor = graph.outer_graph.capture(tensor)
    return original(graph, tensor, *args, **kwargs)
