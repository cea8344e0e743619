"""A SavedModel's graph with its signatures, collections and saver: meta_graph.proto, rewritten as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtools.dialects.bundle.wire import WireError
from kvtools.errors import CorruptFileError
from kvtools.lookup_model.messages import (
    STRING,
    UNKNOWN_RANK,
    message,
    of_number,
    of_type,
    of_types,
    shape,
)
from kvtools.stock_model.fields import (
    Field,
    blob,
    entries,
    join,
    last,
    messages,
    split,
    text,
    texts,
    without,
)
from kvtools.stock_model.function_body import constant_attributes
from kvtools.stock_model.given_rows import GivenTable
from kvtools.stock_model.graph_def import Graph, Node, functions_called, functions_needed, node_of
from kvtools.stock_model.handles import Restored, restored_tables
from kvtools.stock_model.hash_index import index_functions
from kvtools.stock_model.objects import Objects, constants, object_prefixes, rewrite_objects
from kvtools.stock_model.older_tensorflow import for_older
from kvtools.stock_model.op_table import HANDLES
from kvtools.stock_model.plain_ops import strings
from kvtools.stock_model.prune import needed
from kvtools.stock_model.rewrite import Rewriter, UnsupportedOperation
from kvtools.stock_model.table import Handle, StockTable
from kvtools.stock_model.table_nodes import initialize_nodes, resource_nodes, restore_nodes

_INFO, _GRAPH, _SAVER, _COLLECTION, _SIGNATURE, _ASSET, _OBJECTS = 1, 2, 3, 4, 5, 6, 7
_DEVICE, _MACHINE = 4, ("job:", "replica:", "task:")
_MAIN_OP = "saved_model_main_op"
_INIT_SIGNATURE = "__saved_model_init_op"
_INIT_COLLECTIONS = (_MAIN_OP, "legacy_init_op")
_CONTEXTS = ("cond_context", "while_context")
_INIT, _RESTORE_ALL, _SAVED = "kvtools/init", "kvtools/restore_all", "kvtools/saved"


DAMAGED = (ValueError, KeyError, IndexError, AssertionError, RecursionError)
"""What reading, or rewriting, a graph that contradicts itself raises."""


def malformed(file: Path, error: Exception, what: str) -> CorruptFileError:
    """Return the error for a graph that one of `DAMAGED` tells of; `what` is to be saved again."""
    told = str(error) if isinstance(error, WireError) else f"{type(error).__name__} {error}"
    return CorruptFileError(f"reading '{file}': got malformed bytes ({told}); save the {what} again")


@dataclass
class MetaGraph:
    """A MetaGraphDef, taken apart.

    Attributes:
        tags: by which it is chosen.
        graph: its graph.
        signatures: its signatures, encoded.
        objects: its `SavedObjectGraph`; empty for a graph of TensorFlow 1.
    """

    fields: list[Field]
    tags: tuple[str, ...]
    graph: Graph
    signatures: dict[str, bytes]
    collections: dict[str, bytes]
    saver: list[Field]
    assets: list[bytes]
    objects: bytes

    @classmethod
    def decode(cls, data: bytes) -> MetaGraph:
        """Decode a MetaGraphDef."""
        fields = split(data)
        return cls(
            fields,
            tuple(texts(split(last(fields, _INFO)), 4)),
            Graph.decode(last(fields, _GRAPH)),
            dict(entries(fields, _SIGNATURE)),
            dict(entries(fields, _COLLECTION)),
            split(last(fields, _SAVER)),
            messages(fields, _ASSET),
            last(fields, _OBJECTS),
        )

    def encode(self) -> bytes:
        """Encode a MetaGraphDef."""
        rest = without(self.fields, _INFO, _GRAPH, _SAVER, _COLLECTION, _SIGNATURE, _ASSET, _OBJECTS)
        new: list[Field] = [(_INFO, 2, last(self.fields, _INFO)), (_GRAPH, 2, self.graph.encode())]
        new += [(_SAVER, 2, join(self.saver))] if self.saver else []
        for number, of in ((_COLLECTION, self.collections), (_SIGNATURE, self.signatures)):
            new += [(number, 2, message((1, blob(key)), (2, value))) for key, value in of.items()]
        new += [(_ASSET, 2, asset) for asset in self.assets]
        new += [(_OBJECTS, 2, self.objects)] if self.objects else []
        return join(new + rest)

    @property
    def tensorflow(self) -> str:
        """The version of TensorFlow that saved it; empty if it does not say."""
        return text(last(split(last(self.fields, _INFO)), 5))


@dataclass(frozen=True)
class Tables:
    """The tables of a model: by the tensors that they are restored from, and how many parts the graph has of each."""

    by_prefix: Mapping[str, StockTable] = field(default_factory=dict)
    kept_tensors: frozenset[str] | None = None
    """The tensors of the checkpoint that the new one has, too."""

    def handle(self, restored: Sequence[Restored], read_only: bool) -> Handle | None:
        """Return what a handle that is restored like this stands for; None if it is no table of the checkpoint."""
        for one in restored:
            table = self.by_prefix.get(one.prefix)
            if table is not None:
                return Handle(table, one.part, read_only)
        return None

    @property
    def all(self) -> list[StockTable]:
        """Each table once that the model is to hold."""
        held = {table for table in self.by_prefix.values() if not isinstance(table, GivenTable)}
        return sorted(held, key=lambda table: table.number)

    @property
    def some_given(self) -> bool:
        """Whether rows of some are given from outside."""
        return any(isinstance(table, GivenTable) for table in self.by_prefix.values())


@dataclass(frozen=True)
class Changed:
    """A MetaGraphDef as it is now, what the checkpoint says of its objects, and which functions were left out.

    `not_zeros` are the numbers of tables whose missing keys some lookup answers with other rows than zeros.
    """

    meta_graph: bytes
    tracked: bytes
    left_out: Mapping[str, UnsupportedOperation]
    not_zeros: frozenset[int]


def rewrite_meta_graph(data: bytes, tables: Tables, tracked: bytes, is_stock: Callable[[str], bool]) -> Changed:
    """Rewrite a MetaGraphDef.

    Args:
        data: encoded.
        tables: what its handles are restored from.
        tracked: the `TrackableObjectGraph` of its checkpoint; empty if there is none.
        is_stock: tells whether stock TensorFlow has an operation.

    Raises:
        UnsupportedOperation: what is served has an operation that cannot be rewritten.
    """
    meta = MetaGraph.decode(data)
    graph = meta.graph
    arguments = {name: len(function.arguments) for name, function in graph.library.items()}
    restored = restored_tables(graph)
    handles: dict[str, Handle] = {}
    for node in graph.nodes:
        if node.op not in HANDLES:
            continue
        handle = tables.handle(restored.get(node.name, []), node.attrs.boolean("read_only"))
        if handle is not None:
            handles[node.name] = handle
    saver = _Saver(meta.saver)
    serving = serving_nodes(meta)
    lenient = needed(graph.nodes, saver.roots) - serving
    kept = serving | lenient
    tables_own = {node.name for node in graph.nodes if node.op in HANDLES}
    kept |= needed(graph.nodes, variable_roots(meta.collections, kept - tables_own))
    kept |= needed(graph.nodes, constants(meta.objects))
    for node in graph.nodes:
        if node.op in HANDLES and node.name in serving and node.name not in handles:
            raise UnsupportedOperation(node, "", "the model's variables have no table that it is restored from")
    loops = any(node.op in ("Enter", "RefEnter") for node in graph.nodes if node.name in serving)
    rewriter = Rewriter(graph.library, is_stock, tables.kept_tensors, inlined=not loops)
    nodes = rewriter.graph([node for node in graph.nodes if node.name in kept], handles, sorted(lenient))
    nodes, gone = _left(nodes, kept)
    all_tables = tables.all
    for table in all_tables:
        nodes += resource_nodes(table)
        for function in index_functions(table):
            rewriter.functions[function.name] = function
    nodes += _initialize(meta, all_tables)
    nodes += saver.rewritten(all_tables, gone, saves_all=rewriter.saves_all and not tables.some_given)
    meta.saver = saver.fields
    objects = Objects(b"", tracked)
    if meta.objects:
        of_objects: dict[int, Handle] = {}
        for number, (prefix, part) in object_prefixes(meta.objects, tracked, tables.by_prefix).items():
            if prefix in tables.by_prefix:
                of_objects[number] = Handle(tables.by_prefix[prefix], part, True)
        objects = rewrite_objects(meta.objects, tracked, of_objects, all_tables, rewriter, arguments)
        if tracked:
            _replace_constants(nodes, tracked, objects.tracked)
    meta.objects = objects.saved
    wanted = functions_called(nodes, rewriter.functions)
    wanted += [name for name, _ in entries(split(meta.objects), 2)]
    needed_functions = functions_needed(rewriter.functions, wanted)
    graph.nodes = nodes
    graph.library = {name: f for name, f in rewriter.functions.items() if name in needed_functions}
    graph.library_rest = []  # gradients, of functions that are not trained
    for _, node in graph.all_nodes():
        node.attributes = for_older(node)
        node.rest = _on_any_machine(node.rest)
    meta.collections = _collections(meta.collections, {node.name for node in nodes})
    meta.fields = [(_INFO, 2, _info(last(meta.fields, _INFO), is_stock)), *without(meta.fields, _INFO)]
    return Changed(meta.encode(), objects.tracked, objects.left_out, frozenset(rewriter.not_zeros))


def restored_when_served(meta: MetaGraph) -> list[Restored]:
    """Return what the tables are restored from that a graph needs: of a model with objects all, else what is served."""
    restored = restored_tables(meta.graph)
    serving = serving_nodes(meta)
    return [one for node, of in restored.items() if meta.objects or node in serving for one in of]


def serving_nodes(meta: MetaGraph) -> set[str]:
    """Return the names of the nodes that the signatures of a graph need, and what is run when it is loaded."""
    return needed(meta.graph.nodes, _serving_roots(meta))


def served_nodes(meta: MetaGraph) -> list[Node]:
    """Return the nodes that a graph needs, of functions, too: of a model with objects all, else what is served."""
    if meta.objects:
        return [node for _, node in meta.graph.all_nodes()]
    serving = serving_nodes(meta)
    nodes = [node for node in meta.graph.nodes if node.name in serving]
    library = meta.graph.library
    called = functions_needed(library, functions_called(nodes, library))
    return [*nodes, *(node for name in called for node in library[name].nodes)]


def _on_any_machine(rest: list[Field]) -> list[Field]:
    """A node's fields without the job and task that it trained on, which no server has; its device there stays."""
    places = text(last(rest, _DEVICE)).split("/")
    left = "/".join(place for place in places if not place.startswith(_MACHINE))
    new: list[Field] = [(_DEVICE, 2, blob(left))] if left else []
    return without(rest, _DEVICE) + new


