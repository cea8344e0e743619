"""The graph of a TensorFlow 1 training session, made one to be served: signatures, and what fills its variables.

What comes out is what a `SavedModelBuilder` would have written of the same graph: its signatures begin at placeholders,
its saver restores the dense variables that they need, and what fills their lookup tables is run when it is loaded. What
they do not need is left where it is: it goes when the graph is rewritten (`meta_graph.py`).
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtools.dialects.bundle.dtypes import dtype_name, number_named, numpy_dtype
from kvtools.lookup_model.messages import (
    BOOL,
    RESOURCE,
    STRING,
    UNKNOWN_RANK,
    message,
    of_bool,
    of_shape,
    of_text,
    of_type,
    of_types,
    shape,
)
from kvtools.stock_model.attributes import Attributes
from kvtools.stock_model.fields import (
    Field,
    blob,
    entries,
    join,
    last,
    messages,
    number_in,
    split,
    text,
    texts,
    without,
)
from kvtools.stock_model.function_body import constant_attributes
from kvtools.stock_model.graph_def import Node, functions_needed, node_of, tensor_name
from kvtools.stock_model.meta_graph import MetaGraph, variable_roots
from kvtools.stock_model.op_table import BEGUN_IN_DEEPREC, REFUSED, RESTORES
from kvtools.stock_model.plain_ops import strings
from kvtools.stock_model.prune import needed
from kvtools.stock_model.restores import Restores

DEFAULT_SIGNATURE = "serving_default"
_METHOD = "tensorflow/serving/predict"
_INFO, _OPS_OF_INFO, _TAGS = 1, 2, 4
_FILLERS = "table_initializer"
_MAIN_OP, _FILL_TABLES, _RESTORE = "saved_model_main_op", "kvtools/fill_tables", "kvtools/restore_variables"
_FILENAME = "kvtools/restore_from"
_PLACEHOLDERS = frozenset({"Placeholder", "PlaceholderV2"})
_VARIABLES = frozenset({"Variable", "VariableV2", "VarHandleOp"})
_LOOKUP_TABLES = frozenset({"HashTable", "HashTableV2"})
_FILES = {"InitializeTableFromTextFile": 1, "InitializeTableFromTextFileV2": 1}
"""What fills a table from a file -> which of its inputs is the file's name."""
_READS_TRAINING_DATA = ("IteratorGetNext", "QueueDequeue", "ReaderRead", "Unstage", "MapUnstage")
_MAY_INSERT = frozenset({"KvTableGather", "KvTableGatherMany", "KvTablePool"})
_PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_REF = 100
"""What is added to the number of a type where a tensor is a reference."""
_NEAR = 5
_DEVICE, _COLOCATED = 4, "_class"
_VARIABLE_NAME, _INITIALIZER, _INITIAL_VALUE = 1, 2, 6
_OF_VARIABLES = ("variables", "trainable_variables")


class UnknownName(Exception):
    """A tensor, or a signature, that the graph has not: why, with those there are."""


class NotServable(Exception):
    """What is to be served needs something that a server does not have: what, and the way out."""


@dataclass(frozen=True)
class Wanted:
    """What to serve: a signature of the graph, or tensors by the names that requests and answers call them.

    Attributes:
        signature: the graph's signature; empty where tensors are given.
        inputs, outputs: tensors, by the names that they get.
        values: numbers, words, true or false, for tensors that no request feeds.
        read_only: lookups that insert missing keys, as in training, do not, and answer them with zeros.
    """

    signature: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    read_only: bool = False


@dataclass(frozen=True)
class Served:
    """A graph to be served.

    Attributes:
        meta: the graph, as of a SavedModel.
        tensors: the dense tensors of the checkpoint that are restored.
        files: files of words that fill tables: their names where it is served, and where they were.
        fed: per signature and input, the tensor of the original graph; `fetched` the same of outputs.
    """

    meta: MetaGraph
    tensors: frozenset[str]
    files: Mapping[str, str]
    fed: Mapping[str, Mapping[str, str]]
    fetched: Mapping[str, Mapping[str, str]]


