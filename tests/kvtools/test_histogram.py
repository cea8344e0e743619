from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.histogram import NORM_EDGES, FrequencyHistogram, NormHistogram, VersionHistogram, _lines, norm_bins


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norm_bins_are_those_of_a_search(dtype: str) -> None:
    edges = NORM_EDGES.astype(dtype)
    rng = np.random.default_rng(0)
    limits = np.finfo(dtype)
    norms = np.concatenate(
        [
            edges,
            np.nextafter(edges, 0, dtype=dtype),
            np.nextafter(edges, limits.max, dtype=dtype),
            np.array([0, limits.smallest_subnormal, limits.tiny, limits.max], dtype),
            (10.0 ** rng.uniform(-30, 30, 10_000)).astype(dtype),
        ]
    )
    assert np.array_equal(norm_bins(norms), np.searchsorted(edges, norms, side="right"))


def test_powers_of_ten_are_edges() -> None:
    assert all(float(f"1e{decade}") in NORM_EDGES for decade in range(-20, 21))
    assert (np.diff(NORM_EDGES) > 0).all()


def test_norms() -> None:
    norms = np.abs(np.random.default_rng(1).normal(size=5000)) * 10.0 ** np.random.default_rng(2).uniform(-8, 2, 5000)
    histogram = NormHistogram()
    for piece in np.array_split(norms, 7):
        other = NormHistogram()
        other.add(piece)
        histogram.merge(other)
    assert histogram.rows == 5000
    assert histogram.smallest == norms.min() and histogram.largest == norms.max()
    assert histogram.total == pytest.approx(norms.sum())
    for threshold in (1e-8, 1e-3, 1.0, 100.0):
        assert histogram.below(threshold) == np.count_nonzero(norms < threshold)
    for share in (0.01, 0.5, 0.99):
        assert histogram.quantile(share) == pytest.approx(np.quantile(norms, share), rel=0.27)
    for bins in (1, 2, 5, 10):
        bars = histogram.bars(bins)
        assert sum(rows for _, _, rows in bars) == 5000
        assert all(high == low for (_, high, _), (low, _, _) in itertools.pairwise(bars))
        assert all(rows == np.count_nonzero((low <= norms) & (norms < high)) for low, high, rows in bars)


def test_norms_beyond_the_edges_have_bars_of_their_own() -> None:
    histogram = NormHistogram()
    histogram.add(np.array([0.0, 1e-30, 1e30]))
    bars = histogram.bars(10)
    assert bars == [(0.0, 1e-20, 2), (1e20, float("inf"), 1)]
    histogram.add(np.array([0.5, 5.0]))
    assert histogram.bars(10) == [(0.0, 1e-20, 2), (0.1, 1.0, 1), (1.0, 10.0, 1), (1e20, float("inf"), 1)]
    histogram = NormHistogram()
    assert histogram.bars() == [] and histogram.quantile(0.5) is None


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int32", "int64", "uint64", "float32"])
def test_frequencies(dtype: str) -> None:
    rng = np.random.default_rng(3)
    highest = min(1e9, np.iinfo(dtype).max if dtype != "float32" else 1e6)
    freqs = (rng.pareto(0.7, 20_000) * 5).clip(0, highest).astype(dtype)
    histogram = FrequencyHistogram()
    for piece in np.array_split(freqs, 5):
        other = FrequencyHistogram()
        other.add(piece)
        histogram.merge(other)
    wide = np.floor(freqs.astype(np.float64))
    assert histogram.rows == len(freqs)
    assert histogram.total == int(wide.sum())
    for threshold in (0, 1, 2, 3, 100, 4096, 1 << 13, 1 << 20, 1 << 30):
        assert histogram.below(threshold) == np.count_nonzero(wide < threshold)
    for low, high, rows in histogram.bars():
        assert rows == np.count_nonzero((wide >= low) & (wide < high))
    descending = np.sort(wide)[::-1]
    for share in (0.001, 0.01, 0.1, 1.0):
        expected = descending[: max(1, int(np.ceil(share * len(freqs))))].sum() / wide.sum()
        assert histogram.top_share(share) == pytest.approx(expected, rel=0.01)
    ranks = np.array([1, 2, 10, 1000, 20_000])
    assert histogram.frequency_of_rank(ranks) == pytest.approx(descending[ranks - 1], rel=0.016, abs=1)


