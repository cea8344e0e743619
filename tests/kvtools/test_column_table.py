"""Tables made of columns, and slots that have keys of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtools.dialects.chunk import Columns
from kvtools.dialects.column import RawColumn
from kvtools.dialects.column_table import KeyedColumn, KeyedSlotsTable, Part
from kvtools.dialects.schema import SlotSchema, TableSchema
from kvtools.errors import BadInputError, CorruptFileError


def column(folder: Path, array: np.ndarray) -> RawColumn:
    path = folder / f"column-{len(list(folder.iterdir()))}"
    array.tofile(path)
    return RawColumn(path, array.dtype, array.shape[1:])


def rows_of(keys: np.ndarray, factor: float = 1.0) -> np.ndarray:
    return (np.float32(factor) * np.arange(3, dtype=np.float32)) + keys[:, None].astype(np.float32)


def make_table(folder: Path, parts: list[np.ndarray], slot_parts: list[np.ndarray], memory: int = 1 << 20):
    schema = TableSchema(
        name="emb",
        dialect="test",
        key_dtype="int64",
        value_dtype="float32",
        dim=3,
        part_rows=tuple(map(len, parts)),
        slots=(SlotSchema("Adam.m", 3, "float32"),),
        freq_dtype="float32",
    )
    keyed = KeyedColumn([column(folder, k) for k in slot_parts], [column(folder, rows_of(k, 2)) for k in slot_parts])
    own = [Part(len(k), column(folder, k), column(folder, rows_of(k))) for k in parts]
    return KeyedSlotsTable(schema, own, {"slot:Adam.m": keyed, "freqs": keyed}, memory=memory)


def shuffled(keys: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).permutation(keys)


KEYS = np.array([2**63 - 1, -(2**63), 0, -1, 5, 7, 9, 11], np.int64)


@pytest.mark.parametrize("memory", [1 << 20, 1])
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize(
    "slot_parts",
    [[KEYS[:5], KEYS[5:]], [shuffled(KEYS[:5]), KEYS[5:]], [KEYS[5:], KEYS[:5]], [shuffled(KEYS)], [KEYS, KEYS[:0]]],
)
def test_slot_rows_follow_their_keys(tmp_path: Path, slot_parts: list[np.ndarray], rows: int, memory: int) -> None:
    table = make_table(tmp_path, [KEYS[:5], KEYS[5:]], slot_parts, memory)
    chunks = list(table.chunks(rows=rows))
    keys = np.concatenate([chunk.keys for chunk in chunks])
    np.testing.assert_array_equal(keys, KEYS)
    np.testing.assert_array_equal(np.concatenate([chunk.values for chunk in chunks]), rows_of(KEYS))
    np.testing.assert_array_equal(np.concatenate([chunk.slots["Adam.m"] for chunk in chunks]), rows_of(KEYS, 2))
    np.testing.assert_array_equal(np.concatenate([chunk.freqs for chunk in chunks]), rows_of(KEYS, 2))
    taken = table.take(np.array([7, 0, 7]), Columns(slots=True))
    np.testing.assert_array_equal(taken.slots["Adam.m"], rows_of(KEYS[[7, 0, 7]], 2))
    assert taken.freqs is None
    assert list(table.check()) == []


def test_keys_join_in_buckets_when_memory_is_short(tmp_path: Path) -> None:
    keys = np.random.default_rng(1).permutation(np.arange(-3000, 3000))
    table = make_table(tmp_path, [keys], [shuffled(keys)], memory=50_000)
    got = np.concatenate([chunk.slots["Adam.m"] for chunk in table.chunks(rows=700)])
    np.testing.assert_array_equal(got, rows_of(keys, 2))


def test_missing_and_surplus_slot_rows_are_zeros_and_findings(tmp_path: Path) -> None:
    table = make_table(tmp_path, [KEYS], [np.array([5, 0, 12345])])
    expected = np.where(np.isin(KEYS, [5, 0])[:, None], rows_of(KEYS, 2), 0)
    np.testing.assert_array_equal(np.concatenate([c.slots["Adam.m"] for c in table.chunks(rows=3)]), expected)
    lacking, surplus, *of_freqs = [finding.message for finding in table.check()]
    assert [message.split(" has ")[0] for message in of_freqs] == ["freqs", "freqs"]
    assert (
        "slot Adam.m has no row for 6 of 8 keys (9223372036854775807, -9223372036854775808, -1, 7, 9, ...)" in lacking
    )
    assert "slot Adam.m has 1 rows whose keys the table has not" in surplus


def test_rows_that_a_slot_lacks_are_what_its_reader_says(tmp_path: Path) -> None:
    table = make_table(tmp_path, [KEYS], [np.array([5, 0])])
    table = table.filled({"Adam.m": 0.25, "no such slot": 1.0})
    expected = np.where(np.isin(KEYS, [5, 0])[:, None], rows_of(KEYS, 2), np.float32(0.25))
    np.testing.assert_array_equal(np.concatenate([c.slots["Adam.m"] for c in table.chunks(rows=3)]), expected)
    assert next(iter(table.check())).message.endswith("they read as 0.25")


def test_raw_column_of_wrong_size(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"123456789")
    with pytest.raises(CorruptFileError, match="got 9 bytes of rows, expected a multiple of 8"):
        RawColumn(path, np.dtype(np.int64))
    with pytest.raises(CorruptFileError, match="expected 2 rows of 8 bytes"):
        RawColumn(path, np.dtype(np.int64), rows=2)
    with pytest.raises(BadInputError, match="No such file"):
        RawColumn(tmp_path / "none", np.dtype(np.int64))
    short, unread = (RawColumn(path, np.dtype(np.int64), rows=1, offset=1) for _ in range(2))
    [*short.chunks(1)]
    path.write_bytes(b"1234")
    with pytest.raises(CorruptFileError, match="it was cut while it was read"):
        list(short.chunks(1))
    with pytest.raises(BadInputError, match="it was changed since it was opened"):
        list(unread.chunks(1))
