"""Tables as NumPy arrays, Arrow tables and pandas frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import round_trip
from round_trip import check_same, check_same_chunk, joined, same_bytes, write_and_open

from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, CorruptFileError, UsageError


@pytest.mark.parametrize("value_dtype", round_trip.VALUE_DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 4, 50])
def test_whole_tables(value_dtype: str, rows: int) -> None:
    table = round_trip.table("emb", rows, value_dtype=value_dtype, parts=2)
    expected = joined(list(table.chunks()))
    whole = table.to_numpy()
    arrow = table.to_arrow()
    wide, narrow = table.to_pandas(vectors="columns"), table.to_pandas()
    assert len(whole) == arrow.num_rows == len(wide) == len(narrow) == rows
    names = ["key", "value", "slot_Adam.m", "slot_beta/power", "slot_", "freq", "version"]
    assert arrow.column_names == list(narrow.columns) == names
    assert list(wide.columns[:5]) == ["key", "value_0", "value_1", "value_2", "value_3"]
    if expected is None:
        return
    check_same_chunk(whole, expected)
    values = expected.values.astype(np.float32) if value_dtype == "bfloat16" else expected.values
    kept = "float32" if value_dtype == "bfloat16" else value_dtype
    assert np.array_equal(np.stack(narrow["value"]), values, equal_nan=kept[0] == "f")
    assert np.array_equal(wide.filter(like="value_").to_numpy(), values, equal_nan=kept[0] == "f")
    assert wide["value_3"].dtype == kept
    assert same_bytes(wide["key"].to_numpy(), expected.keys)
    assert same_bytes(narrow["version"].to_numpy(), expected.versions)
    assert arrow["value"].combine_chunks().flatten().to_numpy().tobytes() == (
        (expected.values.view(np.uint16).astype(np.uint32) << 16).tobytes()
        if value_dtype == "bfloat16"
        else expected.values.tobytes()
    )


def test_columns_and_rows_are_chosen(tmp_path: Path) -> None:
    table = write_and_open([round_trip.table("emb", 3000, 64)], tmp_path / "a.h5", "hdf5").table("emb")
    chunk = table.to_numpy(["freqs"], limit=7)
    assert len(chunk) == 7 and chunk.values is None and not chunk.slots and chunk.versions is None
    assert table.to_arrow(["values"], limit=2000).column_names == ["key", "value"]
    assert table.to_arrow(["values"], limit=2000).num_rows == 2000
    assert list(table.to_pandas([], limit=0).columns) == ["key"]
    assert len(table.to_pandas([], limit=10**9)) == 3000
    with pytest.raises(UsageError, match="'value', expected a list of 'values'"):
        table.to_numpy(["value"])
    with pytest.raises(UsageError, match="expected a list"):
        table.to_numpy("values")
    with pytest.raises(UsageError, match="limit of -1"):
        table.to_arrow(limit=-1)
    with pytest.raises(UsageError, match="'columns' or 'arrays'"):
        table.to_pandas(vectors="lists")  # type: ignore[arg-type]


def test_damage_is_found_when_all_rows_are_read(tmp_path: Path) -> None:
    table = round_trip.table("emb", 40)
    path = tmp_path / "a.h5"
    write_and_open([table], path, "hdf5")
    whole = bytearray(path.read_bytes())
    whole[whole.index(next(table.chunks()).values.tobytes())] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CorruptFileError, match="checksum mismatch"):
        open_checkpoint(path).table("emb").to_numpy()


def test_an_arrow_table_written_by_hand_is_a_table_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = ArrayTable("emb", rng.permutation(90), rng.normal(size=(90, 3)), freqs=np.arange(90))
    pq.write_table(table.to_arrow(), tmp_path / "emb.parquet")
    check_same(open_checkpoint(tmp_path / "emb.parquet").table("emb"), table)


def test_columns_that_do_not_fit_make_no_table() -> None:
    keys, values = np.arange(3), np.zeros((3, 2))
    with pytest.raises(BadInputError, match=r"values are \[2, 2\], expected \[3, width\]"):
        ArrayTable("emb", keys, values[:2])
    with pytest.raises(BadInputError, match="freqs are"):
        ArrayTable("emb", keys, values, freqs=values)
    with pytest.raises(BadInputError, match="its parts have 4 rows, expected 3"):
        ArrayTable("emb", keys, values, part_rows=(1, 3))
