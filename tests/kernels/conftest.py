from collections.abc import Callable

import numpy as np
import pytest
from table_dtypes import DIMS, KEY_DTYPES, VALUE_DTYPES, extreme_keys

from kvtools._kvtable import Table


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
