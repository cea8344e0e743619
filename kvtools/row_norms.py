"""Norms of rows, and the rows that hold a NaN or an infinity."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt


def row_norms(values: npt.NDArray[Any], norm: Literal["abs", "l2"]) -> npt.NDArray[Any]:
    """Return the norm of each row of `values` [n, dim], any type of number: the largest absolute value as float32 or
    float64 [n], the Euclidean norm as float64 [n].

    That is summed in float64, and scaled where that could under- or overflow. A row with a NaN
    has norm NaN; one with an infinity and no NaN has norm infinity.

    >>> row_norms(np.array([[3.0, -4.0]]), "l2").tolist()
    [5.0]
    """
    values = as_floats(values)
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


def as_floats(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return numbers as float32 or float64, whichever holds them.

    >>> as_floats(np.array([1, 2], np.int8)).dtype.name
    'float32'
    """
    if values.dtype in (np.float32, np.float64):
        return values
    return values.astype(np.float32 if values.dtype.itemsize < 4 else np.float64)


def non_finite_rows(values: npt.NDArray[Any]) -> int:
    """Count the rows of `values` [n, dim] that hold a NaN or an infinity.

    >>> non_finite_rows(np.array([[1.0, np.nan], [0.0, 0.0]]))
    1
    """
    return int(np.count_nonzero(rows_not_finite(values)))


def rows_not_finite(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which rows of `values` [n, dim] hold a NaN or an infinity, bool [n].

    >>> rows_not_finite(np.array([[1.0, np.nan], [0.0, 0.0]])).tolist()
    [True, False]
    """
    if values.dtype.kind in "iu":
        return np.zeros(len(values), np.bool_)
    finite = np.isfinite(values)
    return np.zeros(len(values), np.bool_) if finite.all() else any_in_row(~finite)


def any_in_row(marks: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return `marks.any(axis=1)` [n] of [n, dim]: several marks at once, as NumPy goes through short rows slowly.

    >>> any_in_row(np.array([[False, True], [False, False]])).tolist()
    [True, False]
    """
    dim = marks.shape[1]
    word = next(np.dtype(f"u{size}") for size in (8, 4, 2, 1) if dim % size == 0)
    words = np.ascontiguousarray(marks).view(word)
    if words.shape[1] > 32:
        return np.asarray(words.any(axis=1))
    found = words[:, 0].copy()
    for column in range(1, words.shape[1]):
        found |= words[:, column]
    return np.asarray(found != 0)
