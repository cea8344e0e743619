"""Nodes, functions and graphs: graph.proto, node_def.proto, function.proto and op_def.proto."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtools.lookup_model.messages import entry, message
from kvtools.stock_model.attributes import Attributes, functions_in
from kvtools.stock_model.fields import (
    Field,
    blob,
    entries,
    join,
    last,
    messages,
    number_entries,
    number_in,
    split,
    text,
    texts,
    without,
)


@dataclass
class Node:
    """A node of a graph or of a function; `rest` are fields that nobody changes, such as its device."""

    name: str
    op: str
    inputs: list[str]
    attributes: dict[str, bytes]
    rest: list[Field] = field(default_factory=list)

    @classmethod
    def decode(cls, data: bytes) -> Node:
        """Decode a NodeDef."""
        fields = split(data)
        return cls(
            text(last(fields, 1)),
            text(last(fields, 2)),
            texts(fields, 3),
            dict(entries(fields, 5)),
            without(fields, 1, 2, 3, 5),
        )

    def encode(self) -> bytes:
        """Encode a NodeDef."""
        return message(
            (1, blob(self.name)),
            (2, self.op),
            *((3, blob(source)) for source in self.inputs),
            *((5, message((1, blob(key)), (2, value))) for key, value in self.attributes.items()),
        ) + join(self.rest)

    @property
    def attrs(self) -> Attributes:
        """The attributes, to be read."""
        return Attributes(self.attributes)

    def functions(self) -> list[str]:
        """Return the names of the functions in its attributes."""
        return [name for value in self.attributes.values() for name in functions_in(value)]

    def data_inputs(self) -> list[str]:
        """Return the inputs that are tensors."""
        return [source for source in self.inputs if not source.startswith("^")]


@dataclass
class Argument:
    """An argument, or a result, of a function."""

    name: str
    dtype: int
    rest: list[Field] = field(default_factory=list)

    @classmethod
    def decode(cls, data: bytes) -> Argument:
        """Decode an ArgDef."""
        fields = split(data)
        return cls(text(last(fields, 1)), number_in(fields, 3), without(fields, 1, 3))

    def encode(self) -> bytes:
        """Encode an ArgDef."""
        return message((1, blob(self.name)), (3, self.dtype)) + join(self.rest)


@dataclass
class Function:
    """A function: what it takes and gives, its nodes, and from where in them its results come."""

    name: str
    arguments: list[Argument]
    outputs: list[Argument]
    nodes: list[Node]
    results: dict[str, str]
    control_results: dict[str, str]
    attributes: dict[str, bytes] = field(default_factory=dict)
    argument_attributes: dict[int, bytes] = field(default_factory=dict)
    resource_ids: dict[int, int] = field(default_factory=dict)
    control_outputs: list[str] = field(default_factory=list)
    signature_rest: list[Field] = field(default_factory=list)
    rest: list[Field] = field(default_factory=list)

    @classmethod
    def decode(cls, data: bytes) -> Function:
        """Decode a FunctionDef."""
        fields = split(data)
        signature = split(last(fields, 1))
        return cls(
            name=text(last(signature, 1)),
            arguments=[Argument.decode(value) for value in messages(signature, 2)],
            outputs=[Argument.decode(value) for value in messages(signature, 3)],
            nodes=[Node.decode(value) for value in messages(fields, 3)],
            results={key: text(value) for key, value in entries(fields, 4)},
            control_results={key: text(value) for key, value in entries(fields, 6)},
            attributes=dict(entries(fields, 5)),
            argument_attributes=dict(number_entries(fields, 7)),
            resource_ids={number_in(pair, 1): number_in(pair, 2) for pair in map(split, messages(fields, 8))},
            control_outputs=texts(signature, 20),
            signature_rest=without(signature, 1, 2, 3, 20),
            rest=without(fields, 1, 3, 4, 5, 6, 7, 8),
        )

    def encode(self) -> bytes:
        """Encode a FunctionDef."""
        signature = message(
            (1, blob(self.name)),
            *((2, argument.encode()) for argument in self.arguments),
            *((3, output.encode()) for output in self.outputs),
            *((20, blob(name)) for name in self.control_outputs),
        ) + join(self.signature_rest)
        return message(
            (1, signature),
            *((3, node.encode()) for node in self.nodes),
            *((4, message((1, blob(key)), (2, blob(value)))) for key, value in self.results.items()),
            *((5, message((1, blob(key)), (2, value))) for key, value in self.attributes.items()),
            *((6, message((1, blob(key)), (2, blob(value)))) for key, value in self.control_results.items()),
            *((7, entry(number, value)) for number, value in self.argument_attributes.items()),
            *((8, message((1, number), (2, value))) for number, value in self.resource_ids.items()),
        ) + join(self.rest)


@dataclass
class Graph:
    """A graph and its library of functions."""

    nodes: list[Node]
    library: dict[str, Function]
    library_rest: list[Field]
    rest: list[Field]

    @classmethod
    def decode(cls, data: bytes) -> Graph:
        """Decode a GraphDef."""
        fields = split(data)
        library = split(last(fields, 2))
        functions = [Function.decode(value) for value in messages(library, 1)]
        return cls(
            [Node.decode(value) for value in messages(fields, 1)],
            {function.name: function for function in functions},
            without(library, 1),
            without(fields, 1, 2),
        )

    def encode(self) -> bytes:
        """Encode a GraphDef."""
        library = message(*((1, function.encode()) for function in self.library.values())) + join(self.library_rest)
        return message(*((1, node.encode()) for node in self.nodes), (2, library)) + join(self.rest)

    def all_nodes(self) -> Iterable[tuple[str, Node]]:
        """Yield each node with the name of its function; that of the graph itself is empty."""
        for node in self.nodes:
            yield "", node
        for name, function in self.library.items():
            for node in function.nodes:
                yield name, node


def functions_needed(library: Mapping[str, Function], wanted: Iterable[str]) -> set[str]:
    """Return the names of the functions that these functions need, themselves included."""
    needed: set[str] = set()
    waiting = [name for name in wanted if name in library]
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        waiting += functions_called(library[name].nodes, library)
    return needed


def functions_called(nodes: Sequence[Node], library: Mapping[str, Function]) -> list[str]:
    """Return the names of the functions of `library` that nodes name, or are calls of."""
    found = [name for node in nodes for name in (node.op, *node.functions())]
    return [name for name in dict.fromkeys(found) if name in library]


def tensor_name(tensor: str) -> str:
    """Return the whole name of a tensor.

    >>> tensor_name("ids"), tensor_name("Split:1")
    ('ids:0', 'Split:1')
    """
    return tensor if ":" in tensor else f"{tensor}:0"


def node_of(source: str) -> str:
    """Return the name of the node that an input comes from.

    >>> node_of("^a"), node_of("a:rows:1"), node_of("a")
    ('a', 'a', 'a')
    """
    return source.removeprefix("^").partition(":")[0]
