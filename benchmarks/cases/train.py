"""Whole training steps: lookup, gradient of the sum of squares, apply."""

from __future__ import annotations

from typing import Any

from cases.case import Case, Comparison, Side, Size

TIMES_TFRA = {("SGD", 16): 3.0, ("SGD", 64): 2.5, ("Adam", 16): 8.0, ("Adam", 64): 4.0}
TIMES_TFRA_ZIPF = {"SGD": 5.0, "Adam": 8.0}
OF_NATIVE = 0.9  # asked of the dynamic_embedding API
DE_TIMES_TFRA = {"Adam": 4.0}
FLOOR = {16: 0.6, 64: 0.7}  # share of the memory floor asked for


def parameters(size: Size, optimizer: str, dim: int, ids: str) -> dict[str, Any]:
    """Those of a step of one table."""
    return {
        "optimizer": optimizer,
        "rows": size.train_rows,
        "dim": dim,
        "batch": size.batch,
        "ids": ids,
        "batches": size.batches,
        "parts": 1,
    }


def cases(size: Size) -> list[Case]:
    """One case per optimizer, dim and kind of ids. Targets of the floor are for unique ids."""
    return [
        Case(
            group="train",
            title=f"{optimizer}, dim {dim}, {ids} ids",
            work="train",
            parameters=parameters(size, optimizer, dim, ids),
            sides={"kv": Side("kv"), "de": Side("de"), "dense": Side("dense"), "TFRA": Side("tfra")},
            items=size.batch,
            comparisons=(
                Comparison("kv", "TFRA", at_least=_times_tfra(optimizer, dim, ids)),
                Comparison("de", "kv", at_least=OF_NATIVE),
                Comparison("de", "TFRA", at_least=DE_TIMES_TFRA.get(optimizer) if ids == "unique" else None),
                Comparison("kv", "dense"),
            ),
            floor=FLOOR.get(dim, 0.5) if ids == "unique" else 0.0,
        )
        for ids in ("unique", "zipf")
        for optimizer in size.optimizers
        for dim in size.train_dims
    ]


def _times_tfra(optimizer: str, dim: int, ids: str) -> float | None:
    return TIMES_TFRA.get((optimizer, dim)) if ids == "unique" else TIMES_TFRA_ZIPF.get(optimizer)
