"""Which rows a clipped export keeps: those whose values are not all but zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtools.errors import UsageError


@dataclass(frozen=True)
class Clip:
    """Cut each row whose largest absolute value ("abs") or Euclidean norm ("l2") is below `threshold`.

    A row with a NaN or an infinity is no small row: it is kept, and counted by `non_finite`.

    Raises:
        UsageError: the threshold is negative, NaN or infinite.

    Example:
        >>> Clip("abs", 0.5).keep(np.array([[0.5, 0.0], [0.4, -0.4], [np.nan, 0.0]])).tolist()
        [True, False, True]
    """

    norm: Literal["abs", "l2"]
    threshold: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise UsageError(
                f"clipping by {self.norm}: got threshold {self.threshold}, expected a finite number of 0 or more"
            )

    def keep(self, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which rows of `values` [n, dim] are kept, bool [n]."""
        below: npt.NDArray[np.bool_] = row_norms(values, self.norm) < self.threshold
        return ~below


def row_norms(values: npt.NDArray[Any], norm: Literal["abs", "l2"]) -> npt.NDArray[Any]:
    """Return the norm of each row of `values` [n, dim], any float type, as float32 or float64 [n].

    The Euclidean norm is summed in float64, and scaled where that could under- or overflow. A row with a NaN
    has norm NaN; one with an infinity and no NaN has norm infinity.

    >>> row_norms(np.array([[3.0, -4.0]]), "l2").tolist()
    [5.0]
    """
    if values.dtype.itemsize < 4:
        values = values.astype(np.float32)
    if norm == "abs":
        largest: npt.NDArray[Any] = np.maximum(values.max(axis=1), -values.min(axis=1))
        return largest
    if values.dtype == np.float64:
        scale = np.maximum(values.max(axis=1), -values.min(axis=1))
        usable = np.isfinite(scale) & (scale > 0)
        divisor = np.where(usable, scale, 1.0)
        with np.errstate(over="ignore"):  # an infinite row overflows to what it should be
            scaled = values / divisor[:, None]
            return np.asarray(np.sqrt(np.einsum("ij,ij->i", scaled, scaled)) * divisor)
    wide = values.astype(np.float64)
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", wide, wide)))


def non_finite_rows(values: npt.NDArray[Any]) -> int:
    """Count the rows of `values` [n, dim] that hold a NaN or an infinity.

    >>> non_finite_rows(np.array([[1.0, np.nan], [0.0, 0.0]]))
    1
    """
    if values.dtype.itemsize < 4:
        values = values.astype(np.float32)
    return int(np.count_nonzero(~np.isfinite(values).all(axis=1)))
