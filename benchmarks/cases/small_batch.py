"""Small batches: what a call costs beside the rows."""

from __future__ import annotations

from cases.case import Case, Comparison, Side, Size

TIMES_GATHER = 1.5


def cases(size: Size) -> list[Case]:
    """One case per way of calling."""
    return [
        Case(
            group="small",
            title={"session": "Session.run", "function": "tf.function", "eager": "eager"}[way],
            work="lookup",
            parameters={
                "rows": size.lookup_rows,
                "dim": 16,
                "batch": size.small_batch,
                "ids": "uniform",
                "batches": 16 * size.batches,
                "parts": 1,
                "training": True,
                "way": way,
            },
            sides={
                "kv": Side("kv"),
                "kv, inference": Side("kv", {"training": False}),
                "tf.gather": Side("dense"),
                "TFRA": Side("tfra"),
            },
            items=size.small_batch,
            comparisons=(
                Comparison("kv", "tf.gather", at_most=TIMES_GATHER),
                Comparison("kv, inference", "tf.gather", at_most=TIMES_GATHER),
            ),
        )
        for way in size.ways
    ]
