"""Bytes to and from files with their CRC-32C, without the GIL. Compiled from kernels/python/checked_io_module.cc."""

from typing import Any

import numpy as np
import numpy.typing as npt

def read(file: int, data: npt.NDArray[np.uint8], offset: int, crc: int = 0, check: bool = True) -> tuple[int, int]: ...
def write(file: int, data: npt.NDArray[Any], offset: int, crc: int = 0) -> int: ...
