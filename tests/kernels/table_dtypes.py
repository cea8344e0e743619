"""Types of keys and values, and the keys at the ends of a type."""

import ml_dtypes
import numpy as np

KEY_DTYPES = [np.dtype(name) for name in ("int64", "int32", "uint64")]
VALUE_DTYPES = [np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), np.dtype("float64")]
DIMS = [1, 7, 8, 16, 64, 100, 129]


def extreme_keys(dtype: np.dtype) -> np.ndarray:
    """The keys that an engine with reserved keys would get wrong."""
    info = np.iinfo(dtype)
    keys = [info.min, info.min + 1, -1, 0, 1, 2**31 - 1, info.max - 1, info.max]
    return np.unique(np.array([key for key in keys if info.min <= key <= info.max], dtype))
