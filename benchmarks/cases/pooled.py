"""Pooled lookups of many features: `embedding_lookup_sparse`."""

from __future__ import annotations

from cases.case import Case, Comparison, Side, Size

MOST_IDS = 20
TIMES_STOCK = 2.5


def cases(size: Size) -> list[Case]:
    """Forward, and forward with gradient, for uniform and for skewed ids."""
    items = size.pooled["features"] * size.pooled["examples"]
    return [
        Case(
            group="pooled",
            title=f"{'lookup and gradient' if gradient else 'lookup'}, {ids} ids",
            work="pooled",
            parameters={
                **size.pooled,
                "dim": 16,
                "most_ids": MOST_IDS,
                "ids": ids,
                "batches": min(2, size.batches),
                "gradient": gradient,
            },
            sides={"kv": Side("kv"), "dense": Side("dense"), "TFRA": Side("tfra")},
            items=items,
            comparisons=(Comparison("kv", "dense", at_least=TIMES_STOCK), Comparison("kv", "TFRA")),
        )
        for ids in ("uniform", "zipf")
        for gradient in (False, True)
    ]