def _left(nodes: list[Node], kept: Iterable[str]) -> tuple[list[Node], set[str]]:
    """The nodes, and the names of those that have gone."""
    there = {node.name for node in nodes}
    return nodes, set(kept) - there


# ---- What is served ----


def _serving_roots(meta: MetaGraph) -> list[str]:
    return [name for signature in meta.signatures.values() for name in _tensors_of(signature)] + loading_roots(meta)


def loading_roots(meta: MetaGraph) -> list[str]:
    """Return what a graph needs to be loaded, beside what restores it: what initializes it, and its assets."""
    roots: list[str] = []
    for name in _INIT_COLLECTIONS:
        roots += _nodes_of(meta.collections.get(name, b""))
    for asset in meta.assets:
        roots.append(text(last(split(last(split(asset), 1)), 1)))
    return roots


def _tensors_of(signature: bytes) -> list[str]:
    fields = split(signature)
    return [name for number in (1, 2) for _, info in entries(fields, number) for name in tensor_names(info)]


def tensor_names(info: bytes) -> list[str]:
    """The names in a TensorInfo: of a tensor, or of what a sparse or composite one is made of."""
    fields = split(info)
    names = [text(value) for value in messages(fields, 1)]
    for sparse in messages(fields, 4):
        names += [text(value) for number in (1, 2, 3) for value in messages(split(sparse), number)]
    for composite in messages(fields, 5):
        names += [name for component in messages(split(composite), 2) for name in tensor_names(component)]
    return names


