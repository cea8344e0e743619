from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from kvtools.json_numbers import json_numbers


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_round_trip(dtype: type) -> None:
    values = np.random.default_rng(0).normal(size=(5, 3)).astype(dtype)
    text = json.dumps(json_numbers(values), allow_nan=False)
    assert np.array_equal(np.array(json.loads(text)).astype(dtype), values)


def test_non_finite_numbers_are_named() -> None:
    values = np.array([[np.nan, np.inf, -np.inf, -0.0]], np.float32)
    assert json.dumps(json_numbers(values), allow_nan=False) == '[["NaN", "Infinity", "-Infinity", -0.0]]'


def test_integers_and_no_numbers() -> None:
    assert json_numbers(np.array([2**63], np.uint64)) == [2**63]
    assert json_numbers(np.zeros((0, 3), np.float32)) == []
