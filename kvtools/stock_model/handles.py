"""Which table of the checkpoint the handle of a graph is: the one that the graph restores it from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtools.stock_model.attributes import functions_in
from kvtools.stock_model.graph_def import Function, Graph, Node, node_of
from kvtools.stock_model.op_table import HANDLE, RESTORE


@dataclass(frozen=True)
class Restored:
    """What a handle's table is restored from: the tensors that begin with `prefix`, the rows of a part of them.

    `initializer` says what keys begin with where the checkpoint does not, as JSON.
    """

    prefix: str
    part: int
    parts: int
    initializer: str


CALLS = {"If": 1, "StatelessIf": 1, "Case": 1, "StatelessCase": 1, "RemoteCall": 1}
"""Operations that hand their inputs to functions -> how many inputs they keep for themselves, if any."""
PASSING = frozenset(
    ["Identity", "IdentityN", "Enter", "Exit", "Switch", "Merge", "NextIteration", "RefIdentity", "RefEnter", "RefExit"]
)
"""Operations whose outputs are their inputs."""


def restored_tables(graph: Graph) -> dict[str, list[Restored]]:
    """Return, for the nodes that are handles, what they may be restored from."""
    found: dict[str, list[Restored]] = {}
    seen: set[tuple[str, tuple[tuple[int, str], ...]]] = set()
    handles = {node.name: node.name for node in graph.nodes if node.op == HANDLE}
    _look(graph.nodes, handles, graph.library, found, seen)
    return found


def _look(
    nodes: Sequence[Node],
    known: Mapping[str, str],
    library: Mapping[str, Function],
    found: dict[str, list[Restored]],
    seen: set[tuple[str, tuple[tuple[int, str], ...]]],
) -> None:
    """Follow handles, known by the names of nodes and arguments, through nodes and the functions that these call."""
    by_name = dict(known)
    waiting = True
    while waiting:
        waiting = False
        for node in nodes:
            if node.op in PASSING and node.name not in by_name:
                sources = [by_name[node_of(s)] for s in node.data_inputs() if node_of(s) in by_name]
                if sources:
                    by_name[node.name] = sources[0]
                    waiting = True
    for node in nodes:
        inputs = node.data_inputs()
        bound = {at: by_name[node_of(source)] for at, source in enumerate(inputs) if node_of(source) in by_name}
        if not bound:
            continue
        if node.op == RESTORE and 0 in bound:
            attrs = node.attrs
            one = Restored(
                attrs.text("tensor_prefix"), attrs.number("part"), attrs.number("parts"), attrs.text("initializer")
            )
            listed = found.setdefault(bound[0], [])
            if one not in listed:
                listed.append(one)
        called = [name for value in node.attributes.values() for name in functions_in(value)]
        called += [node.op] if node.op in library else []
        offset = CALLS.get(node.op, 0)
        own = {at - offset: handle for at, handle in bound.items() if at >= offset}
        for name in called:
            key = (name, tuple(sorted(own.items())))
            if name in library and own and key not in seen:
                seen.add(key)
                function = library[name]
                taken = {function.arguments[at].name: h for at, h in own.items() if at < len(function.arguments)}
                _look(function.nodes, taken, library, found, seen)
