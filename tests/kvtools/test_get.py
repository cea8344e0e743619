"""Rows of keys, against a plain dictionary."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import table_from_arrays
from kvtools.dialects.chunk import ALL_COLUMNS, Columns
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import BadInputError, UsageError
from kvtools.get import ChosenRows, choose_columns, read_rows, rows_of_keys
from kvtools.key_file import keys_from, keys_of_words, read_keys
from kvtools.sql.query import query
from kvtools.stats import table_stats
from kvtools.top import top_rows


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("key_dtype", ["int64", "int32", "uint64"])
@pytest.mark.parametrize("asked", [3, 5000])
def test_rows_in_the_order_of_the_keys(
    save_plain: Any, make_sample: Any, table_tensors: Any, tmp_path: Path, parts: int, key_dtype: str, asked: int
) -> None:
    sample = make_sample("emb", rows=300, key_dtype=key_dtype)
    table = open_checkpoint(save_plain(tmp_path / "a", table_tensors(sample, parts=parts))).tables["emb"]
    keys = np.random.default_rng(0).choice(sample.keys, asked)
    rows = rows_of_keys(table, keys)
    chunks = list(read_rows(table, rows, memory=20_000))
    assert len(chunks) > 1 or asked == 3
    np.testing.assert_array_equal(np.concatenate([chunk.keys for chunk in chunks]), keys)
    reference = sample.rows()
    for chunk in chunks:
        for key, value in zip(chunk.keys.tolist(), chunk.values, strict=True):
            np.testing.assert_array_equal(value, reference[key])


def test_keys_of_any_type_and_range(sample_path: Path) -> None:
    table = open_checkpoint(sample_path).tables["ads/emb"]
    asked = np.array([2**64 - 1, -(2**63), 2**70, -1], object)
    assert (rows_of_keys(table, asked) >= 0).tolist() == [False, True, False, True]
    assert rows_of_keys(table, np.array([2**64 - 1, 5], np.uint64)).tolist()[0] == -1
    assert rows_of_keys(table, np.array([-1, 5], np.int8)).min() >= 0
    assert rows_of_keys(table, np.empty(0, np.int64)).tolist() == []
    empty = open_checkpoint(sample_path).tables["empty_emb"]
    assert rows_of_keys(empty, np.arange(20)).max() == -1


@pytest.mark.parametrize("others", [0, 20])
def test_the_last_row_of_a_key_counts(
    save_plain: Any, make_sample: Any, table_tensors: Any, tmp_path: Path, others: int
) -> None:
    sample = make_sample("emb", rows=30)
    sample.keys[[4, 20]] = sample.keys[9]
    table = open_checkpoint(save_plain(tmp_path / "a", table_tensors(sample))).tables["emb"]
    assert rows_of_keys(table, sample.keys[[9, *range(5, 5 + others)]])[0] == 20


def test_words_become_keys() -> None:
    assert keys_of_words(["5", "-7", "+8"], "x").dtype == np.int64
    assert keys_of_words(["18446744073709551615", "1"], "x").dtype == np.uint64
    assert keys_of_words(["18446744073709551615", "-1"], "x").tolist() == [2**64 - 1, -1]
    assert keys_of_words([], "x").tolist() == []
    for wrong in ("1.5", "abc", "9" * 50, "", "0x10"):
        with pytest.raises(BadInputError, match="reading keys from x"):
            keys_of_words(["1", wrong], "x")


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_keys_files(tmp_path: Path) -> None:
    def read(data: bytes) -> list[int]:
        return [key for keys in read_keys(io.BytesIO(data), "x") for key in keys.tolist()]

    assert read(b"1 2\n-3,4,\n\n") == [1, 2, -3, 4]
    assert read(npy(np.array([7], np.uint64))) == [7]
    many = np.random.default_rng(0).integers(-(2**63), 2**63, 400_000)  # several blocks
    assert read(" ".join(map(str, many)).encode()) == many.tolist()
    for wrong in (npy(np.ones(3)), npy(np.ones((2, 2), int)), npy(np.arange(9))[:-4], b"\x93NUMPY", b"5\nkey", b"\xff"):
        with pytest.raises(BadInputError, match="reading keys from x"):
            read(wrong)
    path = tmp_path / "keys"
    path.write_text("8 9")
    assert keys_from(["5,-7"], str(path), io.BytesIO()).tolist() == [5, -7, 8, 9]
    assert keys_from(["-7"], "-", io.BytesIO(b"18446744073709551615")).tolist() == [-7, 2**64 - 1]
    with pytest.raises(BadInputError, match="No such file"):
        keys_from([], str(tmp_path / "gone"), io.BytesIO())


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (b"key\n5\n-7\n", [5, -7]),
        (b"\xef\xbb\xbfkey\r\n5\r\n-7\r\n", [5, -7]),
        (b"\xef\xbb\xbf5\r\n-7", [5, -7]),
        (b"# users of May\n\nuser id\n5 # the first\n-7\n#8", [5, -7]),
        (b"5, -7 # both", [5, -7]),
        (b"key,freq,value.0\n5,1,0.5\n-7,2,nan\n\n", [5, -7]),
        (b'"name";"Key"\r\n"a;b";"5"\r\n"c";"-7"\r\n', [5, -7]),
        (b"freq\tkey\n1\t5\n2\t-7", [5, -7]),
        (b"freq key\n1 18446744073709551615\n", [2**64 - 1]),
        (b"key\n", []),
        (b"key,freq\n", []),
        (b"# nothing", []),
    ],
)
def test_key_files_have_headers_comments_and_marks_of_other_systems(text: bytes, keys: list[int]) -> None:
    assert [key for some in read_keys(io.BytesIO(text), "x") for key in some.tolist()] == keys


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"key\n5\nabc\n", "line 3 is 'abc', expected 64-bit integers"),
        (b"# a\nkey,freq\n5,1\n\n1.5,2\n", "line 5 is '1.5,2', expected a 64-bit integer in column 1"),
        (b"freq,key\n5\n", "line 2 is '5', expected a 64-bit integer in column 2"),
        (b"user,freq\n5,1\n", "got a header of 2 columns, 'user,freq', expected one called key"),
        ("key\n5".encode("utf-16"), "it is in UTF-16, expected UTF-8"),
        (b"1.5\n5", "line 1 is '1.5'"),
        (b"5\n1_000\n", "line 2 is '1_000', expected 64-bit integers"),
        (b"key,freq\n1_000,2\n", "line 2 is '1_000,2', expected a 64-bit integer in column 1"),
        ("key,freq\n\u0661\u0662,2\n".encode(), "line 2 is '\u0661\u0662,2', expected a 64-bit integer in column 1"),
    ],
)
def test_key_files_that_are_wrong_are_named_by_line(text: bytes, said: str) -> None:
    with pytest.raises(BadInputError, match=f"reading keys from x: {re.escape(said)}"):
        list(read_keys(io.BytesIO(text), "x"))


@pytest.mark.parametrize("word", ["1_000", "\u0661\u0662", "\udcff", "1.5", "+"])
def test_arguments_that_are_no_whole_numbers_are_named(word: str) -> None:
    shown = repr(word.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    with pytest.raises(UsageError, match=f"got {re.escape(shown)}, expected integers"):
        keys_from([word], None)


def test_comments_and_columns_are_the_same_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtools import key_file

    keys = list(range(-50, 50))
    for text in ("".join(f"{key} # no. {key}, 1 2 3\n" for key in keys), "key,n\n" + "".join(f"{k},9\n" for k in keys)):
        for block in (7, 64, 1 << 20):
            monkeypatch.setattr(key_file, "_BLOCK", block)
            assert [key for some in read_keys(io.BytesIO(text.encode()), "x") for key in some.tolist()] == keys


def test_choosing_columns(sample_path: Path) -> None:
    tables = open_checkpoint(sample_path).select([])
    assert choose_columns([], tables).columns == ALL_COLUMNS
    assert choose_columns(["values", "freqs"], tables).columns == Columns(values=True, freqs=True)
    assert choose_columns(["key", "value", "freq"], tables).columns == Columns(values=True, freqs=True)
    only_v = choose_columns(["Adam.v"], tables)
    chunk = open_checkpoint(sample_path).tables["ads/emb"].take(np.array([0]), only_v.columns)
    assert list(only_v.shown(chunk).slots) == ["Adam.v"]
    with pytest.raises(
        UsageError, match=r"expected some of key, value, freq, version, norm, part, slots, Adam\.m, Adam\.v"
    ):
        choose_columns(["Adam.x"], tables)


def test_chosen_rows_are_a_table(sample_path: Path) -> None:
    source = open_checkpoint(sample_path).tables["ads/emb"]
    chosen = ChosenRows(source, np.array([9, 2, 5]))
    whole = source.take(np.array([9, 2, 5]), ALL_COLUMNS)
    for rows in (1, 2, 10):
        keys = np.concatenate([chunk.keys for chunk in chosen.chunks(rows=rows)])
        np.testing.assert_array_equal(keys, whole.keys)
    assert (chosen.rows, chosen.parts, chosen.schema.partition) == (3, 1, None)
    np.testing.assert_array_equal(chosen.take(np.array([1])).values, whole.values[[1]])


def test_key_files_that_are_no_text_are_told_as_what_they_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "keys.npz", keys=np.arange(3))
    np.arange(3).tofile(tmp_path / "keys.bin")
    for name, said in (("keys.npz", "zip archive, as .npz is, expected text or .npy"), ("keys.bin", "it is binary")):
        with pytest.raises(BadInputError, match=said):
            keys_from([], str(tmp_path / name))


def test_a_norm_that_the_type_of_values_does_not_hold_is_the_same_everywhere(tmp_path: Path) -> None:
    table = table_from_arrays("t", np.arange(2), np.full((2, 2), 3e38, np.float32))
    norm = float(np.hypot(*table.take(np.arange(1)).values[0].astype(np.float64)))
    (shown,) = choose_columns(["norm"], [table]).numbers(table.take(np.arange(1))).values()
    assert shown.tolist() == [pytest.approx(norm)]
    assert top_rows(table, "norm", 1).numbers.tolist() == shown.tolist()
    assert table_stats([table])["t"].values.l2.largest == shown[0]
    pytest.importorskip("duckdb")
    with query(Checkpoint("", "memory", {"t": table}), "select norm from t limit 1") as result:
        assert result.rows() == [(shown[0],)]
