from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.clip import Clip
from kvtools.decimal_histogram import DecimalHistogram, bin_of, edge_of, edges_of
from kvtools.row_norms import row_norms

SPREADS = {
    "unit": lambda rng: 1 + 1e-6 * rng.standard_normal(4000),
    "concentrated": lambda rng: rng.normal(1, 0.02, 4000),
    "usual": lambda rng: np.abs(rng.lognormal(-4, 1.2, 4000)),
    "everywhere": lambda rng: 10.0 ** rng.uniform(-30, 30, 4000),
    "one": lambda rng: np.full(4000, 0.7),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spread", SPREADS)
def test_what_is_below_an_edge_is_exact_however_it_was_added(spread: str, dtype: str) -> None:
    norms = SPREADS[spread](np.random.default_rng(5)).astype(dtype)
    histogram = DecimalHistogram()
    for number, piece in enumerate(np.array_split(norms, 7)):
        if number % 2:
            other = DecimalHistogram()
            other.add(piece)
            histogram.merge(other)
        else:
            histogram.add(piece)
    assert histogram.rows == len(norms) and len(histogram.counts) <= 8192
    for edge in histogram.edges[::97].tolist():
        if max(norms.min(), 1e-20) < edge < min(norms.max(), 1e20):
            assert histogram.below(edge) == np.count_nonzero(norms < edge), edge
    for threshold, rows in histogram.thresholds([0.01, 0.25, 0.5, 0.9]):
        assert rows == np.count_nonzero(norms < threshold) == histogram.below(threshold)


def test_thresholds_cut_about_the_shares_and_are_short() -> None:
    norms = np.random.default_rng(1).normal(1, 0.02, 100_000)
    histogram = DecimalHistogram()
    histogram.add(norms)
    thresholds = histogram.thresholds([0.05, 0.25, 0.5, 0.75, 0.95])
    assert [rows / 1e5 for _, rows in thresholds] == pytest.approx([0.05, 0.25, 0.5, 0.75, 0.95], rel=0.03)
    assert all(len(repr(threshold)) <= 6 for threshold, _ in thresholds)


def test_a_row_of_a_table_is_below_a_threshold_as_clip_has_it() -> None:
    rng = np.random.default_rng(2)
    values = (rng.standard_normal((3000, 4)) * rng.choice([0.7, 0.1, 0.3], (3000, 1))).astype(np.float32)
    for norm in ("abs", "l2"):
        histogram = DecimalHistogram()
        histogram.add(row_norms(values, norm))
        for threshold, rows in histogram.thresholds([0.1, 0.3, 0.5, 0.9]):
            assert rows == np.count_nonzero(~Clip(norm, threshold).keep(values))


def test_what_is_no_norm_or_beyond_all_edges() -> None:
    histogram = DecimalHistogram()
    histogram.add(np.array([np.nan, np.inf]))
    assert histogram.rows == 0 and histogram.quantile(0.5) is None and histogram.thresholds([0.5]) == []
    histogram.add(np.array([0.0, 1e-30, 1e30]))
    assert (histogram.rows, histogram.under, histogram.over, histogram.thresholds([0.5])) == (3, 2, 1, [])
    assert histogram.quantile(0.1) == 0.0 and histogram.quantile(1.0) == 1e30
    assert histogram.below(1.0) == 2 and histogram.below(1e31) == 3
    histogram.add(np.array([5.0]))
    assert [rows for _, _, rows in histogram.bars([4.0, 4.9999999, 5.0000001, 6.0])] == [0, 1, 0]


@given(st.floats(1e-20, 1e19), st.integers(1, 8))
def test_a_norm_lies_between_two_edges(norm: float, digits: int) -> None:
    number = bin_of(norm, digits)
    assert edge_of(number, digits) <= norm < edge_of(number + 1, digits)


@pytest.mark.parametrize("digits", [1, 2, 3, 5, 8])
def test_edges_are_the_numbers_that_a_person_types(digits: int) -> None:
    for norm in (1e-20, 3e-7, 0.97, 1.0, 5e3, 9.9e19):
        start = bin_of(norm, digits) - 50
        assert edges_of(start, 100, digits).tolist() == [edge_of(start + at, digits) for at in range(100)]
