"""Cut a stream of rows anew: formats come in row groups and HDF5 chunks, callers want runs of their own length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from kvtools.dialects.chunk import Array


def rechunk(arrays: Iterable[Array], rows: int) -> Iterator[Array]:
    """Yield the rows of `arrays`, of one type and row shape, `rows` at a time and the rest at the end.

    A run that lies in one array is a view of it.

    >>> [run.tolist() for run in rechunk([np.array([1, 2, 3]), np.array([4, 5])], 2)]
    [[1, 2], [3, 4], [5]]
    """
    held: list[Array] = []
    count = 0
    for array in arrays:
        while len(array):
            piece = array[: rows - count]
            array = array[len(piece) :]
            held.append(piece)
            count += len(piece)
            if count == rows:
                yield held[0] if len(held) == 1 else np.concatenate(held)
                held, count = [], 0
    if count:
        yield held[0] if len(held) == 1 else np.concatenate(held)
