"""A model cut at its lookups: one signature gives the ids of each lookup, another takes their rows.

A graph is given in which every lookup ends in a node of `GIVEN_ROWS`, somewhere in its functions. Each function with
such nodes becomes two: one that gives ids, made of what these need and of nothing that rows flow into, and one that
takes rows where the lookup was. The functions that call it are changed the same way, up to the graph itself, where the
rows are placeholders. Ids that are an argument as it is are not given back: who calls the function has them.

What a function is not given any more, such as the handles of tables, is no argument of it any more either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtools.dialects.bundle.dtypes import dtype_name, number_named
from kvtools.lookup_model.messages import (
    BOOL,
    UNKNOWN_RANK,
    message,
    of_function,
    of_shape,
    of_text,
    of_type,
    of_types,
)
from kvtools.stock_model.attributes import Attributes, moved_numbers
from kvtools.stock_model.fields import Field, blob, entries, join, last, messages, number_in, split, text, without
from kvtools.stock_model.given_rows import GIVEN_ROWS, GivenTable
from kvtools.stock_model.graph_def import Argument, Function, Node, functions_called, functions_needed, node_of
from kvtools.stock_model.meta_graph import MetaGraph, loading_roots, nodes_of_variables, tensor_names
from kvtools.stock_model.prune import needed
from kvtools.stock_model.rewrite import in_order
from kvtools.stock_model.table import RESOURCES

_CALLS = frozenset(["PartitionedCall", "StatefulPartitionedCall"])
_SAME = frozenset(["Identity", "StopGradient", "PreventGradient"])
_READS = frozenset(["LookupTableFindV2", "LookupTableSizeV2", "ReadVariableOp", "ResourceGather", "ResourceGatherNd"])
"""Operations with no effect, which nobody waits for where nothing is written."""
_WRITES = ("Assign", "Scatter", "ResourceScatter", "LookupTableInsert", "LookupTableImport", "ResourceApply")
_WAITING = frozenset(["NoOp", "Identity"])
_INTO_BRANCHES = frozenset(
    ["Switch", "RefSwitch", "_SwitchN", "Enter", "RefEnter", "NextIteration", "RefNextIteration", "LoopCond"]
)
_OUT_OF_BRANCHES = frozenset(["Merge", "RefMerge", "Exit", "RefExit"])
_MADE = "__kvtools_"
"""What the names of functions begin with that stand for one operation of a model."""
_INTERNAL = "__saved_model"
_READ_ONLY = "_read_only_resource_inputs"
_SHAPES = "_input_shapes"
_INTEGERS = {number_named(name): np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint32", "uint64")}
_HALVES = frozenset(map(number_named, ("float16", "bfloat16")))
_FLOAT32 = number_named("float32")


class CannotCut(Exception):
    """A lookup cannot be cut out: its node, its function (empty: the graph itself), its table, and why."""

    def __init__(self, node: str, function: str, table: str, reason: str) -> None:
        super().__init__(reason)
        self.node, self.function, self.table, self.reason = node, function, table, reason


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
class CutTensor:
    """An input or an output: -1 for a size that varies, a shape of None for any shape."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class CutSignature:
    """A signature: that of ids ("" without a lookup), what each of both takes of its inputs, and its lookups."""

    name: str
    ids_signature: str
    inputs: tuple[CutTensor, ...]
    ids_inputs: tuple[str, ...]
    dense_inputs: tuple[str, ...]
    outputs: tuple[CutTensor, ...]
    lookups: tuple[CutLookup, ...]


@dataclass
class _Lookup:
    """A lookup as a body sees it: the tensor of its ids (`call:ids:n` of a call's), the number of the argument that
    has the ids (`argument`), or has them in another integer type (`plain`), -1 where none has, and where it is."""

    table: GivenTable
    ids: str
    argument: int
    plain: int
    node: str
    function: str


_Results = frozenset[tuple[str, int]]
"""What of a function of ids is asked for: ("result", n) of the function as it was, ("ids", n) of its lookups."""


@dataclass
class _Needs:
    """What some tensors of a body need: nodes, arguments, rows and found of lookups, and what of each call."""

    nodes: set[str] = field(default_factory=set)
    arguments: set[int] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)
    found: set[int] = field(default_factory=set)
    asked: dict[str, set[tuple[str, int]]] = field(default_factory=dict)


