"""Conditions on rows against the same ones in NumPy; and what is no condition."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.dialects.chunk import ALL_COLUMNS, Columns
from kvtools.errors import UsageError
from kvtools.where import Expression, Where

ROWS, DIM = 500, 4


def a_table(value_dtype: Any = np.float32, key_dtype: str = "int64", **others: Any) -> ArrayTable:
    rng = np.random.default_rng(3)
    values = (rng.normal(size=(ROWS, DIM)) * 10).astype(value_dtype)
    given: dict[str, Any] = {
        "slots": {"Adam.m": rng.normal(size=(ROWS, 2)).astype(np.float32), "Adam.v": np.ones((ROWS, 1), np.float16)},
        "freqs": rng.integers(0, 9, ROWS, dtype=np.uint32),
        "versions": rng.integers(0, 99, ROWS),
        "part_rows": (ROWS - 200, 200),
    }
    keys = rng.permutation(np.arange(ROWS, dtype=key_dtype))
    return ArrayTable("emb", keys, values, **{**given, **others})


def judged(text: str, table: ArrayTable) -> np.ndarray:
    where = Where.parse(text)
    masks = [where.mask(chunk) for chunk in table.chunks(where.columns_of(table), rows=77)]
    assert all(mask.dtype == np.bool_ for mask in masks)
    return np.concatenate(masks)


def norms(table: ArrayTable) -> np.ndarray:
    values = table.to_numpy(["values"]).values
    assert values is not None
    return np.sqrt((values.astype(np.float64) ** 2).sum(axis=1)).astype(np.float32)


REFERENCES: dict[str, Callable[[Any, np.ndarray, np.ndarray], np.ndarray]] = {
    "freq < 3 and norm < 15": lambda rows, norm, part: (rows.freqs < 3) & (norm < np.float32(15)),
    "FREQ between 2 and 4 or Version > 90": lambda rows, norm, part: (
        ((rows.freqs >= 2) & (rows.freqs <= 4)) | (rows.versions > 90)
    ),
    "key in (7, 8, 499)": lambda rows, norm, part: np.isin(rows.keys, [7, 8, 499]),
    "key % 3 = 1 and part = 1": lambda rows, norm, part: (rows.keys % 3 == 1) & (part == 1),
    '"Adam.m"[2] > 0.5': lambda rows, norm, part: rows.slots["Adam.m"][:, 1] > 0.5,
    '"Adam.v"[1] = 1': lambda rows, norm, part: np.ones(ROWS, np.bool_),
    "value[1] < 0 -- a comment": lambda rows, norm, part: rows.values[:, 0] < 0,
    "list_max(list_transform(value, lambda key: abs(key))) < 5": lambda rows, norm, part: (
        np.abs(rows.values).max(axis=1) < 5
    ),
    "value is null": lambda rows, norm, part: np.zeros(ROWS, np.bool_),
    "freq < null": lambda rows, norm, part: np.zeros(ROWS, np.bool_),
    "true": lambda rows, norm, part: np.ones(ROWS, np.bool_),
}


@pytest.mark.parametrize("text", REFERENCES)
def test_a_condition_is_that_of_numpy(text: str) -> None:
    table = a_table()
    part = np.repeat([0, 1], table.schema.part_rows)
    expected = REFERENCES[text](table.to_numpy(), norms(table), part)
    np.testing.assert_array_equal(judged(text, table), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ml_dtypes.bfloat16, "int8", "int64"], ids=str)
def test_norms_of_every_type_of_values(dtype: Any) -> None:
    table = a_table(dtype)
    np.testing.assert_array_equal(judged("norm < 20", table), norms(table) < 20)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint64", "uint32"])
def test_extreme_keys(dtype: str) -> None:
    limits = np.iinfo(dtype)
    keys = np.array([limits.min, limits.max, 5], dtype)
    table = ArrayTable("emb", keys, np.zeros((3, 1), np.float32))
    assert judged(f"key = {limits.max}", table).tolist() == [False, True, False]
    assert judged(f"key = ({limits.min})", table).tolist() == [True, False, False]


def test_values_of_truth() -> None:
    table = ArrayTable("emb", np.arange(3), np.array([[True, False], [False, False], [True, True]]))
    assert judged("value[1] and not value[2]", table).tolist() == [True, False, False]


def test_nan_is_larger_than_every_number_as_in_a_query() -> None:
    table = ArrayTable("emb", np.arange(3), np.float32([[np.nan], [np.inf], [1]]))
    assert judged("norm < 5", table).tolist() == [False, False, True]
    assert judged("norm > 5", table).tolist() == [True, True, False]
    assert judged("isnan(norm)", table).tolist() == [True, False, False]
    assert judged("not isfinite(value[1])", table).tolist() == [True, True, False]


def test_only_what_a_condition_is_about_is_read() -> None:
    table = a_table()
    assert Where.parse("freq < 3").columns_of(table) == Columns(freqs=True)
    assert Where.parse("norm < 3 and part = 0").columns_of(table) == Columns(values=True)
    assert Where.parse("key > 3").columns_of(table) == Columns()
    assert Where.parse("version > 3").columns_of(table) == Columns(versions=True)
    assert Where.parse("1 = 1").columns_of(table) == Columns()


def test_slots_whose_names_are_taken() -> None:
    slots = {
        "freq": np.full((3, 1), 5, np.float32),
        "m": np.ones((3, 1), np.float32),
        "M": np.zeros((3, 1), np.float32),
    }
    table = ArrayTable("emb", np.arange(3), np.zeros((3, 1), np.float32), slots=slots, freqs=np.array([1, 2, 3]))
    assert judged("slot_freq[1] = 5 and m[1] = 1 and slot_m[1] = 0 and freq > 1", table).tolist() == [False, True, True]


def test_chunks_of_any_kind() -> None:
    table = a_table()
    where = Where.parse('freq < 3 and "Adam.m"[1] > 0')
    whole = where.mask(table.to_numpy())
    chunk = next(table.chunks(ALL_COLUMNS, rows=10))
    np.testing.assert_array_equal(where.mask(chunk), whole[:10])
    np.testing.assert_array_equal(where.mask(chunk.take(slice(None, None, -2))), whole[:10][::-2])
    assert where.mask(chunk.take([])).shape == (0,)
    with pytest.raises(UsageError, match="got 'freq', expected one of key"):
        where.mask(next(table.chunks(Columns(slots=True))))


def test_many_threads_and_processes_judge_by_one_condition() -> None:
    table = a_table()
    where = pickle.loads(pickle.dumps(Where.parse("norm < 15")))
    chunks = list(table.chunks(where.columns_of(table), rows=9))
    expected = [where.mask(chunk).tolist() for chunk in chunks]
    found: dict[int, list[list[bool]]] = {}

    def judge(number: int) -> None:
        found[number] = [where.mask(chunk).tolist() for chunk in chunks]

    threads = [threading.Thread(target=judge, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(4)] == [expected] * 4


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "": "expected an expression",
        "freq <": r"syntax error at or near \"<\" \(character 6",
        "freq < 3;": "got more than an expression",
        "freq < 3; drop table chunk": "got 2 statements|another statement",
        "freq < 3 order by 1": "got more than an expression",
        "true limit 1": "got more than an expression",
        "true union select true": "got more than an expression",
        "freq < 3) from chunk where (true": "syntax error",
        "true), (true": "syntax error",
        "exists(select 1)": "got a subquery",
        "freq > (select 3)": "got a subquery",
        "freq in (from chunk select freq)": "got a subquery",
        "freq > ?": "got a parameter",
        "row_number() over () < 3": "got a window function",
        "*": "got a \\*|syntax error",
        "columns('freq') > 3": "got a \\*",
        "random() < 0.5": r"got random\(\), .*hash\(key\) % 10 < 5",
        "freq < 3 or UUID()::varchar > 'a'": r"got uuid\(\)",
        "list_transform(value, lambda x: x * random())[1] > 0": r"got random\(\)",
        "version < epoch(now())": r"got now\(\), .*epoch\(timestamp",
        "to_timestamp(version) < ago(interval 3 day)": r"got ago\(\)",
        "Adam.m[1] > 0": 'a name with dots needs quotes: "Adam.m"',
        "chunk.freq > 0": "expected a column",
        "free \0 < 3": "NUL",
        "freq < '\udcff'": "reading the condition",
    }.items(),
)
def test_what_is_no_condition_is_told_where_it_is_read(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Where.parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "frequ < 3": "table 'emb'.*got 'frequ', expected one of key, value, \"Adam.m\".*did you mean freq?",
        '"Adam_m"[1] > 3': 'did you mean "Adam.m"?',
        "freq": "got an expression of type BIGINT, expected a condition",
        "null": "expected a condition",
        "sum(freq) > 3": "cannot contain aggregates",
        "read_text('/etc/passwd') is null": "does not exist|table function",
        "getenv('HOME') is null": "does not exist",
        "unnest(value) > 1": "UNNEST",
        "value > norm": "Cannot compare",
    }.items(),
)
def test_what_fits_no_row_of_a_table_is_told_before_any_is_read(text: str, said: str) -> None:
    where = Where.parse(text)
    with pytest.raises(UsageError, match=said):
        where.columns_of(a_table())


def test_a_row_that_a_condition_fails_on_is_an_error() -> None:
    table = a_table()
    for text in ("cast(chr(65 + freq::int) as integer) > 2", "freq > 'many'"):
        where = Where.parse(text)
        with pytest.raises(UsageError, match="Could not convert string"):
            where.mask(next(table.chunks(where.columns_of(table))))
    where = Where.parse("cast(chr(65 + freq::int) as integer) > 2")
    assert Where.parse("key >= 0").mask(next(table.chunks())).all()


def test_what_is_the_same_each_time_is_a_condition() -> None:
    table = a_table()
    half = judged("hash(key) % 10 < 5", table)
    assert 0.4 < half.mean() < 0.6 and (judged("not hash(key) % 10 < 5", table) == ~half).all()
    assert not judged("version > epoch(timestamp '2026-01-31')", table).any()


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.int64])
def test_counters_are_computed_with_as_signed_integers_of_64_bits(dtype: Any) -> None:
    counts = np.array([0, 3, 2**31 - 1], dtype)
    table = ArrayTable("emb", np.arange(3), np.ones((3, 1), np.float32), freqs=counts, versions=counts)
    chunk = next(table.chunks())
    for name in ("freq", "version"):
        for text, there in ((f"-{name}", -1), (f"{name} - 5", 1), (f"{name} * 4294967295", 4294967295)):
            got = Expression.parse(text).values(chunk)
            wanted = counts.astype(np.int64) * there - 5 * (there == 1)
            assert got.dtype == np.int64 and (got == wanted).all(), text


def test_what_does_not_fit_64_bits_says_how_to_compute_it() -> None:
    keys, counts = np.array([-(2**63), 5]), np.array([1, 2**64 - 1], np.uint64)
    table = ArrayTable("emb", keys, np.ones((2, 1), np.float32), freqs=counts)
    chunk = next(table.chunks())
    for text, column in (("abs(key)", "key"), ("-key", "key"), ("key * 3", "key"), ("freq - 5", "freq")):
        with pytest.raises(UsageError, match=rf"cast it: {column}::hugeint"):
            Expression.parse(text).values(chunk)
        assert len(Expression.parse(text.replace(column, f"{column}::hugeint")).values(chunk)) == 2
    assert Expression.parse("abs(key::hugeint)").values(chunk).tolist() == [2.0**63, 5.0]