def make_read_only(meta: MetaGraph) -> None:
    """Change the lookups of a graph, and of its functions, that insert missing keys into those that give zeros."""
    for _, node in meta.graph.all_nodes():
        if node.op in _MAY_INSERT and node.attrs.text("mode", "train") == "train":
            node.attributes = {**node.attributes, "mode": of_text("zeros")}
        elif node.op in REFUSED:
            # The handle and the keys, without how often these came.
            counts = node.data_inputs()[2:]
            node.op, node.inputs = REFUSED[node.op], [source for source in node.inputs if source not in counts]


def only_what_runs(meta: MetaGraph, tensors: Iterable[str]) -> None:
    """Leave of a training graph what these tensors need, what restores a checkpoint, and what fills lookup tables."""
    fillers = [name for name in texts(split(last(split(meta.collections.get(_FILLERS, b"")), 1)), 1)]
    saver = [text(last(meta.saver, number)) for number in (1, 3)]
    kept = needed(meta.graph.nodes, [name for name in (*tensors, *fillers, *saver) if name])
    meta.graph.nodes = [node for node in meta.graph.nodes if node.name in kept]
    _forget_places(meta)
    meta.collections = {name: value for name, value in meta.collections.items() if name == _FILLERS}


def served_graph(meta: MetaGraph, wanted: Wanted, dtypes: Mapping[str, int]) -> Served:
    """Return a training graph as one to be served.

    Args:
        meta: the training graph; it is changed.
        wanted: what to serve.
        dtypes: the dense tensors of the checkpoint, and the number of the type of each.

    Raises:
        UnknownName: there is no such tensor, or signature.
        NotServable: an output needs what is no input, a variable that the checkpoint lacks, or Python.
    """
    return _Training(meta, dtypes).served(wanted)


