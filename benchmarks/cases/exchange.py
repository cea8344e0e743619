"""`sok.lookup_sparse` of many tables over the ranks of one machine, and what a capacity costs a table."""

from __future__ import annotations

from typing import Any

from cases.case import Case, Comparison, Side, Size

#: Share of the speed of `hvd.alltoall` alone that is asked of a lookup.
OF_ALLTOALL = 0.6


def _parameters(size: Size, dim: int, hotness: int, step: bool, *, batches: int = 4, **more: Any) -> dict[str, Any]:
    """Of a case of `work/exchange.py`."""
    batches = min(batches, size.batches)
    return {**size.exchange, "dim": dim, "hotness": hotness, "ids": "zipf", "batches": batches, "step": step, **more}


def cases(size: Size, ranks: int, threads: int) -> list[Case]:
    """Forward, and a whole step with SGD, for each dim and hotness."""
    return [
        Case(
            group="exchange",
            title=f"{'forward, backward, apply' if step else 'forward'}, dim {dim}, hotness {hotness}",
            work="exchange",
            parameters=_parameters(size, dim, hotness, step, batches=8, ranks=ranks),
            sides={
                "one call": Side("ranks", {"way": "one call"}),
                "bfloat16": Side("ranks", {"way": "one call", "wire_dtype": "bfloat16"}),
                "a call each": Side("ranks", {"way": "a call each"}),
                "over Horovod": Side("ranks", {"way": "over Horovod"}),
                "alltoall": Side("ranks", {"way": "alltoall"}),
                "one rank": Side("kv", {"way": "one call"}),
            },
            items=size.exchange["tables"] * size.exchange["samples"],
            comparisons=(
                Comparison("one call", "alltoall", at_least=OF_ALLTOALL),
                Comparison("bfloat16", "alltoall", at_least=OF_ALLTOALL),
                Comparison("bfloat16", "one call"),
                Comparison("one call", "a call each"),
                Comparison("one call", "over Horovod"),
                Comparison("one call", "one rank"),
            ),
            threads=threads,
        )
        for step in (False, True)
        for dim in size.exchange_dims
        for hotness in size.exchange_hotness
    ]


def scaling_cases(size: Size, most: int) -> list[Case]:
    """One call on 1 rank, 2, ... `most`, of a thread each: each rank with as many samples, or all together with."""
    found = []
    for title, share in (("weak", False), ("strong", True)):
        for step in (False, True):
            dim, hotness = size.exchange_dims[0], size.exchange_hotness[-1]
            samples = size.exchange["samples"]
            of_ranks = {ranks: samples // ranks if share else samples for ranks in range(1, most + 1)}
            names = {ranks: f"{ranks} ranks" if ranks > 1 else "1 rank" for ranks in of_ranks}
            found.append(
                Case(
                    group="rank scaling",
                    title=f"{title}, {'forward, backward, apply' if step else 'forward'}",
                    work="exchange",
                    parameters=_parameters(size, dim, hotness, step, way="one call", own_batches=True),
                    sides={
                        names[ranks]: Side("kv" if ranks == 1 else f"{ranks} ranks", {"samples": own, "ranks": ranks})
                        for ranks, own in of_ranks.items()
                    },
                    items=size.exchange["tables"] * samples,
                    comparisons=tuple(Comparison(name, names[1]) for name in list(names.values())[1:]),
                    threads=1,
                )
            )
    return found


def overlap_cases(size: Size, ranks: int, threads: int) -> list[Case]:
    """A step with a dense part that does not wait for the lookup, beside each of the two alone."""
    return [
        Case(
            group="overlap",
            title=f"dim {dim}, hotness {hotness}",
            work="exchange",
            parameters=_parameters(size, dim, hotness, step=True, ranks=ranks),
            sides={
                "lookup": Side("ranks", {"way": "one call"}),
                "dense": Side("ranks", {"way": "dense only", "dense": 4}),
                "both": Side("ranks", {"way": "one call", "dense": 4}),
                "both, a call each": Side("ranks", {"way": "a call each", "dense": 4}),
            },
            items=size.exchange["samples"],
            comparisons=(Comparison("both", "lookup"), Comparison("both", "both, a call each")),
            threads=threads,
        )
        for dim in size.exchange_dims[:1]
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
