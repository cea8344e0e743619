"""The codecs of the lookup server. Compiled from kernels/python/serving_binding.cc."""

from typing import Any

import numpy as np
import numpy.typing as npt

def read_json_lookup(
    body: bytes, key_dtype: str, max_keys: int
) -> (
    tuple[
        npt.NDArray[np.int64],
        npt.NDArray[np.int64] | None,
        str | None,
        npt.NDArray[np.float32] | None,
        str | None,
    ]
    | None
): ...
def json_rows(values: npt.NDArray[Any]) -> bytes: ...
def json_flags(flags: npt.NDArray[np.bool_]) -> bytes: ...
