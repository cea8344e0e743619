"""Bags of rows made one row each, in NumPy: what servers do, for bags whose rows come from several of them."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Combiner = Literal["sum", "mean", "sqrtn"]
COMBINERS = get_args(Combiner)


def pool(
    rows: npt.NDArray[Any], row_splits: npt.NDArray[np.int64], combiner: Combiner, weights: npt.NDArray[Any] | None
) -> npt.NDArray[np.float32]:
    """Return one row for each bag, float32 [bags, dim]; an empty bag gives zeros.

    Args:
        rows: [n, dim] of numbers.
        row_splits: int64 [bags + 1]: bag i has the rows `row_splits[i]` to `row_splits[i + 1]`.
        combiner: "sum" of the rows times their weights; "mean": that over the sum of the weights; "sqrtn": over the
            root of the sum of their squares.
        weights: float32 [n]; None: all 1.

    Example:
        >>> pool(np.array([[1.0], [2.0], [4.0]], np.float32), np.array([0, 2, 2, 3]), "mean", None).tolist()
        [[1.5], [0.0], [4.0]]
    """
    scale = np.ones(len(rows), np.float32) if weights is None else weights
    sums = _sum_bags(rows * scale[:, None], row_splits)
    if combiner == "sum":
        return sums
    total = _sum_bags((scale if combiner == "mean" else scale * scale)[:, None], row_splits)
    divisor = total if combiner == "mean" else np.sqrt(total)
    pooled: npt.NDArray[np.float32] = np.divide(sums, divisor, out=np.zeros_like(sums), where=divisor != 0)
    return pooled


def _sum_bags(rows: npt.NDArray[Any], row_splits: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    sums = np.zeros((len(row_splits) - 1, rows.shape[1]), np.float32)
    filled = np.flatnonzero(np.diff(row_splits))  # reduceat has no empty runs
    if len(filled):
        sums[filled] = np.add.reduceat(rows, row_splits[filled], axis=0)
    return sums