class _Training:
    """A training graph while it is changed."""

    def __init__(self, meta: MetaGraph, dtypes: Mapping[str, int]) -> None:
        self._meta, self._dtypes = meta, dtypes
        self._nodes = {node.name: node for node in meta.graph.nodes}
        self._moved: dict[str, str] = {}
        self._restores = Restores(self._nodes)
        encoded = messages(split(last(split(last(meta.fields, _INFO)), _OPS_OF_INFO)), 1)
        self._definitions = {text(last(split(one), 1)): split(one) for one in encoded}

    def served(self, wanted: Wanted) -> Served:
        meta = self._meta
        _forget_places(meta)
        for tensor, value in wanted.values.items():
            self._check_there(tensor)
            self._replace(tensor_name(tensor), self._constant(tensor, value))
        given = self._signatures(wanted)
        fed = {name: dict(_names_in(signature, 1)) for name, signature in given.items()}
        fetched = {name: dict(_names_in(signature, 2)) for name, signature in given.items()}
        for tensor in {tensor: None for of in (*fed.values(), *fetched.values()) for tensor in of.values()}:
            self._check_there(tensor)
        cut = {tensor_name(tensor) for of in fed.values() for tensor in of.values()}
        moved = {tensor: self._placeholder(tensor) for tensor in sorted(cut)}
        self._rewire()
        meta.signatures = {name: _renamed(value, moved) for name, value in given.items()}
        info = [*without(split(last(meta.fields, _INFO)), _TAGS), (_TAGS, 2, b"serve")]
        meta.fields, meta.tags = [(_INFO, 2, join(info)), *without(meta.fields, _INFO)], ("serve",)
        roots = [tensor for value in meta.signatures.values() for _, tensor in _names_in(value, 2)]
        inputs = {node_of(tensor) for tensor in moved.values()}
        serving, fillers = self._serving(roots)
        self._check_servable(serving, inputs)
        files = self._assets(serving)
        meta.graph.nodes.append(Node(_FILL_TABLES, "NoOp", [f"^{name}" for name in fillers], {}))
        self._leave_out_other_restores()
        tensors, writers = self._restored(serving)
        kept = {_MAIN_OP: message((1, message((1, _FILL_TABLES))))}
        for name in _OF_VARIABLES:
            variables = self._variable_defs(name, writers)
            if variables:
                kept[name] = message((2, message(*((1, one) for one in variables))))
        meta.collections, meta.objects = kept, b""
        self._leave_out_the_rest(serving | inputs, kept)  # signatures name inputs that no output needs, too
        return Served(meta, frozenset(tensors), files, fed, fetched)

    # ---- Tensors ----

    def _check_there(self, tensor: str) -> None:
        name, _, number = tensor.partition(":")
        node = self._nodes.get(name)
        if node is None:
            raise UnknownName(f"there is no tensor '{tensor}' in the graph{self._near(name)}")
        if not number.isdecimal() and number:
            raise UnknownName(f"'{tensor}' is no name of a tensor: they are NODE or NODE:NUMBER")
        outputs = self._outputs(node)
        if outputs is not None and int(number or 0) >= len(outputs):
            raise UnknownName(f"there is no tensor '{tensor}': node '{name}' ({node.op}) has {len(outputs)} outputs")
        if self._is_in_loop(name):
            raise NotServable(f"tensor '{tensor}' is inside a loop, which gives it many times: name one outside")

    def _is_in_loop(self, name: str) -> bool:
        """Whether a node is between the entry to a loop of version 1 and its exit."""
        waiting, seen = [name], set[str]()
        while waiting:
            node = self._nodes.get(waiting.pop())
            if node is None or node.name in seen or node.op in ("Exit", "RefExit"):
                continue
            if node.op in ("Enter", "RefEnter"):
                return True
            seen.add(node.name)
            waiting += map(node_of, node.inputs)
        return False

    def _near(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._nodes, _NEAR, 0.6)
        near += [one for one in self._nodes if one.rpartition("/")[2] == name.rpartition("/")[2] and one not in near]
        told = f"; near it are {_listed(near[:_NEAR])}" if near else ""
        placeholders = [node.name for node in self._nodes.values() if node.op.startswith("Placeholder")]
        return told + (f"; its placeholders are {_listed(placeholders)}" if placeholders else "; it has no placeholder")

    def _outputs(self, node: Node) -> list[int] | None:
        """The types of a node's outputs; None where the graph does not say."""
        found: list[int] = []
        definition = self._definitions.get(node.op)
        if node.op in self._meta.graph.library:
            return [output.dtype for output in self._meta.graph.library[node.op].outputs]
        if definition is None:
            return None
        defaults = {text(last(one, 1)): last(one, 3) for one in map(split, messages(definition, 4)) if messages(one, 3)}
        attrs = Attributes({**defaults, **node.attributes})
        for output in map(split, messages(definition, 3)):
            count = attrs.number(text(last(output, 5))) if messages(output, 5) else 1
            ref = _REF if number_in(output, 16) else 0
            if messages(output, 6):
                found += attrs.types(text(last(output, 6)))
            elif messages(output, 4):
                found += [attrs.type(text(last(output, 4))) + ref] * count
            else:
                found += [number_in(output, 3) + ref] * count
        return found

    def _type(self, tensor: str) -> int:
        """The type of a tensor; that of a reference is the one that it refers to."""
        name, _, number = tensor.partition(":")
        node = self._nodes[name]
        types = self._outputs(node)
        if types is not None:
            return types[int(number or 0)] % _REF
        for attribute in ("dtype", "T", "Tparams", "out_type", "DstT"):
            if attribute in node.attributes:
                return node.attrs.type(attribute)
        raise NotServable(
            f"the graph does not say of which type tensor '{tensor}' is: it has no definition of '{node.op}'"
        )

    def _shape(self, tensor: str) -> bytes:
        name, _, number = tensor.partition(":")
        node = self._nodes[name]
        if node.op.startswith("Placeholder") and "shape" in node.attributes:
            known = node.attrs.shape("shape")
            # A placeholder without a shape was written as a scalar by old versions: `_output_shapes` knows better.
            if known or "_output_shapes" not in node.attributes:
                return known
        shapes = node.attrs.shapes("_output_shapes")
        return shapes[int(number or 0)] if int(number or 0) < len(shapes) else UNKNOWN_RANK

    def _info(self, tensor: str) -> bytes:
        dtype = self._type(tensor)
        if dtype in (RESOURCE, number_named("variant")):
            raise NotServable(
                f"tensor '{tensor}' is a {dtype_name(dtype)}, which no request holds: name what is read from it"
            )
        return message((1, blob(tensor_name(tensor))), (2, dtype), (3, self._shape(tensor)))

    def _placeholder(self, tensor: str) -> str:
        """Put a placeholder in the place of a tensor; return its name."""
        node = self._nodes[node_of(tensor)]
        if node.op in _PLACEHOLDERS:
            return tensor
        attributes = {"dtype": of_type(self._type(tensor)), "shape": of_shape(self._shape(tensor))}
        return self._replace(tensor, Node("", "Placeholder", [], attributes))

    def _constant(self, tensor: str, value: str) -> Node:
        """A node that is a number, a word, or true or false."""
        dtype = self._type(tensor)
        if dtype == STRING:
            encoded = message((1, STRING), (2, shape()), (8, blob(value)))
            return Node("", "Const", [], {"dtype": of_type(STRING), "value": message((8, encoded))})
        real = numpy_dtype(dtype)
        try:
            if dtype == BOOL:
                number = np.asarray({"true": True, "false": False, "1": True, "0": False}[value.lower()])
            elif real is None:
                raise ValueError
            else:
                number = np.asarray(float(value) if real.kind not in "iu" else int(value)).astype(real)
                if real.kind in "iu" and int(number) != int(value):
                    raise ValueError
        except (ValueError, KeyError, OverflowError, TypeError):
            raise NotServable(
                f"tensor '{tensor}' is of type {dtype_name(dtype)}: '{value}' is no value of it"
            ) from None
        return Node("", "Const", [], constant_attributes(number))

    def _replace(self, tensor: str, by: Node) -> str:
        """Put another node in the place of a tensor; return what it is called there."""
        name = self._free_name(f"kvtools/fed/{tensor.replace(':', '_')}")
        self._moved |= {tensor_name(tensor): name, tensor.removesuffix(":0"): name, f"^{node_of(tensor)}": f"^{name}"}
        self._add(Node(name, by.op, list(by.inputs), by.attributes))
        return f"{name}:0"

    def _rewire(self) -> None:
        """Make the nodes take what was put in the place of others."""
        for node in self._nodes.values():
            node.inputs = [self._moved.get(source, source) for source in node.inputs]

    def _free_name(self, wanted: str) -> str:
        tries = itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(1)))
        return next(name for name in tries if name not in self._nodes)

    def _add(self, node: Node) -> None:
        self._nodes[node.name] = node
        self._meta.graph.nodes.append(node)

    # ---- Signatures ----

    def _signatures(self, wanted: Wanted) -> dict[str, bytes]:
        there = {name: value for name, value in self._meta.signatures.items() if not name.startswith("__saved_model")}
        if wanted.outputs:
            for tensor in (*wanted.inputs.values(), *wanted.outputs.values()):
                self._check_there(tensor)
            outputs = {name: self._readable(tensor) for name, tensor in wanted.outputs.items()}
            fields = [
                (number, message((1, blob(name)), (2, self._info(tensor))))
                for number, of in ((1, wanted.inputs), (2, outputs))
                for name, tensor in of.items()
            ]
            return {DEFAULT_SIGNATURE: message(*fields, (3, _METHOD))}
        if not there:
            raise UnknownName("the graph has no signature: say --input NAME=TENSOR and --output NAME=TENSOR")
        if not wanted.signature:
            return there
        if wanted.signature not in there:
            raise UnknownName(
                f"there is no signature '{wanted.signature}' in the graph; it has {_listed(sorted(there))}"
            )
        one = there[wanted.signature]
        return {wanted.signature: one, DEFAULT_SIGNATURE: one}

    def _readable(self, tensor: str) -> str:
        """A tensor, or where it is a reference, one that is what it refers to."""
        node = self._nodes[node_of(tensor)]
        types = self._outputs(node)
        number = int(tensor.partition(":")[2] or 0)
        if types is None or types[number] < _REF:
            return tensor
        name = self._free_name(f"kvtools/read/{tensor.replace(':', '_')}")
        attributes = {"T": of_type(types[number] % _REF)}
        if "_output_shapes" in node.attributes:
            attributes["_output_shapes"] = message((1, message((7, self._shape(tensor)))))
        self._add(Node(name, "Identity", [tensor.removesuffix(":0")], attributes))
        return f"{name}:0"

    # ---- What is served ----

    def _serving(self, roots: Sequence[str]) -> tuple[set[str], list[str]]:
        """The nodes that are served, and those among them that fill lookup tables."""
        all_fillers = [node for node in map(self._nodes.get, self._listed_nodes(_FILLERS)) if node is not None]
        fillers: list[str] = []
        while True:
            serving = needed(self._meta.graph.nodes, [*roots, *fillers])
            more = [
                node.name
                for node in _leaves(all_fillers, self._nodes)
                if node.name not in fillers
                and node.data_inputs()
                and self._restores.source(node.data_inputs()[0]).name in serving
            ]
            if not more:
                return serving, fillers
            fillers += more

    def _listed_nodes(self, collection: str) -> list[str]:
        listed = texts(split(last(split(self._meta.collections.get(collection, b"")), 1)), 1)
        return [node_of(name) for name in listed]

    def _given(self, node: Node, serving: set[str]) -> list[str]:
        """The tensors that a node gives; of a variant, such as a sparse tensor, those that are read from it."""
        found: list[str] = []
        for at, dtype in enumerate(self._outputs(node) or [0]):
            if dtype != number_named("variant"):
                found.append(f"{node.name}:{at}")
                continue
            variant = f"{node.name}:{at}" if at else node.name
            for reader in self._nodes.values():
                if reader.name in serving and variant in reader.data_inputs():
                    found += [f"{reader.name}:{out}" for out in range(len(self._outputs(reader) or [0]))]
        return found

    def _check_servable(self, serving: set[str], inputs: set[str]) -> None:
        library = self._meta.graph.library
        called = functions_needed(
            library, (name for one in serving for name in (self._nodes[one].op, *self._nodes[one].functions()))
        )
        for name in sorted(serving):
            node = self._nodes[name]
            if node.op in _PLACEHOLDERS and name not in inputs:
                raise NotServable(
                    f"an output depends on placeholder '{name}', which is no input: add --input NAME={name}:0, or"
                    f" give it a value with --feed {name}=VALUE"
                )
            if node.op.startswith(_READS_TRAINING_DATA):
                raise NotServable(
                    f"an output depends on operation '{node.op}' (node '{name}'), which reads what is trained with:"
                    f" name what it gives as inputs, of {_listed(self._given(node, serving))}"
                )
        for function, nodes in [
            ("", [self._nodes[name] for name in sorted(serving)]),
            *((f, library[f].nodes) for f in sorted(called)),
        ]:
            for node in nodes:
                if node.op in _PYTHON:
                    where = f"node '{node.name}'" + (f" of function '{function}'" if function else "")
                    raise NotServable(
                        f"an output depends on operation '{node.op}' ({where}), which runs Python of the process that"
                        " trained: name what it gives as an input"
                    )

    def _assets(self, serving: set[str]) -> dict[str, str]:
        """Make the names of files that are read when the graph is loaded those of assets."""
        constants = dict.fromkeys(name for name in self._listed_nodes("asset_filepaths") if name in serving)
        for name in sorted(serving):
            node = self._nodes[name]
            if node.op in _FILES:
                source = self._restores.source(node.data_inputs()[_FILES[node.op]])
                if source.op == "Const":
                    constants[source.name] = None
        files: dict[str, str] = {}
        assets: list[bytes] = []
        for name in constants:
            node = self._nodes[name]
            tensor = split(last(split(node.attributes.get("value", b"")), 8))
            path = text(last(tensor, 8))
            if node.op != "Const" or not path:
                continue
            short = path.rpartition("/")[2]
            taken = itertools.chain([short], (f"{number}_{short}" for number in itertools.count(2)))
            asset = next(one for one in taken if files.get(one, path) == path)
            files[asset] = path
            value = message((8, join([*without(tensor, 8), (8, 2, blob(asset))])))
            node.attributes = {**node.attributes, "value": value}
            assets.append(message((1, message((1, blob(f"{name}:0")))), (2, blob(asset))))
        self._meta.assets = assets
        return files

    # ---- What is restored ----

    def _restored(self, serving: set[str]) -> tuple[set[str], dict[str, str]]:
        """Make a saver of the dense variables that are served; return their tensors, and what writes each variable."""
        meta = self._meta
        filename, restore = (text(last(meta.saver, number)) for number in (1, 3))
        writers, tensors = self._restores.of(restore, serving)
        missing = sorted(name for of in tensors.values() for name in of if name not in self._dtypes)
        if missing:
            raise NotServable(f"an output needs variable {_listed(missing)}, which the checkpoint has not")
        assigned = {
            self._restores.source(self._nodes[name].data_inputs()[0]).name
            for name in serving
            if self._nodes[name].op in ("Assign", "AssignVariableOp")
        }
        more = [
            name
            for name in sorted(serving)
            if self._nodes[name].op in _VARIABLES and name not in writers and name not in assigned
        ]
        if more:
            filename = self._restore_by_name(more, writers, tensors, filename)
        for name in sorted(serving):
            node = self._nodes[name]
            if node.op in _LOOKUP_TABLES and not self._is_filled(name, serving):
                raise NotServable(
                    f"an output needs lookup table '{name}', which nothing in collection 'table_initializer' fills:"
                    " name what is looked up in it as an input"
                )
        meta.saver = []
        if writers:
            self._add(Node(_RESTORE, "NoOp", [f"^{writer}" for writer in writers.values()], {}))
            meta.saver = [(1, 2, blob(filename)), (2, 2, b""), (3, 2, blob(_RESTORE)), (7, 0, 2)]
        return {name for of in tensors.values() for name in of}, writers

    def _is_filled(self, table: str, serving: set[str]) -> bool:
        return any(
            self._nodes[name].op.startswith(("InitializeTable", "LookupTableImport"))
            and self._restores.source(self._nodes[name].data_inputs()[0]).name == table
            for name in serving
        )

    def _restore_by_name(
        self, variables: Sequence[str], writers: dict[str, str], tensors: dict[str, set[str]], filename: str
    ) -> str:
        """Restore variables that the graph's own saver does not, by their names; return the tensor of the path."""
        names = [self._nodes[name].attrs.text("shared_name") or name for name in variables]
        missing = [name for name in names if name not in self._dtypes]
        if missing:
            raise NotServable(
                f"an output needs variable {_listed(missing)}, which the checkpoint has not: name what is read from it"
                " as an input, or export from a checkpoint that has it"
            )
        if not filename or node_of(filename) not in self._nodes:
            filename = f"{_FILENAME}:0"
            self._add(Node(_FILENAME, "Placeholder", [], {"dtype": of_type(STRING), "shape": of_shape(shape())}))
        self._add(Node("kvtools/by_name/tensors", "Const", [], strings(names)))
        self._add(Node("kvtools/by_name/slices", "Const", [], strings([""] * len(names))))
        inputs = [filename.removesuffix(":0"), "kvtools/by_name/tensors", "kvtools/by_name/slices"]
        dtypes = of_types(self._dtypes[name] for name in names)
        self._add(Node("kvtools/by_name/restore", "RestoreV2", inputs, {"dtypes": dtypes}))
        for at, (variable, name) in enumerate(zip(variables, names, strict=True)):
            source = f"kvtools/by_name/restore:{at}" if at else "kvtools/by_name/restore"
            dtype = of_type(self._dtypes[name])
            if self._nodes[variable].op == "VarHandleOp":
                op, attributes = "AssignVariableOp", {"dtype": dtype, "validate_shape": of_bool(False)}
            else:
                op, attributes = (
                    "Assign",
                    {
                        "T": dtype,
                        "validate_shape": of_bool(True),
                        "use_locking": of_bool(True),
                    },
                )
            self._add(Node(f"kvtools/by_name/write_{at}", op, [variable, source], attributes))
            writers[variable], tensors[variable] = f"kvtools/by_name/write_{at}", {name}
        return filename

    def _leave_out_other_restores(self) -> None:
        """Leave out what fills tables of keys from elsewhere, as a warm start does."""
        graph, restore = self._meta.graph, text(last(self._meta.saver, 3))
        if restore:
            own = needed(graph.nodes, [restore])
            graph.nodes = [node for node in graph.nodes if node.op not in RESTORES or node.name in own]

    def _leave_out_the_rest(self, serving: set[str], collections: Mapping[str, bytes]) -> None:
        """Leave what is served, what restores it, and what tells how tables are restored."""
        meta = self._meta
        said = [node.name for node in meta.graph.nodes if node.op in RESTORES or node.op in BEGUN_IN_DEEPREC]
        saver = [text(last(meta.saver, number)) for number in (1, 3) if meta.saver]
        kept = needed(meta.graph.nodes, [*serving, _FILL_TABLES, *saver, *said, *variable_roots(collections, serving)])
        meta.graph.nodes = [node for node in meta.graph.nodes if node.name in kept]

    def _variable_defs(self, collection: str, writers: Mapping[str, str]) -> list[bytes]:
        """What a collection says of the variables that are served; restoring them is what initializes them."""
        found: list[bytes] = []
        listed = messages(split(self._meta.collections.get(collection, b"")), 2)
        for variable in messages(split(listed[-1]), 1) if listed else ():
            fields = split(variable)
            writer = writers.get(node_of(text(last(fields, _VARIABLE_NAME))))
            if writer is not None:
                new: list[Field] = [(_INITIALIZER, 2, blob(writer))]
                found.append(join([*without(fields, _INITIALIZER, _INITIAL_VALUE), *new]))
        return found


