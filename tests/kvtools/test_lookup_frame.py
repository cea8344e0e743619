from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvtools.lookup_frame import (
    FrameError,
    TableKeys,
    TableRows,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)


def arrays(dtype: type, size: int) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(dtype, size)


@st.composite
def lookups(draw: st.DrawFn) -> TableKeys:
    keys = draw(arrays(np.int64, draw(st.integers(0, 5))))
    name = draw(st.text(max_size=9))
    if draw(st.booleans()):
        return TableKeys(name, keys, own_type=draw(st.booleans()))
    inner = sorted(draw(st.lists(st.integers(0, len(keys)), max_size=3)))
    weights = draw(st.none() | arrays(np.float32, len(keys)))
    return TableKeys(
        name, keys, draw(st.sampled_from(["sum", "mean", "sqrtn"])), np.array([0, *inner, len(keys)]), weights
    )


def same(left: np.ndarray | None, right: np.ndarray | None) -> bool:
    return left is right is None or (left is not None and right is not None and left.tobytes() == right.tobytes())


@given(st.lists(lookups(), max_size=3), st.sampled_from([None, "zeros", "default", "error"]))
def test_requests_come_back(wanted: list[TableKeys], missing: str | None) -> None:
    body = encode_request(wanted, missing)
    assert len(body) % 8 == 0
    got, how = decode_request(body)
    assert how == missing and len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert (one.table, one.combiner, one.bags) == (other.table, other.combiner, other.bags)
        assert one.own_type == other.own_type
        assert (
            same(one.keys, other.keys) and same(one.row_splits, other.row_splits) and same(one.weights, other.weights)
        )


@pytest.mark.parametrize("found", [None, np.array([True, False, True])])
def test_answers_come_back(found: np.ndarray | None) -> None:
    rows = TableRows(np.arange(9, dtype=np.float32).reshape(3, 3), found, 1)
    empty = TableRows(np.empty((0, 4), np.float32), None if found is None else np.empty(0, bool), 0)
    body = encode_answer([rows, empty], 7)
    assert len(body) % 8 == 0
    (first, second), version = decode_answer(body)
    assert version == 7 and first.missing == 1 and first.embeddings.tolist() == rows.embeddings.tolist()
    assert same(first.found, found) and second.embeddings.shape == (0, 4) and (second.found is None) == (found is None)


def test_every_cut_and_every_longer_frame_is_an_error() -> None:
    lookup = TableKeys("ads", np.array([1, 2]), "mean", np.array([0, 2]), np.ones(2, np.float32))
    body = encode_request([lookup])
    for end in range(len(body)):
        with pytest.raises(FrameError):
            decode_request(body[:end])
    with pytest.raises(FrameError, match="ends after"):
        decode_request(body + bytes(8))


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, 0, "first bytes"),
        (8, 4, "missing"),
        (12, 1, "missing"),
        (20, 4, "combiner"),
        (24, 1, "flags"),
        (24, 4, "flags"),
        (28, 1, "combiner"),
        (16, 255, "cut off"),
        (39, 255, "cut off"),
        (48, 255, "UTF-8"),
    ],
)
def test_bytes_that_no_frame_has(at: int, value: int, match: str) -> None:
    body = bytearray(encode_request([TableKeys("ads", np.array([1, 2]))]))
    body[at] = value
    with pytest.raises(FrameError, match=match):
        decode_request(bytes(body))
    with pytest.raises(FrameError):
        decode_answer(bytes(body))