def test_frequencies_that_are_none_count_as_zero() -> None:
    histogram = FrequencyHistogram()
    histogram.add(np.array([-5, -(2**63)], np.int64))
    histogram.add(np.array([np.nan], np.float32))
    histogram.add(np.array([2**64 - 1], np.uint64))
    assert histogram.below(1) == 3 and histogram.rows == 4


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_zipf_exponent(exponent: float) -> None:
    histogram = FrequencyHistogram()
    histogram.add((1e9 * np.arange(1, 100_001, dtype=np.float64) ** -exponent).astype(np.int64))
    assert histogram.zipf_exponent() == pytest.approx(exponent, abs=0.02)


def test_lines_are_those_of_least_squares() -> None:
    x = np.log(np.arange(1.0, 101.0))
    y = 20 - 1.5 * x + np.random.default_rng(0).normal(size=100)
    windows = [(0, 4), (3, 50), (0, 99), (95, 99)]
    found = np.transpose(_lines(x, y, *np.transpose(windows)))
    for (first, last), line in zip(windows, found, strict=True):
        assert line == pytest.approx(np.polyfit(x[first : last + 1], y[first : last + 1], 1))


def test_zipf_exponent_of_too_few_or_equal_frequencies() -> None:
    histogram = FrequencyHistogram()
    assert histogram.zipf_exponent() is None and histogram.top_share(0.1) is None and histogram.bars() == []
    histogram.add(np.array([5] * 9 + [0] * 100))
    assert histogram.zipf_exponent() is None
    histogram.add(np.array([5]))
    assert histogram.zipf_exponent() == pytest.approx(0, abs=1e-9)


versions_of = st.one_of(
    st.lists(st.integers(0, 2**32 - 1), max_size=30),
    st.lists(st.integers(1_700_000_000, 1_700_100_000), max_size=30),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30),
)


@pytest.mark.parametrize("unit", ["seconds", "days", "steps", "unknown"])
@settings(deadline=None)
@given(pieces=st.lists(versions_of, max_size=4))
def test_versions(unit: str, pieces: list[list[int]]) -> None:
    one, merged = VersionHistogram(unit), VersionHistogram(unit)  # type: ignore[arg-type]
    for piece in pieces:
        versions = np.array(piece, np.int64)
        one.add(versions)
        other = VersionHistogram(unit)  # type: ignore[arg-type]
        other.add(versions)
        merged.merge(other)
    dated = [version for piece in pieces for version in piece if version]
    assert one.unset == merged.unset == sum(map(len, pieces)) - len(dated)
    assert one.oldest == merged.oldest == min(dated, default=None)
    assert one.newest == merged.newest == max(dated, default=None)
    assert one.bars() == merged.bars()
    assert len(one.counts) <= 4097
    for width in (one.width, one.readable_width(16)):
        bars = one.bars(width)
        assert [rows for _, _, rows in bars] == [sum(low <= v < high for v in dated) for low, high, _ in bars]
    for share in (0.01, 0.5, 0.9, 1.0):
        age = one.age_of(share)
        if dated:
            exact = max(dated) - sorted(dated, reverse=True)[max(1, math.ceil(share * len(dated))) - 1]
            assert age is not None and exact <= age < exact + one.width
        else:
            assert age is None
    assert len(one.bars(one.readable_width(16))) <= 16


def test_versions_of_any_type() -> None:
    for dtype in ("uint32", "uint64", "int64", "int32", "uint8", "float64"):
        histogram = VersionHistogram("steps")
        histogram.add(np.array([0, 1, 100], dtype))
        assert (histogram.unset, histogram.oldest, histogram.newest, histogram.rows) == (1, 1, 100, 2)
    histogram.add(np.array([2**64 - 1, 2**63], np.uint64))
    assert histogram.newest == 2**64 - 1 and histogram.rows == 4
