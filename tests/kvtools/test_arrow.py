"""Arrow files with pyarrow and pandas, both ways."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pytest
import round_trip
from round_trip import check_same, same_bytes, write

from kvtools.array_table import ArrayTable
from kvtools.dialects.arrow_columns import import_pyarrow
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, CorruptFileError, MissingDependencyError

RNG = np.random.default_rng(0)
KEYS = RNG.integers(-(2**62), 2**62, 50)
VALUES = RNG.normal(size=(50, 4)).astype(np.float32)


def test_pyarrow_maps_what_we_wrote(tmp_path: Path) -> None:
    table = ArrayTable("emb", KEYS, VALUES, slots={"Adam.m": VALUES * 2}, freqs=np.arange(50), part_rows=(20, 30))
    write([table], tmp_path / "emb.arrow", "arrow")
    read = pa.ipc.open_file(pa.memory_map(str(tmp_path / "emb.arrow"))).read_all()
    assert read.column_names == ["key", "value", "slot_Adam.m", "freq"]
    # Parts are written side by side, and come as they are done.
    order, written = np.argsort(KEYS), np.argsort(read["key"].to_numpy())
    assert same_bytes(read["key"].to_numpy()[written], KEYS[order])
    values = read["value"].combine_chunks().flatten().to_numpy().reshape(-1, 4)
    assert same_bytes(values[written], VALUES[order])


def test_pandas_reads_what_we_wrote(tmp_path: Path) -> None:
    write([ArrayTable("emb", KEYS, VALUES)], tmp_path / "emb.feather", "arrow", compression="lz4")
    frame = pd.read_feather(tmp_path / "emb.feather")
    assert same_bytes(frame["key"].to_numpy(), KEYS)
    assert same_bytes(np.stack(frame["value"]), VALUES)


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_feather_files_of_pandas_are_tables(tmp_path: Path, compression: str) -> None:
    frame = pd.DataFrame({"key": KEYS, "value": list(VALUES)})
    feather.write_feather(frame, tmp_path / "emb.feather", compression=compression, chunksize=7)
    table = open_checkpoint(tmp_path / "emb.feather").table("emb")
    check_same(table, ArrayTable("emb", KEYS, VALUES))


def test_batches_of_one_column_are_read_alone(tmp_path: Path) -> None:
    table = round_trip.table("emb", 400, dim=64)
    write([table], tmp_path / "emb.arrow", "arrow")
    path = tmp_path / "emb.arrow"
    whole = bytearray(path.read_bytes())
    values = next(table.chunks()).values.tobytes()
    whole[whole.index(values[:64])] ^= 1
    path.write_bytes(whole)
    got = open_checkpoint(path).table("emb")
    assert same_bytes(got.all_keys(), table.all_keys())  # the damaged column is not touched
    with pytest.raises(CorruptFileError, match=r"column 'value' .* checksum mismatch"):
        list(got.chunks())


def test_the_stream_format_is_told_apart(tmp_path: Path) -> None:
    table = pa.table({"key": KEYS})
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(BadInputError):
        open_checkpoint(tmp_path / "a.arrow")


def test_a_pyarrow_that_refuses_the_numpy_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ImportError('pyarrow requires NumPy 2.0 or newer, found 1.26.4')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pyarrow")
    with pytest.raises(MissingDependencyError, match=r"cannot be imported: .* found 1\.26\.4; .*'pyarrow<25'"):
        import_pyarrow("reading")


@pytest.mark.parametrize("column", ["version", "slot_Adam.m", "freq"])
def test_a_damaged_name_of_a_column_is_no_column_of_others(tmp_path: Path, column: str) -> None:
    counters = {"freqs": np.arange(50), "versions": np.arange(50)}
    write([ArrayTable("emb", KEYS, VALUES, slots={"Adam.m": VALUES}, **counters)], tmp_path / "emb.arrow", "arrow")
    data = bytearray((tmp_path / "emb.arrow").read_bytes())
    data[data.rindex(column.encode() + b"\0")] ^= 1
    (tmp_path / "emb.arrow").write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"emb\.arrow.*not those of its description; the file is damaged"):
        open_checkpoint(tmp_path / "emb.arrow")
