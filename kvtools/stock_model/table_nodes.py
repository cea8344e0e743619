"""The nodes that are tables in a graph: their resources, what fills the indexes, and what restores the variables."""

from __future__ import annotations

from collections.abc import Sequence

from kvtools.lookup_model.messages import (
    INT32,
    RESOURCE,
    of_bool,
    of_function,
    of_shape,
    of_text,
    of_type,
    of_types,
)
from kvtools.stock_model.graph_def import Node
from kvtools.stock_model.hash_index import index_node, is_hashed
from kvtools.stock_model.plain_ops import strings
from kvtools.stock_model.table import RESOURCES, StockTable, Variable


def resource_nodes(table: StockTable) -> list[Node]:
    """Return the nodes that are a table's resources."""
    nodes = [index_node(table.node("index"), table)] if is_hashed(table) else []
    for variable in table.variables:
        name = table.node(variable.resource)
        attributes = {
            "container": of_text(""),
            "shared_name": of_text(name),
            "dtype": of_type(variable.dtype),
            "shape": of_shape(variable.shape),
        }
        nodes.append(Node(name, "VarHandleOp", [], attributes))
    return nodes


def resource_inputs(table: StockTable) -> list[str]:
    """Return the names of the nodes that are a table's resources, in the order of `RESOURCES`."""
    return [table.node(resource) for resource in RESOURCES]


def initialize_nodes(tables: Sequence[StockTable]) -> list[Node]:
    """Return the nodes that fill the indexes that have to be."""
    nodes = []
    for table in filter(is_hashed, tables):
        inputs = [(table.node("keys"), RESOURCE), (table.node("index"), RESOURCE)]
        nodes.append(call_node(table.node("initialize"), table.function("initializer"), inputs, [INT32]))
    return nodes


def restore_nodes(filename: str, tables: Sequence[StockTable]) -> tuple[list[Node], list[str]]:
    """Return the nodes that restore the variables of tables, and the names of those that do it in the end.

    Args:
        filename: the node that gives the path of the bundle.
        tables: the tables.
    """
    variables = variables_of(tables)
    if not variables:
        return [], []
    names = [table.tensor(variable.resource) for table, variable in variables]
    dtypes = of_types(variable.dtype for _, variable in variables)
    nodes = [
        Node("kvtools/tensors", "Const", [], strings(names)),
        Node("kvtools/slices", "Const", [], strings([""] * len(names))),
        Node("kvtools/restore", "RestoreV2", [filename, "kvtools/tensors", "kvtools/slices"], {"dtypes": dtypes}),
    ]
    restored: list[str] = []
    for at, (table, variable) in enumerate(variables):
        name = table.node(variable.resource)
        restored.append(f"{name}/restore")
        inputs = [name, f"kvtools/restore:{at}" if at else "kvtools/restore"]
        attributes = {"dtype": of_type(variable.dtype), "validate_shape": of_bool(False)}
        nodes.append(Node(restored[-1], "AssignVariableOp", inputs, attributes))
    return nodes, restored


def variables_of(tables: Sequence[StockTable]) -> list[tuple[StockTable, Variable]]:
    """Return the variables of all tables."""
    return [(table, variable) for table in tables for variable in table.variables]


def call_node(name: str, function: str, inputs: Sequence[tuple[str, int]], gives: Sequence[int]) -> Node:
    """Return the node that calls a function: inputs are nodes, each with the type of its tensor."""
    attributes = {
        "Tin": of_types(dtype for _, dtype in inputs),
        "Tout": of_types(gives),
        "f": of_function(function),
        "config": of_text(""),
        "config_proto": of_text(""),
        "executor_type": of_text(""),
    }
    return Node(name, "StatefulPartitionedCall", [source for source, _ in inputs], attributes)