class _Body:
    """The nodes of a graph or a function, and where its lookups are."""

    def __init__(self, functions: _Functions, name: str, nodes: Sequence[Node], arguments: Sequence[str]) -> None:
        self._functions = functions
        self.name = name
        self.nodes = in_order(nodes)
        self.by_name = {node.name: node for node in nodes}
        self.arguments = {argument: at for at, argument in enumerate(arguments)}
        self.lookups: list[_Lookup] = []
        self.given: dict[str, int] = {}
        """Nodes that are lookups -> which."""
        self.calls: dict[str, list[int]] = {}
        """Calls of functions that are changed -> which lookup each of that function's is."""
        called = functions_needed(functions.library, functions_called(nodes, functions.library))
        everything = [nodes, *(functions.library[name].nodes for name in called)]
        self.writes = any(node.op.startswith(_WRITES) for each in everything for node in each)
        """Whether there is something that nodes may have to be done before."""
        self._flows: dict[str, list[frozenset[int]]] = {}
        for node in self.nodes:
            self._look_at(node)
        self._follow_rows()
        for number, lookup in enumerate(self.lookups):
            into = next((f for f in sorted(self.flow(lookup.ids)) if f < 0), None)
            if into is not None:
                of = functions.tables[-1 - into].name
                raise CannotCut(
                    *self.place(number), f"its ids are computed from rows of table '{of}', which come with them"
                )

    def place(self, number: int) -> tuple[str, str, str]:
        """Return node, function and table of a lookup, as errors name them."""
        lookup = self.lookups[number]
        return lookup.node, lookup.function, lookup.table.name

    def called(self, node: Node) -> str:
        """Return the function that a node calls with its inputs; "" of all others."""
        if node.op not in _CALLS:
            return ""
        name = text(last(split(last(split(node.attributes["f"]), 10)), 1))
        return name if name in self._functions.library else ""

    def number(self, source: str) -> int:
        """Return the number of an output of a call."""
        return int(tail) if (tail := source.rpartition(":")[2]).isdecimal() and ":" in source else 0

    def _look_at(self, node: Node) -> None:
        if node.op == GIVEN_ROWS:
            table = self._functions.tables[node.attrs.number("table")]
            self.given[node.name] = self._lookup(table, node.inputs[0], node.name, self.name)
            return
        called = self.called(node)
        if not called:
            for name in functions_called([node], self._functions.library):
                body = self._functions.body(name)
                if body.lookups:
                    raise CannotCut(*body.place(0), f"it is in a condition or loop, '{node.name}' ({node.op})")
            return
        body = self._functions.body(called)
        if not self._functions.is_changed(called):
            return
        inputs = node.data_inputs()
        numbers = []
        for at, lookup in enumerate(body.lookups):
            where = (node.name, self.name) if called.startswith(_MADE) else (lookup.node, lookup.function)
            ids = inputs[lookup.argument] if lookup.argument >= 0 else f"{node.name}:ids:{at}"
            plain = inputs[lookup.plain] if lookup.plain >= 0 else ""
            numbers.append(self._lookup(lookup.table, ids, *where, plain))
        self.calls[node.name] = numbers
        if body.lookups and (inside := self._inside(node)):
            raise CannotCut(*self.place(numbers[0]), f"it is in a condition or loop, of '{inside}'")

    def _lookup(self, table: GivenTable, ids: str, node: str, function: str, plain: str = "") -> int:
        ids = self._source(ids)
        for number, known in enumerate(self.lookups):
            if known.table is table and known.ids == ids:
                return number
        argument = self.arguments.get(ids, -1)
        origin = self._source(plain or ids, casts=True)
        self.lookups.append(_Lookup(table, ids, argument, self.arguments.get(origin, -1), node, function))
        return len(self.lookups) - 1

    def _source(self, tensor: str, casts: bool = False) -> str:
        """The tensor that a tensor is the same as, but, with `casts`, for the type of integers."""
        while True:
            node = self.by_name.get(node_of(tensor))
            if node is None or ":ids:" in tensor:
                return tensor
            if node.op not in _SAME and not (casts and _keeps_integers(node)):
                return tensor
            tensor = node.data_inputs()[0]

    def source_name(self, tensor: str) -> str:
        """Return the node, or the argument, of the tensor that has the same integers."""
        return node_of(self._source(tensor, casts=True))

    def _inside(self, call: Node) -> str:
        """The node of TensorFlow 1's control flow that a node is behind; "" if it is done whatever comes."""
        waiting, seen = list(call.inputs), {call.name}
        while waiting:
            name = node_of(waiting.pop())
            if name in seen or name not in self.by_name:
                continue
            seen.add(name)
            node = self.by_name[name]
            if node.op in _INTO_BRANCHES:
                return name
            if node.op not in _OUT_OF_BRANCHES:
                waiting += node.inputs
        return ""

    # ---- What flows where: arguments, by their numbers, and rows of tables, -1 - their numbers ----

    def _follow_rows(self) -> None:
        changed = True
        while changed:  # once more where a loop of TensorFlow 1 closes
            changed = False
            for node in self.nodes:
                flows = self._flows_out(node)
                if flows != self._flows.get(node.name):
                    self._flows[node.name] = flows
                    changed = any(each.op == "NextIteration" for each in self.nodes)

    def _flows_out(self, node: Node) -> list[frozenset[int]]:
        if node.op == GIVEN_ROWS:
            return [frozenset([-1 - node.attrs.number("table")])]
        called = self.called(node)
        inputs = [self.flow(source) for source in node.data_inputs()]
        if not called:
            return [frozenset().union(*inputs)]
        return [self._through(flow, inputs) for flow in self._functions.flows(called)]

    def _through(self, flow: frozenset[int], inputs: Sequence[frozenset[int]]) -> frozenset[int]:
        """What flows into a result of a call, given what flows into the result of its function."""
        return frozenset().union(*([f] if f < 0 else inputs[f] for f in flow))

    def flow(self, tensor: str) -> frozenset[int]:
        """Return what flows into a tensor."""
        name = node_of(tensor)
        if name in self.arguments:
            return frozenset([self.arguments[name]])
        if ":ids:" in tensor and name in self.calls:
            node = self.by_name[name]
            called = self._functions.body(self.called(node))
            return self._through(
                called.flow(called.lookups[self.number(tensor)].ids), [self.flow(s) for s in node.data_inputs()]
            )
        flows = self._flows.get(name, [frozenset()])
        return flows[self.number(tensor)] if len(flows) > 1 else flows[0] if flows else frozenset()

    def has_rows(self, node: str) -> bool:
        """Whether a node is made of rows."""
        return any(f < 0 for flow in self._flows.get(node, ()) for f in flow)

    # ---- What is needed ----

    def needs_for_ids(self, wanted: Iterable[str]) -> _Needs:
        """Return what tensors need that no rows flow into."""
        needs, waiting = _Needs(), list(wanted)
        while waiting:
            source = waiting.pop()
            name = node_of(source)
            if name in self.arguments:
                if not source.startswith("^"):
                    needs.arguments.add(self.arguments[name])
                continue
            node = self.by_name.get(name)
            if node is None or (source.startswith("^") and not self.is_before_rows(node)):
                continue
            if name not in self.calls:
                if name not in needs.nodes:
                    needs.nodes.add(name)
                    waiting += node.inputs
                continue
            asked = needs.asked.setdefault(name, set())
            item = ("ids" if ":ids:" in source else "result", self.number(source))
            if item not in asked:
                asked.add(item)
                needs.nodes.add(name)
                inputs = node.data_inputs()
                waiting += [inputs[at] for at in self._functions.ids_arguments(self.called(node), frozenset(asked))]
                waiting += [source for source in node.inputs if source.startswith("^")]
        return needs

    def is_before_rows(self, node: Node) -> bool:
        """Whether a node may be waited for before there are rows."""
        return node.name not in self.calls and node.name not in self.given and not self.has_rows(node.name)

    def needs(self, wanted: Iterable[str]) -> _Needs:
        """Return what tensors, and nodes that are waited for, need, given rows."""
        needs, waiting = _Needs(), list(wanted)
        while waiting:
            source = waiting.pop()
            name = node_of(source)
            if name in self.arguments:
                if not source.startswith("^"):
                    needs.arguments.add(self.arguments[name])
                continue
            if name in self.given:
                if not source.startswith("^"):
                    (needs.found if ":found" in source else needs.rows).add(self.given[name])
                continue
            node = self.by_name.get(name)
            if node is None or name in needs.nodes:
                continue
            needs.nodes.add(name)
            if name not in self.calls:
                waiting += self.kept_inputs(node)
                continue
            inner = self._functions.needs(self.called(node))
            inputs, numbers = node.data_inputs(), self.calls[name]
            waiting += [inputs[at] for at in inner.arguments]
            waiting += [source for source in self.kept_inputs(node) if source.startswith("^")]
            needs.rows |= {numbers[at] for at in inner.rows}
            needs.found |= {numbers[at] for at in inner.found}
        return needs

    def kept_inputs(self, node: Node) -> list[str]:
        """Return the inputs of a node; nobody waits for a lookup that is gone, nor for a reading without an effect."""
        return [
            source
            for source in node.inputs
            if not source.startswith("^") or not self._is_not_waited_for(node, self.by_name.get(source[1:]))
        ]

    def _is_not_waited_for(self, node: Node, source: Node | None) -> bool:
        if source is None or source.name in self.given:
            return True
        return source.op in _READS and node.op in _WAITING and not self.writes


