"""An HDF5 file opened for reading: groups, datasets as columns, attributes; nothing damaged is walked into."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvtools._checked_io as _checked_io
from kvtools.dialects.bundle.checksum import extend
from kvtools.dialects.chunk import Array
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.rechunk import rechunk
from kvtools.dialects.same_file import SameFile
from kvtools.dialects.table_record import (
    is_count,
    json_object,
)
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, MissingDependencyError
from kvtools.remote.stored import for_library, stored, take_runs

NAME = "hdf5"
ATTRIBUTE = "kvtools"
CHECKSUM = "crc32c"
BLOCK_BYTES = 2 << 20
_GROUPS_SEEN = 100_000


class HDF5File:
    """An HDF5 file opened for reading, by h5py and, for the bytes of contiguous datasets, as it is."""

    def __init__(self, path: Path, options: OpenOptions) -> None:
        self.path = path
        self.options = options
        self.h5py = import_h5py(f"opening '{path}'")
        self._mapped: mmap.mmap | None = None
        self._mapping = threading.Lock()
        self.descriptor = -1
        self.bytes = stored(path)
        try:
            self._same = SameFile(path)
            self.size = self._same.size
            self.descriptor = self._same.open()
            # Not locked: a checkpoint may lie on a file system without locks, and nothing is written.
            self.file = self.h5py.File(for_library(path), "r", locking=False)
        except OSError as error:
            raise CorruptFileError(
                f"opening '{path}' as HDF5: {reason_of(error)}; the file is truncated or damaged, copy it again"
            ) from error

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            os.close(self.descriptor)

    @contextlib.contextmanager
    def reading(self, what: str = "the groups") -> Iterator[None]:
        """Turn what h5py raises for a damaged file into one of our errors."""
        try:
            yield
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, UnicodeDecodeError) as error:
            raise CorruptFileError(
                f"reading {what} of '{self.path}': {reason_of(error)}; the file is damaged, copy it again"
            ) from error

    def layout(self) -> dict[str, Any] | None:
        """Return what the root says of our layout, None of another's; raises `BadInputError` for a later version."""
        doing = f"opening '{self.path}'"
        if ATTRIBUTE not in self.file.attrs:
            return None
        record = json_object(text_of(attribute(self.file, ATTRIBUTE, doing)), doing)
        layout = record.get("layout")
        if not is_count(layout) or layout != 1:
            raise BadInputError(f"opening '{self.path}': got HDF5 layout {layout!r}, expected 1; update kvtools")
        return record

    def names(self, name: str, expected: Any) -> list[str]:
        """Return what is in group `name` of the root: `expected` names, unless that is None, as in files of old.

        Raises:
            CorruptFileError: there are more, or fewer.
        """
        parent = child_of(self.file, name)
        if parent is not None and not isinstance(parent, self.h5py.Group):
            raise CorruptFileError(f"reading the groups of '{self.path}': '/{name}' is a dataset; write it again")
        found = [] if parent is None else list(parent)
        if expected is not None and len(found) != expected:
            raise CorruptFileError(
                f"opening '{self.path}': got {len(found)} {name}, expected {expected}, as the file says of itself; it"
                " is damaged or was written in part, copy it again"
            )
        return found

    def all_groups(self, broken: dict[str, KvtoolsError] | None = None) -> Iterator[Any]:
        """Yield every group of this file once, the root first; links to elsewhere are not followed.

        What cannot be opened is an error, or with `broken` is noted there and left out.
        """
        seen: set[Any] = set()
        waiting = [self.file["/"]]
        while waiting and len(seen) < _GROUPS_SEEN:
            group = waiting.pop()
            address = self.h5py.h5o.get_info(group.id).addr
            if address in seen:
                continue
            seen.add(address)
            yield group
            hard = [
                name
                for name in group
                if group.id.links.get_info(name.encode(errors="surrogateescape")).type == self.h5py.h5l.TYPE_HARD
            ]
            children = []
            for name in hard:
                try:
                    with self.reading(f"'{name}' in '{group.name}'"):
                        children.append(group[name])
                except CorruptFileError as error:
                    if broken is None:
                        raise
                    broken[f"{group.name.rstrip('/')}/{name}"] = error
            waiting += reversed([child for child in children if isinstance(child, self.h5py.Group)])

    def pread(self, size: int, offset: int) -> bytes:
        """Return bytes of the file as they are."""
        with self.bytes.held(offset, offset + size):
            return os.pread(self.descriptor, size, offset)

    def map(self) -> mmap.mmap:
        """Return the mapped file; raises `BadInputError` where it was written over."""
        self._same.check(self.descriptor)  # where it was cut, a map of it would end the process
        with self._mapping:
            if self._mapped is None:
                self._mapped = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
            return self._mapped


