"""The objects that `tf.saved_model.load` builds, and those by which it finds their variables in the checkpoint.

What was a table's object has the variables `keys` and `values` and the resource `index` below it. Functions that
captured a table capture these.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

from kvtools.dialects.tfra_names import of_path
from kvtools.lookup_model.messages import message
from kvtools.stock_model.fields import (
    Field,
    blob,
    entries,
    join,
    last,
    messages,
    number_in,
    numbers,
    split,
    text,
    texts,
    without,
)
from kvtools.stock_model.op_table import HANDLES
from kvtools.stock_model.rewrite import Rewriter, UnsupportedOperation
from kvtools.stock_model.table import RESOURCES, Handle, StockTable
from kvtools.stock_model.table_objects import (
    HAS_VALUES,
    below,
    concrete_functions,
    object_names,
    resource_children,
    table_objects,
    tracked_objects,
)

_OURS = "tfplugin."
_PARTITIONED = "tfplugin.PartitionedKvVariable"
_CHILD, _USER_OBJECT, _FUNCTION, _VARIABLE, _BARE, _CONSTANT, _RESOURCE = 1, 4, 6, 7, 8, 9, 10
_SAVEABLES, _CLASS, _CONFIG, _SAVER_OF_OBJECT = 11, 13, 14, 16
_ATTRIBUTE, _SAVER, _HAS_VALUES = 2, 4, 5
_IN_FILES = "/.ATTRIBUTES/table"
_PLAIN = message((1, "_generic_user_object"), (2, message((1, 1), (2, 1))))
"""An object of no class."""


def constants(saved: bytes) -> list[str]:
    """Return the nodes that objects are constants of: TensorFlow loads these, whether a signature uses them or not."""
    nodes = [split(node) for node in messages(split(saved), 1)]
    return [text(last(split(value), 1)) for node in nodes for value in messages(node, _CONSTANT)]


@dataclass
class Objects:
    """The changed objects: a `SavedObjectGraph`, the `TrackableObjectGraph` of the checkpoint, and the names of
    functions that were left out, with the reasons."""

    saved: bytes
    tracked: bytes
    left_out: dict[str, UnsupportedOperation] = field(default_factory=dict)


def object_prefixes(saved: bytes, tracked: bytes, known: Container[str]) -> dict[int, tuple[str, int]]:
    """Return which objects are tables: by their numbers, what their tensors begin with, and which part they are.

    Args:
        saved: the `SavedObjectGraph`.
        tracked: the `TrackableObjectGraph`.
        known: what the tensors of tables begin with that are saved as tensors of their objects.
    """
    nodes, checkpoint = _nodes(saved), _nodes(tracked)
    found: dict[int, tuple[str, int]] = {}
    parts: dict[int, tuple[str, int]] = {}
    for number, path in _pairs(nodes, checkpoint):
        for attribute in messages(checkpoint[path], _ATTRIBUTE):
            tensor = text(last(split(attribute), 3))
            prefix = tensor.removesuffix("-keys")
            if prefix not in known and tensor.endswith(_IN_FILES):
                # A table of TFRA's in files beside the variables: known by what these are called.
                prefix = of_path(tensor.removesuffix(_IN_FILES).rpartition("/")[0]).base
            if prefix in known:
                found[number] = prefix, -1
        saver = split(last(checkpoint[path], _SAVER))
        if not saver or not text(last(saver, 1)).startswith(_OURS):
            continue
        prefix = f"{text(last(saver, 2))}/.ATTRIBUTES/kv"
        if text(last(nodes[number], _CLASS)) != _PARTITIONED:
            found[number] = prefix, 0
            continue
        for name, child in _children(nodes[number]):
            if name.startswith("part_"):
                parts[child] = prefix, int(name.removeprefix("part_"))
    return found | parts  # a part is saved by the whole


def rewrite_objects(
    saved: bytes,
    tracked: bytes,
    handles: Mapping[int, Handle],
    tables: Sequence[StockTable],
    rewriter: Rewriter,
    library: Mapping[str, int],
) -> Objects:
    """Rewrite the objects of a model, and the functions that they name.

    Args:
        saved: the `SavedObjectGraph`.
        tracked: the `TrackableObjectGraph`.
        handles: which objects are tables.
        tables: all tables.
        rewriter: rewrites the functions.
        library: how many arguments each function has.

    A function with an operation that cannot be rewritten is left out.
    """
    nodes, checkpoint = _nodes(saved), _nodes(tracked)
    first = len(nodes)
    number_of: dict[int, dict[str, int]] = {}
    for table in tables:
        names = object_names(table)
        number_of[table.number] = {name: first + at for at, name in enumerate(names)}
        first += len(names)
    left_out: dict[str, UnsupportedOperation] = {}
    renamed: dict[str, str] = {}
    concrete: list[Field] = []
    for name, value in entries(split(saved), 2):
        fields = split(value)
        captured = numbers(fields, 2)
        start = library.get(name, 0) - len(captured)
        bound = {start + at: handles[number] for at, number in enumerate(captured) if number in handles}
        try:
            renamed[name] = rewriter.function(name, bound).name if name in library else name
        except UnsupportedOperation as reason:
            left_out[name] = reason
            continue
        now: list[int] = []
        for number in captured:
            if number in handles:
                now += [number_of[handles[number].table.number][resource] for resource in RESOURCES]
            else:
                now.append(number)
        changed = [(2, 0, number) for number in now] + without(fields, 2)
        concrete.append((2, 2, message((1, blob(renamed[name])), (2, join(changed)))))
    silent: set[str] = set()
    unused: set[int] = set()
    lost = {at for at, node in enumerate(nodes) for bare in messages(node, _BARE) if _first(bare) in left_out}
    for at, node in enumerate(nodes):
        if messages(node, _RESOURCE):
            its_own = _functions_of(node, nodes)
            if at in handles or any(name in left_out and left_out[name].node.op in HANDLES for name in its_own):
                # A table of TensorFlow's kind: what makes it, fills it and saves it goes, and is no loss. One that is
                # no table of the model's holds optimizer slots, or when keys were seen.
                silent.update(its_own)
                unused.add(at)
                node = [(_USER_OBJECT, 2, _PLAIN)]
        there = [one for one in node if not (one[0] == _CHILD and _child(one) in lost)]
        nodes[at] = _changed(there, renamed, left_out)
    holders = _holders(handles)
    for table in tables:
        holder = holders.get(table.number)
        if holder is not None:
            nodes[holder] = resource_children(number_of[table.number]) + nodes[holder]
        nodes += table_objects(table, number_of[table.number])
        for name, signed in concrete_functions(table, number_of[table.number]):
            concrete.append((2, 2, message((1, name), (2, signed))))
    _track(nodes, checkpoint, handles.keys() | unused, holders, {table.number: table for table in tables})
    return Objects(
        join([(1, 2, join(node)) for node in nodes] + concrete + without(split(saved), 1, 2)),
        join([(1, 2, join(node)) for node in checkpoint] + without(split(tracked), 1)),
        {name: reason for name, reason in left_out.items() if name not in silent},
    )


def _functions_of(node: list[Field], nodes: list[list[Field]]) -> list[str]:
    """The functions below a table: its children, and those that save and restore it."""
    below = [child for _, child in _children(node)]
    for _, saveable in entries(node, _SAVEABLES):
        below += [number_in(split(saveable), number) for number in (2, 3)]
    found: list[str] = []
    for at in list(below):
        below += [child for _, child in _children(nodes[at])]
    for at in below:
        found += [name for value in messages(nodes[at], _FUNCTION) for name in texts(split(value), 1)]
        found += [_first(value) for value in messages(nodes[at], _BARE)]
    return found


def _nodes(graph: bytes) -> list[list[Field]]:
    return [split(node) for node in messages(split(graph), 1)]


def _children(node: list[Field]) -> list[tuple[str, int]]:
    found = [split(child) for child in messages(node, _CHILD)]
    return [(text(last(child, 2)), number_in(child, 1)) for child in found]


def _child(child: Field) -> int:
    return number_in(split(child[2]), 1) if isinstance(child[2], bytes) else -1


def _first(message: bytes) -> str:
    return text(last(split(message), 1))


def _pairs(nodes: list[list[Field]], checkpoint: list[list[Field]]) -> list[tuple[int, int]]:
    """Each object with what it is in the checkpoint: from the roots on, by the names of children."""
    seen = {(0, 0)} if nodes and checkpoint else set()
    waiting = list(seen)
    while waiting:
        number, path = waiting.pop()
        there = dict(_children(checkpoint[path]))
        for name, child in _children(nodes[number]):
            pair = child, there.get(name, -1)
            if pair[1] >= 0 and pair not in seen:
                seen.add(pair)
                waiting.append(pair)
    return sorted(seen)


def _holders(handles: Mapping[int, Handle]) -> dict[int, int]:
    """The object that has a table's new objects below it: that of its first part."""
    found: dict[int, int] = {}
    for number, handle in sorted(handles.items(), key=lambda item: item[1].part):
        found.setdefault(handle.table.number, number)
    return found


