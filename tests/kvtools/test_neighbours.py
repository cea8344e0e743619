"""The nearest rows, against all products in float64 by NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools import neighbours
from kvtools.array_table import ArrayTable
from kvtools.dialects.chunk import Chunk, Columns
from kvtools.errors import BadInputError, UsageError
from kvtools.neighbours import metric_named, nearest, vectors_of_keys

METRICS = ("cosine", "dot", "l2")


def scores_of(values: Any, vector: Any, metric: str) -> np.ndarray:
    wide, to = np.asarray(values, np.longdouble), np.asarray(vector, np.longdouble)
    if metric == "dot":
        return np.asarray(wide @ to)
    if metric == "l2":
        return np.sqrt(((wide - to) ** 2).sum(axis=1))
    return np.asarray((wide @ to) / np.sqrt((wide**2).sum(axis=1)) / np.sqrt((to**2).sum()))


def check(table: ArrayTable, vectors: np.ndarray, k: int, metric: Any, exclude: Any = None) -> None:
    found = nearest(table, vectors, k, metric=metric, exclude=exclude)
    keys, values = table.all_keys(), table.to_numpy().values.astype(np.longdouble)
    usable = np.isfinite(values).all(axis=1)
    assert found.non_finite == np.count_nonzero(~usable)
    if metric == "cosine":
        usable &= (values != 0).any(axis=1)
    for number, vector in enumerate(vectors):
        there = np.flatnonzero(usable & (keys != exclude[number]) if exclude is not None else usable)
        scores = scores_of(values[there], vector, metric)
        sign = 1 if metric == "l2" else -1
        assert len(found.keys[number]) == min(k, len(there)) == len(set(found.rows[number].tolist()))
        assert keys[found.rows[number]].tolist() == found.keys[number].tolist()
        best = np.sort(sign * scores)[: len(found.keys[number])] * sign
        scale = float(np.abs(best).max(initial=0))
        np.testing.assert_allclose(
            found.scores[number],
            best.astype(np.float64),
            rtol=1e-12,
            atol=1e-13 * scale + (1e-15 if metric == "cosine" else 0),
        )


def table_of(rows: int, dim: int, dtype: Any = np.float32, key_dtype: Any = np.int64, scale: float = 1) -> ArrayTable:
    rng = np.random.default_rng(rows + dim)
    limits = np.iinfo(key_dtype)
    keys = np.unique(rng.integers(limits.min, limits.max, 2 * rows + 8, dtype=key_dtype, endpoint=True))
    keys = rng.permutation(keys)[:rows]
    keys[:2] = [limits.min, limits.max][: min(rows, 2)]
    return ArrayTable(
        "emb", keys, (rng.normal(size=(rows, dim)) * scale).astype(dtype), part_rows=[rows // 3, rows - rows // 3]
    )


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int32])
@pytest.mark.parametrize(("rows", "dim"), [(0, 4), (1, 1), (400, 1), (400, 33)])
def test_it_is_what_all_products_give(
    metric: str, dtype: Any, rows: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_CHUNK_BYTES", 4096)
    table = table_of(rows, dim, dtype, scale=20)
    vectors = np.random.default_rng(1).normal(size=(3, dim)).astype(np.float32)
    check(table, vectors, 7, metric)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("key_dtype", [np.int64, np.int32, np.uint64])
def test_a_key_is_not_its_own_neighbour(metric: str, key_dtype: Any) -> None:
    table = table_of(200, 8, key_dtype=key_dtype)
    keys = table.all_keys()[[0, 1, 5]]
    vectors, found = vectors_of_keys(table, np.array([*keys.tolist(), 3], object))
    assert found.tolist() == [True, True, True, False]
    check(table, vectors, 5, metric, exclude=keys)
    assert nearest(table, vectors, 1, metric="l2").keys[2].tolist() == [keys[2]]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e-16, 1e14, 1e17, 3e38 / 8])
def test_numbers_near_the_ends_of_their_type(metric: str, scale: float) -> None:
    rng = np.random.default_rng(2)
    values = (rng.uniform(-1, 1, (300, 6)) * np.float64(scale)).astype(np.float32)
    values[::5] = rng.normal(size=(60, 6))
    table = ArrayTable("emb", np.arange(300), values)
    check(table, np.concatenate([values[3:5], rng.normal(size=(1, 6)).astype(np.float32)]), 20, metric)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_float64_beyond_the_squares_it_has(metric: str) -> None:
    values = np.random.default_rng(2).normal(size=(50, 4)) * np.float64(10.0) ** np.arange(-250, 250, 10)[:, None]
    check(ArrayTable("emb", np.arange(50), values), values[[3, 25, 49]], 9, metric)


@pytest.mark.parametrize("metric", METRICS)
def test_rows_that_nothing_is_near(metric: str) -> None:
    values = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    values[3], values[50, 2], values[51, 0] = 0, np.nan, -np.inf
    table = ArrayTable("emb", np.arange(100), values)
    found = nearest(table, values[:2], 100, metric=metric)
    assert (found.non_finite, found.zero) == (2, metric == "cosine")
    assert not {50, 51} & set(found.keys[0].tolist()) and (3 in found.keys[0].tolist()) == (metric != "cosine")
    check(table, values[:2], 100, metric)


@pytest.mark.parametrize("metric", METRICS)
def test_equally_near_rows_come_by_key(metric: str) -> None:
    rng = np.random.default_rng(0)
    keys = rng.permutation(5000) - 2500
    values = np.repeat(rng.integers(-3, 4, (5, 4)), 1000, axis=0).astype(np.float32) + np.float32(0.5)
    table = ArrayTable("emb", keys, values)
    found = nearest(table, values[[0, 4000]], 30, metric=metric)
    for number, vector in enumerate(values[[0, 4000]]):
        scores = scores_of(values, vector, metric).round(9).tolist()
        sign = 1 if metric == "l2" else -1
        expected = sorted(range(5000), key=lambda at: (sign * scores[at], keys[at]))[:30]
        assert found.keys[number].tolist() == keys[expected].tolist()


def test_rows_that_differ_in_the_last_bit_of_their_type() -> None:
    """A product in float32 cannot tell them apart, the answer does."""
    base = np.random.default_rng(0).normal(size=64).astype(np.float32)
    values = np.tile(base, (500, 1))
    for row in range(500):
        values[row, row % 64] = np.nextafter(values[row, row % 64], np.float32(np.inf), dtype=np.float32)
        values[row, (row // 64)] = np.nextafter(values[row, row // 64], np.float32(-9), dtype=np.float32)
    table = ArrayTable("emb", np.arange(500), values)
    for metric in METRICS:
        check(table, values[[7]], 25, metric)


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=1, max_size=30),
    st.integers(1, 8),
    st.sampled_from(METRICS),
)
def test_small_numbers_and_many_ties(rows: list[list[int]], k: int, metric: Any) -> None:
    values = np.array(rows, np.float32)
    table = ArrayTable("emb", 10 - np.arange(len(values)), values)
    vectors = np.array([[1, 0, -1], [2, 2, 1]], np.float32)
    check(table, vectors, k, metric)
    found = nearest(table, vectors, k, metric=metric)
    for scores, keys in zip(found.scores, found.keys, strict=True):
        for at in range(1, len(keys)):
            assert scores[at] != scores[at - 1] or keys[at] > keys[at - 1]


class Odd:
    def columns_of(self, table: Any) -> Columns:
        return Columns()

    def mask(self, chunk: Chunk) -> np.ndarray:
        return np.asarray(chunk.keys % 2 == 1)


def test_only_rows_that_count() -> None:
    values = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    found = nearest(ArrayTable("emb", np.arange(100), values), values[:1], 100, where=Odd())
    assert sorted(found.keys[0].tolist()) == list(range(1, 100, 2))
    assert found.rows[0].tolist() == found.keys[0].tolist()


def test_more_neighbours_than_rows_take_no_room() -> None:
    found = nearest(ArrayTable("emb", np.arange(3), np.eye(3, dtype=np.float32)), np.ones((1, 3)), 10**15)
    assert found.keys[0].tolist() == [0, 1, 2]


def test_a_metric_that_there_is_not() -> None:
    table = ArrayTable("emb", np.arange(3), np.eye(3, dtype=np.float32))
    with pytest.raises(UsageError, match="got the metric 'cos', expected cosine, dot, l2"):
        nearest(table, np.ones((1, 3)), 2, metric="cos")  # type: ignore[arg-type]


def test_vectors_that_nothing_is_near() -> None:
    table = table_of(10, 4)
    for vectors, said in (
        (np.zeros((1, 4)), "vector 0 is all zeros"),
        (np.array([[0, 1, 2, 3], [0, 1, np.nan, 3]]), "vector 1 has a NaN"),
        (np.zeros((2, 5)), "got vectors of 2 x 5 numbers, expected rows of 4"),
        (np.zeros(4), "expected rows of 4"),
    ):
        with pytest.raises(BadInputError, match=said):
            nearest(table, vectors, 3)
    assert len(nearest(table, np.zeros((1, 4)), 3, metric="dot").keys[0]) == 3
    assert nearest(table, np.zeros((0, 4)), 3).keys == ()
    with pytest.raises(UsageError, match="got k 0"):
        nearest(table, np.ones((1, 4)), 0)
    with pytest.raises(UsageError, match="'euclid'"):
        metric_named("euclid")
