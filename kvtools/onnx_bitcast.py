"""ONNX for what tf2onnx does not know of an exported model: `Bitcast` of integers of 64 bits, in the perfect index.

    tf2onnx.convert.from_function(function, input_signature=..., opset=18, custom_op_handlers=HANDLERS)

tf2onnx is not needed here: it hands over its own graph. See docs/export.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_INT32, _INT64, _UINT32, _UINT64 = 6, 7, 12, 13
"""Types, by ONNX's numbers."""


def bitcast(graph: Any, node: Any, name: str, arguments: Any) -> None:
    """Replace a `Bitcast` node: int64 and uint64 become each other, or their two halves [..., 2], the lower one first.

    Args:
        graph: tf2onnx's graph.
        node: the node.
        name: its name.
        arguments: what is beside this function in `HANDLERS`.

    Raises:
        ValueError: it is a `Bitcast` of other types; ONNX has none.
    """
    source, wanted = graph.get_dtype(node.input[0]), node.get_attr_int("type")
    if source not in (_INT64, _UINT64) or wanted not in (_INT32, _INT64, _UINT32, _UINT64):
        raise ValueError(
            f"converting '{name}' to ONNX: it is a Bitcast from type {source} to type {wanted}, of which ONNX has none;"
            " export the model with rows of float32"
        )
    shapes, types, (given,), outputs = node.output_shapes, node.output_dtypes, node.input, node.output
    graph.remove_node(node.name)
    made = {"name": node.name, "outputs": outputs, "shapes": shapes, "dtypes": types}
    if wanted in (_INT64, _UINT64):
        graph.make_node("Cast", [given], attr={"to": wanted}, **made)
        return

    def step(op: str, inputs: list[str], **attributes: Any) -> str:
        output: str = graph.make_node(op, inputs, attr=attributes).output[0]
        return output

    # Shifts are of numbers without a sign; a cast to fewer bits keeps the lower ones.
    bits = graph.make_const(f"{name}__bits", np.array(32, np.uint64)).output[0]
    last = graph.make_const(f"{name}__last", np.array([-1], np.int64)).output[0]
    whole = step("Cast", [given], to=_UINT64)
    halves = [step("Cast", [half], to=wanted) for half in (whole, step("BitShift", [whole, bits], direction="RIGHT"))]
    graph.make_node("Concat", [step("Unsqueeze", [half, last]) for half in halves], attr={"axis": -1}, **made)


HANDLERS = {"Bitcast": (bitcast, [])}
"""For `custom_op_handlers` of `tf2onnx.convert`."""
