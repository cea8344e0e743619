"""Rows of many numbers as points of two: their principal components."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Projection:
    """Points in a plane, float64 [n, 2], for those of the rows that are finite.

    `rows` int64 [n] tells which they are. `explained` is the share of the rows' variance that either direction has.
    """

    rows: npt.NDArray[np.int64]
    points: npt.NDArray[np.float64]
    explained: tuple[float, float]


def principal_components(values: Array) -> Projection:
    """Project rows [n, dim] on the two directions in which they differ most.

    A row with a NaN or an infinity has no point. The signs are such that each direction's largest number is positive,
    so that equal rows give equal pictures.

    >>> found = principal_components(np.array([[0.0, 0.0], [2.0, 0.0], [4.0, 0.0], [np.nan, 1.0]]))
    >>> found.points.round(3).tolist(), found.explained
    ([[-2.0, 0.0], [0.0, 0.0], [2.0, 0.0]], (1.0, 0.0))
    """
    wide = values.astype(np.float64)
    rows = np.flatnonzero(np.isfinite(wide).all(axis=1))
    wide = wide[rows]
    points = np.zeros((len(rows), 2))
    scale = float(np.abs(wide).max(initial=0.0))
    if len(rows) < 2 or not scale:
        return Projection(rows, points, (0.0, 0.0))
    wide = wide / scale  # so that no square over- or underflows
    wide -= wide.mean(axis=0)
    # The smaller of both products has the same eigenvalues.
    tall = wide.shape[0] > wide.shape[1]
    powers, vectors = np.linalg.eigh(wide.T @ wide if tall else wide @ wide.T)
    powers = np.maximum(powers[::-1], 0.0)
    total = float(powers.sum())
    if not total:
        return Projection(rows, points, (0.0, 0.0))
    for axis in range(min(2, len(powers))):
        if powers[axis] <= 1e-12 * powers[0]:
            continue
        vector = vectors[:, -1 - axis]
        direction = vector if tall else wide.T @ vector / np.sqrt(powers[axis])
        if direction[np.argmax(np.abs(direction))] < 0:
            direction = -direction
        points[:, axis] = wide @ direction * scale
    shares = [float(powers[axis] / total) if axis < len(powers) else 0.0 for axis in range(2)]
    return Projection(rows, points + 0.0, (round(shares[0], 6), round(shares[1], 6)))
