"""Tables that are matrices, looked up by row number: which matrices of a model are such, and how one is written.

Which are is told by names, as nothing else tells them from other weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.named_columns import column_names
from kvtools.dialects.schema import TableSchema

_WORDS = re.compile(r"[^\W_]+")
_TABLES = frozenset({"emb", "embs", "table", "tables", "wte", "wpe", "lookup", "vocab", "shared"})
_LAYERS = frozenset(
    {"linear", "proj", "projection", "dense", "fc", "mlp", "norm", "layernorm", "conv", "head", "bias", "lora"}
)


def is_table_name(name: str) -> bool:
    """Tell whether a matrix of this name is a table.

    One of its words has "embed" in it, ends in "emb", or is `table`, `wte`, `wpe`, `lookup`, `vocab` or `shared`; and
    no later word names a layer, as `linear`, `proj` and `norm` do.

    >>> is_table_name("model.embed_tokens.weight"), is_table_name("model.layers.0.mlp.up_proj.weight")
    (True, False)
    >>> is_table_name("ebc.embedding_bags.t_cat_0.weight"), is_table_name("time_embedding.linear_1.weight")
    (True, False)
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    at = [n for n, word in enumerate(words) if word in _TABLES or "embed" in word or word.endswith("emb")]
    return bool(at) and not any(word in _LAYERS for word in words[at[0] + 1 :])


def tables_among(matrices: Collection[str]) -> list[str]:
    """Return those of a model's matrices that are tables: those that are called so, or all where none is."""
    return [name for name in matrices if is_table_name(name)] or list(matrices)


def are_row_numbers(schema: TableSchema, keys: Iterable[tuple[int, Array]]) -> bool:
    """Tell whether a table's keys are 0, 1, 2, ... in this order: then its values alone say all of it.

    `keys` are the parts' numbers and keys, in the order in which rows will be written.
    """
    start = 0
    for _, some in keys if schema.key_dtype == "int64" else ():
        if not np.array_equal(some, np.arange(start, start + len(some))):
            return False
        start += len(some)
    return start == schema.rows > 0


def dense_names(schema: TableSchema) -> dict[str, str | None]:
    """Return what the columns of a table whose keys are its row numbers are called: the values as the table.

    >>> dense_names(TableSchema("emb.weight", "torch", "int64", "float32", 4, (7,)))
    {'keys': None, 'values': 'emb.weight'}
    """
    return {**column_names(schema), "keys": None, "values": schema.name}
