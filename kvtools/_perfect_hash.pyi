"""A function from keys to slots that meets nowhere. Compiled from kernels/python/perfect_hash_module.cc."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

MIX: int

def build(
    keys: npt.NDArray[np.int64],
    seed: int,
    slots: int,
    pilots: npt.NDArray[np.int64],
    progress: Callable[[int], object],
) -> bool: ...
def slots_of(
    keys: npt.NDArray[np.int64], seed: int, slots: int, pilots: npt.NDArray[np.int64], out: npt.NDArray[np.int64]
) -> None: ...
def scatter(
    rows: npt.NDArray[np.uint8], places: npt.NDArray[np.int64], first: int, to: npt.NDArray[np.uint8]
) -> None: ...
def lie_in(keys: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], in_slots: npt.NDArray[np.int64]) -> bool: ...
def partition(
    rows: npt.NDArray[np.uint8],
    places: npt.NDArray[np.int64],
    first: int,
    group: int,
    rows_out: npt.NDArray[np.uint8],
    places_out: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
) -> None: ...
