"""The object graph of an object-based checkpoint, as far as a writer must know it: which tensors hang where.

`_CHECKPOINTABLE_OBJECT_GRAPH` is one string, a serialized `TrackableObjectGraph`: node 0 is the root, a node has named
children (by node number) and attributes with the tensor that each is saved as; an object that saves itself has the name
of its saver, and its path, instead. TensorFlow finds what to restore by it, and says nothing of what it does not find.
Format: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/protobuf/trackable_object_graph.proto
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping

from kvtools.dialects.bundle.wire import WireError, put_varint, read_fields
from kvtools.errors import CorruptFileError

OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_ATTRIBUTES = "/.ATTRIBUTES/"
_CHILD, _ATTRIBUTE, _NODE_ID, _LOCAL_NAME, _ATTRIBUTE_NAME, _FULL_NAME, _TENSOR, _HAS_VALUES = 1, 2, 1, 2, 1, 2, 3, 5
_SAVER, _SAVER_NAME, _OBJECT_NAME = 4, 1, 2


def extend_object_graph(graph: bytes, tensors: Iterable[str] = (), *, savers: Mapping[str, str] | None = None) -> bytes:
    """Return `graph` with what it lacks: an object and an attribute for each of `tensors`, an object for each saver.

    Args:
        graph: a serialized graph, or nothing.
        tensors: what attributes are saved as, `<path>/.ATTRIBUTES/<attribute>`: a tensor's name, or what the names of
            an object's tensors begin with.
        savers: what objects that save themselves are saved by, the name that their class is registered under, by the
            path of the object.

    Raises:
        CorruptFileError: `graph` is no object graph.

    Example:
        >>> graph = extend_object_graph(b"", ["m/v/.ATTRIBUTES/VARIABLE_VALUE"])
        >>> extend_object_graph(graph, ["m/v/.ATTRIBUTES/VARIABLE_VALUE"]) == graph
        True
    """
    with _well_formed():
        nodes = [bytearray(node) for node in _nodes(graph)] or [bytearray(_NEW)]
        children = [_children(bytes(node), len(nodes)) for node in nodes]
        known = {tensor for node in nodes for tensor in _attributes(bytes(node))}
        saved = {path for node in nodes for path in _saved_by_themselves(bytes(node))}

    def node_at(path: str) -> int:
        at = 0
        for local_name in map(unescape, path.split("/") if path else ()):
            child = children[at].get(local_name)
            if child is None:
                child = children[at][local_name] = len(nodes)
                nodes.append(bytearray(_NEW))
                children.append({})
                nodes[at] += _message(_CHILD, _number(_NODE_ID, child) + _text(_LOCAL_NAME, local_name))
            at = child
        return at

    for tensor in tensors:
        if tensor in known:
            continue
        known.add(tensor)
        path, _, attribute = f"/{tensor}".rpartition(_ATTRIBUTES)
        record = _text(_ATTRIBUTE_NAME, attribute) + _text(_TENSOR, tensor)
        nodes[node_at(path.removeprefix("/"))] += _message(_ATTRIBUTE, record)
    for path, saver in (savers or {}).items():
        if path not in saved:
            saved.add(path)
            nodes[node_at(path)] += _message(_SAVER, _text(_SAVER_NAME, saver) + _text(_OBJECT_NAME, path))
    return b"".join(_message(1, bytes(node)) for node in nodes)


def full_names(graph: bytes) -> set[str]:
    """Return what the variables in a serialized graph were called, such as "Adam/m/dense/kernel".

    Raises:
        CorruptFileError: `graph` is no object graph.
    """
    with _well_formed():
        return {name for node in _nodes(graph) for name in _attributes(node, _FULL_NAME)}


@contextlib.contextmanager
def _well_formed() -> Iterator[None]:
    try:
        yield
    except (WireError, UnicodeDecodeError) as error:
        raise CorruptFileError(
            f"reading '{OBJECT_GRAPH}': got malformed bytes ({error}), expected an object graph; write the checkpoint"
            " again"
        ) from error


def unescape(local_name: str) -> str:
    """Return the name of an object that its path in a tensor's name spells with ".S" for "/" and ".." for ".".

    >>> unescape("a.Sb..c")
    'a/b.c'
    """
    return re.sub(r"\.(\.|S)", lambda found: "/" if found[1] == "S" else ".", local_name)


def _nodes(graph: bytes) -> list[bytes]:
    return [value for number, value in read_fields(graph) if number == 1 and isinstance(value, bytes)]


def _children(node: bytes, nodes: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, value in read_fields(node):
        if number == _CHILD and isinstance(value, bytes):
            record = dict(read_fields(value))
            child, local_name = record.get(_NODE_ID, 0), record.get(_LOCAL_NAME, b"")
            if not isinstance(child, int) or child >= nodes or not isinstance(local_name, bytes):
                raise WireError("a child that is no node")
            found[local_name.decode()] = child
    return found


def _attributes(node: bytes, field: int = _TENSOR) -> set[str]:
    found: set[str] = set()
    for number, value in read_fields(node):
        if number == _ATTRIBUTE and isinstance(value, bytes):
            text = dict(read_fields(value)).get(field, b"")
            if isinstance(text, bytes):
                found.add(text.decode())
    return found


def _saved_by_themselves(node: bytes) -> set[str]:
    found: set[str] = set()
    for number, value in read_fields(node):
        if number == _SAVER and isinstance(value, bytes):
            path = dict(read_fields(value)).get(_OBJECT_NAME, b"")
            if isinstance(path, bytes):
                found.add(path.decode())
    return found


def _number(field: int, value: int) -> bytes:
    return put_varint(field << 3) + put_varint(value)


def _message(field: int, value: bytes) -> bytes:
    return put_varint(field << 3 | 2) + put_varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


_NEW = _message(_HAS_VALUES, _number(1, 1))
"""A node that TensorFlow restores: it, or what hangs below it, has values."""
