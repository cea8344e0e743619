"""A model cut at its lookups: one signature gives the ids of each lookup, another takes their rows.

A graph is given in which every lookup ends in a node of `GIVEN_ROWS`, somewhere in its functions. These are cut
(`cut_functions.py`), and what is left of the lookups in the graph itself are placeholders for rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtools.dialects.bundle.dtypes import dtype_name, number_named
from kvtools.lookup_model.messages import BOOL, UNKNOWN_RANK, message, of_shape, of_text, of_type
from kvtools.split_manifest import SplitTensor
from kvtools.stock_model.cut_functions import Body, CannotCut, Functions, place_of
from kvtools.stock_model.fields import Field, blob, entries, join, last, messages, number_in, split, text, without
from kvtools.stock_model.given_rows import GivenTable
from kvtools.stock_model.graph_def import Node, functions_called, functions_needed, node_of
from kvtools.stock_model.meta_graph import MetaGraph, loading_roots, nodes_of_variables, tensor_names
from kvtools.stock_model.prune import needed
from kvtools.stock_model.table import RESOURCES

_INTERNAL = "__saved_model"
_HALVES = frozenset(map(number_named, ("float16", "bfloat16")))
_FLOAT32 = number_named("float32")


@dataclass(frozen=True)
class CutLookup:
    """A lookup of a signature: which table, and what its ids, rows and whether they were found are called.

    `ids` is an output of the signature of ids; `ids_input` the input that has the same ids, or "". `rows` and `found`
    are inputs of the signature of rows, "" where it does not ask for them; `dtype` is the type of `rows`.
    """

    table: str
    ids: str
    ids_input: str
    rows: str
    found: str
    dtype: str


@dataclass(frozen=True)
class CutSignature:
    """A signature: that of ids ("" without a lookup), what each of both takes of its inputs, and its lookups."""

    name: str
    ids_signature: str
    inputs: tuple[SplitTensor, ...]
    ids_inputs: tuple[str, ...]
    dense_inputs: tuple[str, ...]
    outputs: tuple[SplitTensor, ...]
    lookups: tuple[CutLookup, ...]


def cut_model(
    data: bytes, tables: Mapping[int, GivenTable], names: Mapping[str, str], unique: str
) -> tuple[bytes, list[CutSignature]]:
    """Cut a MetaGraphDef at its lookups.

    Args:
        data: encoded, rewritten for tables whose rows are given; as a graph of TensorFlow 1, without objects.
        tables: the tables, by their numbers.
        names: what inputs and outputs of each table are named after.
        unique: what the names of its resources begin with in a process, which no other model's do.

    Returns:
        The MetaGraphDef, encoded, and its signatures but for those of ids.

    Raises:
        CannotCut: the ids of a lookup depend on rows, or on a condition.
    """
    meta = MetaGraph.decode(data)
    return _Graph(meta, tables, names).cut(unique)


class _Graph:
    """A graph that is cut."""

    def __init__(self, meta: MetaGraph, tables: Mapping[int, GivenTable], names: Mapping[str, str]) -> None:
        self._meta, self._names = meta, names
        nodes = meta.graph.nodes
        served = needed(nodes, [name for _, one in self._signatures() for _, info in _infos(one) for name in info])
        self._kept = loading_roots(meta) + nodes_of_variables(meta.collections)
        self._kept += [text(last(meta.saver, number)) for number in (1, 2, 3) if messages(meta.saver, number)]
        there = served | needed(nodes, self._kept)
        self._functions = Functions(meta.graph.library, tables)
        self._body = Body(self._functions, "", [node for node in nodes if node.name in there], [])

    def _signatures(self) -> list[tuple[str, bytes]]:
        return [(name, one) for name, one in self._meta.signatures.items() if not name.startswith(_INTERNAL)]

    def cut(self, unique: str) -> tuple[bytes, list[CutSignature]]:
        """Return the graph and its signatures."""
        meta, body = self._meta, self._body
        nodes = [self._node(node) for node in body.nodes]
        wanted = {number for numbers in body.calls.values() for number in numbers}
        shapes = {number: self._shape(number) for number in wanted}
        for number in sorted(wanted):
            nodes += self._placeholders(number, shapes[number])
        ids, ids_nodes = self._ids(wanted)
        nodes += ids_nodes
        signatures: dict[str, bytes] = {}
        told: list[CutSignature] = []
        # What initializes the model is in a collection, too: TensorFlow 2 would make a function of such a signature.
        for name, encoded in self._signatures():
            cut, rows_signature, ids_signature, more = self._signature(name, encoded, nodes, ids, shapes)
            told.append(cut)
            signatures[name] = rows_signature
            if cut.ids_signature:
                signatures[cut.ids_signature] = ids_signature
            nodes += more
        meta.signatures = signatures
        roots = self._kept + [name for one in signatures.values() for _, info in _infos(one) for name in info]
        left = needed(nodes, roots)
        meta.graph.nodes = [node for node in nodes if node.name in left]
        self._check_whole(meta.graph.nodes)
        library = {**meta.graph.library, **self._functions.made}
        there = functions_needed(library, functions_called(meta.graph.nodes, library))
        meta.graph.library = {name: function for name, function in library.items() if name in there}
        for node in [*meta.graph.nodes, *(n for f in meta.graph.library.values() for n in f.nodes)]:
            _name_apart(node, unique)
        return meta.encode(), told

    def _node(self, node: Node) -> Node:
        """A node, given rows."""
        body = self._body
        controls = [source for source in body.kept_inputs(node) if source.startswith("^")]
        if node.name not in body.calls:
            return Node(node.name, node.op, node.data_inputs() + controls, dict(node.attributes), node.rest)
        new, kept, rows, found = self._functions.call_with_rows(node, body.called(node))
        data, numbers = node.data_inputs(), body.calls[node.name]
        new.inputs = [data[at] for at in kept]
        new.inputs += [self._rows_node(numbers[at]) for at in rows] + [f"kvtools/found_{numbers[at]}" for at in found]
        new.inputs += controls
        return new

    def _rows_node(self, number: int) -> str:
        halves = self._body.lookups[number].table.dtype in _HALVES
        return f"kvtools/rows_{number}" + "/cast" * halves

    def _placeholders(self, number: int, of_ids: bytes) -> list[Node]:
        """What a lookup's rows, and whether they were found, are fed to. Halves come as float32."""
        table = self._body.lookups[number].table
        of_rows = of_ids if of_ids == UNKNOWN_RANK else of_ids + message((2, message((1, table.dim))))
        name, dtype = f"kvtools/rows_{number}", _rows_type(table)
        nodes = [Node(name, "Placeholder", [], {"dtype": of_type(dtype), "shape": of_shape(of_rows)})]
        if dtype != table.dtype:
            attributes = {"SrcT": of_type(dtype), "DstT": of_type(table.dtype)}
            nodes.append(Node(f"{name}/cast", "Cast", [name], attributes))
        found = {"dtype": of_type(BOOL), "shape": of_shape(of_ids)}
        return [*nodes, Node(f"kvtools/found_{number}", "Placeholder", [], found)]

    def _shape(self, number: int) -> bytes:
        """The shape of a lookup's ids, as far as it is known: that of the input that they are."""
        source = node_of(self._body.lookups[number].plain)
        for _, one in self._signatures():
            for _, info in entries(split(one), 1):
                if [node_of(name) for name in tensor_names(info)] == [source]:
                    return [UNKNOWN_RANK, *messages(split(info), 3)][-1]
        return UNKNOWN_RANK

    def _ids(self, numbers: Iterable[int]) -> tuple[dict[int, str], list[Node]]:
        """The tensor of each lookup's ids, and the nodes that compute them beside those that compute other things,
        too: what needs a function of ids, and what waited for rows."""
        body = self._body
        wanted = {number: body.lookups[number].ids for number in numbers}
        needs = body.needs_for_ids(wanted.values())
        copied: set[str] = set()
        changed = True
        while changed:
            before = len(copied)
            for node in body.nodes:
                if node.name in needs.nodes and self._is_copied(node, copied):
                    copied.add(node.name)
            changed = len(copied) > before
        nodes: list[Node] = []

        def tensor(source: str) -> str:
            name = node_of(source)
            if name in body.calls:
                return f"kvtools/ids/{name}:{place_of(body, source, needs)}"
            return f"kvtools/ids/{source}" if name in copied else source

        for name in [node.name for node in body.nodes if node.name in copied]:
            node = body.by_name[name]
            sources = [s[1:] for s in node.inputs if s.startswith("^")]
            controls = [f"^{tensor(s)}" for s in sources if s in needs.nodes and s not in body.calls]
            data, new = node.data_inputs(), Node("", node.op, [], node.attributes, node.rest)
            if name in body.calls:
                new, kept = self._functions.call_for_ids(node, body.called(node), needs.asked[name])
                data = [data[at] for at in kept]
            inputs = [tensor(source) for source in data] + controls
            nodes.append(Node(f"kvtools/ids/{name}", new.op, inputs, dict(new.attributes), new.rest))
        return {number: tensor(source) for number, source in wanted.items()}, nodes

    def _is_copied(self, node: Node, copied: set[str]) -> bool:
        if node.name in self._body.calls or any(node_of(source) in copied for source in node.inputs):
            return True
        controls = [self._body.by_name[s[1:]] for s in node.inputs if s.startswith("^") and s[1:] in self._body.by_name]
        return not all(self._body.is_before_rows(source) for source in controls)

    def _signature(
        self, name: str, encoded: bytes, nodes: Sequence[Node], ids: Mapping[int, str], shapes: Mapping[int, bytes]
    ) -> tuple[CutSignature, bytes, bytes, list[Node]]:
        """A signature that is given rows, and that of its ids."""
        fields, meta = split(encoded), self._meta
        inputs, outputs = entries(fields, 1), entries(fields, 2)
        live = needed(nodes, [tensor for _, info in outputs for tensor in tensor_names(info)])
        used = [(key, info) for key, info in inputs if any(node_of(tensor) in live for tensor in tensor_names(info))]
        wanted = [at for at in sorted(ids) if {f"kvtools/rows_{at}", f"kvtools/found_{at}"} & live]
        taken = {key for key, _ in inputs}
        lookups: list[CutLookup] = []
        more: list[Node] = []
        of_rows, of_ids = list(used), []
        ids_name = _free(f"{name}_ids", meta.signatures) if wanted else ""
        for at in wanted:
            table = self._body.lookups[at].table
            stem = self._names[table.name]
            suffix = next(s for s in _suffixes() if not {f"{stem}_{what}{s}" for what in _WHAT} & taken)
            called = {what: f"{stem}_{what}{suffix}" for what in _WHAT}
            taken |= set(called.values())
            node = f"kvtools/ids_of/{name}/{called['ids']}"
            more.append(Node(node, "Identity", [ids[at]], {"T": of_type(table.key_type)}))
            of_ids.append((called["ids"], _tensor_info(f"{node}:0", table.key_type, shapes[at])))
            shape = shapes[at]
            if shape != UNKNOWN_RANK:
                shape += message((2, message((1, table.dim))))
            has = {what: f"kvtools/{what}_{at}" in live for what in ("rows", "found")}
            if has["rows"]:
                of_rows.append((called["rows"], _tensor_info(f"kvtools/rows_{at}:0", _rows_type(table), shape)))
            if has["found"]:
                of_rows.append((called["found"], _tensor_info(f"kvtools/found_{at}:0", BOOL, shapes[at])))
            source = node_of(self._body.lookups[at].plain)
            plain = (key for key, info in inputs if [node_of(tensor) for tensor in tensor_names(info)] == [source])
            lookups.append(
                CutLookup(
                    table.name,
                    called["ids"],
                    next(plain, ""),
                    called["rows"] if has["rows"] else "",
                    called["found"] if has["found"] else "",
                    dtype_name(_rows_type(table)),
                )
            )
        for_ids = needed([*nodes, *more], [node.name for node in more])
        asked = [(key, info) for key, info in inputs if any(node_of(t) in for_ids for t in tensor_names(info))]
        cut = CutSignature(
            name,
            ids_name,
            _described(inputs),
            tuple(sorted(key for key, _ in asked)),
            tuple(sorted(key for key, _ in used)),
            _described(outputs),
            tuple(lookups),
        )
        rest = without(fields, 1, 2)
        return cut, _signature_def(of_rows, outputs, rest), _signature_def(asked, of_ids, rest), more

    def _check_whole(self, nodes: Sequence[Node]) -> None:
        """What is left takes nothing of what is gone."""
        there = {node.name for node in nodes}
        for node in nodes:
            gone = next((node_of(source) for source in node.inputs if node_of(source) not in there), None)
            if gone is not None:
                of = [table.name for table in self._functions.tables.values() if gone == table.node(RESOURCES[0])]
                raise CannotCut(node.name, "", of[0] if of else gone, f"'{node.op}' is handed the table as it is")


