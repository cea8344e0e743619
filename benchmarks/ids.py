"""Ids that the benchmarks look up: the same for every library, drawn with a seed."""

from __future__ import annotations

import functools

import numpy as np

#: Exponent of the skewed ids: rank r is drawn with a probability proportional to r ** -ZIPF.
ZIPF = 1.05


def draw(how: str, rows: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """`size` ids in [0, rows): int64.

    `how` is ``uniform`` (with repetitions), ``unique`` (none within the draw) or ``zipf`` (many; which ids are the
    frequent ones is random).
    """
    if how == "uniform":
        return rng.integers(0, rows, size)
    if how == "unique":
        return rng.choice(rows, size, replace=False)
    if how == "zipf":
        cumulative, id_of_rank = _zipf(rows)
        return id_of_rank[np.searchsorted(cumulative, rng.random(size) * cumulative[-1])]
    raise ValueError(f"ids: no way to draw called {how!r}: uniform, unique or zipf")


def batches(how: str, rows: int, size: int, count: int) -> list[np.ndarray]:
    """`count` draws. They rotate while time is taken, so that no batch finds its rows in cache."""
    rng = np.random.default_rng(17)
    return [draw(how, rows, size, rng) for _ in range(count)]


@functools.cache
def _zipf(rows: int) -> tuple[np.ndarray, np.ndarray]:
    cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF)
    return cumulative, np.random.default_rng(rows).permutation(rows)
