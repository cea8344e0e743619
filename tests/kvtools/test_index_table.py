from __future__ import annotations

import contextlib
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.dialects.bundle.checksum import extend, masked
from kvtools.dialects.bundle.index_table import read_table, table_bytes
from kvtools.errors import BadInputError, CorruptFileError


def write(folder: Path, data: bytes) -> Path:
    path = folder / "a.index"
    path.write_bytes(data)
    return path


@given(st.dictionaries(st.binary(max_size=12), st.binary(max_size=300), max_size=60))
def test_round_trip(entries: dict[bytes, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert read_table(write(Path(folder), table_bytes(sorted(entries.items())))) == entries


def test_many_blocks(tmp_path: Path) -> None:
    entries = {f"variable/{number:06}".encode(): bytes(100) for number in range(10_000)}
    data = table_bytes(entries.items())
    assert read_table(write(tmp_path, data)) == entries


def test_every_flipped_bit_is_found_or_harmless(tmp_path: Path) -> None:
    entries = {b"a": b"1", b"ab": b"22", b"b": b""}
    data = table_bytes(entries.items())
    for byte in range(len(data)):
        damaged = bytearray(data)
        damaged[byte] ^= 0x10
        try:
            # The handle of the metaindex, its block and the footer's padding hold nothing that is used.
            assert read_table(write(tmp_path, bytes(damaged))) == entries
        except CorruptFileError as error:
            assert "a.index" in str(error)


@pytest.mark.parametrize("length", [0, 1, 47, 60])
def test_truncated(tmp_path: Path, length: int) -> None:
    path = write(tmp_path, table_bytes([(b"a", b"1")])[:length])
    with pytest.raises(CorruptFileError, match=r"a\.index.*truncated"):
        read_table(path)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no such file"):
        read_table(tmp_path / "a.index")


def test_folder_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.index").mkdir()
    with pytest.raises(BadInputError, match="Is a directory"):
        read_table(tmp_path / "a.index")


def test_snappy_is_refused_by_name(tmp_path: Path) -> None:
    data = bytearray(table_bytes([(b"a", b"1")]))
    size = data.index(b"a1") + 2 + 8  # the first block: one entry, one restart, their count
    data[size] = 1
    data[size + 1 : size + 5] = struct.pack("<I", masked(extend(0, bytes(data[: size + 1]))))
    with pytest.raises(BadInputError, match="snappy"):
        read_table(write(tmp_path, bytes(data)))


@given(st.binary(max_size=200))
def test_hostile_blocks_are_refused(contents: bytes) -> None:
    """A block of any bytes under a right checksum."""
    stored = contents + b"\0"
    block = stored + struct.pack("<I", masked(extend(0, stored)))
    good = table_bytes([])
    footer = bytearray(good[-48:])
    footer[:8] = bytes([0, 0, 0]) + bytes([len(contents) & 0x7F | 0x80, len(contents) >> 7]) + bytes(3)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(CorruptFileError, BadInputError):
        read_table(write(Path(folder), block + bytes(footer)))
