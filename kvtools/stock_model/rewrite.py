"""Graphs and functions rewritten: a handle becomes a table's resources wherever it goes, an operation a call.

A handle is one tensor; what takes its place is several (`RESOURCES`). So each node that passes a handle on passes these
on, each function that takes one takes these, and its calls are changed as it is: calls, conditions and loops alike. A
function is rewritten once for the tables that it is called with, and keeps its name where that is always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtools.lookup_model.messages import RESOURCE, message, of_bool, of_function, of_text, of_types, shape
from kvtools.stock_model.attributes import (
    expanded_shapes,
    expanded_types,
    functions_in,
    moved_numbers,
    with_functions,
)
from kvtools.stock_model.fields import blob, last, split, texts, without
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.graph_def import Argument, Function, Node, functions_called, node_of
from kvtools.stock_model.handles import CALLS, PASSING, names_read
from kvtools.stock_model.op_table import ANSWERS_BEGIN, GIVES_DEFAULTS, HANDLES, OPERATIONS, RESTORES
from kvtools.stock_model.plain_ops import Call, NotRewritable, strings
from kvtools.stock_model.table import RESOURCES, Handle

_LOOPS = frozenset(["While", "StatelessWhile"])
_PYTHON = frozenset(["PyFunc", "PyFuncStateless", "EagerPyFunc"])
_INPUT_TYPES = ("T", "Tin")
_READ_ONLY = "_read_only_resource_inputs"
_SAVE = frozenset(["KvTableSave", "SaveV2", "SaveV3", "SaveSlices", "Save", "MergeV2Checkpoints"])
_KEPT = ("_output_shapes",)
_COLOCATED = "_class"
_LOCATION = "loc:@"
_DEVICE = 4


class UnsupportedOperation(Exception):
    """An operation that cannot be rewritten: its name, the node, its function (empty: the graph itself), and why."""

    def __init__(self, node: Node, function: str, reason: str) -> None:
        super().__init__(reason)
        self.node, self.function, self.reason = node, function, reason


@dataclass(frozen=True)
class Rewritten:
    """A function that was rewritten: its name, which of its results are handles, and whether some are gone."""

    name: str
    outputs: tuple[Handle | None, ...]
    lost: bool = False


Binding = tuple[tuple[int, Handle | None], ...]
"""The arguments of a function that are handles, by their numbers, and those that are gone (None)."""


class Rewriter:
    """Rewrites the functions of a library, and the graphs that call them.

    Args:
        library: the functions as they are.
        is_stock: tells whether stock TensorFlow has an operation.
        kept_tensors: the tensors of the checkpoint that the new one has, too; all if None.
        inlined: whether TensorFlow may put the nodes of an operation's function in the place of its call: their
            constants would be outside of a loop of version 1 that the call is in.

    Attributes:
        functions: those that were rewritten, and those of stock operations that they call.
        saves_all: whether nothing was left out that writes a checkpoint.
        not_zeros: the numbers of tables whose missing keys some lookup answers with other rows than zeros.
    """

    def __init__(
        self,
        library: Mapping[str, Function],
        is_stock: Callable[[str], bool],
        kept_tensors: Container[str] | None = None,
        *,
        inlined: bool = True,
    ) -> None:
        self._inlined = inlined
        self._library = library
        self.kept_tensors = kept_tensors
        self._is_stock = is_stock
        self._done: dict[tuple[str, Binding, bool], Rewritten] = {}
        self._operations: dict[tuple[object, ...], str] = {}
        self.functions: dict[str, Function] = {}
        self.saves_all = True
        self.not_zeros: set[int] = set()

    def graph(self, nodes: Sequence[Node], handles: Mapping[str, Handle], lenient: Sequence[str]) -> list[Node]:
        """Rewrite a graph.

        Args:
            nodes: its nodes.
            handles: what its nodes that are handles stand for.
            lenient: nodes that save and restore: what of them cannot be rewritten is left out.
        """
        kept = set(lenient)
        return _Body(self, nodes, "", lambda node: node.name in kept, handles).nodes

    def function(self, name: str, bound: Mapping[int, Handle | None], lenient: bool = False) -> Rewritten:
        """Rewrite a function for the tables that it is given; for what it is not given any more, None."""
        binding = tuple(sorted(bound.items(), key=lambda item: item[0]))
        key = (name, binding, lenient)
        if key not in self._done:
            self._done[key] = self._rewrite(self._library[name], dict(binding), lenient)
        return self._done[key]

    def _rewrite(self, function: Function, bound: dict[int, Handle | None], lenient: bool) -> Rewritten:
        taken = {function.arguments[at].name: handle for at, handle in bound.items() if handle is not None}
        gone = {function.arguments[at].name for at, handle in bound.items() if handle is None}
        body = _Body(self, function.nodes, function.name, lambda _: lenient, taken, gone, in_function=True)
        outputs: list[Argument] = []
        results: dict[str, str] = {}
        passed: list[Handle | None] = []
        for output in function.outputs:
            source = function.results[output.name]
            if node_of(source) in body.gone:
                return Rewritten(function.name, (), lost=True)
            resources = body.resources(source)
            if resources is None:
                outputs.append(output)
                results[output.name] = body.tensor(source)
                passed.append(None)
                continue
            passed.append(body.handle(source))
            for resource, tensor in zip(RESOURCES, resources, strict=True):
                outputs.append(Argument(f"{output.name}_{resource}", RESOURCE))
                results[outputs[-1].name] = tensor
        arguments: list[Argument] = []
        number_of: dict[int, list[int]] = {}
        for at, argument in enumerate(function.arguments):
            new = [argument]
            if at in bound:
                new = [] if bound[at] is None else [Argument(name, RESOURCE) for name in _names(argument.name)]
            number_of[at] = list(range(len(arguments), len(arguments) + len(new)))
            arguments += new
        attributes = dict(function.attributes)
        if "_input_shapes" in attributes:
            attributes["_input_shapes"] = expanded_shapes(attributes["_input_shapes"], _counts(bound), shape())
        controls = {key: name for key, name in function.control_results.items() if name not in body.gone}
        rewritten = Function(
            self.free_name(function.name),
            arguments,
            outputs,
            body.nodes,
            results,
            controls,
            attributes,
            {number_of[at][0]: value for at, value in function.argument_attributes.items() if at not in bound},
            {number_of[at][0]: value for at, value in function.resource_ids.items() if at not in bound},
            [name for name in function.control_outputs if name in controls],
            function.signature_rest,
            function.rest,
        )
        self.functions[rewritten.name] = rewritten
        return Rewritten(rewritten.name, tuple(passed))

    def free_name(self, name: str) -> str:
        """Return a name for a function that no other has."""
        wanted, number = name, 0
        while wanted in self.functions or (number and wanted in self._library):
            number += 1
            wanted = f"{name}_kvtools_{number}"
        return wanted

    def is_known(self, node: Node) -> bool:
        """Tell whether stock TensorFlow, or the library, has the operation of a node."""
        return node.op in self._library or self._is_stock(node.op)

    def is_function(self, name: str) -> bool:
        """Tell whether there is a function of this name."""
        return name in self._library

    def calls_function(self, node: Node) -> list[str]:
        """Return the functions that a node calls."""
        return functions_called([node], self._library)

    def operation(self, node: Node, handles: tuple[Handle, ...]) -> Function:
        """Return the function of stock operations that an operation becomes, made once for all of its kind."""
        told = tuple(sorted((key, value) for key, value in node.attributes.items() if not key.startswith("_")))
        key = (node.op, handles, told)
        if node.op in GIVES_DEFAULTS | ANSWERS_BEGIN or node.attrs.text("mode") == "initial":
            self.not_zeros |= {handle.table.number for handle in handles}
        if key not in self._operations:
            body = FunctionBody(self.free_name(f"__kvtools_{node.op}_{len(self._operations)}"))
            OPERATIONS[node.op].build(body, Call(node.attrs, handles))
            function = body.function()
            if not self._inlined:
                function.attributes["_noinline"] = of_bool(True)
            self.functions[body.name] = function
            self._operations[key] = body.name
        return self.functions[self._operations[key]]


@dataclass
class _Outputs:
    """How the outputs of a node are to be found: the new number of each, which ones are handles, and their new name."""

    starts: list[int]
    handles: list[Handle | None]
    name: str = "output"
    flat: dict[str, int] = field(default_factory=dict)


class _Body:
    """The nodes of one graph or function while they are rewritten."""

    def __init__(
        self,
        rewriter: Rewriter,
        nodes: Sequence[Node],
        name: str,
        lenient: Callable[[Node], bool],
        handles: Mapping[str, Handle],
        gone: Iterable[str] = (),
        in_function: bool = False,
    ) -> None:
        self._rewriter = rewriter
        self._name = name
        self._lenient = lenient
        self._in_function = in_function
        self._sources: dict[str, Handle] = dict(handles)
        """Arguments, or nodes, that are handles."""
        self._passing: dict[str, Handle] = {}
        self._outputs: dict[str, _Outputs] = {}
        self.nodes: list[Node] = []
        self.gone: set[str] = set(gone)
        self._lost: dict[str, set[int]] = {}
        """Outputs that are gone, of nodes that are not."""
        self._by_name = {node.name: node for node in nodes}
        for node in in_order(nodes):
            self._add(node)
        self._forget_places(nodes)

    # ---- Tensors -----------------------------------------------------------------------------------------------------

    def handle(self, source: str) -> Handle | None:
        """Return what a tensor is the handle of, if it is one."""
        node = node_of(source)
        if node in self._sources:
            return self._sources[node]
        if node in self._passing:
            # The second output of a Merge is a number.
            return (
                None if source.endswith((":value_index:0", f"{node}:1")) and self._merges(node) else self._passing[node]
            )
        if node in self._outputs:
            return self._outputs[node].handles[self._number(source)]
        return None

    def resources(self, source: str) -> list[str] | None:
        """Return the tensors that take the place of a handle; None of another tensor."""
        handle, node = self.handle(source), node_of(source)
        if handle is None:
            return None
        if node in self._sources:
            return _names(node) if self._in_function else [handle.table.node(resource) for resource in RESOURCES]
        if node in self._passing:
            return [name + source.removeprefix(node) for name in _copies(node)]
        found = self._outputs[node]
        start = found.starts[self._number(source)]
        return [self._output(node, found.name, start + at) for at in range(len(RESOURCES))]

    def tensor(self, source: str) -> str:
        """Return what a tensor that is no handle is called now."""
        node = node_of(source)
        if node not in self._outputs or source.startswith("^"):
            return source
        found = self._outputs[node]
        return self._output(node, found.name, found.starts[self._number(source)])

    def _output(self, node: str, name: str, number: int) -> str:
        return f"{node}:{name}:{number}" if self._in_function else f"{node}:{number}"

    def _number(self, source: str) -> int:
        """The number of an output among all outputs of its node."""
        parts = source.split(":")
        if not self._in_function:
            return int(parts[1]) if len(parts) > 1 else 0
        return self._outputs[parts[0]].flat.get(parts[1], 0) + int(parts[2])

    def _merges(self, node: str) -> bool:
        return any(one.name == node and one.op == "Merge" for one in self.nodes)

    # ---- Nodes -------------------------------------------------------------------------------------------------------

    def _add(self, node: Node) -> None:
        if node.name in self._sources and node.op in HANDLES:
            return
        lenient = self._lenient(node)
        gone = [at for at, source in enumerate(node.data_inputs()) if self._is_gone(source)]
        if gone and not (lenient and self._can_do_without(node, gone)):
            self._leave_out(node)
            return
        if lenient and node.op == "RestoreV2" and self._restore_rest(node):
            return
        if node.op in OPERATIONS:
            try:
                self._replace(node)
            except NotRewritable as reason:
                raise UnsupportedOperation(node, self._name, str(reason)) from None
            return
        if not self._rewriter.is_known(node) or (lenient and node.op in _PYTHON):
            if not lenient:
                raise UnsupportedOperation(node, self._name, _why_not(node))
            self._leave_out(node)
            return
        taken = {at: h for at, source in enumerate(node.data_inputs()) if (h := self.handle(source)) is not None}
        if taken and node.op in PASSING:
            self._pass_on(node, taken)
        elif self._rewriter.calls_function(node):
            self._call(node, {**taken, **dict.fromkeys(gone)}, lenient)
        elif taken:
            name = next(iter(taken.values())).table.name
            raise UnsupportedOperation(node, self._name, f"it takes table '{name}' as if it were a variable")
        else:
            self.nodes.append(Node(node.name, node.op, self._inputs(node), node.attributes, node.rest))

    def _leave_out(self, node: Node) -> None:
        self.gone.add(node.name)
        if node.op in _SAVE:
            self._rewriter.saves_all = False

    def _is_gone(self, source: str) -> bool:
        node = node_of(source)
        return node in self.gone or (node in self._lost and self._number(source) in self._lost[node])

    def _can_do_without(self, node: Node, gone: Sequence[int]) -> bool:
        """Whether a node calls a function that may not be given these inputs: what saves, or restores, all there is."""
        return node.op in CALLS and node.op not in _LOOPS and gone[0] >= CALLS[node.op]

    def _restore_rest(self, node: Node) -> bool:
        """A node that reads tensors by one that reads those that still are; tells whether it had to be changed."""
        names = names_read(node, self._by_name)
        kept_tensors = self._rewriter.kept_tensors
        lost = {at for at, name in enumerate(names) if kept_tensors is not None and name not in kept_tensors}
        if not lost:
            return False
        if len(lost) == len(names):
            self._leave_out(node)
            return True
        kept = [at for at in range(len(names)) if at not in lost]
        slices = texts(split(last(split(self._by_name[node_of(node.inputs[2])].attributes["value"]), 8)), 8)
        types = node.attrs.types("dtypes")
        inputs = self._inputs(node)
        for place, values in ((1, names), (2, slices)):
            constant = Node(f"{node.name}/kept_{place}", "Const", [], strings([values[at] for at in kept]))
            self.nodes.append(constant)
            inputs[place] = f"{constant.name}:output:0" if self._in_function else constant.name
        attributes = {**node.attributes, "dtypes": of_types(types[at] for at in kept)}
        attributes.pop("_output_shapes", None)
        self.nodes.append(Node(node.name, node.op, inputs, attributes, node.rest))
        starts = [kept.index(at) if at in kept else -1 for at in range(len(names))]
        self._outputs[node.name] = _Outputs(starts, [None] * len(names), "tensors")
        self._lost[node.name] = lost
        return True

    def _inputs(self, node: Node) -> list[str]:
        """The inputs of a node as they are now: resources for each handle, no control by what is gone."""
        inputs: list[str] = []
        for source in node.inputs:
            if source.startswith("^"):
                if source[1:] in self._sources:
                    if not self._in_function:
                        inputs.append(f"^{self._sources[source[1:]].table.node(RESOURCES[0])}")
                elif source[1:] not in self.gone:
                    inputs.append(source)
                continue
            if not self._is_gone(source):
                inputs += self.resources(source) or [self.tensor(source)]
        return inputs

    def _replace(self, node: Node) -> None:
        """An operation by the call of a function."""
        handles = tuple(h for source in node.data_inputs() if (h := self.handle(source)) is not None)
        if OPERATIONS[node.op].takes_tables and not handles:
            raise NotRewritable("the table that it takes is none that the model restores")
        function = self._rewriter.operation(node, handles)
        attributes = {
            "Tin": of_types(argument.dtype for argument in function.arguments),
            "Tout": of_types(output.dtype for output in function.outputs),
            "f": of_function(function.name),
            "config": of_text(""),
            "config_proto": of_text(""),
            "executor_type": of_text(""),
            **{key: node.attributes[key] for key in _KEPT if key in node.attributes},
        }
        op = "StatefulPartitionedCall" if function.control_outputs else "PartitionedCall"
        # Without its device: a table is where its resources are.
        self.nodes.append(Node(node.name, op, self._inputs(node), attributes, without(node.rest, _DEVICE)))
        flat, at = {}, 0
        for name, count in OPERATIONS[node.op].outputs(node.attrs):
            flat[name] = at
            at += count
        self._outputs[node.name] = _Outputs(list(range(at)), [None] * at, flat=flat)

    def _pass_on(self, node: Node, taken: Mapping[int, Handle]) -> None:
        """A node that passes a handle on by one such node for each resource."""
        handles = set(taken.values())
        if len(handles) > 1 or node.op == "IdentityN":
            raise UnsupportedOperation(node, self._name, "it mixes handles of tables with each other, or with others")
        self._passing[node.name] = handles.pop()
        for at, name in enumerate(_copies(node.name)):
            inputs = []
            for source in node.inputs:
                if source.startswith("^"):
                    inputs.append(source)
                    continue
                if node_of(source) not in self._passing and self.handle(source) is None and node.op == "Merge":
                    # The way back of a loop, which comes later: it passes the same on.
                    inputs.append(_copies(node_of(source))[at] + source.removeprefix(node_of(source)))
                    continue
                inputs.append((self.resources(source) or [self.tensor(source)] * len(RESOURCES))[at])
            controls = [one for one in self._inputs(Node("", "", [s for s in inputs if s.startswith("^")], {}))]
            data = [source for source in inputs if not source.startswith("^")]
            self.nodes.append(Node(name, node.op, data + controls, node.attributes, node.rest))

    def _call(self, node: Node, taken: Mapping[int, Handle | None], lenient: bool) -> None:
        """A node that calls functions: these take the resources, and so does it."""
        offset = CALLS.get(node.op, 0)
        bound = {at - offset: handle for at, handle in taken.items()}
        if bound and node.op not in CALLS and not self._rewriter.is_function(node.op):
            raise UnsupportedOperation(node, self._name, "it hands a table to a function in a way of its own")
        if any(at < 0 for at in bound):
            raise UnsupportedOperation(node, self._name, "it takes a table where it wants a number")
        called = self._rewriter.calls_function(node)
        done = {name: self._rewriter.function(name, bound if _takes(node, name) else {}, lenient) for name in called}
        if any(one.lost for one in done.values()):
            self._leave_out(node)
            return
        attributes = {
            key: with_functions(value, lambda name: done[name].name if name in done else name)
            if functions_in(value)
            else value
            for key, value in node.attributes.items()
        }
        if bound:
            for key in _INPUT_TYPES:
                if key in attributes:
                    attributes[key] = expanded_types(attributes[key], _counts(bound), RESOURCE)
            if _READ_ONLY in attributes:
                attributes[_READ_ONLY] = moved_numbers(attributes[_READ_ONLY], _mover(_counts(taken)))
        op = done[node.op].name if node.op in done else node.op
        self.nodes.append(Node(node.name, op, self._inputs(node), attributes, node.rest))
        if node.op in _LOOPS:
            given = [bound.get(at) for at in range(len(node.data_inputs()))]
            if any(list(done[name].outputs) != given for name in functions_in(node.attributes["body"])):
                raise UnsupportedOperation(node, self._name, "its body passes tables on in another order")
            if "output_shapes" in attributes:
                attributes["output_shapes"] = expanded_shapes(attributes["output_shapes"], _counts(bound), shape())
        else:
            given = list(next(iter(done.values())).outputs)
            if any(list(one.outputs) != given for one in done.values()):
                raise UnsupportedOperation(node, self._name, "its branches give different tables")
        if not any(given):
            return
        if node.op in done:
            raise UnsupportedOperation(node, self._name, "it gives a table's handle back")
        attributes.pop("_output_shapes", None)
        if "Tout" in attributes:
            gives = {at: handle for at, handle in enumerate(given) if handle is not None}
            attributes["Tout"] = expanded_types(attributes["Tout"], _counts(gives), RESOURCE)
        starts, at = [], 0
        for handle in given:
            starts.append(at)
            at += 1 if handle is None else len(RESOURCES)
        self._outputs[node.name] = _Outputs(starts, given)

    def _forget_places(self, nodes: Sequence[Node]) -> None:
        """Leave out colocation with nodes that are not there any more."""
        there = {node.name for node in self.nodes}
        lost = {node.name for node in nodes} - there
        for node in self.nodes:
            if _COLOCATED not in node.attributes:
                continue
            places = texts(split(last(split(node.attributes[_COLOCATED]), 1)), 2)
            kept = [place for place in places if place.removeprefix(_LOCATION) not in lost]
            if kept != places:
                node.attributes = {key: value for key, value in node.attributes.items() if key != _COLOCATED}
                if kept:
                    node.attributes[_COLOCATED] = message((1, message(*((2, blob(place)) for place in kept))))


def in_order(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes, each after those that it has inputs from; where a loop closes, the order is as it was."""
    by_name = {node.name: node for node in nodes}
    done: set[str] = set()
    ordered: list[Node] = []
    for first in nodes:
        waiting = [(first, False)]
        while waiting:
            node, ready = waiting.pop()
            if ready:
                ordered.append(node)
                continue
            if node.name in done:
                continue
            done.add(node.name)
            waiting.append((node, True))
            for source in reversed(node.inputs):
                name = node_of(source)
                if name in by_name and name not in done and by_name[name].op != "NextIteration":
                    waiting.append((by_name[name], False))
    return ordered


def _names(argument: str) -> list[str]:
    return [f"{argument}_{resource}" for resource in RESOURCES]


def _copies(node: str) -> list[str]:
    return [node, *(f"{node}/{resource}" for resource in RESOURCES[1:])]


def _takes(node: Node, function: str) -> bool:
    """Whether a function that a node names takes the node's inputs: it is called with them, and not its gradient."""
    return node.op == function or any(
        function in functions_in(value) for key, value in node.attributes.items() if not key.startswith("_")
    )


def _counts(handles: Mapping[int, Handle | None]) -> dict[int, int]:
    """How many resources take each place: none where something is gone."""
    return {at: 0 if handle is None else len(RESOURCES) for at, handle in handles.items()}


def _mover(counts: Mapping[int, int]) -> Callable[[int], list[int]]:
    def moved(number: int) -> list[int]:
        start = number + sum(count - 1 for place, count in counts.items() if place < number)
        return list(range(start, start + counts.get(number, 1)))

    return moved


def _why_not(node: Node) -> str:
    if node.op in HANDLES or node.op in RESTORES:
        return "a function has it that is served; tables belong to the graph"
    return "it is none of stock TensorFlow's"
