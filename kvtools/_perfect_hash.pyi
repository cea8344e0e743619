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
