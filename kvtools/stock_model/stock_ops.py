"""The operations that stock TensorFlow has: `stock_ops.txt`, the registry of TensorFlow 2.21."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from kvtools.stock_model.fields import messages, split
from kvtools.stock_model.graph_def import Node
from kvtools.stock_model.meta_graph import MetaGraph

_LIST = Path(__file__).with_name("stock_ops.txt")


@functools.cache
def stock_operations() -> frozenset[str]:
    """Return the names of all of them."""
    return frozenset(_LIST.read_text("ascii").split())


def is_stock(operation: str) -> bool:
    """Tell whether stock TensorFlow has an operation.

    >>> is_stock("MatMul"), is_stock("KvTableGather")
    (True, False)
    """
    return operation in stock_operations()


def foreign_nodes(saved_model: bytes) -> Iterator[tuple[str, Node]]:
    """Yield each node of a SavedModel whose operation stock TensorFlow has not, with the name of its function (empty: a
    graph itself). The call of a function by its name is no operation.
    """
    for encoded in messages(split(saved_model), 2):
        graph = MetaGraph.decode(encoded).graph
        for function, node in graph.all_nodes():
            if not is_stock(node.op) and node.op not in graph.library:
                yield function, node
