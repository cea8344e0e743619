"""Zip files whose members are mapped and written in place: NumPy archives, and what `torch.save` writes.

Members are stored, or compressed before they come; each begins at a multiple of 64 bytes and has zip64 sizes. Format:
PKWARE's APPNOTE.TXT, 6.3.10.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.bundle.writer import write_fully
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.remote.stored import open_binary

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_CENTRAL_HEADER = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_BYTES = 20
"""What stands between the two ends, where an archive has both."""
_ALIGNMENT = 64
_ALIGNMENT_EXTRA = 0xD935  # the id under which Android's zipalign pads
_UTF8 = 0x800
_DOS_EPOCH = 0x21  # 1980-01-01: two runs write the same bytes


@contextlib.contextmanager
def zip_errors(doing: str) -> Iterator[None]:
    """Turn what can go wrong in reading an archive into our errors, whose messages begin with `doing`."""
    try:
        yield
    except OSError as error:
        raise BadInputError(f"{doing}: {error.strerror or error}") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        ValueError,
        RuntimeError,
        NotImplementedError,
        OverflowError,
        SyntaxError,
        tokenize.TokenError,
        struct.error,
    ) as error:
        reason = str(error)[:200]  # some hold the bytes of a header
        raise CorruptFileError(f"{doing}: {reason}; the archive is damaged, copy it again from its source") from error


def opened(file: Any) -> zipfile.ZipFile:
    """Open an archive of which no member is missing: its directory, which has no checksum, is compared with the rest.

    Raises:
        zipfile.BadZipFile: its end counts other members, or one is called otherwise where it lies.
    """
    archive = zipfile.ZipFile(file)
    try:
        _check_directory(archive)
    except BaseException:
        archive.close()
        raise
    return archive


def _check_directory(archive: zipfile.ZipFile) -> None:
    file, members = archive.fp, archive.infolist()
    assert file is not None
    end = file.seek(0, os.SEEK_END) - len(archive.comment) - _END.size
    file.seek(max(0, end - _LOCATOR_BYTES - _END64.size))
    tail = file.read(min(end, _LOCATOR_BYTES + _END64.size) + _END.size)
    count = _END.unpack(tail[-_END.size :])[4]
    if count == 0xFFFF and tail.startswith(b"PK\x06\x06"):
        count = _END64.unpack(tail[: _END64.size])[7]
    if count != len(members):
        raise zipfile.BadZipFile(f"its directory has {len(members)} members, expected {count}")
    for info in members:
        file.seek(info.header_offset)
        *_, name_bytes, _ = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        name = file.read(name_bytes).decode("utf-8" if info.flag_bits & _UTF8 else "cp437", "replace")
        if name != info.orig_filename:
            raise zipfile.BadZipFile(f"member '{info.filename[:80]}' is called '{name[:80]}' where it lies")


def data_offset(path: Path, info: zipfile.ZipInfo, doing: str, start: int = 0) -> int:
    """Return the byte of a file at which a member's data begin, the archive beginning at byte `start`.

    Raises:
        CorruptFileError: the file ends before.
    """
    with open_binary(path) as file:
        file.seek(start + info.header_offset)
        fields = file.read(_LOCAL_HEADER.size)
    if len(fields) < _LOCAL_HEADER.size:
        raise CorruptFileError(f"{doing}: its header lies past the end of the file; the archive is truncated")
    *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(fields)
    return start + info.header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


@dataclass(frozen=True)
class Member:
    """A member of an archive being written: where its header and its data begin."""

    name: bytes
    method: int
    offset: int
    data: int
    size: int
    packed_size: int

    def local_header(self, crc: int) -> bytes:
        """Return what stands before the data, padded so that they begin where they do."""
        sizes = struct.pack("<2H2Q", 1, 16, self.size, self.packed_size)
        padding = self.data - self.offset - _LOCAL_HEADER.size - len(self.name) - len(sizes) - 4
        extra = sizes + struct.pack("<2H", _ALIGNMENT_EXTRA, padding) + bytes(padding)
        common = (45, _UTF8, self.method, 0, _DOS_EPOCH, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(self.name), len(extra))
        return _LOCAL_HEADER.pack(b"PK\x03\x04", *common) + self.name + extra

    def central_header(self, crc: int) -> bytes:
        """Return the member's entry in the archive's directory."""
        extra = struct.pack("<2H3Q", 1, 24, self.size, self.packed_size, self.offset)
        common = (45, _UTF8, self.method, 0, _DOS_EPOCH, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(self.name), len(extra))
        made_by, rest = 3 << 8 | 45, (0, 0, 0, 0o644 << 16, 0xFFFFFFFF)
        return _CENTRAL_HEADER.pack(b"PK\x01\x02", made_by, *common, *rest) + self.name + extra


class Archive:
    """A zip file being written: members one after the other, each with zip64 sizes, their names ending in `suffix`."""

    def __init__(self, path: Path, suffix: str) -> None:
        self.path = path
        self._suffix = suffix
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._end = 0
        self._directory: list[bytes] = []
        self._names: set[str] = set()

    def claim(self, name: str) -> None:
        """Take the name of an array; raises `BadInputError` if it is taken or cannot be one."""
        if name in self._names:
            raise BadInputError(f"writing '{self.path.name}': two arrays would be called '{name}'; rename a table")
        if len(self._member_name(name)) > 0xFFFF:
            raise BadInputError(
                f"writing '{self.path.name}': array name '{name[:40]}...' is too long; rename the table"
            )
        self._names.add(name)

    def begin(self, name: str, method: int, size: int, packed_size: int) -> Member:
        """Make room for a member whose name was claimed; its data begin at a multiple of 64."""
        encoded = self._member_name(name)
        data = self._end + _LOCAL_HEADER.size + len(encoded) + 20 + 4
        data += -data % _ALIGNMENT
        member = Member(encoded, method, self._end, data, size, packed_size)
        self._end = data + packed_size
        os.ftruncate(self._file, self._end)
        return member

    def end(self, member: Member, crc: int) -> None:
        """Write a member's header, its checksum being known."""
        self.write(member.local_header(crc), member.offset)
        self._directory.append(member.central_header(crc))

    def write(self, data: bytes, offset: int) -> None:
        """Write bytes of a member's data."""
        write_fully(self._file, np.frombuffer(data, np.uint8), offset)

    def close(self) -> None:
        """Write the directory."""
        directory, count = b"".join(self._directory), len(self._directory)
        sized = (count, count, len(directory), self._end)
        end = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 3 << 8 | 45, 45, 0, 0, *sized)
        end += struct.pack("<4sIQI", b"PK\x06\x07", 0, self._end + len(directory), 1)
        end += struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        self.write(directory + end, self._end)
        os.fsync(self._file)
        os.close(self._file)

    def abort(self) -> None:
        """Close the file as it is."""
        os.close(self._file)

    def _member_name(self, name: str) -> bytes:
        return (name + self._suffix).encode("utf-8", "replace")