def _nodes_of(collection: bytes) -> list[str]:
    return texts(split(last(split(collection), 1)), 1)


# ---- Variables of collections ----

_VARIABLE_FIELDS = (1, 2, 3, 6)
"""A VariableDef's name, and those of its initializer, of what reads it, and of its initial value."""


def _variables(collection: bytes) -> list[bytes] | None:
    """The VariableDefs of a collection; None if it has others."""
    found = messages(split(collection), 2)
    return messages(split(found[-1]), 1) if found else None


def _variable_nodes(variable: bytes) -> list[str]:
    fields = split(variable)
    return [node_of(text(value)) for number in _VARIABLE_FIELDS for value in messages(fields, number)]


def nodes_of_variables(collections: Mapping[str, bytes]) -> list[str]:
    """Return the nodes that collections name for their variables."""
    found = [_variables(collections.get(name, b"")) or () for name in _OF_VARIABLES]
    return [node for variables in found for variable in variables for node in _variable_nodes(variable)]


_OF_VARIABLES = (
    "variables",
    "trainable_variables",
    "local_variables",
    "model_variables",
    "global_step",
    "metric_variables",
)


def variable_roots(collections: Mapping[str, bytes], kept: set[str]) -> list[str]:
    """What collections say of variables that are kept: TensorFlow wants it there when it imports the graph."""
    roots: list[str] = []
    for name in _OF_VARIABLES:
        for variable in _variables(collections.get(name, b"")) or ():
            if node_of(text(last(split(variable), 1))) in kept:
                roots += _variable_nodes(variable)
    return roots


