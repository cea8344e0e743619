"""The signatures of the model: what each takes and gives, and its function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.lookup_model.messages import BOOL, INT64, RESOURCE, of_function, of_text, of_type, of_types
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.graph_def import Function
from kvtools.stock_model.index import find
from kvtools.stock_model.rows import gather
from kvtools.stock_model.table import RESOURCES, Handle, StockTable, resources_of

DEFAULT_SIGNATURE = "serving_default"
_ANSWERED_WIDER = frozenset(map(number_named, ("float16", "bfloat16", "int8", "bool")))


def legal(name: str) -> str:
    """Return a name that a node may have: none may begin with `_`.

    >>> legal("user_emb"), legal("_emb")
    ('user_emb', '._emb')
    """
    return f".{name}" if name.startswith("_") else name


@dataclass(frozen=True)
class Lookup:
    """A table in a signature: what its ids are called among the inputs, and its rows, and whether each was found,
    among the outputs."""

    table: StockTable
    ids: str
    embeddings: str
    found: str

    @property
    def answer_dtype(self) -> int:
        """The type of the rows: float32 where values are narrower than that."""
        return number_named("float32") if self.table.dtype in _ANSWERED_WIDER else self.table.dtype


@dataclass(frozen=True)
class Signature:
    """A signature: its name, that of its function, and what it looks up."""

    name: str
    function: str
    lookups: tuple[Lookup, ...]

    def inputs(self) -> list[Lookup]:
        """Return its inputs, in the order of the function's arguments: TensorFlow sorts them by name."""
        return sorted(self.lookups, key=lambda lookup: lookup.ids)

    def outputs(self) -> list[tuple[str, int]]:
        """Return the name and type of its outputs, in the order of the function's results: they are sorted, too."""
        rows = [(lookup.embeddings, lookup.answer_dtype) for lookup in self.lookups]
        return sorted(rows + [(lookup.found, BOOL) for lookup in self.lookups])

    def input_node(self, lookup: Lookup) -> str:
        """Return the name of the node that ids are fed to, as TensorFlow calls it."""
        return f"{legal(self.name)}_{lookup.ids}"

    @property
    def answer_node(self) -> str:
        """The name of the node that answers."""
        return f"answer/{self.name}"


def signatures_of(tables: Sequence[tuple[str, StockTable]]) -> list[Signature]:
    """Return the signatures of a model of these tables, each with the name of its signature.

    One for each table; and `serving_default`, which is that of a single table, or else looks up in all of them.

    Example:
        >>> from kvtools.stock_model.initial_rows import InitialRows
        >>> tables = [StockTable(n, "", "int64", "float32", 4, (9,), InitialRows(), f"index {n}") for n in (0, 1)]
        >>> one, other, default = signatures_of([("user", tables[0]), ("item", tables[1])])
        >>> [lookup.ids for lookup in one.lookups], [lookup.ids for lookup in default.inputs()]
        (['ids'], ['item_ids', 'user_ids'])
        >>> [name for name, _ in default.outputs()]
        ['item_embeddings', 'item_found', 'user_embeddings', 'user_found']
    """
    signatures = [
        Signature(name, table.function("lookup"), (Lookup(table, "ids", "embeddings", "found"),))
        for name, table in tables
    ]
    if len(tables) == 1:
        lookups = signatures[0].lookups
    else:
        lookups = tuple(Lookup(table, f"{name}_ids", f"{name}_embeddings", f"{name}_found") for name, table in tables)
    return [*signatures, Signature(DEFAULT_SIGNATURE, "__kvtools_lookup_default", lookups)]


def lookup_function(signature: Signature) -> Function:
    """Return the function of a signature: ids of each table, its resources -> rows, and whether they were found.

    One over several tables calls that of each.
    """
    body = FunctionBody(signature.function)
    inputs = signature.inputs()
    ids = [body.argument(f"ids_{at}", INT64) for at, _ in enumerate(inputs)]
    handles = [Handle(lookup.table, -1, True) for lookup in inputs]
    answers: dict[str, str] = {}
    all_resources = resources_of(body, handles)
    if len(inputs) > 1:
        for lookup, asked, resources in zip(inputs, ids, all_resources, strict=True):
            answered = body.op(
                "StatefulPartitionedCall",
                [asked, *(getattr(resources, resource) for resource in RESOURCES)],
                Tin=of_types([INT64, *[RESOURCE] * len(RESOURCES)]),
                Tout=of_types([lookup.answer_dtype, BOOL]),
                f=of_function(lookup.table.function("lookup")),
                config=of_text(""),
                config_proto=of_text(""),
                executor_type=of_text(""),
            )
            answers[lookup.embeddings], answers[lookup.found] = answered, f"{answered[:-1]}1"
        for name, dtype in signature.outputs():
            body.result(dtype, answers[name])
        return body.function()
    for lookup, handle, asked, resources in zip(inputs, handles, ids, all_resources, strict=True):
        table = lookup.table
        numbers = find(body, handle, resources, asked, missing=table.zeros_row)
        zeros_row = body.constant(table.zeros_row, np.int64)
        answers[lookup.found] = body.op("NotEqual", [numbers, zeros_row], "z", T=of_type(INT64))
        answers[lookup.embeddings] = body.cast(
            gather(body, table, resources, numbers), table.dtype, lookup.answer_dtype
        )
    for name, dtype in signature.outputs():
        body.result(dtype, answers[name])
    return body.function()
