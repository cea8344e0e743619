from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.server.key_index import KeyIndex

INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 5)


@given(st.lists(INT64, max_size=60), st.lists(INT64, max_size=20))
def test_matches_a_dict(keys: list[int], others: list[int]) -> None:
    index = KeyIndex(np.array(keys, np.int64))
    reference = {key: row for row, key in enumerate(keys)}
    wanted = keys + others
    assert index.find(np.array(wanted, np.int64)).tolist() == [reference.get(key, -1) for key in wanted]
    assert index.duplicates == len(keys) - len(reference)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint64])
@pytest.mark.parametrize("kind", ["random", "sequence", "multiples"])
def test_many_keys(dtype: type, kind: str) -> None:
    rng = np.random.default_rng(0)
    if kind == "random":
        keys = np.unique(rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, 100_000, dtype=dtype))
    else:
        keys = (np.arange(100_000) * (1 if kind == "sequence" else 1024)).astype(dtype)
    keys = rng.permutation(keys)
    index = KeyIndex(keys)
    assert np.array_equal(index.find(keys), np.arange(len(keys)))
    absent = np.setdiff1d((np.arange(1000) * 7919 + 3).astype(dtype), keys)
    assert (index.find(absent) == -1).all()


def test_extreme_uint64_keys() -> None:
    keys = np.array([0, 2**64 - 1, 2**63], np.uint64)
    assert KeyIndex(keys).find(np.array([2**63, 2**64 - 1, 5], np.uint64)).tolist() == [2, 1, -1]
