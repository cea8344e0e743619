"""Parquet with the programs that people have: pandas and pyarrow, both ways."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import round_trip
from round_trip import check_same, same_bytes, write

from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import open_checkpoint
from kvtools.migrate import write_tables

RNG = np.random.default_rng(0)
KEYS = RNG.integers(-(2**62), 2**62, 50)
VALUES = RNG.normal(size=(50, 4)).astype(np.float32)


def test_pandas_reads_what_we_wrote(tmp_path: Path) -> None:
    table = ArrayTable("ads/emb", KEYS, VALUES, slots={"Adam.m": VALUES * 2}, freqs=np.arange(50), part_rows=(20, 30))
    for path in (tmp_path / "out", tmp_path / "emb.parquet"):
        write([table], path, "parquet")
        frame = pd.read_parquet(path / "ads%2Femb" if path.is_dir() else path)
        assert list(frame.columns) == ["key", "value", "slot_Adam.m", "freq"]
        frame = frame.set_index("key").loc[KEYS]  # parts come as they are done
        assert len(frame) == len(KEYS)
        assert same_bytes(np.stack(frame["value"]), VALUES)
        assert same_bytes(np.stack(frame["slot_Adam.m"]), VALUES * 2)
        assert frame["freq"].tolist() == list(range(50))


def test_bfloat16_is_float32_to_others(tmp_path: Path) -> None:
    table = round_trip.table("emb", 20, value_dtype="bfloat16")
    write([table], tmp_path / "emb.parquet", "parquet")
    values = np.stack(pd.read_parquet(tmp_path / "emb.parquet", columns=["value"])["value"])
    expected = next(table.chunks()).values.astype(np.float32)
    assert values.dtype == np.float32
    assert np.array_equal(values, expected, equal_nan=True)


def test_a_dataset_of_ours_is_one_of_pyarrow(tmp_path: Path) -> None:
    table = round_trip.table("emb", 90, parts=3)
    write([table], tmp_path / "out", "parquet")
    dataset = ds.dataset(tmp_path / "out" / "emb", format="parquet")  # extras are not taken for rows
    assert dataset.count_rows() == 90
    one = dataset.to_table(filter=ds.field("key") == 0)
    assert one.num_rows == int((table.all_keys() == 0).sum())


def test_frames_of_pandas_as_tables(tmp_path: Path) -> None:
    wide = pd.DataFrame(VALUES, columns=[f"c{number}" for number in range(4)])
    wide.insert(0, "key", KEYS)
    wide.to_parquet(tmp_path / "wide.parquet")
    pd.DataFrame({"user": KEYS, "vector": list(VALUES)}).to_parquet(tmp_path / "arrays.parquet")
    frame = wide.assign(day=np.arange(50) % 2)
    frame.to_parquet(tmp_path / "days", partition_cols=["day"])
    check_same(open_checkpoint(tmp_path / "wide.parquet").table("wide"), ArrayTable("wide", KEYS, VALUES))
    check_same(open_checkpoint(tmp_path / "arrays.parquet").table("arrays"), ArrayTable("arrays", KEYS, VALUES))
    days = open_checkpoint(tmp_path / "days").table("days")
    assert days.all_keys().tolist() == [*KEYS[::2].tolist(), *KEYS[1::2].tolist()]


def test_pages_have_checksums_and_keys_statistics(tmp_path: Path) -> None:
    write([ArrayTable("emb", KEYS, VALUES)], tmp_path / "emb.parquet", "parquet")
    group = pq.ParquetFile(tmp_path / "emb.parquet").metadata.row_group(0)
    assert group.column(0).statistics.min == KEYS.min()
    assert not group.column(1).is_stats_set
    assert group.column(1).compression == "ZSTD"


_EACH_DAMAGE = """
import sys, kvtools
from kvtools.errors import KvtoolsError
from kvtools.inspect import describe
from kvtools.verify import verify

sound, found = open("a.parquet", "rb").read(), 0
footer = len(sound) - 8 - int.from_bytes(sound[-8:-4], "little")
# 0x26: a list of two 64-bit numbers, such as the histogram of a column's repetition levels; of six, then.
places = [at for at in range(footer, len(sound) - 8) if sound[at] == 0x26]
for at in places:
    damaged = bytearray(sound)
    damaged[at] ^= 0x40
    open("b.parquet", "wb").write(damaged)
    try:
        describe(kvtools.open("b.parquet"))
        found += verify("b.parquet").count("error") > 0
    except KvtoolsError:
        found += 1
print(len(places), found)
"""


def test_a_damaged_histogram_is_an_error_and_ends_no_process(tmp_path: Path) -> None:
    write_tables([round_trip.table("emb", 60)], tmp_path / "a.parquet", "parquet")
    ran = subprocess.run([sys.executable, "-c", _EACH_DAMAGE], cwd=tmp_path, capture_output=True, text=True, check=True)
    places, found = map(int, ran.stdout.split())
    assert places > 10 and found > 3
