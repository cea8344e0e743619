"""The first rows by a number, against sorting all of them with NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.array_table import ArrayTable
from kvtools.dialects.chunk import Chunk, Columns
from kvtools.errors import BadInputError, UsageError
from kvtools.top import BUILT_IN, Ranking, Top, overall, ranking, top_rows


def table_of(rows: int, value_dtype: Any = np.float32, key_dtype: Any = np.int64, parts: int = 3) -> ArrayTable:
    rng = np.random.default_rng(rows)
    limits = np.iinfo(key_dtype)
    keys = np.unique(rng.integers(limits.min, limits.max, 2 * rows + 8, dtype=key_dtype, endpoint=True))
    keys = rng.permutation(np.concatenate([keys[:rows], np.array([limits.min, limits.max], key_dtype)]))[:rows]
    values = (rng.normal(size=(rows, 5)) * 9).astype(value_dtype)
    cut = np.sort(rng.integers(0, rows + 1, parts - 1))
    return ArrayTable(
        "emb",
        keys,
        values,
        freqs=rng.integers(0, 20, rows).astype(np.uint32),
        versions=rng.integers(-5, 5, rows),
        part_rows=np.diff([0, *cut, rows]).tolist(),
    )


def reference(numbers: np.ndarray, keys: np.ndarray, limit: int, ascending: bool) -> list[int]:
    told = [at for at in range(len(keys)) if numbers[at] == numbers[at]]
    sign = 1 if ascending else -1
    return sorted(told, key=lambda at: (sign * numbers[at].item(), int(keys[at]), at))[:limit]


def check(table: ArrayTable, by: Any, numbers: np.ndarray, limit: int, ascending: bool) -> None:
    found = top_rows(table, by, limit, ascending=ascending)
    rows = reference(numbers, table.all_keys(), limit, ascending)
    assert found.rows.tolist() == rows
    assert found.keys.tolist() == table.all_keys()[rows].tolist() and found.keys.dtype == table.key_dtype
    np.testing.assert_array_equal(found.numbers, numbers[rows])
    assert found.passed + found.without == table.rows


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("by", BUILT_IN)
@pytest.mark.parametrize("rows", [0, 1, 300])
@pytest.mark.parametrize("limit", [0, 1, 7, 1000])
def test_it_is_what_sorting_gives(by: str, rows: int, limit: int, ascending: bool) -> None:
    table = table_of(rows)
    wide = table.to_numpy().values.astype(np.float64)
    numbers = {
        "freq": table.to_numpy().freqs,
        "version": table.to_numpy().versions,
        "norm": np.sqrt((wide * wide).sum(axis=1)),
        "value-abs": np.abs(wide).max(axis=1, initial=0).astype(np.float32),
    }[by]
    found = top_rows(table, by, limit, ascending=ascending)
    rows_there = reference(numbers, table.all_keys(), limit, ascending)
    assert found.keys.tolist() == table.all_keys()[rows_there].tolist()
    np.testing.assert_allclose(found.numbers, numbers[rows_there], rtol=1e-14)


@pytest.mark.parametrize("value_dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.int8, np.int64, np.bool_])
@pytest.mark.parametrize("key_dtype", [np.int64, np.int32, np.uint64])
def test_types(value_dtype: Any, key_dtype: Any) -> None:
    table = table_of(100, value_dtype, key_dtype)
    check(table, "value-abs", np.abs(table.to_numpy().values.astype(np.float64)).max(axis=1), 10, False)


@given(st.lists(st.floats(width=64), max_size=40), st.integers(0, 12), st.booleans())
def test_any_floats(numbers: list[float], limit: int, ascending: bool) -> None:
    """NaN is left out, and counted; infinities and both zeros have their place."""
    array = np.array(numbers, np.float64)
    table = ArrayTable("emb", np.arange(len(array))[::-1] - 5, np.zeros((len(array), 1)))
    starts = {int(key): at for at, key in enumerate(table.all_keys())}
    by = Ranking("x", lambda _: Columns(), lambda chunk: array[[starts[key] for key in chunk.keys.tolist()]])
    check(table, by, array, limit, ascending)
    assert top_rows(table, by, limit).without == np.isnan(array).sum()


def test_equal_numbers_come_by_key_however_many_there_are() -> None:
    rows = 200_000  # several times what waits to be sorted
    keys = np.random.default_rng(0).permutation(rows) - rows // 2
    table = ArrayTable("emb", keys, np.zeros((rows, 1), np.float32), freqs=np.ones(rows, np.int32))
    for ascending in (False, True):
        found = top_rows(table, "freq", 5, ascending=ascending)
        assert found.keys.tolist() == [-rows // 2 + n for n in range(5)]
        assert table.all_keys()[found.rows].tolist() == found.keys.tolist()


def test_integers_beyond_what_a_float_holds() -> None:
    numbers = np.array([2**63, 2**64 - 1, 2**64 - 2, 2**53 + 1, 2**53], np.uint64)
    table = ArrayTable("emb", np.arange(5), np.zeros((5, 1)), freqs=numbers)
    assert top_rows(table, "freq", 5).keys.tolist() == [1, 2, 0, 3, 4]
    assert top_rows(table, "freq", 5, ascending=True).numbers.tolist() == sorted(numbers.tolist())


class Even:
    def columns_of(self, table: Any) -> Columns:
        return Columns(freqs=True)

    def mask(self, chunk: Chunk) -> np.ndarray:
        assert chunk.freqs is not None
        return np.asarray(chunk.freqs % 2 == 0)


def test_only_rows_that_count() -> None:
    table = table_of(300)
    values = table.to_numpy()
    even = np.flatnonzero(values.freqs % 2 == 0)
    found = top_rows(table, "norm", 300, where=Even())
    assert sorted(found.rows.tolist()) == even.tolist() and found.passed == len(even)


def test_what_a_table_has_not() -> None:
    table = ArrayTable("emb", np.arange(3), np.zeros((3, 2)))
    for by in ("freq", "version"):
        with pytest.raises(BadInputError, match=f"ranking table 'emb' by {by}: it has no"):
            top_rows(table, by, 3)
    with pytest.raises(UsageError, match="limit of -1"):
        top_rows(table, "norm", -1)


def test_several_tables_together() -> None:
    one = Top("a", np.arange(2), np.array([5, 6]), np.array([9.5, 2.0]), 2, 0)
    other = Top("b", np.arange(2), np.array([5, 6]), np.array([2**63, 2], np.uint64), 2, 0)
    assert overall([one, other], 9) == [(1, 0), (0, 0), (0, 1), (1, 1)]
    assert overall([one, other], 1, ascending=True) == [(0, 1)]
    assert ranking("norm").name == "norm"
