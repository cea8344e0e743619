"""What is needed of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvtools.stock_model.graph_def import Node, node_of


def needed(nodes: Sequence[Node], roots: Iterable[str]) -> set[str]:
    """Return the names of the nodes that these nodes need, themselves included.

    >>> sorted(needed([Node("a", "Const", [], {}), Node("b", "Neg", ["a"], {}), Node("c", "Neg", ["a"], {})], ["b:0"]))
    ['a', 'b']
    """
    by_name: Mapping[str, Node] = {node.name: node for node in nodes}
    found: set[str] = set()
    waiting = [node_of(root) for root in roots]
    while waiting:
        name = waiting.pop()
        if name in found or name not in by_name:
            continue
        found.add(name)
        waiting += map(node_of, by_name[name].inputs)
    return found
