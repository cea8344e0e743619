"""`saved_model.pb` of a model that looks up rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtools.lookup_model.functions import (
    Lookup,
    creator_function,
    destroyer_function,
    initializer_function,
    lookup_function,
)
from kvtools.lookup_model.graph import FILENAME, INIT, RESTORED, SAVED, answer_node, graph_nodes, ids_node
from kvtools.lookup_model.messages import INT64, UNKNOWN_RANK, entry, message
from kvtools.lookup_model.objects import object_graphs

DEFAULT_SIGNATURE = "serving_default"
_PRODUCER, _MIN_CONSUMER = 1645, 12
"""Versions of the graph: TensorFlow 2.15 makes the first, and programs of the second can read it."""
_LIKE = "2.16.1"
"""The oldest TensorFlow that kvtools supports: what the model says that it was made by."""


@dataclass(frozen=True)
class LookupModel:
    """A model: `saved_model` is the file of that name, `object_graph` a string in the bundle of its variables."""

    saved_model: bytes
    object_graph: bytes


def lookup_model(lookups: Sequence[Lookup], rows: Sequence[int]) -> LookupModel:
    """Return the model of these tables, numbered from 0, with a signature each; that of a single table is the default.

    Args:
        lookups: the tables.
        rows: how many rows each has; the one after the last is what missing ids get.

    Example:
        >>> lookup = Lookup(0, "emb", "float32", 4, "an index of its own")
        >>> b"serving_default" in lookup_model([lookup], [10]).saved_model
        True
    """
    signatures = {lookup.signature: (lookup, lookup.function("lookup")) for lookup in lookups}
    if len(lookups) == 1:
        signatures[DEFAULT_SIGNATURE] = (lookups[0], "__inference_default_lookup_0")
    saved_objects, object_graph = object_graphs(lookups, signatures)
    functions = [lookup_function(lookup, name, rows[lookup.number]) for lookup, name in signatures.values()]
    for make in (creator_function, initializer_function, destroyer_function):
        functions += [make(lookup) for lookup in lookups]
    graph = message(
        *((1, node) for node in graph_nodes(lookups, signatures, object_graph)),
        (2, message(*((1, function) for function in functions))),
        (4, message((1, _PRODUCER), (2, _MIN_CONSUMER))),
    )
    described = [(5, entry(name, _signature(name, lookup))) for name, (lookup, _) in signatures.items()]
    output = message((1, INIT), (3, UNKNOWN_RANK))
    initialization = message((2, entry("__saved_model_init_op", output)))
    meta_graph = message(
        (1, message((4, "serve"), (5, _LIKE))),
        (2, graph),
        (3, message((1, f"{FILENAME}:0"), (2, f"{SAVED}:0"), (3, RESTORED), (7, 2))),
        (4, entry("saved_model_main_op", message((1, message((1, INIT)))))),
        *described,
        (5, entry("__saved_model_init_op", initialization)),
        (7, saved_objects),
    )
    return LookupModel(message((1, 1), (2, meta_graph)), object_graph)


def _signature(name: str, lookup: Lookup) -> bytes:
    def tensor(node: str, dtype: int) -> bytes:
        return message((1, f"{node}:0"), (2, dtype), (3, UNKNOWN_RANK))

    return message(
        (1, entry("ids", tensor(ids_node(name), INT64))),
        (2, entry("embeddings", tensor(answer_node(name), lookup.answer_dtype))),
        (3, "tensorflow/serving/predict"),
    )
