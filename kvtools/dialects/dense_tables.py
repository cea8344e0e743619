"""Which matrices of a model are embedding tables: told by names, as nothing else tells them from other weights."""

from __future__ import annotations

import re
from collections.abc import Collection

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
