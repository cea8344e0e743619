"""A variable in five parts on one device against one in one part."""

from __future__ import annotations

from cases.case import Case, Comparison, Side, Size

PARTS = 5
SHARE = 0.95


def cases(size: Size) -> list[Case]:
    """A lookup and a training step, per dim."""
    cases = []
    for dim in size.train_dims:
        table = {
            "rows": size.train_rows,
            "dim": dim,
            "batch": size.batch,
            "batches": size.batches,
            "parts": 1,
        }
        works = {
            "lookup": {**table, "ids": "uniform", "training": True, "way": "function"},
            "train": {**table, "ids": "unique", "optimizer": "Adam"},
        }
        cases += [
            Case(
                group="parts",
                title=f"{work}{', Adam' if work == 'train' else ''}, dim {dim}",
                work=work,
                parameters=parameters,
                sides={"1 part": Side("kv"), f"{PARTS} parts": Side("kv", {"parts": PARTS})},
                items=size.batch,
                comparisons=(Comparison(f"{PARTS} parts", "1 part", at_least=SHARE),),
            )
            for work, parameters in works.items()
        ]
    return cases
