"""Functions cut at their lookups, which are nodes of `GIVEN_ROWS`.

Each function with such nodes becomes two: one that gives ids, made of what these need and of nothing that rows flow
into, and one that takes rows where the lookup was. The functions that call it are changed the same way. Ids that are an
argument as it is are not given back: who calls the function has them. What a function does not need any more, such as
the handles of tables, is no argument of it any more either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.lookup_model.messages import (
    BOOL,
    UNKNOWN_RANK,
    message,
    of_function,
    of_text,
    of_types,
)
from kvtools.stock_model.attributes import Attributes, moved_numbers
from kvtools.stock_model.fields import last, split, text
from kvtools.stock_model.given_rows import GIVEN_ROWS, GivenTable
from kvtools.stock_model.graph_def import Argument, Function, Node, functions_called, functions_needed, node_of
from kvtools.stock_model.rewrite import in_order

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
_READ_ONLY = "_read_only_resource_inputs"
_SHAPES = "_input_shapes"
_INTEGERS = {number_named(name): np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint32", "uint64")}


class CannotCut(Exception):
    """A lookup cannot be cut out: its node, its function (empty: the graph itself), its table, and why."""

    def __init__(self, node: str, function: str, table: str, reason: str) -> None:
        super().__init__(reason)
        self.node, self.function, self.table, self.reason = node, function, table, reason


@dataclass
class Lookup:
    """A lookup as a body sees it, and where it is.

    `ids` is the tensor of its ids, `call:ids:n` of a call's; `plain` one that has the same integers, perhaps in another
    type. `argument` is the number of the argument that has the ids, -1 where none has.
    """

    table: GivenTable
    ids: str
    argument: int
    plain: str
    node: str
    function: str


Results = frozenset[tuple[str, int]]
"""What of a function of ids is asked for: ("result", n) of the function as it was, ("ids", n) of its lookups."""


@dataclass
class Needs:
    """What some tensors of a body need: nodes, arguments, rows and found of lookups, and what of each call."""

    nodes: set[str] = field(default_factory=set)
    arguments: set[int] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)
    found: set[int] = field(default_factory=set)
    asked: dict[str, set[tuple[str, int]]] = field(default_factory=dict)


class Body:
    """The nodes of a graph or a function, and where its lookups are."""

    def __init__(self, functions: Functions, name: str, nodes: Sequence[Node], arguments: Sequence[str]) -> None:
        self._functions = functions
        self.name = name
        self.nodes = in_order(nodes)
        self.by_name = {node.name: node for node in nodes}
        self.arguments = {argument: at for at, argument in enumerate(arguments)}
        self.lookups: list[Lookup] = []
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
            has = body.arguments.get(lookup.plain, -1)
            plain = inputs[has] if has >= 0 else ids
            numbers.append(self._lookup(lookup.table, ids, *where, plain))
        self.calls[node.name] = numbers
        if body.lookups and (inside := self._inside(node)):
            raise CannotCut(*self.place(numbers[0]), f"it is in a condition or loop, of '{inside}'")

    def _lookup(self, table: GivenTable, ids: str, node: str, function: str, plain: str = "") -> int:
        ids, plain = self._source(ids), self._source(plain or ids, casts=True)
        for number, known in enumerate(self.lookups):
            if known.table is table and known.ids == ids:
                return number
        self.lookups.append(Lookup(table, ids, self.arguments.get(ids, -1), plain, node, function))
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

    def needs_for_ids(self, wanted: Iterable[str]) -> Needs:
        """Return what tensors need that no rows flow into."""
        needs, waiting = Needs(), list(wanted)
        calls: set[str] = set()
        while waiting or calls:
            if not waiting:  # all that is asked of a call at once
                node = self.by_name[calls.pop()]
                inputs, asked = node.data_inputs(), frozenset(needs.asked[node.name])
                waiting = [inputs[at] for at in self._functions.ids_arguments(self.called(node), asked)]
                waiting += [source for source in node.inputs if source.startswith("^")]
                continue
            source = waiting.pop()
            name = node_of(source)
            if name in self.arguments:
                if not source.startswith("^"):
                    needs.arguments.add(self.arguments[name])
                continue
            found = self.by_name.get(name)
            if found is None or (source.startswith("^") and not self.is_before_rows(found)):
                continue
            if name not in self.calls:
                if name not in needs.nodes:
                    needs.nodes.add(name)
                    waiting += found.inputs
                continue
            results = needs.asked.setdefault(name, set())
            item = ("ids" if ":ids:" in source else "result", self.number(source))
            if item not in results:
                results.add(item)
                needs.nodes.add(name)
                calls.add(name)
        return needs

    def is_before_rows(self, node: Node) -> bool:
        """Whether a node may be waited for before there are rows."""
        return node.name not in self.calls and node.name not in self.given and not self.has_rows(node.name)

    def needs(self, wanted: Iterable[str]) -> Needs:
        """Return what tensors, and nodes that are waited for, need, given rows."""
        needs, waiting = Needs(), list(wanted)
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


class Functions:
    """The functions of a library, as they are, and what became of them."""

    def __init__(self, library: Mapping[str, Function], tables: Mapping[int, GivenTable]) -> None:
        self.library = library
        self.tables = tables
        self.made: dict[str, Function] = {}
        self._bodies: dict[str, Body] = {}
        self._needs: dict[str, Needs] = {}
        self._ids_needs: dict[tuple[str, Results], Needs] = {}
        self._done: dict[tuple[str, Results | None], str] = {}

    def body(self, name: str) -> Body:
        """Return the body of a function."""
        if name not in self._bodies:
            function = self.library[name]
            arguments = [argument.name for argument in function.arguments]
            self._bodies[name] = Body(self, name, function.nodes, arguments)
        return self._bodies[name]

    def flows(self, name: str) -> list[frozenset[int]]:
        """Return what flows into each result of a function."""
        function, body = self.library[name], self.body(name)
        return [body.flow(function.results[output.name]) for output in function.outputs]

    def needs(self, name: str) -> Needs:
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

    def ids_arguments(self, name: str, results: Results) -> set[int]:
        """Return the arguments that these results need."""
        return self._needs_of_ids(name, results).arguments

    def _needs_of_ids(self, name: str, results: Results) -> Needs:
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

    def for_ids(self, name: str, results: Results) -> str:
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

    def _node_for_ids(self, body: Body, node: Node, needs: Needs) -> Node:
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

    def _node_with_rows(self, body: Body, node: Node) -> Node:
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
    source, target = (_INTEGERS.get(node.attrs.type(name)) for name in ("SrcT", "DstT"))
    return node.op == "Cast" and source is not None and target is not None and np.can_cast(source, target, "safe")


def _ids_tensor(body: Body, source: str, needs: Needs) -> str:
    """Return what a tensor is called in a function of ids: an output of a call has another number."""
    name = node_of(source)
    if name not in body.calls:
        return source
    return f"{name}:output:{place_of(body, source, needs)}"


def place_of(body: Body, source: str, needs: Needs) -> int:
    """Return the number that an output of a call has among what is asked of its function of ids."""
    asked = sorted(needs.asked[node_of(source)])
    return asked.index(("ids" if ":ids:" in source else "result", body.number(source)))


def _row_tensor(body: Body, source: str) -> str:
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
