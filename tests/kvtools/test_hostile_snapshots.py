"""Snapshots from strangers: cut, flipped and lying ones are told, or answer something, and end no process."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.array_table import ArrayTable
from kvtools.dialects.bundle.checksum import extend
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import CorruptFileError, KvtoolsError
from kvtools.migrate import write_tables
from kvtools.snapshot import Snapshot
from kvtools.verify import verify

ROWS = 700
HEADER = struct.Struct("<8sIIQQQQQIIQQ44xI")
RECORD = struct.Struct("<IIBBBBBBHIIQQ12QQ16x")
SECTIONS = ("directory", "keys", "rows", "frequencies", "versions", "default row")
KEYS = np.arange(-350, 350)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sample") / "a.kvsnap"
    table = ArrayTable(
        "emb",
        KEYS,
        np.ones((ROWS, 3), np.float32),
        freqs=np.arange(ROWS, dtype=np.uint32),
        versions=np.arange(ROWS),
        extras={"default_row": np.float32([1, 2, 3])},
    )
    write_tables([table, ArrayTable("none", KEYS[:0], np.ones((0, 1), np.int8))], path, "snapshot")
    return path.read_bytes()


def places(data: bytes) -> dict[str, tuple[int, int]]:
    """Where everything of the first table is: offset and bytes, as the specification says."""
    _, _, _, _, description, description_bytes, checksums, checksums_bytes, *_ = HEADER.unpack_from(data)
    record = RECORD.unpack_from(data, description + 16)
    found = {name: (record[13 + 2 * i], record[14 + 2 * i]) for i, name in enumerate(SECTIONS)}
    return {
        "header": (0, 128),
        "description": (description, description_bytes),
        "checksums": (checksums, checksums_bytes),
        **found,
    }


def sealed(data: bytearray) -> bytes:
    """The same with right checksums of header, description and checksums, as far as these lie in it."""
    header = list(HEADER.unpack_from(data))
    for offset, size, crc in ((4, 5, 8), (6, 7, 9)):
        header[crc] = extend(0, bytes(data[header[offset] : header[offset] + header[size]]))
    data[:128] = HEADER.pack(*header)
    data[124:128] = struct.pack("<I", extend(0, bytes(data[:124])))
    return bytes(data)


def use(path: Path) -> None:
    """Do all that is done with a snapshot; what it answers does not matter."""
    with contextlib.suppress(KvtoolsError):
        snapshot = Snapshot(path)
        for table in snapshot.tables.values():
            asked = np.arange(-400, 400).astype(table.key_dtype)
            table.find(asked)
            if table.dim < 1000:
                table.lookup(asked)
                table.pool(asked, np.array([0, len(asked)]))
        snapshot.populate()
    with contextlib.suppress(KvtoolsError):
        for reader in open_checkpoint(path).select([]):
            if reader.dim < 1000 and reader.rows < 10_000:
                reader.take(np.arange(min(reader.rows, 5)))
                for _ in reader.chunks(rows=100):
                    pass
    with contextlib.suppress(KvtoolsError):
        Snapshot(path).verify()


def ends(data: bytes) -> Iterator[int]:
    for offset, size in places(data).values():
        yield from (offset, offset + 1, offset + size - 1, offset + size)


def test_one_that_is_cut_anywhere(sample: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    for length in {0, 1, 7, 8, 127, 4095, *ends(sample), len(sample) - 1}:
        if length >= len(sample):
            continue
        path.write_bytes(sample[:length])
        with pytest.raises(CorruptFileError, match=r"a\.kvsnap"):
            Snapshot(path)
    path.write_bytes(sample + b"\0")
    with pytest.raises(CorruptFileError, match="its header says"):
        Snapshot(path)


@pytest.mark.parametrize("section", ["header", "description", "checksums", *SECTIONS])
def test_a_flipped_bit_is_told_wherever_it_is(sample: bytes, tmp_path: Path, section: str) -> None:
    path = tmp_path / "a.kvsnap"
    offset, size = places(sample)[section]
    assert size > 0
    for at in np.unique(np.linspace(0, size - 1, 9).astype(int)).tolist():
        data = bytearray(sample)
        data[offset + at] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(CorruptFileError, match=section if section in SECTIONS else "opening"):
            Snapshot(path).verify()
        use(path)
        if section in ("keys", "rows", "frequencies", "versions"):
            (reader, _) = open_checkpoint(path).select([])
            with pytest.raises(CorruptFileError, match=f"table 'emb', its {section} from byte 0 on"):
                list(reader.chunks())
        if section == "directory":
            assert any("directory" in finding.message for finding in verify(path).findings)


def test_a_later_version_asks_for_a_later_kvtools(sample: bytes, tmp_path: Path) -> None:
    data = bytearray(sample)
    data[8] = 2
    (tmp_path / "a.kvsnap").write_bytes(sealed(data))
    with pytest.raises(CorruptFileError, match="got version 2 of the format, expected at most 1; update kvtools"):
        Snapshot(tmp_path / "a.kvsnap")


@settings(max_examples=150)
@given(
    field=st.integers(0, 15),
    number=st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**31, 2**32, 2**63, 2**64 - 8, 4096, 8192])),
    table=st.integers(0, 1),
)
def test_numbers_that_lie_under_right_checksums(
    sample: bytes, tmp_path_factory: pytest.TempPathFactory, field: int, number: int, table: int
) -> None:
    data = bytearray(sample)
    description = places(sample)["description"][0]
    struct.pack_into("<Q", data, description + 16 + 160 * table + 8 * field, number)
    path = tmp_path_factory.getbasetemp() / "lies.kvsnap"
    path.write_bytes(sealed(data))
    use(path)


@settings(max_examples=60)
@given(edits=st.lists(st.tuples(st.integers(8, 79), st.integers(0, 255)), min_size=1, max_size=4))
def test_headers_that_lie_under_a_right_checksum(
    sample: bytes, tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]]
) -> None:
    data = bytearray(sample)
    for at, value in edits:
        data[at] = value
    data[124:128] = struct.pack("<I", extend(0, bytes(data[:124])))
    path = tmp_path_factory.getbasetemp() / "header.kvsnap"
    path.write_bytes(data)
    use(path)


@settings(max_examples=60)
@given(section=st.sampled_from(["directory", "keys"]), seed=st.integers(0, 2**32 - 1), how=st.integers(0, 2))
def test_a_directory_and_keys_of_any_bytes(
    sample: bytes, tmp_path_factory: pytest.TempPathFactory, section: str, seed: int, how: int
) -> None:
    data = bytearray(sample)
    offset, size = places(sample)[section]
    random = np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()
    data[offset : offset + size] = (random, bytes(size), b"\xff" * size)[how]
    path = tmp_path_factory.getbasetemp() / "bytes.kvsnap"
    path.write_bytes(data)
    use(path)


def test_keys_out_of_order_are_told_whatever_their_checksum(sample: bytes, tmp_path: Path) -> None:
    data = bytearray(sample)
    offset, size = places(sample)["keys"]
    data[offset : offset + 16] = data[offset + 8 : offset + 16] + data[offset : offset + 8]
    checksums = places(sample)["checksums"][0]
    struct.pack_into("<I", data, checksums + 4, extend(0, bytes(data[offset : offset + size])))
    (tmp_path / "a.kvsnap").write_bytes(sealed(data))
    with pytest.raises(CorruptFileError, match="keys out of order"):
        Snapshot(tmp_path / "a.kvsnap").verify()


def test_a_description_that_is_no_json(sample: bytes, tmp_path: Path) -> None:
    offset, size = places(sample)["description"]
    for at, byte in ((offset + size - 1, b"x"), (offset + 16 + 320, b"\xff")):
        data = bytearray(sample)
        data[at : at + 1] = byte
        (tmp_path / "a.kvsnap").write_bytes(sealed(data))
        assert Snapshot(tmp_path / "a.kvsnap").tables  # lookups need none of it
        with pytest.raises(CorruptFileError):
            open_checkpoint(tmp_path / "a.kvsnap")


def test_two_tables_of_one_name(sample: bytes, tmp_path: Path) -> None:
    data: Any = bytearray(sample)
    description = places(sample)["description"][0]
    data[description + 16 + 160 : description + 16 + 168] = data[description + 16 : description + 24]
    (tmp_path / "a.kvsnap").write_bytes(sealed(data))
    with pytest.raises(CorruptFileError, match="two of its tables are called 'emb'"):
        Snapshot(tmp_path / "a.kvsnap")