class _Functions:
    """The functions of a library, as they are, and what became of them."""

    def __init__(self, library: Mapping[str, Function], tables: Mapping[int, GivenTable]) -> None:
        self.library = library
        self.tables = tables
        self.made: dict[str, Function] = {}
        self._bodies: dict[str, _Body] = {}
        self._needs: dict[str, _Needs] = {}
        self._ids_needs: dict[tuple[str, _Results], _Needs] = {}
        self._done: dict[tuple[str, _Results | None], str] = {}

    def body(self, name: str) -> _Body:
        """Return the body of a function."""
        if name not in self._bodies:
            function = self.library[name]
            arguments = [argument.name for argument in function.arguments]
            self._bodies[name] = _Body(self, name, function.nodes, arguments)
        return self._bodies[name]

    def flows(self, name: str) -> list[frozenset[int]]:
        """Return what flows into each result of a function."""
        function, body = self.library[name], self.body(name)
        return [body.flow(function.results[output.name]) for output in function.outputs]

    def needs(self, name: str) -> _Needs:
        """Return what a function needs that is given rows."""
        if name not in self._needs:
            function = self.library[name]
            roots = [function.results[output.name] for output in function.outputs]
            body = self.body(name)
            for node in function.control_results.values():
                one = body.by_name.get(node)
                if one is not None and one.name not in body.given and (one.op not in _READS or body.writes):
                    roots.append(f"^{node}")
            self._needs[name] = body.needs(roots)
        return self._needs[name]

    def is_changed(self, name: str) -> bool:
        """Whether a function has lookups, or arguments that nothing needs."""
        return bool(self.body(name).lookups) or len(self.needs(name).arguments) < len(self.library[name].arguments)

    def ids_arguments(self, name: str, results: _Results) -> set[int]:
        """Return the arguments that these results need."""
        return self._needs_of_ids(name, results).arguments

    def _needs_of_ids(self, name: str, results: _Results) -> _Needs:
        if (name, results) not in self._ids_needs:
            wanted = [self._tensor(name, result) for result in results]
            self._ids_needs[name, results] = self.body(name).needs_for_ids(wanted)
        return self._ids_needs[name, results]

    def _tensor(self, name: str, result: tuple[str, int]) -> str:
        function = self.library[name]
        kind, number = result
        if kind == "ids":
            return self.body(name).lookups[number].ids
        return function.results[function.outputs[number].name]

    # ---- What functions become ----

    def call_for_ids(self, node: Node, called: str, asked: set[tuple[str, int]]) -> tuple[Node, list[int]]:
        """Return the call of a function of ids, without its inputs, and the numbers of the arguments that it takes."""
        results = frozenset(asked)
        kept = sorted(self.ids_arguments(called, results))
        types = node.attrs.types("Tin")
        gives = [self._result_type(called, result) for result in sorted(results)]
        attributes = {
            "Tin": of_types(types[at] for at in kept),
            "Tout": of_types(gives),
            "f": of_function(self.for_ids(called, results)),
            **{key: node.attributes.get(key, of_text("")) for key in ("config", "config_proto", "executor_type")},
            **_moved_read_only(node, kept),
        }
        return Node(node.name, node.op, [], attributes, node.rest), kept

    def call_with_rows(self, node: Node, called: str) -> tuple[Node, list[int], list[int], list[int]]:
        """Return the call of a function that is given rows, without its inputs, the numbers of the arguments that it
        takes, and those of the lookups whose rows, and whose found, come behind them."""
        needs, lookups = self.needs(called), self.body(called).lookups
        kept, rows, found = sorted(needs.arguments), sorted(needs.rows), sorted(needs.found)
        types = [node.attrs.types("Tin")[at] for at in kept]
        types += [lookups[at].table.dtype for at in rows] + [BOOL] * len(found)
        attributes = {
            **node.attributes,
            "Tin": of_types(types),
            "f": of_function(self.with_rows(called)),
            **_moved_read_only(node, kept),
        }
        return Node(node.name, node.op, [], attributes, node.rest), kept, rows, found

    def _result_type(self, name: str, result: tuple[str, int]) -> int:
        kind, number = result
        if kind == "ids":
            return self.body(name).lookups[number].table.key_type
        return self.library[name].outputs[number].dtype

    def for_ids(self, name: str, results: _Results) -> str:
        """Make the function that gives these results, sorted, and nothing that rows flow into; return its name."""
        if (name, results) in self._done:
            return self._done[name, results]
        function, body = self.library[name], self.body(name)
        needs = self._needs_of_ids(name, results)
        nodes = [self._node_for_ids(body, node, needs) for node in body.nodes if node.name in needs.nodes]
        outputs, given = [], {}
        for at, result in enumerate(sorted(results)):
            outputs.append(Argument(f"result_{at}", self._result_type(name, result)))
            given[outputs[-1].name] = _ids_tensor(body, self._tensor(name, result), needs)
        made = self._reduced(f"{name}_ids", function, sorted(needs.arguments), [])
        made.nodes, made.outputs, made.results = nodes, outputs, given
        made.control_outputs, made.control_results = [], {}
        self._done[name, results] = made.name
        return made.name

    def _node_for_ids(self, body: _Body, node: Node, needs: _Needs) -> Node:
        controls = [s for s in node.inputs if s.startswith("^") and s[1:] in needs.nodes and s[1:] not in body.calls]
        if node.name not in body.calls:
            data = [_ids_tensor(body, source, needs) for source in node.data_inputs()]
            return Node(node.name, node.op, data + controls, node.attributes, node.rest)
        new, kept = self.call_for_ids(node, body.called(node), needs.asked[node.name])
        inputs = node.data_inputs()
        new.inputs = [_ids_tensor(body, inputs[at], needs) for at in kept] + controls
        return new

    def with_rows(self, name: str) -> str:
        """Make the function that is given rows where its lookups were; return its name."""
        if (name, None) in self._done:
            return self._done[name, None]
        function, body, needs = self.library[name], self.body(name), self.needs(name)
        more = [Argument(_rows(at), body.lookups[at].table.dtype) for at in sorted(needs.rows)]
        more += [Argument(_found(at), BOOL) for at in sorted(needs.found)]
        made = self._reduced(f"{name}_given_rows", function, sorted(needs.arguments), more)
        self._done[name, None] = made.name
        made.nodes = [self._node_with_rows(body, node) for node in body.nodes if node.name in needs.nodes]
        made.outputs = function.outputs
        made.results = {key: _row_tensor(body, source) for key, source in function.results.items()}
        made.control_results = {key: node for key, node in function.control_results.items() if node in needs.nodes}
        made.control_outputs = [key for key in function.control_outputs if key in made.control_results]
        return made.name

    def _node_with_rows(self, body: _Body, node: Node) -> Node:
        controls = [source for source in body.kept_inputs(node) if source.startswith("^")]
        data = [_row_tensor(body, source) for source in node.data_inputs()]
        if node.name not in body.calls:
            return Node(node.name, node.op, data + controls, node.attributes, node.rest)
        new, kept, rows, found = self.call_with_rows(node, body.called(node))
        numbers = body.calls[node.name]
        new.inputs = [data[at] for at in kept]
        new.inputs += [_rows(numbers[at]) for at in rows] + [_found(numbers[at]) for at in found] + controls
        return new

    def _reduced(self, name: str, function: Function, kept: Sequence[int], more: Sequence[Argument]) -> Function:
        """A function of some of the arguments of another, and of `more`; its body is to come."""
        wanted, number = name, 0
        while wanted in self.library or wanted in self.made:
            number += 1
            wanted = f"{name}_{number}"
        attributes = dict(function.attributes)
        shapes = Attributes(attributes).shapes(_SHAPES)
        if len(shapes) == len(function.arguments):
            left = [shapes[at] for at in kept] + [UNKNOWN_RANK] * len(more)
            attributes[_SHAPES] = message((1, message(*((7, one) for one in left))))
        else:
            attributes.pop(_SHAPES, None)
        made = Function(
            wanted,
            [function.arguments[at] for at in kept] + list(more),
            [],
            [],
            {},
            {},
            attributes,
            {kept.index(at): value for at, value in function.argument_attributes.items() if at in kept},
            {kept.index(at): value for at, value in function.resource_ids.items() if at in kept},
            [],
            function.signature_rest,
            function.rest,
        )
        self.made[wanted] = made
        return made


