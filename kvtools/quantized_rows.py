"""Rows of float32 in 8 or 4 bits a number, and what rows lose by being kept in fewer bits.

A row becomes bytes (docs/dialects/snapshot.md has them): its smallest number as a float32 (the offset), a scale as a
bfloat16, and a code for each number, of 0 to 255 or 0 to 15. A number is then the offset plus the scale times the code,
off by at most half the scale. The scale is rounded up, so that the codes reach the largest number, and has few enough
bits that its product with a code is exact: whoever computes the sum, in one step or two, gets the same bits.

Measured on rows of 16 and 64 numbers: with an offset the mean error is half of that with a scale alone on skewed rows,
and smaller by 10% (int8) or 20% (int4) on normal ones. A scale of two bytes makes it larger than one of four does by
2% (int4) to 7% (int8). The offset has four, so that rows of one number, which new keys often begin with, are exact.
Neither is float16: it has too few bits for rows of numbers around 1e-6.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtools._quantized_rows import decode as _decode
from kvtools._quantized_rows import encode as _encode
from kvtools._quantized_rows import first_unfit as _first_unfit
from kvtools._quantized_rows import loss as _loss
from kvtools._quantized_rows import row_bytes as _row_bytes
from kvtools.dialects.chunk import Columns
from kvtools.dialects.schema import TableSchema, row_bytes

Array = npt.NDArray[np.float32]
_NOT_VALUES = Columns(values=False, slots=True, freqs=True, versions=True)
QUANTIZED = ("int8", "int4")
"""The types of fewer bits than any number has: rows of them have an offset and a scale."""


def bytes_of_row(dtype: str, dim: int) -> int:
    """Return how many bytes a row of `dim` numbers takes.

    >>> bytes_of_row("int8", 5), bytes_of_row("int4", 5)
    (11, 9)
    """
    return _row_bytes(dtype, dim)


def inexact(dtype: str) -> str:
    """Say what is left out where rows are written as `dtype`."""
    share = {"int8": 510, "int4": 30}[dtype]
    return (
        f"the exact numbers: rows are {dtype} with an offset and a scale, off by up to 1/{share} of the distance"
        " between their smallest number and their largest"
    )


def written_out(dtype: str) -> str:
    """Say that rows which are stored as `dtype` are written as they are read."""
    return f"its {dtype} rows are written as the float32 that they are read as"


def stored_row_bytes(schema: TableSchema) -> int:
    """Return how many bytes one row takes where it is stored, the key and every column.

    >>> stored_row_bytes(TableSchema("emb", "snapshot", "int64", "float32", 16, (10,), rows_as="int8"))
    30
    """
    if schema.rows_as is None:
        return row_bytes(schema)
    return row_bytes(schema, _NOT_VALUES) + bytes_of_row(schema.rows_as, schema.dim)


def first_unfit(values: Array) -> int | None:
    """Return the first row of `values` [n, dim] that cannot be encoded; None if there is none.

    Such a row has a NaN or an infinity, or numbers more than 3.3e38 apart.

    >>> first_unfit(np.float32([[1, 2], [np.nan, 1]]))
    1
    """
    row = _first_unfit(np.require(values, np.float32, ["C", "A"]))
    return None if row < 0 else row


def encode(values: Array, dtype: str) -> npt.NDArray[np.uint8]:
    """Return rows [n, dim] of float32, all of which fit, as bytes [n, bytes_of_row], "int8" or "int4".

    >>> encode(np.float32([[1, 1], [0, 255]]), "int8").tolist()
    [[0, 0, 128, 63, 0, 0, 0, 0], [0, 0, 0, 0, 128, 63, 0, 255]]
    """
    values = np.require(values, np.float32, ["C", "A"])
    rows = np.empty((len(values), bytes_of_row(dtype, values.shape[1])), np.uint8)
    _encode(values, dtype, rows)
    return rows


def decode(rows: npt.NDArray[np.uint8], dtype: str, dim: int) -> Array:
    """Return what bytes [n, bytes_of_row] are: float32 [n, dim].

    >>> decode(encode(np.float32([[0, 1, 15]]), "int4"), "int4", 3).tolist()
    [[0.0, 1.0, 15.0]]
    """
    values = np.empty((len(rows), dim), np.float32)
    _decode(np.ascontiguousarray(rows), dtype, values)
    return values


@dataclass(frozen=True)
class Rounding:
    """What the rows of a table have lost: the largest and the mean absolute error of their numbers, and the mean and
    the least cosine between a row and what became of it. Rows with a NaN or an infinity do not count.

    Of no rows at all, the errors are 0 and the cosines 1.
    """

    max_error: float
    mean_error: float
    mean_cosine: float
    least_cosine: float


@dataclass(frozen=True)
class RowLoss:
    """What some rows have lost, to be added up; `errors` and `cosines` are sums."""

    rows: int = 0
    numbers: int = 0
    max_error: float = 0.0
    errors: float = 0.0
    cosines: float = 0.0
    least_cosine: float = 1.0

    def plus(self, other: RowLoss) -> RowLoss:
        """Return the loss of both."""
        return RowLoss(
            self.rows + other.rows,
            self.numbers + other.numbers,
            max(self.max_error, other.max_error),
            self.errors + other.errors,
            self.cosines + other.cosines,
            min(self.least_cosine, other.least_cosine),
        )

    def rounding(self) -> Rounding:
        """Return what that comes to."""
        mean_cosine = self.cosines / self.rows if self.rows else 1.0
        return Rounding(self.max_error, self.errors / max(self.numbers, 1), mean_cosine, self.least_cosine)


def loss_of(before: npt.NDArray[np.floating], after: npt.NDArray[np.floating]) -> RowLoss:
    """Return what rows [n, dim] of floating-point numbers have lost by becoming `after`.

    >>> loss_of(np.float32([[3, 4]]), np.float32([[3, 5]])).max_error
    1.0
    """
    if before.dtype == np.float64:
        return _loss_of_doubles(before, after.astype(np.float64))
    as_floats = (np.ascontiguousarray(rows, np.float32) for rows in (before, after))
    rows, max_error, errors, cosines, least = _loss(*as_floats)
    return RowLoss(rows, rows * before.shape[1], max_error, errors, cosines, least)


def _loss_of_doubles(before: npt.NDArray[np.floating], after: npt.NDArray[np.floating]) -> RowLoss:
    finite = np.isfinite(before).all(axis=1) & np.isfinite(after).all(axis=1)
    before, after = before[finite], after[finite]
    if not before.size:
        return RowLoss()
    errors = np.abs(before - after)
    # Scaled, so that no square under- or overflows.
    largest = np.abs(before).max(axis=1), np.abs(after).max(axis=1)
    a, b = (rows / np.where(top > 0, top, 1)[:, None] for rows, top in zip((before, after), largest, strict=True))
    norms = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    cosines = np.minimum((a * b).sum(axis=1) / np.where(norms > 0, norms, 1), 1)
    cosines[(largest[0] == 0) & (largest[1] == 0)] = 1
    total = float(errors.sum()), float(cosines.sum())
    return RowLoss(len(before), before.size, float(errors.max()), *total, float(cosines.min()))
