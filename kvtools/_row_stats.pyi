"""What statistics need of each row, in one pass. Compiled from kernels/python/row_stats_module.cc."""

import numpy as np
import numpy.typing as npt

def row_stats(
    values: npt.NDArray[np.float32], largest: npt.NDArray[np.float32], squares: npt.NDArray[np.float32]
) -> tuple[float, int]: ...
