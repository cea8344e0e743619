"""`saved_model.pb` of a model that looks up rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtools.lookup_model.graph import INIT, SAVER, graph_nodes
from kvtools.lookup_model.messages import INT64, UNKNOWN_RANK, entry, message
from kvtools.lookup_model.objects import object_graphs
from kvtools.lookup_model.signatures import Signature, lookup_function, signatures_of
from kvtools.stock_model.graph_def import Graph
from kvtools.stock_model.hash_index import index_functions
from kvtools.stock_model.meta_graph import MetaGraph
from kvtools.stock_model.table import StockTable

_PRODUCER, _MIN_CONSUMER = 1645, 12
"""Versions of the graph: TensorFlow 2.15 makes the first, and programs of the second can read it."""
_LIKE = "2.16.1"
"""The oldest TensorFlow that kvtools supports: what the model says that it was made by."""


@dataclass(frozen=True)
class LookupModel:
    """A model: `saved_model` is the file of that name, `object_graph` a string in the bundle of its variables."""

    saved_model: bytes
    object_graph: bytes


def lookup_model(tables: Sequence[tuple[str, StockTable]]) -> LookupModel:
    """Return the model of these tables, numbered from 0, each with the name of its signature.

    Example:
        >>> from kvtools.stock_model.initial_rows import InitialRows
        >>> table = StockTable(0, "emb", "int64", "float32", 4, (9,), InitialRows(), "an index of its own", "tables")
        >>> b"serving_default" in lookup_model([("emb", table)]).saved_model
        True
    """
    of_model = [table for _, table in tables]
    signatures = signatures_of(tables)
    saved_objects, object_graph = object_graphs(of_model, signatures)
    functions = [lookup_function(signature) for signature in signatures]
    functions += [function for table in of_model for function in index_functions(table)]
    graph = Graph(
        list(graph_nodes(of_model, signatures, object_graph)),
        {function.name: function for function in functions},
        [],
        [(4, 2, message((1, _PRODUCER), (2, _MIN_CONSUMER)))],
    )
    output = message((1, INIT), (3, UNKNOWN_RANK))
    meta_graph = MetaGraph(
        fields=[(1, 2, message((4, "serve"), (5, _LIKE)))],
        tags=("serve",),
        graph=graph,
        signatures={
            **{signature.name: _described(signature) for signature in signatures},
            "__saved_model_init_op": message((2, entry("__saved_model_init_op", output))),
        },
        collections={"saved_model_main_op": message((1, message((1, INIT))))},
        saver=SAVER,
        assets=[],
        objects=saved_objects,
    )
    return LookupModel(message((1, 1), (2, meta_graph.encode())), object_graph)


def _described(signature: Signature) -> bytes:
    def tensor(name: str, dtype: int) -> bytes:
        return message((1, name), (2, dtype), (3, UNKNOWN_RANK))

    inputs = [(lookup.ids, f"{signature.input_node(lookup)}:0") for lookup in signature.lookups]
    outputs = [
        (name, tensor(f"{signature.answer_node}:{at}", dtype)) for at, (name, dtype) in enumerate(signature.outputs())
    ]
    return message(
        *((1, entry(name, tensor(node, INT64))) for name, node in inputs),
        *((2, entry(name, described)) for name, described in outputs),
        (3, "tensorflow/serving/predict"),
    )
