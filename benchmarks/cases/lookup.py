"""Lookups of ids that are there, through the TensorFlow op."""

from __future__ import annotations

from cases.case import Case, Comparison, Side, Size

OF_NATIVE = 0.9  # asked of the dynamic_embedding API
TIMES_GATHER = {64: 1.1, 128: 1.1}
TIMES_TFRA = {16: 4.0, 64: 3.5, 128: 3.0}


def cases(size: Size) -> list[Case]:
    """One case per dim."""
    return [
        Case(
            group="lookup",
            title=f"dim {dim}",
            work="lookup",
            parameters={
                "rows": size.lookup_rows,
                "dim": dim,
                "batch": size.batch,
                "ids": "uniform",
                "batches": size.batches,
                "parts": 1,
                "training": True,
                "way": "function",
            },
            sides={
                "kv": Side("kv"),
                "kv, inference": Side("kv", {"training": False}),
                "de": Side("de"),
                "tf.gather": Side("dense"),
                "TFRA": Side("tfra"),
            },
            items=size.batch,
            comparisons=(
                Comparison("kv", "TFRA", at_least=TIMES_TFRA.get(dim)),
                Comparison("kv, inference", "TFRA", at_least=TIMES_TFRA.get(dim)),
                Comparison("de", "kv, inference", at_least=OF_NATIVE),
                Comparison("de", "TFRA"),
                Comparison("kv", "tf.gather", at_least=TIMES_GATHER.get(dim)),
                Comparison("kv, inference", "tf.gather", at_least=TIMES_GATHER.get(dim)),
            ),
            floor=0.0,
        )
        for dim in size.lookup_dims
    ]
