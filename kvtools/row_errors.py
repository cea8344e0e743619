"""What rows lose in fewer bits, so that one type can be chosen: relative error, and cosine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtools.cast import FLOATS, rounded
from kvtools.dialects.chunk import Array
from kvtools.quantized_rows import QUANTIZED, bytes_of_row, decode, encode, first_unfit, loss_of

NARROW = ("float16", "bfloat16", *QUANTIZED)


@dataclass(frozen=True)
class RowError:
    """What rows become as `dtype`, of `bytes` each: `rms` is the root of the squared error over that of the squares of
    all numbers; the mean and the least cosine are those between a row and what became of it."""

    dtype: str
    bytes: int
    rms: float
    mean_cosine: float
    least_cosine: float


def read_back(values: Array, dtype: str) -> Array:
    """Return rows [n, dim] as they are read once they were stored as `dtype`; int8 and int4 come as float32.

    Raises:
        ValueError: a number that the type does not hold.
    """
    if dtype in QUANTIZED:
        return decode(encode(np.asarray(values, np.float32), dtype), dtype, values.shape[1])
    return rounded(values, dtype)


def row_errors(values: Array) -> list[RowError]:
    """Return what rows [n, dim] of floating-point numbers lose in each type that is smaller, the largest first.

    Rows that are not finite do not count; a type in which a number would become infinite is left out.

    >>> [error.dtype for error in row_errors(np.float32([[1, 2, 3, 4, 5, 6, 7, 8]]))]
    ['float16', 'bfloat16', 'int8', 'int4']
    """
    if values.dtype.name not in FLOATS:
        return []
    finite = values[np.isfinite(values).all(axis=1)]
    exact = finite.astype(np.float64)
    power = float((exact * exact).sum())
    found = []
    for dtype in NARROW:
        quantized = dtype in QUANTIZED
        size = bytes_of_row(dtype, values.shape[1]) if quantized else 2 * values.shape[1]
        if size >= values.shape[1] * values.dtype.itemsize:
            continue
        if quantized and (len(finite) < len(values) or first_unfit(finite.astype(np.float32)) is not None):
            continue
        back = read_back(finite, dtype)
        if not np.isfinite(back).all():
            continue
        errors = back.astype(np.float64) - exact
        loss = loss_of(finite, back).rounding()
        rms = (float((errors * errors).sum()) / power) ** 0.5 if power else 0.0
        found.append(RowError(dtype, size, rms, loss.mean_cosine, loss.least_cosine))
    return found