def _collections(collections: Mapping[str, bytes], there: set[str]) -> dict[str, bytes]:
    """Collections without what is gone."""
    left: dict[str, bytes] = {}
    for name, collection in collections.items():
        if name in _CONTEXTS:
            continue  # only gradients need them
        fields = split(collection)
        if messages(fields, 1):
            nodes = [node for node in _nodes_of(collection) if node_of(node) in there]
            if nodes:
                left[name] = message((1, message(*((1, blob(node)) for node in nodes))))
        elif name in _OF_VARIABLES:
            kept = [v for v in _variables(collection) or () if all(node in there for node in _variable_nodes(v))]
            if kept:
                left[name] = message((2, message(*((1, variable) for variable in kept))))
        else:
            left[name] = collection
    return left


# ---- Tables ----


def _initialize(meta: MetaGraph, tables: Sequence[StockTable]) -> list[Node]:
    """What fills the indexes, after what the model does already when it is loaded; changes `meta` so that it is run."""
    before = [node for name in _INIT_COLLECTIONS for node in _nodes_of(meta.collections.get(name, b""))]
    before += _tensors_of(meta.signatures.get(_INIT_SIGNATURE, b""))
    nodes = initialize_nodes(tables)
    controls = [f"^{node_of(node)}" for node in dict.fromkeys(before)] + [f"^{node.name}" for node in nodes]
    nodes.append(Node(_INIT, "NoOp", controls, {}))
    meta.collections = {key: value for key, value in meta.collections.items() if key not in _INIT_COLLECTIONS}
    meta.collections[_MAIN_OP] = message((1, message((1, _INIT))))
    if not meta.objects and _INIT_SIGNATURE not in meta.signatures:
        return nodes  # a model of TensorFlow 1: one that is loaded by TensorFlow 2 would have a function of this name
    output = message((1, _INIT), (3, UNKNOWN_RANK))
    meta.signatures[_INIT_SIGNATURE] = message((2, message((1, _INIT_SIGNATURE), (2, output))))
    return nodes


