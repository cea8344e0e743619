"""The graph that a session runs: the tables, a call per signature, initialization, saving and restoring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtools.dialects.object_graph import OBJECT_GRAPH
from kvtools.lookup_model.messages import (
    INT64,
    RESOURCE,
    STRING,
    UNKNOWN_RANK,
    message,
    of_shape,
    of_type,
    of_types,
    shape,
)
from kvtools.lookup_model.signatures import Signature
from kvtools.stock_model.fields import Field
from kvtools.stock_model.graph_def import Node
from kvtools.stock_model.plain_ops import strings
from kvtools.stock_model.table import StockTable
from kvtools.stock_model.table_nodes import (
    call_node,
    initialize_nodes,
    resource_inputs,
    resource_nodes,
    restore_nodes,
    variables_of,
)

INIT = "init"
_FILENAME = "save/filename"
_SAVED = "save/saved"
_RESTORED = "save/restored"
SAVER: list[Field] = [
    (1, 2, f"{_FILENAME}:0".encode()),
    (2, 2, f"{_SAVED}:0".encode()),
    (3, 2, _RESTORED.encode()),
    (7, 0, 2),
]
"""The SaverDef: what takes the path, what to fetch for saving, what restores, and the version of the format."""


def graph_nodes(tables: Sequence[StockTable], signatures: Sequence[Signature], object_graph: bytes) -> Iterator[Node]:
    """Yield the nodes of the graph.

    Args:
        tables: the tables.
        signatures: the signatures.
        object_graph: what is saved beside the variables.
    """
    for table in tables:
        yield from resource_nodes(table)
    for signature in signatures:
        inputs = []
        for lookup in signature.inputs():
            inputs.append((signature.input_node(lookup), INT64))
            attributes = {"dtype": of_type(INT64), "shape": of_shape(UNKNOWN_RANK)}
            yield Node(inputs[-1][0], "Placeholder", [], attributes)
        for lookup in signature.inputs():
            inputs += [(name, RESOURCE) for name in resource_inputs(lookup.table)]
        yield call_node(signature.answer_node, signature.function, inputs, [dtype for _, dtype in signature.outputs()])
    initialize = initialize_nodes(tables)
    yield from initialize
    yield Node(INIT, "NoOp", [f"^{node.name}" for node in initialize], {})
    yield from _save_and_restore(tables, object_graph)


def _save_and_restore(tables: Sequence[StockTable], object_graph: bytes) -> Iterator[Node]:
    yield Node(_FILENAME, "Placeholder", [], {"dtype": of_type(STRING), "shape": of_shape(shape())})
    names, dtypes, read = [], [], []
    for table, variable in variables_of(tables):
        node = table.node(variable.resource)
        names.append(table.tensor(variable.resource))
        dtypes.append(variable.dtype)
        read.append(f"{node}/read")
        yield Node(read[-1], "ReadVariableOp", [node], {"dtype": of_type(variable.dtype)})
    tensor = message((1, STRING), (2, shape()), (8, object_graph))
    yield Node("save/objects", "Const", [], {"dtype": of_type(STRING), "value": message((8, tensor))})
    yield Node("save/tensors", "Const", [], strings([*names, OBJECT_GRAPH]))
    yield Node("save/slices", "Const", [], strings([""] * (len(names) + 1)))
    inputs = [_FILENAME, "save/tensors", "save/slices", *read, "save/objects"]
    yield Node("save/save", "SaveV2", inputs, {"dtypes": of_types([*dtypes, STRING])})
    yield Node(_SAVED, "Identity", [_FILENAME, "^save/save"], {"T": of_type(STRING)})
    nodes, restored = restore_nodes(_FILENAME, tables)
    yield from nodes
    yield Node(_RESTORED, "NoOp", [f"^{name}" for name in restored], {})