def _forget_places(meta: MetaGraph) -> None:
    """Leave out on which machines the nodes were, and beside which other nodes, that may be gone."""
    for _, node in meta.graph.all_nodes():
        node.rest = without(node.rest, _DEVICE)
        node.attributes = {key: value for key, value in node.attributes.items() if key != _COLOCATED}


def _leaves(fillers: Iterable[Node], nodes: Mapping[str, Node]) -> list[Node]:
    """The nodes that fill tables, of groups of them, too."""
    found: dict[str, Node] = {}
    waiting = list(fillers)
    while waiting:
        node = waiting.pop()
        if node.data_inputs():
            found[node.name] = node
        else:
            waiting += [nodes[node_of(source)] for source in node.inputs]
    return list(found.values())


def _names_in(signature: bytes, number: int) -> list[tuple[str, str]]:
    """The tensors of a signature's inputs (1) or outputs (2), by their names there; those of a sparse one by `/` and
    a name of their own."""
    found: list[tuple[str, str]] = []

    def add(name: str, info: bytes) -> None:
        fields = split(info)
        found.extend((name, text(value)) for value in messages(fields, 1))
        for sparse in messages(fields, 4):
            of_sparse = split(sparse)
            for part, called in enumerate(("values", "indices", "shape"), 1):
                found.extend((f"{name}/{called}", text(value)) for value in messages(of_sparse, part))
        for composite in messages(fields, 5):
            for at, component in enumerate(messages(split(composite), 2)):
                add(f"{name}/{at}", component)

    for name, info in entries(split(signature), number):
        add(name, info)
    return found