class _Saver:
    """A SaverDef: the tensor that takes a path, the one to fetch for saving, and the operation that restores."""

    def __init__(self, fields: list[Field]) -> None:
        self.fields = fields
        self._filename, self._save, self._restore = (text(last(fields, number)) for number in (1, 2, 3))

    @property
    def roots(self) -> list[str]:
        return [name for name in (self._filename, self._save, self._restore) if name]

    def rewritten(self, tables: Sequence[StockTable], gone: set[str], *, saves_all: bool) -> list[Node]:
        """Return the nodes that restore tables, after what restores the rest, and change the SaverDef for them."""
        nodes: list[Node] = []
        if not self._filename or node_of(self._filename) in gone:
            self._filename = "kvtools/filename:0"
            nodes.append(
                Node("kvtools/filename", "Placeholder", [], {"dtype": of_type(STRING), "shape": message((7, shape()))})
            )
        of_tables, restored = restore_nodes(self._filename.removesuffix(":0"), tables)
        nodes += of_tables
        done = [f"^{node_of(self._restore)}"] if self._restore and node_of(self._restore) not in gone else []
        done += [f"^{name}" for name in restored]
        nodes.append(Node(_RESTORE_ALL, "NoOp", done, {}))
        if not saves_all or not self._save or node_of(self._save) in gone:
            nodes += self._refusal()
            self._save = f"{_SAVED}:0"
        new: list[Field] = [(1, 2, blob(self._filename)), (2, 2, blob(self._save)), (3, 2, blob(_RESTORE_ALL))]
        version: list[Field] = [] if self.fields else [(7, 0, 2)]
        self.fields = new + without(self.fields, 1, 2, 3) + version
        return nodes

    def _refusal(self) -> list[Node]:
        """What saves a model whose own way to be saved is gone: an error."""
        why = strings(["this model was exported to be served: what saved it is not in it"])
        return [
            Node("kvtools/never", "Const", [], constant_attributes(np.asarray(False))),
            Node("kvtools/why", "Const", [], why),
            Node(
                "kvtools/refuse",
                "Assert",
                ["kvtools/never", "kvtools/why"],
                {"T": of_types([STRING]), "summarize": of_number(3)},
            ),
            Node(_SAVED, "Identity", [self._filename.removesuffix(":0"), "^kvtools/refuse"], {"T": of_type(STRING)}),
        ]


def _replace_constants(nodes: Sequence[Node], old: bytes, new: bytes) -> None:
    """What saves the model writes its objects, too: those that it has now."""
    for node in nodes:
        if node.op != "Const" or "value" not in node.attributes:
            continue
        tensor = split(last(split(node.attributes["value"]), 8))
        if messages(tensor, 8) == [old]:
            changed = [*without(tensor, 8), (8, 2, new)]
            node.attributes = {**node.attributes, "value": message((8, join(changed)))}


def _info(info: bytes, is_stock: Callable[[str], bool]) -> bytes:
    """The MetaInfoDef with the definitions of stock operations only."""
    fields = split(info)
    changed: list[Field] = []
    for number, kind, value in fields:
        if number == 2 and isinstance(value, bytes):
            kept = [one for one in split(value) if isinstance(one[2], bytes) and is_stock(text(last(split(one[2]), 1)))]
            value = join(kept)
        changed.append((number, kind, value))
    return join(changed)
