"""Training steps of rows of 16 bits, stochastically rounded, beside those of float32."""

from __future__ import annotations

from cases.case import Case, Comparison, Side, Size
from cases.train import parameters

OF_FLOAT32 = 0.8
DTYPES = ("float16", "bfloat16")


def cases(size: Size) -> list[Case]:
    """One case per optimizer and dim. The loss is computed in float32 on all sides."""
    return [
        Case(
            group="half",
            title=f"{optimizer}, dim {dim}",
            work="train",
            parameters=parameters(size, optimizer, dim, "unique"),
            sides={"float32": Side("kv"), **{dtype: Side("kv", {"dtype": dtype}) for dtype in DTYPES}},
            items=size.batch,
            comparisons=tuple(Comparison(dtype, "float32", at_least=OF_FLOAT32) for dtype in DTYPES),
        )
        for optimizer in size.optimizers
        for dim in size.train_dims
    ]