def _changed(
    node: list[Field], renamed: Mapping[str, str], left_out: Mapping[str, UnsupportedOperation]
) -> list[Field]:
    """An object without what only tfplugin could make again, and with the functions' new names."""
    if text(last(node, _CLASS)).startswith(_OURS):
        node = without(node, _CLASS, _CONFIG)
    if text(last(node, _SAVER_OF_OBJECT)):
        node = without(node, _SAVER_OF_OBJECT)
    changed: list[Field] = []
    for number, kind, value in node:
        if number == _USER_OBJECT and isinstance(value, bytes):
            if text(last(split(value), 1)).startswith(_OURS):
                value = _PLAIN
        elif number == _FUNCTION and isinstance(value, bytes):
            fields = split(value)
            names = [renamed.get(name, name) for name in texts(fields, 1) if name not in left_out]
            value = join([(1, 2, blob(name)) for name in names] + without(fields, 1))
        elif number == _BARE and isinstance(value, bytes):
            name = text(last(split(value), 1))
            if name in left_out:
                changed.append((_USER_OBJECT, 2, _PLAIN))
                continue
            value = join([(1, 2, blob(renamed.get(name, name))), *without(split(value), 1)])
        changed.append((number, kind, value))
    return changed


def _track(
    nodes: list[list[Field]],
    checkpoint: list[list[Field]],
    saved_tables: Collection[int],
    holders: Mapping[int, int],
    tables: Mapping[int, StockTable],
) -> None:
    """Give the checkpoint's objects what is below those of tables, and take away what saved these."""
    paths: dict[int, int] = {}
    for number, path in _pairs(nodes, checkpoint):
        paths.setdefault(number, path)
        if number in saved_tables:
            checkpoint[path] = without(checkpoint[path], _ATTRIBUTE)
    for at, node in enumerate(checkpoint):
        if messages(node, _SAVER):
            checkpoint[at] = without(node, _SAVER)

    def add(parent: int, name: str, fields: list[Field]) -> int:
        checkpoint.append(fields)
        new = below(len(checkpoint) - 1, name)
        checkpoint[parent] = [new, *without(checkpoint[parent], _HAS_VALUES), HAS_VALUES]
        return len(checkpoint) - 1

    parents = {child: (at, name) for at, node in enumerate(nodes) for name, child in _children(node) if at in paths}
    for number, holder in holders.items():
        if holder not in paths:
            # A part: the checkpoint knows the whole only.
            parent, name = parents[holder]
            paths[holder] = add(paths[parent], name, [HAS_VALUES])
        table, path = tables[number], paths[holder]
        names = object_names(table)
        number_of = {name: len(checkpoint) + at for at, name in enumerate(names)}
        checkpoint += tracked_objects(table, number_of)
        checkpoint[path] = [*resource_children(number_of), *without(checkpoint[path], _HAS_VALUES), HAS_VALUES]
