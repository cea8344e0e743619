from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.clip import Age, Clip, Top
from kvtools.errors import UsageError
from kvtools.key_list import key_list
from kvtools.row_norms import non_finite_rows, row_norms

DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]

# Every number that float16 has, by its bits: the infinities, the zeros and all that are none among them.
FLOAT16 = st.integers(0, 0xFFFF).map(lambda bits: float(np.uint16(bits).view(np.float16)))


def reference_norm(row: Any, norm: str) -> float:
    """Plain Python, one row at a time."""
    numbers = [float(value) for value in row]
    if any(math.isnan(number) for number in numbers):
        return math.nan
    return max(map(abs, numbers)) if norm == "abs" else math.hypot(*numbers)


@pytest.mark.parametrize("norm", ["abs", "l2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    rows=st.lists(
        st.lists(FLOAT16, min_size=3, max_size=3),
        min_size=1,
        max_size=9,
    )
)
def test_norms_match_plain_python(norm: Any, dtype: np.dtype[Any], rows: list[list[float]]) -> None:
    with np.errstate(invalid="ignore"):  # of a NaN that signals
        values = np.array(rows).astype(dtype)
    expected = [reference_norm(row, norm) for row in values]
    np.testing.assert_allclose(row_norms(values, norm).astype(np.float64), expected, rtol=1e-6, atol=0)


def test_norms_of_extreme_float64() -> None:
    values = np.array([[3e200, 4e200], [3e-200, 4e-200], [0, 0], [5e-324, 0], [np.inf, -np.inf]])
    np.testing.assert_allclose(row_norms(values, "l2"), [5e200, 5e-200, 0, 5e-324, np.inf])


def test_norms_of_no_rows() -> None:
    assert row_norms(np.zeros((0, 4), np.float32), "l2").shape == (0,)
    assert row_norms(np.zeros((0, 4), np.float32), "abs").shape == (0,)


@pytest.mark.parametrize("norm", ["abs", "l2"])
def test_a_row_at_the_threshold_is_kept(norm: Any) -> None:
    values = np.array([[0.5, 0], [np.nextafter(np.float32(0.5), np.float32(0)), 0], [-0.5, 0]], np.float32)
    assert Clip(norm, 0.5).keep(values).tolist() == [True, False, True]


def test_zero_threshold_keeps_all_and_tiny_one_cuts_zero_rows() -> None:
    values = np.array([[0, 0], [1e-10, 0]], np.float32)
    assert Clip("abs", 0).keep(values).tolist() == [True, True]
    assert Clip("abs", 1e-20).keep(values).tolist() == [False, True]


@pytest.mark.parametrize("norm", ["abs", "l2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_finite_are_kept_and_counted(norm: Any, dtype: np.dtype[Any]) -> None:
    values = np.array([[np.nan, 0], [np.inf, 0], [-np.inf, np.nan], [0, 0], [1, 1]]).astype(dtype)
    assert Clip(norm, 0.5).keep(values).tolist() == [True, True, True, False, True]
    assert non_finite_rows(values) == 3


@pytest.mark.parametrize("threshold", [math.nan, -1.0, -1e-300, math.inf])
def test_senseless_thresholds_are_refused(threshold: float) -> None:
    with pytest.raises(UsageError, match="expected a finite number of 0 or more"):
        Clip("abs", threshold)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Clip("max", 0.5), "got norm 'max', expected 'abs' or 'l2'"),  # type: ignore[arg-type]
        (lambda: Top(2, "norm"), "got by 'norm', expected one of freq, l2"),  # type: ignore[arg-type]
        (lambda: Top(-1, "l2"), "got -1"),
        (lambda: Age(-5, timed=False), "an age of -5"),
        (lambda: key_list(np.array([1.5, np.nan])), r"got float64\[2\], expected integers"),
        (lambda: key_list([1.5]), "expected integers"),  # type: ignore[list-item]
    ],
)
def test_criteria_that_would_cut_others_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_norms_of_whole_numbers(dtype: Any) -> None:
    values = np.array([[np.iinfo(dtype).min, 0], [3, -4], [0, 0]], dtype)
    assert row_norms(values, "abs").tolist() == [-float(np.iinfo(dtype).min), 4, 0]
    assert Clip("abs", 4.5).keep(values).tolist() == [True, False, False]
    assert Clip("l2", 5).keep(values).tolist() == [True, True, False]
    assert non_finite_rows(values) == 0


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 12, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keep_is_the_norm_not_below_the_threshold_in_any_width(dtype: np.dtype[Any], dim: int) -> None:
    values = np.random.default_rng(dim).normal(size=(50, dim)).astype(dtype)
    values[3, -1], values[4, 0] = np.nan, np.inf
    expected = [not reference_norm(row, "abs") < 1 for row in values]
    assert Clip("abs", 1.0).keep(values).tolist() == expected
    assert non_finite_rows(values) == 2
