"""End to end: a DeepFM on a generated click log, one shared table for all features."""

from __future__ import annotations

from pathlib import Path

from cases.case import Case, Comparison, Side, Size


def cases(size: Size, log: Path) -> list[Case]:
    """The model with each library. `log` is the folder that `work.ctr` reads."""
    return [
        Case(
            group="ctr",
            title="DeepFM, Adam",
            work="ctr",
            parameters={**size.ctr, "log": str(log)},
            sides={"kv": Side("kv"), "hashed tf.Variable": Side("dense"), "TFRA": Side("tfra")},
            items=size.ctr["batch"],
            comparisons=(Comparison("kv", "TFRA"), Comparison("kv", "hashed tf.Variable")),
            calls=size.ctr["steps"],
        )
    ]
