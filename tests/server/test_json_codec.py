"""The C++ codecs beside Python's json and NumPy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("fastapi")
from kvtools import _snapshot
from kvtools.server import codecs, request
from kvtools.server.request import RequestError, parse_lookup

KEY = st.integers(-(2**63), 2**64 - 1) | st.integers(-3, 3)
NUMBER = st.floats(width=32) | st.integers(-(10**40), 10**40) | st.booleans() | st.none()
LIST = st.lists(KEY | st.lists(KEY, max_size=3) | st.floats(), max_size=4) | st.lists(
    st.lists(KEY, max_size=3), max_size=4
)
DOCUMENT = st.fixed_dictionaries(
    {},
    optional={
        "keys": LIST,
        "row_splits": st.lists(st.integers(-1, 5), max_size=5),
        "combiner": st.sampled_from(["sum", "mean", "sqrtn", "max", None]),
        "weights": st.lists(NUMBER | st.lists(NUMBER, max_size=3), max_size=4),
        "missing": st.sampled_from(["zeros", "default", "error", "", 3]),
        "kyes": LIST,
    },
)
SPACE = st.sampled_from(["", " ", "\n", "\t\r "])


def read(body: bytes, key_dtype: str) -> Any:
    """What the server makes of a body, in a form that compares; the code of its error."""
    try:
        lookup, missing = parse_lookup(body, "t", binary=False, key_dtype=key_dtype, max_keys=5)
    except RequestError as error:
        return error.code
    lists = [None if a is None else a.tolist() for a in (lookup.keys, lookup.row_splits, lookup.weights)]
    return (*lists, lookup.combiner, missing)


def read_slowly(body: bytes, key_dtype: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request._snapshot, "read_json_lookup", lambda *arguments: None)
        return read(body, key_dtype)


@given(DOCUMENT, SPACE, st.sampled_from(["int64", "int32", "uint64"]))
@example({"keys": [[1], [2, 3]], "combiner": "sum", "weights": [[1], [0.1, 3e38]]}, " ", "int64")
@example({"keys": [1, 2], "row_splits": [0, 1, 1, 2], "combiner": "mean", "weights": [1, 2]}, "", "uint64")
@example({"keys": [], "row_splits": [0], "combiner": "mean", "weights": []}, "", "int64")
@example({"keys": [[], []], "combiner": "sqrtn", "weights": [[], []]}, "", "int32")
def test_both_readers_take_the_same(document: dict[str, Any], space: str, key_dtype: str) -> None:
    text = json.dumps(document, separators=(f"{space},{space}", f"{space}:{space}"))
    body = f"{space}{text}{space}".encode()
    assert read(body, key_dtype) == read_slowly(body, key_dtype)


@given(st.data(), st.sampled_from(["int64", "int32", "uint64"]))
def test_both_readers_take_the_same_of_broken_json(data: st.DataObject, key_dtype: str) -> None:
    whole = data.draw(
        st.sampled_from(
            [
                b'{"keys": [1, -20, 0], "missing": "error"}',
                b'{"keys": [[1, -0], []], "combiner": "mean", "weights": [[1.5e1, -0.5], []]}',
                b'{"keys": [10, 20], "row_splits": [0, 1, 2], "combiner": "sum"}',
            ]
        )
    )
    body = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        new = data.draw(st.sampled_from(list(b'{}[],:"0123456789.-+eE \n\0nul\\\xff')))
        if data.draw(st.booleans()) and at < len(body):
            body[at] = new
        else:
            body.insert(at, new)
    assert read(bytes(body), key_dtype) == read_slowly(bytes(body), key_dtype)


def test_what_clients_write_is_read_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request.json, "loads", lambda body: pytest.fail("Python's reader was asked"))
    for document in (
        {"keys": [0, -1, 2**63 - 1, -(2**63)]},
        {"missing": "error", "keys": [1]},
        {"keys": [[1, 2], []], "combiner": "mean", "weights": [[0.5, 1], []]},
        {"keys": [1, 2], "row_splits": [0, 2], "combiner": "sum", "weights": [1e-3, 2]},
    ):
        for indent in (None, 2):
            assert read(json.dumps(document, indent=indent).encode(), "int64")[0] is not None


def numbers_of(text: bytes) -> Any:
    """Read rows as a client does: numbers are float64, names of what is none are strings."""
    return [[float(number) for number in row] for row in json.loads(b"[" + text + b"]")]


def bits(*patterns: int) -> np.ndarray:
    return np.array([patterns], np.uint32).view(np.float32)


def check_float32(values: np.ndarray) -> None:
    text = _snapshot.json_rows(values)
    assert np.array_equal(np.array(numbers_of(text), np.float32), values, equal_nan=True)
    for number, shown in zip(values[0].tolist(), text.decode()[1:-1].split(","), strict=True):
        if np.isfinite(number):
            assert "." in shown or "e" in shown, "a reader would take it for an integer"
            shortest = np.format_float_scientific(np.float32(number), unique=True)
            # Whole numbers may be written out, where that takes no more characters than an exponent.
            assert digits(shown) <= digits(shortest) + (shown.lstrip("-") == "7.0385307e-26") or (
                shown.endswith(".0") and len(shown) - 2 <= len(shortest)
            )


def digits(number: str) -> int:
    return len(number.partition("e")[0].replace(".", "").strip("-").strip("0"))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
@example([0, 1 << 31, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x4B800000])
def test_a_float32_keeps_its_bits_in_fewest_digits(patterns: list[int]) -> None:
    check_float32(bits(*patterns))


@pytest.mark.parametrize("pattern", [0x15AE43FD, 0x95AE43FD])
def test_the_float32_that_would_be_rounded_twice(pattern: int) -> None:
    # Its shortest decimal is a hair beyond the middle between it and its neighbour. As a float64 it lies in the middle.
    assert np.float32(float("7.038531e-26")) != np.uint32(0x15AE43FD).view(np.float32)
    check_float32(bits(pattern))


def test_signs_names_and_zeros() -> None:
    values = np.array([[1.0, -0.0, 0.1], [np.nan, np.inf, -np.inf]], np.float32)
    assert _snapshot.json_rows(values) == b'[1.0,-0.0,0.1],["NaN","Infinity","-Infinity"]'
    assert _snapshot.json_rows(np.empty((2, 0), np.float32)) == b"[],[]"
    assert _snapshot.json_rows(np.empty((0, 3), np.float32)) == b""
    assert _snapshot.json_flags(np.array([True, False])) == b"true,false"


@given(st.lists(st.floats(width=64), min_size=1))
def test_a_float64_keeps_its_bits(numbers: list[float]) -> None:
    values = np.array([numbers])
    assert np.array_equal(np.array(numbers_of(codecs.json_numbers(values))), values, equal_nan=True)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"])
def test_integers_are_exact(dtype: str) -> None:
    values = (
        np.array([[0, 1]], bool) if dtype == "bool" else np.array([[np.iinfo(dtype).min, np.iinfo(dtype).max]], dtype)
    )
    assert json.loads(codecs.json_numbers(values)) == values[0].tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_float_is_exact(dtype: str) -> None:
    import ml_dtypes

    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    values = np.arange(1 << 16, dtype=np.uint16).view(kind).reshape(1, -1)
    back = np.array(numbers_of(codecs.json_numbers(values)), np.float32).astype(kind)
    assert np.array_equal(back.astype(np.float32), values.astype(np.float32), equal_nan=True)
