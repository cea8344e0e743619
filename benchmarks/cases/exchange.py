"""`sok.lookup_sparse` of many tables over the ranks of one machine, and what a capacity costs a table."""

from __future__ import annotations

from cases.case import Case, Comparison, Side, Size


def cases(size: Size, ranks: int, threads: int) -> list[Case]:
    """Forward, and a whole step with SGD, for each dim and hotness."""
    return [
        Case(
            group="exchange",
            title=f"{'forward, backward, apply' if step else 'forward'}, dim {dim}, hotness {hotness}",
            work="exchange",
            parameters={
                **size.exchange,
                "ranks": ranks,
                "dim": dim,
                "hotness": hotness,
                "ids": "zipf",
                "batches": min(8, size.batches),
                "step": step,
            },
            sides={
                "one call": Side("ranks", {"way": "one call"}),
                "a call each": Side("ranks", {"way": "a call each"}),
                "alltoall": Side("ranks", {"way": "alltoall"}),
                "one rank": Side("kv", {"way": "one call"}),
            },
            items=size.exchange["tables"] * size.exchange["samples"],
            comparisons=(
                Comparison("one call", "a call each"),
                Comparison("one call", "alltoall"),
                Comparison("one call", "one rank"),
            ),
            threads=threads,
        )
        for step in (False, True)
        for dim in size.exchange_dims
        for hotness in size.exchange_hotness
    ]


def bounded_cases(size: Size) -> list[Case]:
    """Hits only, the table full to its capacity."""
    return [
        Case(
            group="bounded",
            title=f"dim {dim}, {ids} ids",
            work="bounded",
            parameters={
                "rows": size.train_rows,
                "dim": dim,
                "batch": size.batch,
                "ids": ids,
                "batches": size.batches,
                "training": True,
            },
            sides={
                "unbounded": Side("kv", {"bounded": False}),
                "LRU": Side("kv", {"bounded": True}),
                "unbounded, inference": Side("kv", {"bounded": False, "training": False}),
                "LRU, inference": Side("kv", {"bounded": True, "training": False}),
            },
            items=size.batch,
            comparisons=(Comparison("LRU", "unbounded"), Comparison("LRU, inference", "unbounded, inference")),
        )
        for dim in size.exchange_dims
        for ids in ("uniform", "zipf")
    ]