def _keeps_integers(node: Node) -> bool:
    """Whether a node gives the integers that it takes, all of them, in another type."""
    of = [_INTEGERS.get(node.attrs.type(name)) for name in ("SrcT", "DstT")]
    return node.op == "Cast" and None not in of and np.can_cast(*of, "safe")  # type: ignore[arg-type]


def _ids_tensor(body: _Body, source: str, needs: _Needs) -> str:
    """Return what a tensor is called in a function of ids: an output of a call has another number."""
    name = node_of(source)
    if name not in body.calls:
        return source
    return f"{name}:output:{_place(body, source, needs)}"


def _place(body: _Body, source: str, needs: _Needs) -> int:
    asked = sorted(needs.asked[node_of(source)])
    return asked.index(("ids" if ":ids:" in source else "result", body.number(source)))


def _row_tensor(body: _Body, source: str) -> str:
    """What a tensor is called in a function that is given rows."""
    name = node_of(source)
    if name not in body.given or source.startswith("^"):
        return source
    return (_found if ":found" in source else _rows)(body.given[name])


def _rows(number: int) -> str:
    return f"kvtools_rows_{number}"


def _found(number: int) -> str:
    return f"kvtools_found_{number}"


def _moved_read_only(node: Node, kept: Sequence[int]) -> dict[str, bytes]:
    if _READ_ONLY not in node.attributes:
        return {}
    return {_READ_ONLY: moved_numbers(node.attributes[_READ_ONLY], lambda at: [kept.index(at)] if at in kept else [])}


# ---- The graph ----


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
        self._functions = _Functions(meta.graph.library, tables)
        self._body = _Body(self._functions, "", [node for node in nodes if node.name in there], [])

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
        source = self._body.source_name(self._body.lookups[number].ids)
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
                return f"kvtools/ids/{name}:{_place(body, source, needs)}"
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
            source = self._body.source_name(self._body.lookups[at].ids)
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
                raise CannotCut(node.name, "", *of[:1] or [gone], f"'{node.op}' is handed the table as it is")


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


def _described(infos: Sequence[tuple[str, bytes]]) -> tuple[CutTensor, ...]:
    found = []
    for name, info in sorted(infos):
        fields = split(info)
        shape = split([UNKNOWN_RANK, *messages(fields, 3)][-1])
        sizes = [number_in(split(dim), 1) for dim in messages(shape, 2)]
        known = None if number_in(shape, 3) else tuple(-1 if size >> 63 else size for size in sizes)
        found.append(CutTensor(name, dtype_name(number_in(fields, 2)), known))
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
