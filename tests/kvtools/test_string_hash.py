"""The keys of strings, without TensorFlow: tests/tfplugin/test_strings_of_tensorflow.py compares them with its own."""

from __future__ import annotations

import numpy as np
import pytest

from kvtools import string_keys
from kvtools.errors import UsageError


def test_text_is_hashed_as_utf_8_and_bytes_as_they_are() -> None:
    assert string_keys(["wine", "é", "a\0b"]).tolist() == string_keys([b"wine", "é".encode(), b"a\0b"]).tolist()
    assert string_keys(["é"]) != string_keys(["e\u0301"])  # composed or not: other bytes


def test_keys_have_the_shape_of_the_strings_and_their_order() -> None:
    words = np.array([["b", "a" * 70], ["", "b"]], object)
    keys = string_keys(words)
    assert keys.shape == (2, 2) and keys.dtype == np.int64 and keys[0, 0] == keys[1, 1]
    assert keys.tolist() == string_keys(words.astype(str)).tolist()
    assert [string_keys([word]).tolist() for word in words.reshape(-1)] == [[key] for key in keys.reshape(-1).tolist()]
    assert string_keys([]).shape == (0,) and string_keys(word for word in "ab").shape == (2,)


@pytest.mark.parametrize(
    ("wrong", "said"), [([7], "got 7 among strings"), (["a", ["b"]], r"\['b'\]"), (["\ud800"], "half")]
)
def test_what_is_no_string_is_an_error(wrong: list[object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        string_keys(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("one", ["wine", b"wine", np.str_("wine")])
def test_one_string_is_no_list_of_letters(one: str | bytes) -> None:
    with pytest.raises(UsageError, match=r"got the string .*, expected a list of strings"):
        string_keys(one)  # type: ignore[arg-type]
    assert string_keys(np.array(one)).tolist() == 6833201401099529939  # an array without dimensions is one string
