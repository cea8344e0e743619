"""A function of stock operations, made step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtools.dialects.bundle.dtypes import dtype_number
from kvtools.lookup_model.messages import INT32, INT64, message, of_number, of_text, of_type, shape
from kvtools.stock_model.graph_def import Argument, Function, Node

_STATEFUL = frozenset(
    {
        "AssignVariableOp",
        "Assert",
        "HashTableV2",
        "InitializeTableV2",
        "LookupTableFindV2",
        "ReadVariableOp",
        "ResourceGather",
        "SaveV2",
        "StatefulPartitionedCall",
    }
)
_IS_STATEFUL = 17


class FunctionBody:
    """Collects the nodes of a function; tensors are the strings by which nodes of a function name them.

    Example:
        >>> from kvtools.lookup_model.messages import INT64
        >>> body = FunctionBody("double")
        >>> x = body.argument("x", INT64)
        >>> body.result(INT64, body.op("AddV2", [x, x], "z", T=of_type(INT64)))
        >>> [node.op for node in body.function().nodes]
        ['AddV2', 'Identity']
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._arguments: list[Argument] = []
        self._nodes: list[Node] = []
        self._results: list[tuple[int, str]] = []

    def argument(self, name: str, dtype: int) -> str:
        """Add an argument."""
        self._arguments.append(Argument(name, dtype))
        return name

    def op(self, op: str, inputs: Sequence[str], output: str = "output", **attributes: bytes) -> str:
        """Add a node; return the first tensor of its output of this name."""
        name = f"n{len(self._nodes)}"
        self._nodes.append(Node(name, op, list(inputs), attributes))
        return f"{name}:{output}:0"

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> str:
        """Add a constant."""
        return self.op("Const", [], "output", **constant_attributes(np.asarray(value, dtype)))

    def cast(self, tensor: str, source: int, target: int) -> str:
        """Return a tensor as another type."""
        return (
            tensor if source == target else self.op("Cast", [tensor], "y", SrcT=of_type(source), DstT=of_type(target))
        )

    def take(self, tensor: str, places: str, dtype: int) -> str:
        """Return what lies at `places` (int64) of the first axis of a tensor."""
        return self.op(
            "GatherV2",
            [tensor, places, self.constant(0, np.int32)],
            Tparams=of_type(dtype),
            Tindices=of_type(INT64),
            Taxis=of_type(INT32),
            batch_dims=of_number(0),
        )

    def result(self, dtype: int, tensor: str) -> None:
        """Add a result."""
        self._results.append((dtype, tensor))

    def function(self) -> Function:
        """Return the function. Its results come when all that has an effect is done."""
        stateful = [node.name for node in self._nodes if node.op in _STATEFUL]
        nodes = list(self._nodes)
        if stateful:
            nodes.append(Node("done", "NoOp", [f"^{name}" for name in stateful], {}))
        results: dict[str, str] = {}
        outputs: list[Argument] = []
        for number, (dtype, tensor) in enumerate(self._results):
            inputs = [tensor, *(["^done"] if stateful else [])]
            nodes.append(Node(f"result_{number}", "Identity", inputs, {"T": of_type(dtype)}))
            outputs.append(Argument(f"result_{number}", dtype))
            results[f"result_{number}"] = f"result_{number}:output:0"
        return Function(
            self.name,
            list(self._arguments),
            outputs,
            nodes,
            results,
            {name: name for name in stateful},
            {"_construction_context": of_text("kEagerRuntime")},
            control_outputs=stateful,
            signature_rest=[(_IS_STATEFUL, 0, 1)] if stateful else [],
        )


def constant_attributes(value: npt.NDArray[np.generic]) -> dict[str, bytes]:
    """Return the attributes of a node that is a constant: numbers of any shape."""
    number = dtype_number(value.dtype)
    tensor = message((1, number), (2, shape(*value.shape)), (4, np.ascontiguousarray(value).tobytes()))
    return {"dtype": of_type(number), "value": message((8, tensor))}
