"""Read a TensorFlow bundle: tensors by name out of `<prefix>.index` and `<prefix>.data-0000i-of-0000n`.

Nothing is loaded but the index. Data files are memory-mapped, and a tensor is read in runs of rows or row by
row, whether it is stored whole or in slices along its first dimension. Missing and truncated data files are
found when the bundle is opened; the bytes' checksums when they are streamed.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvtools._checked_io as _checked_io
from kvtools.dialects.bundle import dtypes
from kvtools.dialects.bundle.checksum import extend, masked
from kvtools.dialects.bundle.index_table import read_table
from kvtools.dialects.bundle.records import (
    HEADER_KEY,
    BundleEntry,
    decode_entry,
    decode_header,
    slice_key,
)
from kvtools.dialects.bundle.wire import WireError, read_varint
from kvtools.dialects.same_file import SameFile
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.remote.stored import Stored, stored, take_runs

Array = npt.NDArray[Any]

_SLICE_KEY_START = b"\x00"
_FULL = -1
_CHECKED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Segment:
    """Rows `start` to `stop` of a tensor, which lie together in one data file."""

    start: int
    stop: int
    shard: int
    offset: int
    size: int
    crc32c: int


@dataclass(frozen=True)
class ByteRange:
    """Bytes `offset` to `end` of data file number `shard`, and the tensor, or slice of one, that lies there."""

    shard: int
    offset: int
    end: int
    name: str = ""


class Bundle:
    """A TensorFlow bundle, opened for reading.

    Args:
        prefix: the path of the checkpoint without `.index`.
        salvage: that data files are missing or cut is an error when what lay there is read, and not before.

    Raises:
        BadInputError: the index or a data file is missing.
        CorruptFileError: the index is damaged, or a data file is shorter than the index says.

    Example:
        >>> Bundle(Path("no/such/model.ckpt"))
        Traceback (most recent call last):
        kvtools.errors.BadInputError: reading checkpoint index 'no/such/model.ckpt.index': no such file; ...
    """

    def __init__(self, prefix: Path, *, salvage: bool = False) -> None:
        self.prefix = prefix
        self.index_path = Path(f"{prefix}.index")
        records = read_table(self.index_path)
        try:
            self.header = decode_header(records.pop(HEADER_KEY, b""))
            self._slice_entries: dict[bytes, BundleEntry] = {}
            self.entries: dict[str, BundleEntry] = {}
            for key, record in records.items():
                if key.startswith(_SLICE_KEY_START):
                    self._slice_entries[key] = decode_entry(record, with_shape=False)
                else:
                    self.entries[key.decode("utf-8", "surrogateescape")] = decode_entry(record)
        except WireError as error:
            raise CorruptFileError(
                f"reading checkpoint index '{self.index_path}': {error}; the file is damaged, copy it again"
            ) from error
        if self.header.min_consumer > 1:
            raise BadInputError(
                f"reading checkpoint index '{self.index_path}': its format asks for a reader of version"
                f" {self.header.min_consumer}, got version 1; update kvtools"
            )
        self._found_slices: dict[str, list[BundleEntry]] = {}
        self._maps: dict[int, mmap.mmap | bytes] = {}
        self._files: dict[int, int] = {}
        self._bytes: dict[int, Stored] = {}
        self._data_files: dict[int, SameFile] = {}
        self._opening = threading.Lock()
        self._salvage = salvage
        self._check_data_files()

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)

    def data_path(self, shard: int) -> Path:
        """Return the path of data file number `shard`."""
        return Path(f"{self.prefix}.data-{shard:05d}-of-{self.header.shards:05d}")

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def nbytes(self, name: str) -> int:
        """Return how many bytes of the data files the tensor `name` takes, its slices added up."""
        entry = self.entries[name]
        if not entry.slices:
            return entry.size
        return sum(part.size for part in self._slices_of(name, entry))

    def stored(self) -> list[tuple[str, BundleEntry]]:
        """Return what lies in the data files, each tensor and each slice of one, with a name for messages."""
        found, seen = [], set()
        for name, entry in self.entries.items():
            if not entry.slices:
                found.append((name, entry))
            for extents in entry.slices:
                key = slice_key(name.encode("utf-8", "surrogateescape"), extents)
                if key in self._slice_entries and key not in seen:
                    seen.add(key)
                    found.append((f"{name}[{_format_slice(extents)}]", self._slice_entries[key]))
        found += [("a slice of no tensor", entry) for key, entry in self._slice_entries.items() if key not in seen]
        return found

    def ranges(self) -> list[ByteRange]:
        """Return where each tensor, and each slice of one, lies in the data files, in their order; nothing is read."""
        ranges = [ByteRange(e.shard, e.offset, e.offset + e.size, name) for name, e in self.stored() if e.size]
        return sorted(ranges, key=lambda r: (r.shard, r.offset, r.end, r.name))

    def overlaps(self) -> Iterator[tuple[ByteRange, ByteRange]]:
        """Yield each range of bytes that another one reaches into, after that other one."""
        furthest: ByteRange | None = None
        for here in self.ranges():
            if furthest is None or here.shard != furthest.shard:
                furthest = here
                continue
            if here.offset < furthest.end:
                yield furthest, here
            if here.end > furthest.end:
                furthest = here

    def gaps(self) -> Iterator[ByteRange]:
        """Yield the runs of bytes in which no tensor lies, at the end of a data file too."""
        ends: dict[int, int] = {}
        for here in self.ranges():
            end = ends.get(here.shard, 0)
            if here.offset > end:
                yield ByteRange(here.shard, end, here.offset)
            ends[here.shard] = max(end, here.end)
        for shard, end in ends.items():
            path = self.data_path(shard)
            size = path.stat().st_size if path.exists() else 0
            if size > end:
                yield ByteRange(shard, end, size)

    def tensor(self, name: str) -> BundleTensor:
        """Return a view of the numeric tensor `name`; raises `BadInputError` if there is none."""
        entry = self._entry(name)
        dtype = dtypes.numpy_dtype(entry.dtype)
        if dtype is None:
            raise BadInputError(
                f"reading tensor '{name}' of '{self.prefix}': got type {dtypes.dtype_name(entry.dtype)},"
                " expected numbers; check how the checkpoint was written"
            )
        return BundleTensor(self, name, entry.shape, dtype, self._segments(name, entry, dtype))

    def strings(self, name: str) -> list[bytes]:
        """Read the string tensor `name` (any shape, flattened), checking its checksums.

        Stored as one varint length per string, a masked crc32c of the lengths, then the strings' bytes.
        """
        entry = self._entry(name)
        if entry.dtype != dtypes.STRING or entry.slices:
            raise BadInputError(
                f"reading tensor '{name}' of '{self.prefix}': got type {dtypes.dtype_name(entry.dtype)},"
                " expected string, stored whole; check how the checkpoint was written"
            )
        data = bytes(self.raw(entry.shard, entry.offset, entry.size))
        order = "big" if self.header.big_endian else "little"
        count = math.prod(entry.shape)
        try:
            if count > entry.size:
                raise WireError(f"it claims {count} strings in {entry.size} bytes")
            lengths, position, crc = [], 0, 0
            for _ in range(count):
                length, position = read_varint(data, position)
                lengths.append(length)
                crc = extend(crc, length.to_bytes(4 if length < 1 << 32 else 8, order))  # type: ignore[arg-type]
            stored = data[position : position + 4]
            position += 4
            if position + sum(lengths) != entry.size:
                raise WireError(f"its strings take {position + sum(lengths)} bytes of {entry.size}")
        except WireError as error:
            raise CorruptFileError(
                f"reading string tensor '{name}' from '{self.data_path(entry.shard)}': {error};"
                " the file is damaged, copy it again from its source"
            ) from error
        if masked(crc) != int.from_bytes(stored, order):  # type: ignore[arg-type]
            raise self._mismatch(name, entry.shard, entry.offset, position, masked(crc), stored[::-1].hex())
        computed = masked(extend(extend(crc, stored), data[position:]))
        if computed != entry.crc32c:
            raise self._mismatch(name, entry.shard, entry.offset, entry.size, computed, f"{entry.crc32c:08x}")
        strings = []
        for length in lengths:
            strings.append(data[position : position + length])
            position += length
        return strings

    def raw(self, shard: int, offset: int, size: int) -> Array:
        """Return `size` mapped bytes of a data file as a read-only uint8 array [size], without copying."""
        if size == 0:
            return np.empty(0, np.uint8)
        data = self._map(shard)
        if offset + size > len(data):
            raise self._cut(shard, len(data), offset + size)
        self._bytes_of(shard).keep(offset, offset + size)
        return np.frombuffer(data, np.uint8, size, offset)

    def copy(
        self, shard: int, offset: int, size: int, crc: int, *, check: bool, upto: int | None = None
    ) -> tuple[Array, int]:
        """Return a copy of `size` bytes of a data file, uint8 [size], and `crc` extended over them if `check`.

        A copy is faster than the pages of a map for bytes that are read once, and it is gone when it is dropped.
        Who will go on to read up to byte `upto` says so.
        """
        data = np.empty(size, np.uint8)
        file = self._file(shard)
        with self._bytes_of(shard).held(offset, offset + size, upto or offset + size):
            done, crc = _checked_io.read(file, data, offset, crc, check)
        if done < size:
            raise self._cut(shard, offset + done, offset + size)
        return data, crc

    def check(self, name: str, entry: BundleEntry) -> None:
        """Read what `stored` has given, and raise `CorruptFileError` where it does not match its checksum."""
        if entry.dtype == dtypes.STRING:
            self.strings(name)
            return
        crc = 0
        for start in range(0, entry.size, _CHECKED_AT_ONCE):
            size = min(_CHECKED_AT_ONCE, entry.size - start)
            end = entry.offset + entry.size
            _, crc = self.copy(entry.shard, entry.offset + start, size, crc, check=True, upto=end)
        if entry.size and masked(crc) != entry.crc32c:
            raise self._mismatch(name, entry.shard, entry.offset, entry.size, masked(crc), f"{entry.crc32c:08x}")

    def forget(self) -> None:
        """Give back the memory of mapped pages; they are read again when they are needed."""
        for mapped in self._maps.values():
            if isinstance(mapped, mmap.mmap):
                mapped.madvise(mmap.MADV_DONTNEED)

    def rows_at(self, shard: int, offsets: Array, row_bytes: int) -> Array:
        """Copy the runs of `row_bytes` bytes at int64 `offsets` [n] of a data file; void<row_bytes> [n]."""
        data = self._map(shard)
        if len(offsets) and int(offsets.max()) + row_bytes > len(data):
            raise self._cut(shard, len(data), int(offsets.max()) + row_bytes)
        return take_runs(self._bytes_of(shard), data, offsets, row_bytes)

    def _entry(self, name: str) -> BundleEntry:
        try:
            return self.entries[name]
        except KeyError:
            raise BadInputError(
                f"reading tensor '{name}' of '{self.prefix}': the checkpoint has no such tensor;"
                " it was written in part or by another program"
            ) from None

    def _slices_of(self, name: str, entry: BundleEntry) -> list[BundleEntry]:
        if name in self._found_slices:
            return self._found_slices[name]
        encoded, found = name.encode("utf-8", "surrogateescape"), []
        for extents in entry.slices:
            key = slice_key(encoded, extents)
            if key not in self._slice_entries:
                raise CorruptFileError(
                    f"reading tensor '{name}' of '{self.index_path}': its slice {_format_slice(extents)}"
                    " has no entry; the index was written in part, write the checkpoint again"
                )
            found.append(self._slice_entries[key])
        self._found_slices[name] = found
        return found

    def _segments(self, name: str, entry: BundleEntry, dtype: np.dtype[Any]) -> list[Segment]:
        rows = entry.shape[0] if entry.shape else 1
        row_shape = entry.shape[1:]
        segments = []
        if not entry.slices:
            segments.append(Segment(0, rows, entry.shard, entry.offset, entry.size, entry.crc32c))
        for extents, part in zip(entry.slices, self._slices_of(name, entry), strict=True):
            whole_rows = all(
                start == 0 and length in (_FULL, size)
                for (start, length), size in zip(extents[1:], row_shape, strict=False)
            )
            start, length = extents[0] if extents else (0, _FULL)
            stop = rows if length == _FULL else start + length
            if len(extents) != len(entry.shape) or not whole_rows or not 0 <= start <= stop <= rows:
                raise BadInputError(
                    f"reading tensor '{name}' of '{self.index_path}': got slice {_format_slice(extents)}"
                    " of shape"
                    f" {list(entry.shape)}, expected slices of whole rows; write the checkpoint again"
                    " unpartitioned"
                )
            segments.append(Segment(start, stop, part.shard, part.offset, part.size, part.crc32c))
        segments = sorted((s for s in segments if s.stop > s.start), key=lambda segment: segment.start)
        row_bytes = dtype.itemsize * math.prod(row_shape)
        expected = 0
        for segment in segments:
            if segment.start != expected:
                raise CorruptFileError(
                    f"reading tensor '{name}' of '{self.index_path}': its slices leave out or repeat rows"
                    f" between {min(expected, segment.start)} and {max(expected, segment.start)} of {rows};"
                    " the index was written in part, write the checkpoint again"
                )
            expected = segment.stop
            if segment.size != (segment.stop - segment.start) * row_bytes:
                raise CorruptFileError(
                    f"reading tensor '{name}' of '{self.index_path}': got {segment.size} bytes for"
                    f" {segment.stop - segment.start} rows, expected {row_bytes} bytes a row; the index is"
                    " damaged"
                )
        if expected != rows:
            raise CorruptFileError(
                f"reading tensor '{name}' of '{self.index_path}': its slices hold {expected} rows,"
                f" expected {rows}; the index was written in part, write the checkpoint again"
            )
        return segments

    def _check_data_files(self) -> None:
        ends: dict[int, int] = {}
        for entries in (self.entries, self._slice_entries):
            for entry in entries.values():
                if entry.shard >= self.header.shards:
                    raise CorruptFileError(
                        f"reading checkpoint index '{self.index_path}': an entry lies in data file"
                        f" {entry.shard} of {self.header.shards}; the index is damaged, copy it again"
                    )
                ends[entry.shard] = max(ends.get(entry.shard, 0), entry.offset + entry.size)
        for shard, end in ends.items():
            path = self.data_path(shard)
            try:
                self._data_files[shard] = SameFile(path)
            except OSError as error:
                missing = isinstance(error, FileNotFoundError)
                if self._salvage or (missing and end == 0):
                    continue
                if not missing:
                    raise self._not_opened(shard, error) from error
                raise BadInputError(
                    f"opening checkpoint '{self.prefix}': data file '{path}' is missing, expected {end}"
                    " bytes; copy every file of the checkpoint"
                ) from None
            size = self._data_files[shard].size
            if size < end and not self._salvage:
                raise CorruptFileError(
                    f"opening checkpoint '{self.prefix}': data file '{path}' is truncated: got {size} bytes,"
                    f" expected at least {end}; copy it again"
                )

    def _bytes_of(self, shard: int) -> Stored:
        """Return what gives the bytes of a data file that `_file` or `_map` has opened."""
        return self._bytes[shard]

    def _file(self, shard: int) -> int:
        with self._opening:
            if shard not in self._files:
                self._files[shard] = self._open(shard)
            return self._files[shard]

    def _map(self, shard: int) -> mmap.mmap | bytes:
        if self._salvage and shard not in self._data_files:
            return b""
        file = self._file(shard)
        self._data_files[shard].check(file)  # where it was cut, a map of it would end the process
        with self._opening:
            if shard not in self._maps:
                try:
                    empty = self._data_files[shard].size == 0
                    self._maps[shard] = b"" if empty else mmap.mmap(file, 0, access=mmap.ACCESS_READ)
                except OSError as error:
                    raise self._not_opened(shard, error) from error
            return self._maps[shard]

    def _open(self, shard: int) -> int:
        """Open a data file: the one that was there when the bundle was opened."""
        path = self.data_path(shard)
        self._bytes.setdefault(shard, stored(path))
        if shard not in self._data_files:
            try:
                self._data_files[shard] = SameFile(path)
            except OSError as error:
                raise self._not_opened(shard, error) from error
        return self._data_files[shard].open()

    def _not_opened(self, shard: int, error: OSError) -> BadInputError:
        return BadInputError(f"opening checkpoint data file '{self.data_path(shard)}': {error.strerror or error}")

    def _cut(self, shard: int, end: int, expected: int) -> CorruptFileError:
        when = "" if self._salvage else " while it was read"
        return CorruptFileError(
            f"reading checkpoint data file '{self.data_path(shard)}': it ends at byte {end}, expected {expected}; it"
            f" was cut{when}, copy it again"
        )

    def _mismatch(
        self, name: str, shard: int, offset: int, size: int, computed: int, expected: str
    ) -> CorruptFileError:
        return CorruptFileError(
            f"reading tensor '{name}' from '{self.data_path(shard)}': checksum mismatch in bytes {offset} to"
            f" {offset + size}: got {computed:#010x}, expected 0x{expected};"
            " the file is damaged, copy it again from its source"
        )


class BundleTensor:
    """A numeric tensor of a bundle, as rows along its first dimension; `shape` [rows, ...]."""

    direct = True
    """Whether `take` finds each row where it lies."""

    def __init__(
        self,
        bundle: Bundle,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        segments: list[Segment],
    ) -> None:
        self.bundle = bundle
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.segments = segments
        self.rows = shape[0] if shape else 1
        self.row_shape = shape[1:]
        self.row_bytes = dtype.itemsize * math.prod(self.row_shape)

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Return rows `start` to `stop`, [stop - start, ...], not checked against their checksums.

        The array is a read-only view of the mapped file where the rows lie in one segment, and a copy where
        they do not.
        """
        stop = self.rows if stop is None else min(stop, self.rows)
        pieces = []
        for segment in self._segments_between(start, stop):
            first, last = max(start, segment.start), min(stop, segment.stop)
            offset = segment.offset + (first - segment.start) * self.row_bytes
            raw = self.bundle.raw(segment.shard, offset, (last - first) * self.row_bytes)
            pieces.append(self._typed(raw))
        return pieces[0] if len(pieces) == 1 else self._joined(pieces)

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield copies of all rows in order, `chunk_rows` at a time, checking each segment's checksum as its last
        row goes by.

        Raises `CorruptFileError` on a mismatch, before the rows that end the damaged segment are yielded.
        """
        running: dict[int, int] = {}
        for start in range(0, self.rows, chunk_rows):
            stop = min(start + chunk_rows, self.rows)
            pieces = []
            for segment in self._segments_between(start, stop):
                first, last = max(start, segment.start), min(stop, segment.stop)
                offset = segment.offset + (first - segment.start) * self.row_bytes
                crc = running.pop(segment.start, 0)
                size = (last - first) * self.row_bytes
                upto = segment.offset + segment.size
                raw, crc = self.bundle.copy(segment.shard, offset, size, crc, check=verify, upto=upto)
                if last < segment.stop:
                    running[segment.start] = crc
                elif verify and masked(crc) != segment.crc32c:
                    raise self._mismatch(segment, crc)
                pieces.append(self._typed(raw))
            yield pieces[0] if len(pieces) == 1 else self._joined(pieces)

    def take(self, rows: Array) -> Array:
        """Copy the rows of these int64 numbers [n] into an array [n, ...], wherever they lie."""
        if self.row_bytes == 0 or len(rows) == 0:
            return np.zeros((len(rows), *self.row_shape), self.dtype)
        starts, offsets, shards = self._segment_columns
        which = np.searchsorted(starts, rows, side="right") - 1
        offsets = offsets[which] + (rows - starts[which]) * self.row_bytes
        if len(self._shards) == 1:
            records = self.bundle.rows_at(self._shards[0], offsets, self.row_bytes)
        else:
            records = np.empty(len(rows), f"V{self.row_bytes}")
            row_shards = shards[which]
            for shard in self._shards:
                here = row_shards == shard
                records[here] = self.bundle.rows_at(shard, offsets[here], self.row_bytes)
        return self._typed(records.view(np.uint8))

    @cached_property
    def _segment_columns(self) -> tuple[Array, Array, Array]:
        table = np.array([(s.start, s.offset, s.shard) for s in self.segments], np.int64).reshape(-1, 3)
        return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()

    @cached_property
    def _shards(self) -> list[int]:
        return sorted({segment.shard for segment in self.segments})

    def _segments_between(self, start: int, stop: int) -> list[Segment]:
        if start >= stop:
            return []
        first = int(np.searchsorted(self._segment_columns[0], start, side="right")) - 1
        last = int(np.searchsorted(self._segment_columns[0], stop, side="left"))
        return self.segments[max(first, 0) : last]

    def _joined(self, pieces: list[Array]) -> Array:
        return np.concatenate([np.empty((0, *self.row_shape), self.dtype), *pieces])

    def _mismatch(self, segment: Segment, crc: int) -> CorruptFileError:
        expected = f"{segment.crc32c:08x}"
        return self.bundle._mismatch(self.name, segment.shard, segment.offset, segment.size, masked(crc), expected)

    def _typed(self, raw: Array) -> Array:
        """View bytes [n * row_bytes] as rows [n, ...] in this machine's byte order."""
        if self.bundle.header.big_endian != (np.little_endian is False):
            raw = raw.view(f"u{self.dtype.itemsize}").byteswap().view(np.uint8)
        rows = len(raw) // self.row_bytes if self.row_bytes else 0
        return np.ndarray((rows, *self.row_shape), self.dtype, buffer=raw)


def _format_slice(extents: tuple[tuple[int, int], ...]) -> str:
    return ":".join("-" if length == _FULL else f"{start},{length}" for start, length in extents) or "-"
