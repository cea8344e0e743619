"""A Keras DeepFM under ``fit``, and what else trains it."""

from __future__ import annotations

from pathlib import Path

from cases.case import Case, Comparison, Side, Size


def cases(size: Size, log: Path) -> list[Case]:
    """The model in each way. `log` is the folder that `work.keras_fit` reads."""
    return [
        Case(
            group="keras",
            title="DeepFM, Adam",
            work="keras_fit",
            parameters={**size.ctr, "log": str(log)},
            sides={
                "fit": Side("kv"),
                "loop": Side("kv", {"loop": True}),
                "hashed Embedding": Side("dense"),
                "TFRA": Side("tfra"),
            },
            items=size.ctr["batch"] * size.ctr["steps"],
            comparisons=(
                Comparison("fit", "loop", at_least=0.9),
                Comparison("fit", "hashed Embedding"),
                Comparison("fit", "TFRA"),
            ),
            calls=1,
        )
    ]
