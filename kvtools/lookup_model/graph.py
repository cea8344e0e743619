"""The graph that a session runs: variables and indexes, a call per signature, initialization, saving and restoring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvtools.dialects.object_graph import OBJECT_GRAPH
from kvtools.lookup_model.functions import KEYS_SHAPE, Lookup, index_node, legal
from kvtools.lookup_model.messages import (
    INT32,
    INT64,
    RESOURCE,
    STRING,
    UNKNOWN_RANK,
    node,
    of_bool,
    of_function,
    of_shape,
    of_text,
    of_type,
    of_types,
    shape,
    texts,
)

INIT = "init"
FILENAME = "save/filename"
SAVED = "save/saved"
RESTORED = "save/restored"


def ids_node(signature: str) -> str:
    """Return the name of the node that ids are fed to, as TensorFlow calls it."""
    return f"{legal(signature)}_ids"


def answer_node(signature: str) -> str:
    """Return the name of the node that answers a signature."""
    return f"answer/{signature}"


def graph_nodes(
    lookups: Sequence[Lookup], signatures: Mapping[str, tuple[Lookup, str]], object_graph: bytes
) -> Iterator[bytes]:
    """Yield the nodes of the graph.

    Args:
        lookups: the tables.
        signatures: the signatures, each with its table and function.
        object_graph: what is saved beside the variables.
    """
    for lookup in lookups:
        yield index_node(_node(lookup, "index"), lookup)
        yield from _variable(lookup, "keys", INT64, KEYS_SHAPE)
        yield from _variable(lookup, "values", lookup.dtype, lookup.values_shape)
    for signature, (lookup, function) in signatures.items():
        ids = ids_node(signature)
        yield node(ids, "Placeholder", dtype=of_type(INT64), shape=of_shape(UNKNOWN_RANK))
        yield _call(
            answer_node(signature),
            function,
            [(ids, INT64), (_node(lookup, "index"), RESOURCE), (_node(lookup, "values"), RESOURCE)],
            lookup.answer_dtype,
        )
    initialized = []
    for lookup in lookups:
        initialized.append(_node(lookup, "initialize"))
        handles = [(_node(lookup, "keys"), RESOURCE), (_node(lookup, "index"), RESOURCE)]
        yield _call(initialized[-1], lookup.function("_initializer"), handles, INT32)
    yield node(INIT, "NoOp", [f"^{name}" for name in initialized])
    yield from _save_and_restore(lookups, object_graph)


def _node(lookup: Lookup, what: str) -> str:
    return f"tables/{lookup.number}/{what}"


def _variable(lookup: Lookup, variable: str, dtype: int, of_rows: bytes) -> Iterator[bytes]:
    name = _node(lookup, variable)
    yield node(
        name,
        "VarHandleOp",
        container=of_text(""),
        shared_name=of_text(lookup.variable(variable)),
        dtype=of_type(dtype),
        shape=of_shape(of_rows),
    )
    yield node(f"{name}/read", "ReadVariableOp", [name], dtype=of_type(dtype))


def _call(name: str, function: str, inputs: Sequence[tuple[str, int]], dtype: int) -> bytes:
    return node(
        name,
        "StatefulPartitionedCall",
        [source for source, _ in inputs],
        Tin=of_types(source for _, source in inputs),
        Tout=of_types([dtype]),
        f=of_function(function),
        config=of_text(""),
        config_proto=of_text(""),
        executor_type=of_text(""),
    )


def _save_and_restore(lookups: Sequence[Lookup], object_graph: bytes) -> Iterator[bytes]:
    variables = [
        (lookup, variable, dtype)
        for lookup in lookups
        for variable, dtype in (("keys", INT64), ("values", lookup.dtype))
    ]
    tensors = [lookup.tensor(variable) for lookup, variable, _ in variables]
    dtypes = [dtype for _, _, dtype in variables]
    yield node(FILENAME, "Placeholder", dtype=of_type(STRING), shape=of_shape(shape()))
    yield texts("save/tensors", [*tensors, OBJECT_GRAPH])
    yield texts("save/slices", [""] * (len(tensors) + 1))
    yield texts("save/objects", [object_graph], scalar=True)
    read = [f"{_node(lookup, variable)}/read" for lookup, variable, _ in variables]
    inputs = [FILENAME, "save/tensors", "save/slices", *read, "save/objects"]
    yield node("save/save", "SaveV2", inputs, dtypes=of_types([*dtypes, STRING]))
    yield node(SAVED, "Identity", [FILENAME, "^save/save"], T=of_type(STRING))
    yield texts("restore/tensors", tensors)
    yield texts("restore/slices", [""] * len(tensors))
    inputs = [FILENAME, "restore/tensors", "restore/slices"]
    yield node("restore/restore", "RestoreV2", inputs, dtypes=of_types(dtypes))
    assigned = []
    for number, (lookup, variable, dtype) in enumerate(variables):
        assigned.append(f"{_node(lookup, variable)}/restore")
        inputs = [_node(lookup, variable), f"restore/restore:{number}"]
        yield node(assigned[-1], "AssignVariableOp", inputs, dtype=of_type(dtype), validate_shape=of_bool(False))
    yield node(RESTORED, "NoOp", [f"^{name}" for name in assigned])