def _renamed(signature: bytes, moved: Mapping[str, str]) -> bytes:
    """A signature with other names for its tensors."""

    def name(value: bytes) -> bytes:
        return blob(moved.get(tensor_name(text(value)), tensor_name(text(value))))

    def of_sparse(value: bytes) -> bytes:
        return join([(n, k, name(v) if isinstance(v, bytes) else v) for n, k, v in split(value)])

    def of_composite(value: bytes) -> bytes:
        return join([(n, k, info(v) if n == 2 and isinstance(v, bytes) else v) for n, k, v in split(value)])

    changes: dict[int, Callable[[bytes], bytes]] = {1: name, 4: of_sparse, 5: of_composite}

    def info(value: bytes) -> bytes:
        return join([(n, k, changes[n](v) if n in changes and isinstance(v, bytes) else v) for n, k, v in split(value)])

    fields: list[Field] = []
    for number, kind, value in split(signature):
        if number in (1, 2) and isinstance(value, bytes):
            pair = split(value)
            value = message((1, last(pair, 1)), (2, info(last(pair, 2))))
        fields.append((number, kind, value))
    return join(fields)


def _listed(names: Sequence[str], most: int = 12) -> str:
    told = ", ".join(f"'{name}'" for name in names[:most])
    return told + f" and {len(names) - most} more" * (len(names) > most)