class DatasetColumn:
    """A dataset as a column: row i is [row_shape]; see `kvtools.dialects.column.Column`.

    `dtype` is what its numbers are, where HDF5 has no such type and they are stored as integers of the same size.
    """

    def __init__(self, file: HDF5File, dataset: Any, dtype: np.dtype[Any] | None = None) -> None:
        self._file = file
        self._dataset = dataset
        self.name = str(dataset.name)
        self.shape: tuple[int, ...] = tuple(dataset.shape)
        self.rows = self.shape[0] if self.shape else 1
        self.row_shape = self.shape[1:]
        stored: np.dtype[Any] = dataset.dtype
        self._stored = stored.newbyteorder("=")
        self.dtype = self._stored if dtype is None else dtype
        self.row_bytes = self.dtype.itemsize * math.prod(self.row_shape)
        self.size = self.rows * self.row_bytes
        self._chunk_rows = int(dataset.chunks[0]) if dataset.chunks else 0
        self._offset = self._contiguous_offset(stored)
        crc = attribute(dataset, CHECKSUM, f"opening dataset '{dataset.name}' of '{file.path}'")
        self._crc = None if crc is None else int(crc)
        self._check_sizes()

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield copies of all rows in order, checking their checksum as the last row goes by."""
        if not self.rows or not self.row_bytes:
            yield from ([np.zeros((self.rows, *self.row_shape), self.dtype)] if self.rows else ())
            return
        crc = 0
        for start, rows in self._runs(chunk_rows):
            if verify and self._crc is not None:
                crc = extend(crc, np.ascontiguousarray(rows).reshape(-1).view(np.uint8))
                if start + len(rows) == self.rows and crc != self._crc:
                    raise CorruptFileError(
                        f"reading dataset '{self.name}' of '{self._file.path}': checksum mismatch: got {crc:#010x},"
                        f" expected {self._crc:#010x}; the file is damaged, copy it again from its source"
                    )
            yield rows

    def take(self, rows: Array) -> Array:
        """Copy the rows of these int64 numbers [n]."""
        if not len(rows) or not self.row_bytes:
            return np.zeros((len(rows), *self.row_shape), self.dtype)
        if self._offset is not None:
            mapped = self._file.map()
            if self._file.bytes.remote:
                offsets = self._offset + np.asarray(rows, np.int64) * self.row_bytes
                runs = take_runs(self._file.bytes, mapped, offsets, self.row_bytes)
                return np.ndarray((len(runs), *self.row_shape), self.dtype, buffer=runs)
            whole: Array = np.ndarray((self.rows, *self.row_shape), self.dtype, buffer=mapped, offset=self._offset)
            return whole[rows]
        # Each HDF5 chunk that is touched is read once.
        block = self._chunk_rows or max(1, BLOCK_BYTES // self.row_bytes)
        result = np.empty((len(rows), *self.row_shape), self.dtype)
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        starts = np.flatnonzero(np.diff(ordered // block, prepend=-1))
        for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(rows)], strict=True):
            at = int(ordered[first]) // block * block
            read = self._through_h5py(at, min(at + block, self.rows))
            result[order[first:last]] = read[ordered[first:last] - at]
        return result

    def read(self) -> Array:
        """Return the whole dataset, checked, in its own shape."""
        pieces = list(self.chunks(max(1, BLOCK_BYTES // max(1, self.row_bytes))))
        whole = np.concatenate(pieces) if pieces else np.zeros((0, *self.row_shape), self.dtype)
        return whole.reshape(self.shape)

    def _contiguous_offset(self, stored: np.dtype[Any]) -> int | None:
        """Return where the dataset's bytes lie in the file as they are in memory, or None if they do not."""
        plain = self._dataset.chunks is None and not self._dataset.external and not self._dataset.is_virtual
        if not plain or not stored.isnative or stored.kind not in "iufcb" or stored.hasobject:
            return None
        if self._dataset.id.get_storage_size() != self.size:
            return None
        offset = self._dataset.id.get_offset()
        return None if offset is None else int(offset)

    def _check_sizes(self) -> None:
        doing = f"opening dataset '{self.name}' of '{self._file.path}'"
        # Not that of an external link. Asked of the library itself: `Dataset.file` makes an object each time.
        linked = self._file.h5py.h5i.get_file_id(self._dataset.id) != self._file.file.id
        if linked or self._dataset.is_virtual or self._dataset.external:
            raise BadInputError(f"{doing}: its rows lie in other files; copy them into one, as `h5repack` does")
        if self._offset is not None and self._offset + self.size > self._file.size:
            raise CorruptFileError(
                f"{doing}: got a file of {self._file.size} bytes, expected {self._offset + self.size} or more; it is"
                " truncated, copy it again"
            )
        if self._chunk_rows:
            chunk = math.prod(self._dataset.chunks) * self._stored.itemsize
            if chunk > self._file.options.memory:
                raise BadInputError(
                    f"{doing}: got HDF5 chunks of {chunk} bytes, expected at most {self._file.options.memory}, the"
                    " --memory that may be used; give more, or `h5repack` the file with smaller chunks"
                )
            expected = math.prod(
                -(-size // length) for size, length in zip(self.shape, self._dataset.chunks, strict=True)
            )
            got = self._dataset.id.get_num_chunks()
            if got != expected:
                raise CorruptFileError(
                    f"{doing}: got {got} chunks of rows, expected {expected}; it was written in part, write it again"
                )
        elif self._offset is None and self.size > max(1 << 16, self._file.size):
            raise CorruptFileError(
                f"{doing}: got no bytes for its {self.rows} rows; it was written in part, write it again"
            )

    def _runs(self, chunk_rows: int) -> Iterator[tuple[int, Array]]:
        if self._offset is not None:
            for start in range(0, self.rows, chunk_rows):
                yield start, self._copy(start, min(start + chunk_rows, self.rows))
            return
        block = max(1, BLOCK_BYTES // self.row_bytes)
        if self._chunk_rows:  # each HDF5 chunk is read once
            block = max(block // self._chunk_rows, 1) * self._chunk_rows
        blocks = (self._through_h5py(at, min(at + block, self.rows)) for at in range(0, self.rows, block))
        start = 0
        for rows in rechunk(blocks, chunk_rows):
            yield start, rows
            start += len(rows)

    def _through_h5py(self, start: int, stop: int) -> Array:
        with self._file.reading(f"dataset '{self.name}', rows {start} to {stop},"):
            rows: Array = self._dataset[start:stop] if self.shape else np.asarray(self._dataset[()]).reshape(1)
        rows = np.ascontiguousarray(rows, self._stored)
        return rows if self.dtype == self._stored else rows.view(self.dtype)

    def _copy(self, start: int, stop: int) -> Array:
        assert self._offset is not None
        rows = np.empty((stop - start, *self.row_shape), self.dtype)
        view = rows.reshape(-1).view(np.uint8)
        at = self._offset + start * self.row_bytes
        with self._file.bytes.held(at, at + view.size, self._offset + self.size):
            done, _ = _checked_io.read(self._file.descriptor, view, at, check=False)
        if done < view.size:
            raise CorruptFileError(
                f"reading dataset '{self.name}' of '{self._file.path}': the file ends at byte {at + done}; it was"
                " cut while it was read, copy it again"
            )
        return rows


def child_of(group: Any, name: str) -> Any:
    """Return what is at a path in a group, None if there is no such link, or if it leads nowhere.

    `Group.get` and `Group.items` of h5py say None of what is there and cannot be opened, too: a damaged object would be
    no object.

    Raises:
        OSError: it is there, and its header is damaged.
    """
    import h5py

    at, _, rest = name.partition("/")
    link = at.encode(errors="surrogateescape")
    if not group.id.links.exists(link):
        return None
    kind = group.id.links.get_info(link).type
    if kind != h5py.h5l.TYPE_HARD:
        return group.get(name)
    try:
        child = group[at]
    except KeyError as error:
        raise OSError(f"'{at}' in '{group.name}': {reason_of(error)}") from error
    if not rest:
        return child
    return child_of(child, rest) if isinstance(child, h5py.Group) else None


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of HDF5 that holds a number: itself, or an integer of its size for those of `ml_dtypes`."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" or dtype.name.startswith("float8") else dtype


def note_dtype(dataset: Any, dtype: np.dtype[Any]) -> None:
    """Say in an attribute what the numbers are, where HDF5 has no such type."""
    if stored_dtype(dtype) != dtype:
        dataset.attrs["dtype"] = dtype.name  # for others; we do not read it


def string_checksum(strings: Array) -> int:
    """Return a checksum of strings and their lengths."""
    crc = 0
    for one in strings.reshape(-1):
        crc = extend(extend(crc, len(one).to_bytes(8, "little")), one)
    return crc


def attribute(owner: Any, name: str, doing: str) -> Any:
    """Return an attribute, None if there is none.

    One of variable length lies in the file's global heap, which has no checksum, and a damaged heap keeps the HDF5
    library busy for ever: it is not read. Others lie in the header of their object, which has one.
    """
    attributes = owner.attrs
    if name not in attributes:
        return None
    found = attributes.get_id(name)
    kind = found.dtype.kind
    if kind == "O":
        raise CorruptFileError(
            f"{doing}: attribute '{name}' of '{owner.name}' is of variable length, expected a fixed one; write it again"
        )
    if kind not in "Su" or found.shape != () or not found.get_storage_size():
        return attributes[name]
    value = np.zeros((), found.dtype)  # of those of ours there may be thousands: they are opened once
    found.read(value)
    return value[()]


def check_heap(file: HDF5File, dataset: Any, doing: str) -> None:
    """Check the parts of the global heap that hold a dataset's strings, before the HDF5 library walks through them.

    An element is its length (4 bytes), the address of a collection (8) and a number in it (4). A collection is "GCOL",
    version (1 byte), zeros (3), its size (8), and objects: number (2), references (2), zeros (4), size (8), bytes up to
    a multiple of 8. Number 0 is free space, whose size counts its own header. Format: "Disk Format: Level 1E - Global
    Heap", https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
    """
    if dataset.dtype.kind != "O" or not dataset.size:
        return
    offset, size = dataset.id.get_offset(), 16 * int(dataset.size)
    if offset is None or offset + size > file.size:
        raise CorruptFileError(f"{doing}: its strings are not in one run of the file; write it again")
    elements = np.frombuffer(file.pread(size, offset), [("n", "<u4"), ("at", "<u8"), ("number", "<u4")])
    for at in np.unique(elements["at"]).tolist():
        head = file.pread(16, at) if 0 < at < file.size else b""
        end = at + int.from_bytes(head[8:16], "little")
        here = at + 16
        sound = head[:4] == b"GCOL" and here <= end <= file.size
        while sound and here + 16 <= end:
            header = file.pread(16, here)
            length = int.from_bytes(header[8:16], "little")
            step = 16 + -(-length // 8) * 8 if header[:2] != b"\0\0" else length
            sound = step >= 16 and here + step <= end
            here += step
        if at and not sound:
            raise CorruptFileError(f"{doing}: its strings' heap at byte {at} is damaged, copy the file again")


def text_of(attribute: Any) -> str | bytes:
    """Return an attribute as text."""
    return attribute if isinstance(attribute, str | bytes) else str(attribute)


def reason_of(error: BaseException) -> str:
    """Return what an error of h5py says, on one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def import_h5py(doing: str) -> Any:
    """Return h5py; raises `MissingDependencyError` if it is not installed."""
    try:
        import h5py
    except ImportError:
        raise MissingDependencyError(
            f"{doing}: HDF5 needs h5py, which is not installed; run `pip install 'kvtools[formats]'`"
        ) from None
    return h5py
