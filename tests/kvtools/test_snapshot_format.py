"""A reader of snapshots in plain Python, written from docs/dialects/snapshot.md, beside the one that is used."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.dialects.bundle.checksum import extend
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.writing import WriteOptions
from kvtools.migrate import write_tables
from kvtools.snapshot import Snapshot

M = 2**64 - 1
COUNTERS = (None, "<u4", "<i8", "<u8", "<i4", "<u2", "<i2", "u1", "i1")
VALUES = (None, "<f4", "<f2", "bfloat16", "<f8", "i1", "<i4", "<i8", "?")


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & M
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & M
    return x ^ (x >> 31)


def unmix(x: int) -> int:
    x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642B2D24D8EC3 & M
    x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96DE1B173F119089 & M
    return x ^ (x >> 30) ^ (x >> 60)


def fingerprint(*texts: bytes) -> str:
    a = b = 0
    for text in texts:
        for at in range(0, len(text), 8):
            word = int.from_bytes(text[at : at + 8].ljust(8, b"\0"), "little")
            a = mix(a ^ word)
            b = mix((b + word) & M) ^ a
    return f"{a:016x}{b:016x}"


def read(data: bytes) -> dict[str, dict[str, Any]]:
    """All tables of a file, every checksum checked."""
    magic, version, tables, size, place, length, sums, sums_length, crc, sums_crc, a, b = struct.unpack_from(
        "<8s2I5Q2I2Q", data
    )
    assert (magic, version, size) == (bytes.fromhex("894b56530d0a1a0a"), 1, len(data))
    assert place % 8 == sums % 8 == 0 and data[80:124] == bytes(44)
    assert struct.unpack_from("<I", data, 124)[0] == extend(0, data[:124])
    description, checksums = data[place : place + length], data[sums : sums + sums_length]
    assert (extend(0, description), extend(0, checksums)) == (crc, sums_crc)
    json_at, json_length = struct.unpack_from("<2Q", description)
    assert fingerprint(description[16:json_at], checksums) == f"{a:016x}{b:016x}"
    said = json.loads(description[json_at : json_at + json_length])
    left = [number for (number,) in struct.iter_unpack("<I", checksums)]
    found = {}
    for number in range(tables):
        record = struct.unpack_from("<2I6BH2I2Q12QQ", description, 16 + 160 * number)
        name = description[record[0] : record[0] + record[1]].decode()
        key, value, form, freq, version_type, entry, zero, dim, row_bytes, rows, buckets = record[2:13]
        sections = []
        for offset, section_bytes in zip(record[13:25:2], record[14:25:2], strict=True):
            assert offset % 4096 == 0
            sections.append(data[offset : offset + section_bytes])
            for at in range(0, section_bytes, 1 << 20):
                assert extend(0, sections[-1][at : at + (1 << 20)]) == left.pop(0)
        directory = np.frombuffer(sections[0], f"<u{entry}").tolist()
        mixed = np.frombuffer(sections[1], "<u8").tolist()
        assert (
            zero == 0 and len(directory) == buckets + 1 and len(mixed) == rows and len(sections[2]) == rows * row_bytes
        )
        found[name] = {
            "key": key,
            "value": value,
            "form": form,
            "dim": dim,
            "buckets": buckets,
            "directory": directory,
            "mixed": mixed,
            "rows": [sections[2][at * row_bytes : (at + 1) * row_bytes] for at in range(rows)],
            "freqs": None if not freq else np.frombuffer(sections[3], COUNTERS[freq]).tolist(),
            "versions": None if not version_type else np.frombuffer(sections[4], COUNTERS[version_type]).tolist(),
            "default": sections[5],
            "duplicates": record[25],
            "json": said["tables"][name],
        }
    assert not left
    return found


def row_of(table: dict[str, Any], key: int) -> int | None:
    """Look a key up, as the page says."""
    mixed = mix(key & M)
    bucket = mixed * table["buckets"] >> 64
    keys = table["mixed"][table["directory"][bucket] : table["directory"][bucket + 1]]
    return table["directory"][bucket] + keys.index(mixed) if mixed in keys else None


@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_the_file_is_as_the_page_says(tmp_path: Path, rows: int) -> None:
    keys = np.random.default_rng(0).integers(-(2**31), 2**31, rows, dtype=np.int64).astype(np.int32)
    values = np.random.default_rng(1).normal(size=(rows, 3)).astype(np.float16)
    table = ArrayTable(
        "größe/a",
        keys,
        values,
        freqs=np.arange(rows, dtype=np.uint16),
        versions=-np.arange(rows, dtype=np.int64),
        version_unit="days",
        extras={"default_row": np.float16([1, 2, 3])},
    )
    write_tables([table, ArrayTable("b", keys[:1], values[:1])], tmp_path / "a.kvsnap", "snapshot")
    data = (tmp_path / "a.kvsnap").read_bytes()
    found = read(data)
    a = found["größe/a"]
    assert (a["key"], VALUES[a["value"]], a["form"], a["dim"]) == (2, "<f2", 0, 3)
    assert a["json"] == {"version_unit": "days", "metadata": {}} and a["duplicates"] == rows - len(set(keys.tolist()))
    assert np.frombuffer(a["default"], "<f2").tolist() == [1, 2, 3]
    for row, key in enumerate(keys.tolist()):
        at = row_of(a, key)
        assert at is not None and unmix(a["mixed"][at]) == key & M
        assert (a["rows"][at], a["freqs"][at], a["versions"][at]) == (values[row].tobytes(), row, -row)
    assert row_of(a, 12345678901) is None
    assert Snapshot(tmp_path / "a.kvsnap").fingerprint == fingerprint_in(data)


def fingerprint_in(data: bytes) -> str:
    a, b = struct.unpack_from("<2Q", data, 64)
    return f"{a:016x}{b:016x}"


def row_in(form: int, data: bytes, dim: int) -> np.ndarray:
    """The numbers of a row, as the page says."""
    if form == 1:
        return np.frombuffer(data, "<f4", 1) * np.frombuffer(data, "i1", dim, 4)
    offset = np.frombuffer(data, "<f4", 1)
    scale = (np.frombuffer(data, "<u2", 1, 4).astype("<u4") << 16).view("<f4")
    codes = np.frombuffer(data, "u1", offset=6)
    if form == 3:
        codes = np.concatenate([codes & 15, codes >> 4])[:dim]
    return offset + scale * codes.astype(np.float32)


@pytest.mark.parametrize(("dtype", "form", "steps"), [("int8", 2, 255), ("int4", 3, 15)])
@pytest.mark.parametrize("dim", [5, 8])
def test_rows_with_an_offset_and_a_scale(tmp_path: Path, dim: int, dtype: str, form: int, steps: int) -> None:
    values = np.random.default_rng(1).normal(size=(50, dim)).astype(np.float32)
    options = WriteOptions(compression=dtype)
    write_tables([ArrayTable("emb", np.arange(50), values)], tmp_path / "a.kvsnap", "snapshot", options=options)
    table = read((tmp_path / "a.kvsnap").read_bytes())["emb"]
    got, _ = Snapshot(tmp_path / "a.kvsnap").table("emb").lookup(np.arange(50))
    assert (table["form"], VALUES[table["value"]]) == (form, "<f4")
    for key, row in enumerate(values):
        at = row_of(table, key)
        assert at is not None
        assert np.array_equal(got[key], row_in(form, table["rows"][at], dim))
        assert np.abs(got[key] - row).max() <= np.ptp(row) / steps / 2 * 1.01


def test_a_file_of_int8_with_a_scale_alone_is_still_read() -> None:
    """Written by kvtools before int8 had offsets."""
    path = Path(__file__).parents[1] / "data" / "formats" / "int8_with_scale.kvsnap"
    table = read(path.read_bytes())["emb"]
    values = np.random.default_rng(3).normal(size=(20, 5)).astype(np.float32)
    values[4] = 0
    keys = np.arange(20) * 7 - 3
    snapshot = Snapshot(path)
    assert snapshot.verify()
    got, found = snapshot.table("emb").lookup(keys)
    assert table["form"] == 1 and found.all()
    for key, row, of_file in zip(keys.tolist(), values, got, strict=True):
        at = row_of(table, key)
        assert at is not None and np.array_equal(of_file, row_in(1, table["rows"][at], 5))
        assert np.abs(of_file - row).max() <= np.abs(row).max() / 254 * 1.0001
    checkpoint = open_checkpoint(path)
    schema = checkpoint.table("emb").schema
    assert schema.rows_as == "int8" and "a float32 scale each" in schema.notes[0]
    pooled = snapshot.table("emb").pool(keys, np.array([0, 2, 20]))
    assert np.allclose(pooled, [got[:2].sum(axis=0), got[2:].sum(axis=0)], atol=1e-5)


def test_sections_of_several_mebibytes(tmp_path: Path) -> None:
    keys = np.arange(140_000)
    write_tables([ArrayTable("emb", keys, np.ones((140_000, 4), np.float32))], tmp_path / "a.kvsnap", "snapshot")
    table = read((tmp_path / "a.kvsnap").read_bytes())["emb"]
    assert all(row_of(table, key) is not None for key in range(0, 140_000, 1000))


def test_the_same_tables_give_the_same_bytes(tmp_path: Path) -> None:
    keys, values = np.arange(9000) * 7, np.random.default_rng(1).normal(size=(9000, 5)).astype(np.float32)
    for name, order, memory in (("a", 1, 1 << 30), ("b", -1, 1 << 30), ("c", 1, 1 << 16)):
        table = ArrayTable("emb", keys[::order], values[::order], part_rows=(4000, 5000))
        write_tables([table], tmp_path / name, "snapshot", options=WriteOptions(memory=memory))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()
