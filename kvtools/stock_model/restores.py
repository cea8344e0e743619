"""What of a graph of TensorFlow 1 is restored from a checkpoint: which node writes which variable, of which tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvtools.stock_model.fields import blob, last, text
from kvtools.stock_model.graph_def import Node, node_of
from kvtools.stock_model.handles import names_read
from kvtools.stock_model.meta_graph import MetaGraph, serving_nodes
from kvtools.stock_model.op_table import HANDLES, RESTORES
from kvtools.stock_model.prune import needed

_SAME = frozenset({"Identity", "RefIdentity", "Enter", "RefEnter", "Switch", "RefSwitch"})
_RESTORE = "kvtools/restore_served"


class Restores:
    """The nodes of a graph, by name, looked at for what they restore."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self._names_read: dict[str, list[str]] = {}

    def source(self, source: str) -> Node:
        """Return the node that a handle comes from."""
        node = self._nodes[node_of(source)]
        while node.op in _SAME and node.data_inputs():
            node = self._nodes[node_of(node.data_inputs()[0])]
        return node

    def of(self, restore: str, serving: set[str]) -> tuple[dict[str, str], dict[str, set[str]]]:
        """Return what writes each variable of `serving` when `restore` is run, and the names of its tensors."""
        writers: dict[str, str] = {}
        tensors: dict[str, set[str]] = {}
        for name in sorted(needed(list(self._nodes.values()), [restore] if restore else [])):
            node = self._nodes[name]
            inputs = node.data_inputs()
            if node.op in RESTORES or node.op in _SAME or len(inputs) < 2:
                continue
            target = self.source(inputs[0])
            if target.name in serving and target.name not in writers and target.op not in HANDLES:
                read = self._read(inputs[1:])
                if read:
                    writers[target.name], tensors[target.name] = name, read
        return writers, tensors

    def _read(self, sources: Iterable[str]) -> set[str]:
        """The names of the tensors of a checkpoint that these tensors are made of."""
        found: set[str] = set()
        for source in sources:
            waiting, seen = [source], set[str]()
            while waiting:
                one = waiting.pop()
                node = self._nodes[node_of(one)]
                if one in seen:
                    continue
                seen.add(one)
                if node.op != "RestoreV2":
                    waiting += node.data_inputs()
                    continue
                if node.name not in self._names_read:
                    self._names_read[node.name] = names_read(node, self._nodes)
                names = self._names_read[node.name]
                number = int(one.partition(":")[2] or 0)
                found |= set(names[number : number + 1])
        return found


def restore_what_is_served(meta: MetaGraph) -> frozenset[str]:
    """Change the saver of a SavedModel of TensorFlow 1: it restores what its signatures need, and saves nothing.

    Returns the names of the dense tensors that it restores: optimizers' are not among them.
    """
    nodes = {node.name: node for node in meta.graph.nodes}
    filename, restore = (text(last(meta.saver, number)) for number in (1, 3))
    writers, tensors = Restores(nodes).of(restore, serving_nodes(meta))
    meta.saver = []
    if writers:
        meta.graph.nodes.append(Node(_RESTORE, "NoOp", [f"^{writer}" for writer in writers.values()], {}))
        meta.saver = [(1, 2, blob(filename)), (2, 2, b""), (3, 2, blob(_RESTORE)), (7, 0, 2)]
    return frozenset(name for of in tensors.values() for name in of)


def read_what_is_restored(meta: MetaGraph) -> bool:
    """Have a graph read the copies of variables that it restores, in place of variables that it does not.

    `tf.saved_model.save` of a model of Keras 3 saves each variable twice: the one that functions read, and a copy,
    which is restored. Only the objects of `tf.saved_model.load` know that both are one; in a session, and so on a
    server, the first has no value.

    Returns:
        Whether there were any.
    """
    nodes = {node.name: node for node in meta.graph.nodes}
    restored = needed(meta.graph.nodes, [text(last(meta.saver, 3))])
    copies: dict[str, str] = {}
    for node in meta.graph.nodes:
        if node.op != "AssignVariableOp":
            continue
        copy, value = map(node_of, node.data_inputs())
        if copy in restored and value in nodes and nodes[value].op == "ReadVariableOp":
            read = node_of(nodes[value].data_inputs()[0])
            if read not in restored:
                copies[read] = copy
    for node in meta.graph.nodes:
        node.inputs = [copies.get(source, source) for source in node.inputs]
    return bool(copies)
