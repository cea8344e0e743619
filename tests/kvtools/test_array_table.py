from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pandas
import pytest

import kvtools
from kvtools.dialects.chunk import KEYS
from kvtools.errors import BadInputError, UsageError

KEYS_ = np.array([5, -1, 9], np.int64)
VALUES = np.arange(6, dtype=np.float32).reshape(3, 2)


def test_a_table_gives_its_arrays() -> None:
    table = kvtools.table_from_arrays(
        "emb",
        KEYS_,
        VALUES.astype(ml_dtypes.bfloat16),
        slots={"m": np.ones((3, 1))},
        freqs=[1, 2, 3],
        versions=np.zeros(3, np.uint32),
        version_unit="steps",
        extras={"initial_values": np.zeros((4, 2), np.float32)},
        metadata={"initializer": {"kind": "rows"}},
    )
    schema = table.schema
    assert (schema.key_dtype, schema.value_dtype, schema.dim, schema.part_rows) == ("int64", "bfloat16", 2, (3,))
    assert (schema.freq_dtype, schema.version_dtype, schema.version_unit) == ("int64", "uint32", "steps")
    assert [(slot.name, slot.width, slot.dtype) for slot in schema.slots] == [("m", 1, "float64")]
    assert schema.bytes == 24 + 12 + 24 + 24 + 12 + 32
    assert table.extra("initial_values").shape == (4, 2)
    (chunk,) = table.chunks()
    assert chunk.keys is not None and chunk.values is not None and chunk.freqs is not None
    assert np.array_equal(chunk.keys, KEYS_) and chunk.freqs.tolist() == [1, 2, 3]
    assert [len(chunk) for chunk in table.chunks(KEYS, rows=2)] == [2, 1]
    assert table.take(np.array([2, 0])).keys.tolist() == [9, 5]
    again = pickle.loads(pickle.dumps(table))
    assert again.schema == schema and np.array_equal(again.all_keys(), KEYS_)


def test_rows_go_to_the_part_of_their_key() -> None:
    table = kvtools.table_from_arrays("emb", KEYS_, VALUES, parts=3)
    assert table.schema.part_rows == (1, 0, 2)
    assert [chunk.keys.tolist() for chunk in table.chunks()] == [[9], [5, -1]]
    assert [chunk.values.tolist() for chunk in table.chunks(part=0) if chunk.values is not None] == [[[4, 5]]]


def test_a_table_without_rows() -> None:
    table = kvtools.table_from_arrays("emb", np.empty(0, np.uint64), np.empty((0, 4), np.float32), parts=2)
    assert table.schema.part_rows == (0, 0) and list(table.chunks()) == []


def test_foreign_byte_order_is_turned() -> None:
    table = kvtools.table_from_arrays("emb", KEYS_.astype(">i8"), VALUES)
    assert table.all_keys().tolist() == KEYS_.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": KEYS_.astype(np.float32)}, "keys are float32, expected int64"),
        ({"keys": KEYS_[:2]}, r"values have shape \[3, 2\], expected \[2, dim\]"),
        ({"keys": KEYS_[None]}, r"keys have shape \[1, 3\], expected \[n\]"),
        ({"values": VALUES[:, 0]}, r"values have shape \[3\], expected \[3, dim\]"),
        ({"values": VALUES[:, :0]}, r"values have shape \[3, 0\]"),
        ({"values": VALUES.astype(complex)}, "values are complex128"),
        ({"slots": {"m": VALUES[:1]}}, r"slot 'm' have shape \[1, 2\], expected \[3, width\]"),
        ({"freqs": VALUES[:, 0]}, "freqs are float32"),
        ({"values": pandas.Series(list(VALUES))}, "values are object, .*; numpy.stack makes one array"),
        ({"values": [[1.0], [1.0, 2.0], [3.0]]}, r"values are lists of several lengths, expected an array \[3, dim\]"),
        ({"versions": np.zeros(2, int)}, r"versions have shape \[2\], expected \[3\]"),
        ({"version_unit": "hours"}, "got version_unit 'hours', expected seconds, days, steps, unknown"),
        ({"parts": 0}, "got 0 parts"),
        ({"partition": "odd"}, "rule 'odd'"),
        ({"name": ""}, "it has no name"),
        ({"name": b"emb"}, "got name b'emb', expected text"),
        ({"parts": 2.5}, "got 2.5 parts"),
        ({"slots": [VALUES]}, r"expected arrays \[n, width\] by name"),
        ({"slots": {1: VALUES}}, "got slots {1: "),
    ],
)
def test_what_makes_no_table_is_told(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kvtools.table_from_arrays(**{"name": "emb", "keys": KEYS_, "values": VALUES, **arguments})  # type: ignore[arg-type]


def test_a_key_that_is_there_twice_is_told() -> None:
    with pytest.raises(BadInputError, match="key 5 is there more than once"):
        kvtools.table_from_arrays("emb", np.array([5, 7, 5]), VALUES)
