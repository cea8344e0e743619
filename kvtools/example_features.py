"""The features of the tf.Examples that a graph parses, and how examples are written.

A model that takes tf.Examples has one input of serialized ones, which tells nothing of what is in them. The operations
that parse them do: `ParseExample`, `ParseExampleV2` and `ParseSingleExample` have the names, types and shapes.

Formats: tensorflow/core/example/example.proto, feature.proto, and tensorflow/core/ops/parsing_ops.cc.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtools.dialects.bundle.dtypes import dtype_name
from kvtools.dialects.bundle.wire import put_varint
from kvtools.dialects.chunk import Array
from kvtools.lookup_model.messages import message
from kvtools.stock_model.fields import blob, last, messages, number_in, split, texts
from kvtools.stock_model.graph_def import Function, Graph, Node, tensor_name

_PARSERS = ("ParseExample", "ParseExampleV2", "ParseSingleExample")
_PASS_ON = {
    **dict.fromkeys(("Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "PlaceholderWithDefault"), "output"),
    "TensorListFromTensor": "output_handle",  # of tf.map_fn
    "TensorListGetItem": "item",
}
"""Operations whose output is examples where an input is, and what it is called in functions."""
_CONDITIONS = ("If", "StatelessIf", "Case", "StatelessCase")
_LISTS = {"string": 1, "float32": 2, "int64": 3}  # of a Feature: bytes_list, float_list, int64_list
_64_BITS = (1 << 64) - 1


@dataclass(frozen=True)
class Feature:
    """A feature that examples are parsed for.

    Attributes:
        name: its key.
        dtype: "int64", "float32" or "string".
        shape: of a dense one, -1 for a first size that varies; None of a sparse or ragged one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None


def parsed_features(graph: Graph, tensor: str) -> tuple[Feature, ...]:
    """Return the features that a graph parses examples for which come from a tensor, by name; none if it parses none.

    Args:
        graph: a graph, with its functions.
        tensor: a string tensor of it, such as "examples:0".
    """
    found: dict[str, Feature] = {}
    _follow(graph.nodes, [tensor_name(tensor)], graph.library, found, set())
    return tuple(sorted(found.values(), key=lambda feature: feature.name))


def _follow(
    nodes: Sequence[Node],
    examples: Sequence[str],
    library: Mapping[str, Function],
    found: dict[str, Feature],
    seen: set[tuple[str, tuple[int, ...]]],
) -> None:
    """Find what parses `examples`, tensors by their whole names, in the nodes and the functions that they call."""
    by_name = {node.name: node for node in nodes}
    reading: dict[str, list[tuple[Node, int]]] = {}
    for node in nodes:
        for number, source in enumerate(node.data_inputs()):
            reading.setdefault(tensor_name(source), []).append((node, number))
    waiting = [*examples]
    given: dict[str, list[int]] = {}
    while waiting:
        for node, number in reading.pop(waiting.pop(), ()):
            given.setdefault(node.name, []).append(number)
            if node.op in _PASS_ON:
                output = number if node.op == "IdentityN" else 0
                waiting += [f"{node.name}:{output}", f"{node.name}:{_PASS_ON[node.op]}:{output}"]
    for name, numbers in given.items():
        node = by_name[name]
        if node.op in _PARSERS and 0 in numbers:
            found |= {feature.name: feature for feature in _features(node, by_name)}
        if node.op in _CONDITIONS:  # whose first input the functions do not take
            numbers = [number - 1 for number in numbers if number]
        for called in (node.op, *node.functions()):
            function, key = library.get(called), (called, tuple(numbers))
            if function is None or key in seen:
                continue
            seen.add(key)
            taken = [f"{function.arguments[number].name}:0" for number in numbers if number < len(function.arguments)]
            _follow(function.nodes, taken, library, found, seen)


def _features(node: Node, by_name: Mapping[str, Node]) -> Iterator[Feature]:
    """Yield what an operation parses; nothing where the names are computed."""
    attrs, sources = node.attrs, node.data_inputs()
    shapes = [_sizes(encoded) for encoded in attrs.shapes("dense_shapes")]
    ragged: list[str] = []
    if node.op == "ParseSingleExample":
        sparse, dense = attrs.texts("sparse_keys"), attrs.texts("dense_keys")
    elif node.op == "ParseExampleV2":
        sparse, dense, ragged = (_constant(source, by_name) for source in sources[2:5])
    else:
        count, more = attrs.number("Nsparse"), attrs.number("Ndense")
        sparse = [name for source in sources[2 : 2 + count] for name in _constant(source, by_name)]
        dense = [name for source in sources[2 + count : 2 + count + more] for name in _constant(source, by_name)]
    yield from _typed(dense, attrs.types("Tdense"), shapes)
    yield from _typed(sparse, attrs.types("sparse_types"), [None] * len(sparse))
    yield from _typed(ragged, attrs.types("ragged_value_types"), [None] * len(ragged))


def _typed(names: Iterable[str], types: Iterable[int], shapes: Iterable[tuple[int, ...] | None]) -> Iterator[Feature]:
    for name, dtype, shape in zip(names, types, shapes, strict=False):
        if dtype_name(dtype) in _LISTS:
            yield Feature(name, dtype_name(dtype), shape)


def _sizes(encoded: bytes) -> tuple[int, ...]:
    sizes = [number_in(split(dim), 1) for dim in messages(split(encoded), 2)]
    return tuple(-1 if size >> 63 else size for size in sizes)


def _constant(source: str, by_name: Mapping[str, Node]) -> list[str]:
    """The strings of a tensor that is a constant; none of another."""
    node = by_name.get(source.partition(":")[0])
    while node is not None and node.op == "Identity":
        node = by_name.get(node.data_inputs()[0].partition(":")[0])
    if node is None or node.op != "Const":
        return []
    return texts(split(last(split(node.attributes["value"]), 8)), 8)


def serialized_example(features: Mapping[str, Array]) -> bytes:
    """Return a tf.Example of arrays, each of int64, float32 or bytes in an array of objects.

    Example:
        >>> import numpy as np
        >>> serialized_example({"id": np.array([7])})
        b'\\n\\r\\n\\x0b\\n\\x02id\\x12\\x05\\x1a\\x03\\n\\x01\\x07'
    """
    return message(
        (1, message(*((1, message((1, blob(name)), (2, _feature(values)))) for name, values in features.items())))
    )


def _feature(values: Array) -> bytes:
    flat = values.reshape(-1)
    if flat.dtype == object:
        return message((_LISTS["string"], message(*((1, value) for value in flat))))
    if flat.dtype.kind == "f":
        return message((_LISTS["float32"], message((1, flat.astype("<f4").tobytes()))))
    return message((_LISTS["int64"], message((1, b"".join(put_varint(one & _64_BITS) for one in flat.tolist())))))
