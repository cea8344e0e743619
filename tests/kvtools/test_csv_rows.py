"""Rows as comma-separated values: numbers come back as they were, in as few digits as that takes."""

from __future__ import annotations

import csv
import io
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvtools import csv_rows
from kvtools.csv_rows import csv_header, csv_lines


def lines_of(*columns: Any) -> list[list[str]]:
    return list(csv.reader(io.StringIO(b"".join(csv_lines(columns)).decode())))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_of_all_sizes_come_back(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    kind = np.dtype(f"u{np.dtype(dtype).itemsize}")
    limits, tiny = np.iinfo(kind), np.finfo(dtype)
    numbers = np.concatenate(
        [
            rng.integers(0, limits.max, 20_000, dtype=kind, endpoint=True).view(dtype),
            rng.normal(size=5000).astype(dtype),
            np.arange(-50, 50).astype(dtype),
            np.array(
                [0.0, -0.0, 0.1, 1e7, 1e16, 2.0**30, -(2.0**31), tiny.max, tiny.tiny, tiny.smallest_subnormal], dtype
            ),
        ]
    )
    texts = [line[0] for line in lines_of(numbers)]
    for number, text in zip(numbers, texts, strict=True):
        if not np.isfinite(number):
            assert text == ("NaN" if np.isnan(number) else "Infinity" if number > 0 else "-Infinity")
            continue
        back = dtype(float(text))  # as a reader of doubles has it
        assert back == number and np.signbit(back) == np.signbit(number)
        assert "." in text or "e" in text
        digits = sum(character.isdigit() for character in text.partition("e")[0].strip("-0.").replace(".", ""))
        shortest = np.format_float_scientific(number, unique=True, trim="-").partition("e")[0]
        plain = sum(character.isdigit() for character in shortest.strip("-0.").replace(".", ""))
        # One more for the one float that a reader of doubles would round to its neighbour.
        assert digits <= max(plain, 0) + (np.abs(number) == np.float32(7.0385307e-26)) or "e" not in text


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
def test_integers(dtype: Any) -> None:
    limits = np.iinfo(dtype)
    numbers = np.array([limits.min, limits.max, 0, 7], dtype)
    assert [int(line[0]) for line in lines_of(numbers)] == numbers.tolist()
    assert lines_of(numbers.astype(np.dtype(dtype).newbyteorder(">"))) == lines_of(numbers)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_short_floats_are_the_float32_that_they_are(dtype: Any) -> None:
    numbers = np.random.default_rng(0).normal(size=(50, 3)).astype(dtype)
    back = np.array([[float(text) for text in line] for line in lines_of(numbers)], np.float32)
    np.testing.assert_array_equal(back.astype(dtype), numbers)


def test_columns_side_by_side_in_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_rows, "_NUMBERS_AT_ONCE", 50)
    rng = np.random.default_rng(0)
    keys, values = rng.integers(-(2**63), 2**63 - 1, 1000), rng.normal(size=(2000, 4)).astype(np.float32)[::2]
    flags = rng.integers(0, 2, (1000, 1)).astype(np.bool_)
    lines = lines_of(keys, values, flags, np.empty((1000, 0), np.float32))
    assert len(lines) == 1000 and {len(line) for line in lines} == {6}
    assert [int(line[0]) for line in lines] == keys.tolist()
    np.testing.assert_array_equal(np.array([line[1:5] for line in lines], np.float32), values)
    assert [line[5] for line in lines] == [str(bool(flag)) for flag in flags[:, 0]]


def test_no_rows_and_names() -> None:
    assert list(csv_lines([np.empty(0, np.int64), np.empty((0, 4), np.float32)])) == []
    names = ["key", 'a "b"', "c,d", "ü", "two\nlines", "a\rb"]
    assert next(csv.reader(io.StringIO(csv_header(names), newline=""))) == names


def test_what_cannot_be_written() -> None:
    from kvtools._row_text import csv_lines as compiled

    for columns, begin, end in (
        ([np.arange(3)], 0, 4),
        ([np.arange(3)], 2, 1),
        ([np.arange(3)], -1, 2),
        ([], 0, 0),
        ([np.empty((3, 0))], 0, 3),
        ([np.zeros((2, 2, 2))], 0, 2),
        ([np.arange(3), np.arange(2)], 0, 3),
    ):
        with pytest.raises(ValueError):
            compiled(columns, begin, end)
    with pytest.raises(TypeError):
        compiled([np.zeros(3, np.complex64)], 0, 3)
