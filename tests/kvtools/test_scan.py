"""Rows within a range of keys, against sorting and filtering with NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.array_table import ArrayTable
from kvtools.dialects.chunk import ALL_COLUMNS, Chunk, Columns
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import UsageError
from kvtools.migrate import write_tables
from kvtools.scan import KeyRange, order_named, rows_in_range, scan


def table_of(rows: int, key_dtype: Any = np.int64, value_dtype: Any = np.float32) -> ArrayTable:
    rng = np.random.default_rng(rows)
    limits = np.iinfo(key_dtype)
    keys = np.unique(rng.integers(limits.min, limits.max, rows + 8, dtype=key_dtype, endpoint=True))[:rows]
    keys[:2], keys[-1:] = [limits.min, 0][: min(rows, 2)], limits.max
    return ArrayTable(
        "emb",
        rng.permutation(np.unique(keys)),
        rng.normal(size=(len(np.unique(keys)), 3)).astype(value_dtype),
        slots={"m": rng.normal(size=(len(np.unique(keys)), 2)).astype(np.float32)},
        freqs=rng.integers(0, 9, len(np.unique(keys))).astype(np.uint32),
    )


def joined(chunks: Any) -> Chunk:
    found = list(chunks)
    return Chunk(
        np.concatenate([chunk.keys for chunk in found]),
        np.concatenate([chunk.values for chunk in found]),
        {"m": np.concatenate([chunk.slots["m"] for chunk in found])},
        np.concatenate([chunk.freqs for chunk in found]),
    )


@pytest.mark.parametrize("dialect", ["tfplugin", "npz", "hdf5", "parquet", "snapshot"])
@pytest.mark.parametrize("order", ["key", "stream"])
def test_every_dialect_gives_the_rows_in_order(tmp_path: Path, dialect: str, order: Any) -> None:
    source = table_of(200)
    write_tables([source], tmp_path / "a", dialect)
    table = open_checkpoint(tmp_path / "a").table("emb")
    values = dict(zip(source.all_keys().tolist(), source.to_numpy().values, strict=True))
    stored = table.all_keys()
    median = int(np.median(stored))
    columns = ALL_COLUMNS if dialect != "snapshot" else Columns(values=True)
    for keys in (KeyRange(), KeyRange(median), KeyRange(None, median), KeyRange(-(2**62), 2**62), KeyRange(0, 0)):
        chunks = list(scan(table, keys, columns, order=order, memory=1 << 16))
        found = np.concatenate([np.empty(0, np.int64), *(chunk.keys for chunk in chunks)])
        inside = stored[keys.contains(stored)]
        assert found.tolist() == (np.sort(inside) if order == "key" else inside).tolist()
        for chunk in chunks:
            np.testing.assert_array_equal(chunk.values, np.stack([values[key] for key in chunk.keys.tolist()]))


@pytest.mark.parametrize("key_dtype", [np.int64, np.int32, np.uint64, np.uint32])
@pytest.mark.parametrize("value_dtype", [np.float16, ml_dtypes.bfloat16, np.int8])
def test_the_ends_of_every_type(key_dtype: Any, value_dtype: Any) -> None:
    table = table_of(40, key_dtype, value_dtype)
    limits = np.iinfo(key_dtype)
    keys = np.sort(table.all_keys())
    for first, last in ((limits.min, limits.max), (limits.max, None), (None, limits.min), (2**64 - 1, 2**64), (-1, 0)):
        expected = [key for key in keys.tolist() if (first is None or key >= first) and (last is None or key <= last)]
        chunks = scan(table, KeyRange(first, last))
        assert [key for chunk in chunks for key in chunk.keys.tolist()] == expected


@given(
    st.lists(st.integers(-4, 4), max_size=40),
    st.none() | st.integers(-5, 5),
    st.none() | st.integers(0, 12),
    st.sampled_from(["key", "stream"]),
    st.integers(1, 3),
)
def test_keys_that_come_again_and_little_memory(
    keys: list[int], first: int | None, limit: int | None, order: Any, rows: int
) -> None:
    table = ArrayTable("emb", np.array(keys, np.int64), np.arange(len(keys), dtype=np.float32)[:, None])
    found = rows_in_range(table, KeyRange(first), order=order, limit=limit, memory=256 * rows)
    numbers = [number for numbers in found for number in numbers.tolist()]
    inside = [(key, row) for row, key in enumerate(keys) if first is None or key >= first]
    expected = sorted(inside) if order == "key" else inside
    assert numbers == [row for _, row in expected][:limit]


class Frequent:
    def columns_of(self, table: Any) -> Columns:
        return Columns(freqs=True)

    def mask(self, chunk: Chunk) -> np.ndarray:
        assert chunk.freqs is not None
        return np.asarray(chunk.freqs > 4)


@pytest.mark.parametrize("order", ["key", "stream"])
@pytest.mark.parametrize("keys", [KeyRange(), KeyRange(0)])
@pytest.mark.parametrize("limit", [None, 0, 5])
def test_only_rows_that_count(order: Any, keys: KeyRange, limit: int | None) -> None:
    table = table_of(300)
    whole = table.to_numpy()
    at = np.flatnonzero((whole.freqs > 4) & keys.contains(whole.keys))
    at = at[np.argsort(whole.keys[at])] if order == "key" else at
    chunks = list(scan(table, keys, order=order, limit=limit, where=Frequent()))
    if limit == 0:
        assert not chunks
        return
    found = joined(chunks)
    assert found.keys.tolist() == whole.keys[at][:limit].tolist()
    np.testing.assert_array_equal(found.slots["m"], whole.slots["m"][at][:limit])
    np.testing.assert_array_equal(found.freqs, whole.freqs[at][:limit])


def test_an_empty_table_and_wrong_ranges() -> None:
    table = ArrayTable("emb", np.empty(0, np.int64), np.empty((0, 3), np.float32))
    assert list(scan(table)) == list(scan(table, order="stream")) == list(scan(table, KeyRange(1))) == []
    with pytest.raises(UsageError, match="got 5 to 4"):
        KeyRange(5, 4)
    with pytest.raises(UsageError, match="limit of -1"):
        next(scan(table_of(5), limit=-1))
    with pytest.raises(UsageError, match="'random'"):
        order_named("random")
