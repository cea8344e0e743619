from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.row_mask import RowMask

PARTS = st.lists(st.integers(0, 200), min_size=1, max_size=5)


@given(parts=PARTS, seed=st.integers(0, 99), step=st.integers(1, 70), memory=st.sampled_from([1, 1 << 20]))
def test_a_mask_is_an_array_of_bools(parts: list[int], seed: int, step: int, memory: int) -> None:
    rng = np.random.default_rng(seed)
    expected = [rng.random(rows) < rng.random() for rows in parts]
    mask = RowMask(parts, memory=memory)
    for part, kept in enumerate(expected):
        for start in range(0, len(kept), step):
            mask.put(part, start, kept[start : start + step])
    drop = np.flatnonzero(rng.random(sum(parts)) < 0.2)
    mask.clear(drop)
    whole = np.concatenate(expected)
    whole[drop] = False
    split = np.split(whole, np.cumsum(parts)[:-1])
    mask = pickle.loads(pickle.dumps(mask))
    assert mask.kept_rows() == tuple(int(kept.sum()) for kept in split)
    for part, kept in enumerate(split):
        for start in range(0, len(kept), step):
            assert np.array_equal(mask.get(part, start, min(step, len(kept) - start)), kept[start : start + step])
    numbers = rng.permutation(int(whole.sum()))
    assert np.array_equal(mask.rows_of(numbers), np.flatnonzero(whole)[numbers])


@pytest.mark.parametrize("parts", [[0], [1], [8, 7, 9], [64, 0, 65]])
def test_a_mask_can_start_with_all_rows(parts: list[int]) -> None:
    mask = RowMask(parts, memory=1, kept=True)
    assert mask.kept_rows() == tuple(parts)
    assert np.array_equal(mask.rows_of(np.arange(sum(parts))), np.arange(sum(parts)))
