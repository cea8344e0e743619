from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from kvtools._kvtable import Table

KEY_DTYPES = [np.dtype(name) for name in ("int64", "int32", "uint64")]
VALUE_DTYPES = [np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), np.dtype("float64")]
DIMS = [1, 7, 8, 16, 64, 100, 129]


def extreme_keys(dtype: np.dtype) -> np.ndarray:
    """The keys that an engine with reserved keys would get wrong."""
    info = np.iinfo(dtype)
    keys = [info.min, info.min + 1, -1, 0, 1, 2**31 - 1, info.max - 1, info.max]
    return np.unique(np.array([key for key in keys if info.min <= key <= info.max], dtype))


@pytest.fixture(params=KEY_DTYPES, ids=str)
def key_dtype(request: pytest.FixtureRequest) -> np.dtype:
    return request.param


@pytest.fixture(params=VALUE_DTYPES, ids=str)
def value_dtype(request: pytest.FixtureRequest) -> np.dtype:
    return request.param


@pytest.fixture(params=DIMS, ids=lambda dim: f"dim{dim}")
def dim(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def make_keys(key_dtype: np.dtype) -> Callable[[int], np.ndarray]:
    """n different keys, the extreme ones among them, in no order."""

    def make(n: int) -> np.ndarray:
        extremes = extreme_keys(key_dtype)
        rng = np.random.default_rng(n)
        info = np.iinfo(key_dtype)
        drawn = rng.integers(info.min, info.max, size=2 * n + 100, dtype=key_dtype, endpoint=True)
        keys = np.concatenate([extremes, np.setdiff1d(drawn, extremes)[:n]])[:n]
        return rng.permutation(keys)

    return make


@pytest.fixture
def small_table() -> Table:
    return Table("int64", "float32", 2)