_WHAT = ("ids", "rows", "found")


def _suffixes() -> Iterable[str]:
    yield ""
    number = 2
    while True:
        yield f"_{number}"
        number += 1


def _free(name: str, taken: Mapping[str, bytes]) -> str:
    return next(f"{name}{suffix}" for suffix in _suffixes() if f"{name}{suffix}" not in taken)


def _rows_type(table: GivenTable) -> int:
    """The type in which rows are fed: halves as float32, as servers of tables answer."""
    return _FLOAT32 if table.dtype in _HALVES else table.dtype


def _infos(signature: bytes) -> list[tuple[str, list[str]]]:
    fields = split(signature)
    return [(key, tensor_names(info)) for number in (1, 2) for key, info in entries(fields, number)]


def _described(infos: Sequence[tuple[str, bytes]]) -> tuple[SplitTensor, ...]:
    found = []
    for name, info in sorted(infos):
        fields = split(info)
        shape = split([UNKNOWN_RANK, *messages(fields, 3)][-1])
        sizes = [number_in(split(dim), 1) for dim in messages(shape, 2)]
        known = None if number_in(shape, 3) else tuple(-1 if size >> 63 else size for size in sizes)
        found.append(SplitTensor(name, dtype_name(number_in(fields, 2)), known))
    return tuple(found)


def _tensor_info(name: str, dtype: int, shape: bytes) -> bytes:
    return message((1, blob(name)), (2, dtype), (3, shape))


def _signature_def(
    inputs: Sequence[tuple[str, bytes]], outputs: Sequence[tuple[str, bytes]], rest: list[Field]
) -> bytes:
    of_both = [(1, key, info) for key, info in inputs] + [(2, key, info) for key, info in outputs]
    # Defaults of inputs that are not taken any more would be refused.
    there = {key for key, _ in inputs}
    kept = [one for one in rest if one[0] != 4 or (isinstance(one[2], bytes) and text(last(split(one[2]), 1)) in there)]
    return message(*((number, message((1, blob(key)), (2, info))) for number, key, info in of_both)) + join(kept)


def _name_apart(node: Node, unique: str) -> None:
    """Give a resource a name in the process that no other model's has: each would be the other's."""
    if "shared_name" in node.attributes and not node.op.startswith(("Variable", "TemporaryVariable")):
        own = node.attrs.text("shared_name") or node.name
        node.attributes = {**node.attributes, "shared_name": of_text(f"{unique}/{own}")}
