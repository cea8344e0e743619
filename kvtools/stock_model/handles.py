"""Which table of the checkpoint the handle of a graph is: the one that the graph restores it from."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtools.stock_model.attributes import functions_in
from kvtools.stock_model.fields import last, split, text, texts
from kvtools.stock_model.graph_def import Function, Graph, Node, node_of
from kvtools.stock_model.op_table import (
    BEGUN_IN_DEEPREC,
    DEEPREC,
    HANDLES,
    NAMED_IN_DEEPREC,
    READS_FILES,
    RESTORES,
    TFPLUS,
)

_READ_BY_RESTORES = ("Const", "Identity", "RestoreV2")
_PART = re.compile(r"/part_[0-9]+$")


@dataclass(frozen=True)
class Restored:
    """What a handle's table is restored from: the tensors that begin with `prefix`, the rows of a part of them.

    A part of -1 says that the tensors are all that it has. `initializer` says what keys begin with where the checkpoint
    does not, as JSON.
    """

    prefix: str
    part: int
    parts: int
    initializer: str


CALLS = {
    "PartitionedCall": 0,
    "StatefulPartitionedCall": 0,
    "While": 0,
    "StatelessWhile": 0,
    "If": 1,
    "StatelessIf": 1,
    "Case": 1,
    "StatelessCase": 1,
    "RemoteCall": 1,
}
"""Operations that hand their inputs to functions -> how many inputs they keep for themselves."""
PASSING = frozenset(
    ["Identity", "IdentityN", "Enter", "Exit", "Switch", "Merge", "NextIteration", "RefIdentity", "RefEnter", "RefExit"]
)
"""Operations whose outputs are their inputs."""


def restored_tables(graph: Graph) -> dict[str, list[Restored]]:
    """Return, for the nodes that are handles, what they may be restored from."""
    found: dict[str, list[Restored]] = {}
    seen: set[tuple[str, tuple[tuple[int, str], ...]]] = set()
    handles = {node.name: node.name for node in graph.nodes if node.op in HANDLES}
    _look(graph.nodes, handles, graph.library, found, seen)
    _look_in_peers(graph.nodes, found)
    return found


def _look_in_peers(nodes: Sequence[Node], found: dict[str, list[Restored]]) -> None:
    """What tables of TFPlus and DeepRec are restored from, where no operation says it: what has their name; and how
    DeepRec answers missing keys."""
    by_name = {node.name: node for node in nodes}
    begun: dict[str, float] = {}
    for node in nodes:
        at = BEGUN_IN_DEEPREC.get(node.op)
        if at is not None:
            begun[_source(node.data_inputs()[at], by_name)] = node.attrs.real("default_value_no_permission")
    for node in nodes:
        if node.op not in (*TFPLUS, DEEPREC):
            continue
        own = found.get(node.name) or [Restored(_whole(node.attrs.text("shared_name") or node.name), -1, 1, "")]
        value = begun.get(node.name, 0.0)
        initializer = json.dumps({"kind": "constant", "a": value}) if value else ""
        found[node.name] = [dataclasses.replace(one, initializer=initializer) for one in own]


def _source(source: str, nodes: Mapping[str, Node]) -> str:
    """The name of the node that a handle comes from."""
    node = nodes[node_of(source)]
    while node.op == "Identity":
        node = nodes[node_of(node.data_inputs()[0])]
    return node.name


def _whole(variable: str) -> str:
    """The name of a table, given the variable that is a part of it, or the whole."""
    return _PART.sub("", variable.removesuffix(":0"))


def _named(tensor: str, nodes: Mapping[str, Node]) -> str:
    """The text that a tensor is, which is a constant."""
    node = nodes.get(node_of(tensor))
    if node is None or node.op != "Const":
        return ""
    return text(last(split(last(split(node.attributes["value"]), 8)), 8))


def _restored(node: Node, nodes: Mapping[str, Node]) -> Restored | None:
    """What an operation restores a table from; None where a caller gives it the tensors."""
    attrs = node.attrs
    if "tensor_prefix" in node.attributes:
        part, parts = attrs.number("part"), attrs.number("parts")
        return Restored(attrs.text("tensor_prefix"), part, parts, attrs.text("initializer"))
    if node.op in NAMED_IN_DEEPREC:
        name = _named(node.data_inputs()[NAMED_IN_DEEPREC[node.op]], nodes)
        return Restored(_whole(name), -1, 1, "") if name else None
    if node.op in READS_FILES:
        name = _named(node.data_inputs()[2], nodes)
        return Restored(name.partition("_mht_")[0], -1, 1, "") if name else None
    source = node.data_inputs()[1]
    read = nodes.get(node_of(source))
    while read is not None and read.op == "Identity":
        source = read.data_inputs()[0]
        read = nodes.get(node_of(source))
    if read is None or read.op != "RestoreV2":
        return None
    names, number = names_read(read, nodes), source.rpartition(":")[2]
    keys = names[int(number) if number.isdecimal() else 0].removesuffix("-keys")
    return Restored(_whole(keys) if node.op.startswith("KvVariable") else keys, -1, 1, "")


def names_read(node: Node, nodes: Mapping[str, Node]) -> list[str]:
    """Return the names of the tensors that a `RestoreV2` reads, given the nodes beside it."""
    names = nodes.get(node_of(node.data_inputs()[1]))
    if names is None or names.op != "Const":
        return []
    tensor = split(last(split(names.attributes["value"]), 8))
    return texts(tensor, 8)


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
    nodes_by_name = {node.name: node for node in nodes if node.op in (*_READ_BY_RESTORES, *RESTORES)}
    for node in nodes:
        inputs = node.data_inputs()
        bound = {at: by_name[node_of(source)] for at, source in enumerate(inputs) if node_of(source) in by_name}
        if not bound:
            continue
        restored = 1 if node.op in NAMED_IN_DEEPREC else 0
        if node.op in RESTORES and restored in bound:
            one = _restored(node, nodes_by_name)
            if one is None:
                continue
            listed = found.setdefault(bound[restored], [])
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
