"""HDF5: a group per table, in it a group per part with a dataset per column; and groups of datasets from elsewhere.

The layout is specified in `docs/dialects/hdf5.md`; this file reads and writes version 1 of it. Uncompressed columns
are contiguous: HDF5 says where in the file they lie, and their bytes are read and written past it, by any thread or
process, at the speed of the disk. Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import kvtools._checked_io as _checked_io
from kvtools.dialects.bundle.checksum import extend, of_runs
from kvtools.dialects.bundle.writer import Region, Runs
from kvtools.dialects.bundle_output import BundleShard, plain_columns
from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.column_table import ColumnTable, Part
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.rechunk import rechunk
from kvtools.dialects.safe_name import safe_name
from kvtools.dialects.schema import SlotSchema, TableSchema, VariableSchema, numpy_dtype
from kvtools.dialects.table_record import (
    COUNTER_DTYPES,
    KEY_DTYPES,
    VALUE_DTYPES,
    is_count,
    json_object,
    table_json,
    table_schema,
)
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter, WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, MissingDependencyError, UsageError

NAME = "hdf5"

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SIGNATURE_AT = (0, *(512 << power for power in range(16)))
_VERSION = ("v110", "v110")  # HDF5 1.10, of 2016: its metadata have checksums
_ALIGNMENT = 64
_ATTRIBUTE = "kvtools"
_CHECKSUM = "crc32c"
_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 2 << 20
_LEVEL = 4

_KEYS = ("keys", "key", "ids", "id")
_VALUES = ("values", "value", "embeddings", "embedding", "vectors", "weights")
_FREQS = ("freqs", "freq", "frequencies", "counts", "count")
_VERSIONS = ("versions", "version")
_GROUPS_SEEN = 100_000
_NEEDED = (
    "a kvtools HDF5 file has an attribute 'kvtools' and a group 'tables'; of others kvtools reads groups with a"
    f" dataset of integer keys [n] ({', '.join(_KEYS)}) beside one of values [n, dim] ({', '.join(_VALUES)})"
)


def sniff(source: Source) -> bool:
    """Tell whether a source is an HDF5 file: its signature is at byte 0, 512, 1024, 2048, ..."""
    if source.is_url:
        return False
    try:
        with source.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return any(os.pread(file.fileno(), 8, at) == _SIGNATURE for at in _SIGNATURE_AT if at < size)
    except OSError:
        return False


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables and variables of an HDF5 file of ours, or what of another one looks like tables.

    Raises:
        BadInputError: there is no table in it, or it is of a later layout.
        CorruptFileError: it is damaged, or its datasets do not fit together.
    """
    file = _File(source.path, options)
    tables: dict[str, TableReader] = {}
    broken: dict[str, KvtoolsError] = {}
    variables: dict[str, tuple[VariableSchema, Any]] = {}

    def add(name: str, open_table: Callable[[], TableReader]) -> None:
        try:
            with file.reading(f"table '{name}'"):
                table = open_table()
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[name] = error
            return
        if table.schema.name in tables:
            raise CorruptFileError(
                f"opening '{file.path}': two tables are called '{table.schema.name}'; write it again"
            )
        tables[table.schema.name] = table

    with file.reading():
        if file.is_ours():
            for name, group in file.groups("tables"):
                add(name, lambda group=group: _open_table(file, group))  # type: ignore[misc]
            variables = _variables(file)
        else:
            for group in file.all_groups():
                if _pick(group, _KEYS) and _pick(group, _VALUES):
                    add(group.name, lambda group=group: _open_stranger(file, group))  # type: ignore[misc]
            if not tables and not broken:
                raise BadInputError(f"opening '{file.path}' as HDF5: got no table in it; {_NEEDED}")

    def read_variable(name: str) -> Iterator[Array]:
        yield from _variable_chunks(file, *variables[name])

    schemas = tuple(schema for schema, _ in variables.values())
    return Checkpoint(source.path, NAME, tables, schemas, read_variable, broken=broken)


class _File:
    """An HDF5 file opened for reading, by h5py and, for the bytes of contiguous datasets, as it is."""

    def __init__(self, path: Path, options: OpenOptions) -> None:
        self.path = path
        self.options = options
        self.h5py = _h5py(f"opening '{path}'")
        self._mapped: mmap.mmap | None = None
        self._mapping = threading.Lock()
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self.descriptor).st_size
            # Not locked: a checkpoint may lie on a file system without locks, and nothing is written.
            self.file = self.h5py.File(path, "r", locking=False)
        except OSError as error:
            raise CorruptFileError(
                f"opening '{path}' as HDF5: {_reason(error)}; the file is truncated or damaged, copy it again"
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
                f"reading {what} of '{self.path}': {_reason(error)}; the file is damaged, copy it again"
            ) from error

    def is_ours(self) -> bool:
        """Tell whether the file is in our layout; raises `BadInputError` if that is of a later version."""
        doing = f"opening '{self.path}'"
        if _ATTRIBUTE not in self.file.attrs:
            return False
        record = json_object(_text(_attribute(self.file, _ATTRIBUTE, doing)), doing)
        layout = record.get("layout")
        if not is_count(layout) or layout != 1:
            raise BadInputError(f"opening '{self.path}': got HDF5 layout {layout!r}, expected 1; update kvtools")
        return True

    def groups(self, name: str) -> Iterator[tuple[str, Any]]:
        """Yield the groups in group `name` of the root."""
        parent = self.file.get(name, {})
        if isinstance(parent, self.h5py.Dataset):
            raise CorruptFileError(f"reading the groups of '{self.path}': '/{name}' is a dataset; write it again")
        for child, group in parent.items():
            if isinstance(group, self.h5py.Group):
                yield child, group

    def all_groups(self) -> Iterator[Any]:
        """Yield every group of this file once, the root first; links to elsewhere are not followed."""
        seen: set[Any] = set()
        waiting = [self.file["/"]]
        while waiting and len(seen) < _GROUPS_SEEN:
            group = waiting.pop()
            address = self.h5py.h5o.get_info(group.id).addr
            if address in seen:
                continue
            seen.add(address)
            yield group
            children = [
                group[name]
                for name in group
                if isinstance(group.get(name, getlink=True), self.h5py.HardLink)
                and group.get(name, getclass=True) is self.h5py.Group
            ]
            waiting += reversed(children)

    def map(self) -> mmap.mmap:
        """Return the mapped file."""
        with self._mapping:
            if self._mapped is None:
                self._mapped = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
            return self._mapped


class DatasetColumn:
    """A dataset as a column: row i is [row_shape]; see `kvtools.dialects.column.Column`.

    `dtype` is what its numbers are, where HDF5 has no such type and they are stored as integers of the same size.
    """

    def __init__(self, file: _File, dataset: Any, dtype: np.dtype[Any] | None = None) -> None:
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
        crc = _attribute(dataset, _CHECKSUM, f"opening dataset '{dataset.name}' of '{file.path}'")
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
            mapped: Array = np.ndarray(
                (self.rows, *self.row_shape), self.dtype, buffer=self._file.map(), offset=self._offset
            )
            return mapped[rows]
        # Each HDF5 chunk that is touched is read once.
        block = self._chunk_rows or max(1, _BLOCK_BYTES // self.row_bytes)
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
        pieces = list(self.chunks(max(1, _BLOCK_BYTES // max(1, self.row_bytes))))
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
        linked = self._dataset.file != self._file.file  # an external link led there
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
        block = max(1, _BLOCK_BYTES // self.row_bytes)
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
        done, _ = _checked_io.read(self._file.descriptor, view, at, check=False)
        if done < view.size:
            raise CorruptFileError(
                f"reading dataset '{self.name}' of '{self._file.path}': the file ends at byte {at + done}; it was"
                " cut while it was read, copy it again"
            )
        return rows


def _open_table(file: _File, group: Any) -> TableReader:
    doing = f"opening table '{group.name}' of '{file.path}'"
    if _ATTRIBUTE not in group.attrs:
        raise CorruptFileError(f"{doing}: it has no attribute '{_ATTRIBUTE}'; the file was written in part")
    schema = table_schema(_text(_attribute(group, _ATTRIBUTE, doing)), NAME, doing)

    def column(part: Any, name: str, dtype: str, shape: tuple[int, ...]) -> DatasetColumn:
        dataset = part.get(name)
        if not isinstance(dataset, file.h5py.Dataset):
            raise CorruptFileError(
                f"{doing}: got no dataset '{part.name}/{name}', which its description tells of; write it again"
            )
        wanted = numpy_dtype(dtype)
        stored = _stored_dtype(wanted)
        if dataset.dtype != stored or dataset.shape != shape:
            raise CorruptFileError(
                f"{doing}: got dataset '{dataset.name}' of {dataset.dtype} {list(dataset.shape or ())}, expected"
                f" {stored} {list(shape)}, as its description says; write it again"
            )
        return DatasetColumn(file, dataset, wanted)

    parts = []
    for number, rows in enumerate(schema.part_rows):
        part = group.get(f"part_{number}")
        if not isinstance(part, file.h5py.Group):
            raise CorruptFileError(
                f"{doing}: got no group 'part_{number}', expected {schema.parts} parts; write it again"
            )
        parts.append(
            Part(
                rows,
                column(part, "keys", schema.key_dtype, (rows,)),
                column(part, "values", schema.value_dtype, (rows, schema.dim)),
                {
                    slot.name: column(part, f"slots/{safe_name(slot.name)}", slot.dtype, (rows, slot.width))
                    for slot in schema.slots
                },
                column(part, "freqs", schema.freq_dtype, (rows,)) if schema.freq_dtype else None,
                column(part, "versions", schema.version_dtype, (rows,)) if schema.version_dtype else None,
            )
        )
    extras = {
        extra.name: column(group, f"extras/{safe_name(extra.name)}", extra.dtype, extra.shape)
        for extra in schema.extras
    }
    return ColumnTable(dataclasses.replace(schema, checksums="CRC-32C"), parts, extras=extras)


def _open_stranger(file: _File, group: Any) -> TableReader:
    """Open a group of another program's file that has keys and values."""
    doing = f"opening group '{group.name}' of '{file.path}' as a table"
    keys, values = _pick(group, _KEYS), _pick(group, _VALUES)
    notes = [f"keys are dataset '{keys.name}', values dataset '{values.name}', by their names and shapes"]
    key_column, decode = DatasetColumn(file, keys), None
    rows = key_column.rows
    if keys.dtype.kind not in "iu" or key_column.shape not in ((rows,), (rows, 1)):
        raise BadInputError(
            f"{doing}: '{keys.name}' is {keys.dtype} {list(keys.shape)}, expected integers of shape [n]; {_NEEDED}"
        )
    key_dtype = key_column.dtype.name
    if key_dtype not in KEY_DTYPES:
        notes.append(f"keys are stored as {key_dtype} and read as int64")
        key_dtype = "int64"
    if key_dtype != key_column.dtype.name or key_column.row_shape:

        def decode(stored: Array) -> Array:
            return stored.reshape(-1).astype(key_dtype, copy=False)

    value_column = DatasetColumn(file, values)
    dim = int(np.prod(value_column.row_shape, dtype=np.int64))
    if value_column.dtype.name not in VALUE_DTYPES or len(value_column.row_shape) != 1 or not dim:
        raise BadInputError(
            f"{doing}: '{values.name}' is {values.dtype} {list(values.shape)}, expected [n, dim] of"
            f" {' or '.join(VALUE_DTYPES)}"
        )
    if value_column.rows != rows:
        raise BadInputError(
            f"{doing}: '{keys.name}' has {rows} rows and '{values.name}' {value_column.rows}, expected as many; they do"
            " not belong together"
        )

    def counter(names: Sequence[str]) -> DatasetColumn | None:
        found = _pick(group, names)
        return DatasetColumn(file, found) if found and _is_counter(found, rows) else None

    freqs, versions = counter(_FREQS), counter(_VERSIONS)
    taken = {column.name for column in (key_column, value_column, freqs, versions) if column}
    slots: dict[str, DatasetColumn] = {}
    left = []
    for name, dataset in group.items():
        if not isinstance(dataset, file.h5py.Dataset) or dataset.name in taken:
            continue
        shape: tuple[int, ...] = tuple(dataset.shape or ())
        if len(shape) == 2 and shape[0] == rows and 0 not in shape[1:] and dataset.dtype.name in VALUE_DTYPES:
            slots[name] = DatasetColumn(file, dataset)
        else:
            left.append(name)
    if slots:
        notes.append(f"datasets of a row per key are read as slots: {', '.join(slots)}")
    if left:
        notes.append(f"datasets left aside: {', '.join(left)}")
    schema = TableSchema(
        name=group.name.strip("/") or file.path.stem,
        dialect=NAME,
        key_dtype=key_dtype,
        value_dtype=value_column.dtype.name,
        dim=dim,
        part_rows=(rows,),
        slots=tuple(SlotSchema(name, slot.row_shape[0], slot.dtype.name) for name, slot in slots.items()),
        freq_dtype=freqs.dtype.name if freqs else None,
        version_dtype=versions.dtype.name if versions else None,
        checksums="Fletcher-32" if keys.fletcher32 and values.fletcher32 else None,
        notes=tuple(notes),
        bytes=sum(
            column.size for column in (key_column, value_column, freqs, versions, *slots.values()) if column is not None
        ),
    )
    return ColumnTable(schema, [Part(rows, key_column, value_column, slots, freqs, versions)], decode)


def _pick(group: Any, names: Sequence[str]) -> Any:
    """Return the first dataset of a group that is called so, or None."""
    for name in names:
        dataset: Any = group.get(name) if name in group else None
        if hasattr(dataset, "chunks") and dataset.shape:
            return dataset
    return None


def _is_counter(dataset: Any, rows: int) -> bool:
    return dataset.shape == (rows,) and dataset.dtype.name in COUNTER_DTYPES


def _variables(file: _File) -> dict[str, tuple[VariableSchema, Any]]:
    found: dict[str, tuple[VariableSchema, Any]] = {}
    group = file.file.get("variables")
    for link, dataset in group.items() if isinstance(group, file.h5py.Group) else ():
        doing = f"opening variable '{link}' of '{file.path}'"
        if not isinstance(dataset, file.h5py.Dataset) or _ATTRIBUTE not in dataset.attrs:
            raise CorruptFileError(f"{doing}: it has no attribute '{_ATTRIBUTE}'; the file was written in part")
        record = json_object(_text(_attribute(dataset, _ATTRIBUTE, doing)), doing)
        name, dtype = record.get("name"), record.get("dtype")
        if not isinstance(name, str) or not isinstance(dtype, str) or dataset.shape is None:
            raise CorruptFileError(f"{doing}: its description lacks a name or type; the file is damaged, copy it again")
        if dtype == "string":
            size = int(_attribute(dataset, "bytes", doing) or 0)
        else:
            with contextlib.suppress(TypeError):
                if dataset.dtype != _stored_dtype(numpy_dtype(dtype)):
                    raise CorruptFileError(
                        f"{doing}: got {dataset.dtype}, expected {dtype} as its description says; write it again"
                    )
            size = DatasetColumn(file, dataset, numpy_dtype(dtype)).size
        found[name] = VariableSchema(name, dtype, tuple(dataset.shape), size), dataset
    return found


def _variable_chunks(file: _File, schema: VariableSchema, dataset: Any) -> Iterator[Array]:
    if schema.dtype != "string":
        column = DatasetColumn(file, dataset, numpy_dtype(schema.dtype))
        if not schema.shape or not column.row_bytes:
            yield column.read()
            return
        yield from column.chunks(max(1, _BLOCK_BYTES // column.row_bytes))
        return
    doing = f"reading variable '{schema.name}' of '{file.path}'"
    with file.reading(f"variable '{schema.name}'"):
        _check_heap(file, dataset, doing)
        read = np.asarray(dataset[()], object)
    strings = np.empty(schema.shape, object)
    strings.reshape(-1)[:] = [one if isinstance(one, bytes) else np.asarray(one).tobytes() for one in read.reshape(-1)]
    expected = _attribute(dataset, _CHECKSUM, doing)
    if expected is not None and int(expected) != _string_checksum(strings):
        raise CorruptFileError(f"{doing}: checksum mismatch; the file is damaged, copy it again")
    yield strings


class HDF5Shard(ShardWriter):
    """Compresses the rows of whole parts, an HDF5 chunk at a time."""

    def __init__(self, table: ChunkedTableWriter) -> None:
        self._table = table
        self._parts: dict[tuple[int, str], _ChunkedColumn] = {}

    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Write a chunk; see `ShardWriter.write`."""
        for name, rows in plain_columns(chunk).items():
            if (part, name) not in self._parts:
                self._parts[part, name] = _ChunkedColumn(self._table.datasets[part, name], self._table.level)
            self._parts[part, name].append(rows)

    def finish(self) -> None:
        """Write the rows that make no whole chunk."""
        for column in self._parts.values():
            column.close()


class _ChunkedColumn:
    """A chunked dataset being filled from its first row to its last."""

    def __init__(self, dataset: Any, level: int | None) -> None:
        self._dataset = dataset
        self._level = level
        self._length = int(dataset.chunks[0]) if dataset.chunks else 0
        self._held: list[Array] = []
        self._count = self._row = self._crc = 0

    def append(self, rows: Array) -> None:
        rows = np.ascontiguousarray(rows)
        self._crc = extend(self._crc, rows.reshape(-1).view(np.uint8))
        while len(rows):
            piece = rows[: self._length - self._count]
            rows = rows[len(piece) :]
            # What waits for a whole chunk is copied: the caller may give views of something larger.
            self._held.append(piece if len(piece) == self._length else piece.copy())
            self._count += len(piece)
            if self._count == self._length:
                self._flush()

    def close(self) -> None:
        if self._count:
            self._flush()
        self._dataset.attrs[_CHECKSUM] = np.uint32(self._crc)

    def _flush(self) -> None:
        rows = self._held[0] if len(self._held) == 1 else np.concatenate(self._held)
        if self._level is None:
            stored = rows.view(self._dataset.dtype) if rows.dtype != self._dataset.dtype else rows
            self._dataset[self._row : self._row + len(rows)] = stored
        else:
            # Compressed here and not by HDF5, which works on one chunk at a time for the whole process.
            padded = np.zeros((self._length, *rows.shape[1:]), rows.dtype)
            padded[: len(rows)] = rows
            shuffled = np.ascontiguousarray(padded.reshape(-1).view(np.uint8).reshape(-1, rows.itemsize).T)
            data = zlib.compress(shuffled.data, self._level)
            from h5py._objects import phil

            with phil:  # h5py takes its lock in every call but, up to 3.15, this one
                self._dataset.id.write_direct_chunk((self._row, *[0] * (rows.ndim - 1)), data)
        self._row += len(rows)
        self._held, self._count = [], 0


class _Hdf5TableWriter(TableWriter):
    """A table of an HDF5 file being written: its groups, its description, its extras."""

    def __init__(self, file: Any, schema: TableSchema) -> None:
        self._file = file
        self._schema = schema
        self.group = file.require_group("tables").create_group(safe_name(schema.name))
        self.group.attrs[_ATTRIBUTE] = np.bytes_(table_json(schema))
        if schema.extras:
            self.group.create_group("extras")
        for part, rows in enumerate(schema.part_rows):
            group = self.group.create_group(f"part_{part}")
            self._column(part, group, "keys", "keys", schema.key_dtype, (rows,))
            self._column(part, group, "values", "values", schema.value_dtype, (rows, schema.dim))
            if schema.freq_dtype:
                self._column(part, group, "freqs", "freqs", schema.freq_dtype, (rows,))
            if schema.version_dtype:
                self._column(part, group, "versions", "versions", schema.version_dtype, (rows,))
            slots = group.create_group("slots") if schema.slots else None
            for slot in schema.slots:
                path = f"slot:{slot.name}"
                self._column(part, slots, path, safe_name(slot.name), slot.dtype, (rows, slot.width))

    def _column(self, part: int, group: Any, column: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        raise NotImplementedError

    def extra(self, name: str, array: Array) -> None:
        """Write an extra array."""
        extra = next(extra for extra in self._schema.extras if extra.name == name)
        array = np.ascontiguousarray(array, numpy_dtype(extra.dtype)).reshape(extra.shape)
        dataset = _contiguous(self.group["extras"], safe_name(name), array.dtype, extra.shape)
        if array.size:
            dataset[...] = array.view(_stored_dtype(array.dtype))
        dataset.attrs[_CHECKSUM] = np.uint32(extend(0, array.reshape(-1).view(np.uint8)))


class ContiguousTableWriter(_Hdf5TableWriter):
    """A table whose rows are written straight to their places in the file, by any thread or process."""

    random_access: ClassVar[bool] = True
    distributable: ClassVar[bool] = True

    def __init__(self, file: Any, path: str, schema: TableSchema) -> None:
        self._path = path
        self._regions: dict[tuple[int, str], list[Region]] = {}
        self._datasets: dict[str, Any] = {}
        self._runs: dict[str, Runs] = {}
        super().__init__(file, schema)

    def _column(self, part: int, group: Any, column: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        dataset = _contiguous(group, name, numpy_dtype(dtype), shape)
        self._datasets[dataset.name] = dataset
        offset = dataset.id.get_offset() or 0
        region = Region(dataset.name, self._path, offset, shape[0], shape[1:], numpy_dtype(dtype))
        self._regions[part, column] = [region]

    def shard(self) -> BundleShard:
        """Return a writer for one task."""
        return BundleShard(self._path, self._regions, plain_columns)

    def absorb(self, result: Any) -> None:
        """Take over what a shard wrote."""
        for name, runs in result.items():
            self._runs.setdefault(name, []).extend(runs)

    def close(self) -> None:
        """Write the checksums of all columns."""
        for (region,) in self._regions.values():
            runs = sorted(self._runs.get(region.name, []))
            if sum(count for _, count, _ in runs) != region.rows:
                raise ValueError(f"writing '{region.name}': not all of its {region.rows} rows were written")
            crc = of_runs((crc, count * region.row_bytes) for _, count, crc in runs)
            self._datasets[region.name].attrs[_CHECKSUM] = np.uint32(crc)


class ChunkedTableWriter(_Hdf5TableWriter):
    """A table whose parts are each compressed by one shard."""

    def __init__(self, file: Any, schema: TableSchema, compression: str, level: int, batch_rows: int | None) -> None:
        self.level = level if compression == "gzip" else None
        self.datasets: dict[tuple[int, str], Any] = {}
        self._batch_rows = batch_rows
        super().__init__(file, schema)

    def _column(self, part: int, group: Any, column: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        wanted = numpy_dtype(dtype)
        stored = _stored_dtype(wanted)
        if shape[0] == 0:
            self.datasets[part, column] = _contiguous(group, name, wanted, shape)
            return
        width = max(1, wanted.itemsize * math.prod(shape[1:]))
        length = min(shape[0], self._batch_rows or max(1, _CHUNK_BYTES // width))
        filters: dict[str, Any] = {"compression": "lzf", "fletcher32": True}
        if self.level is not None:
            filters = {"compression": "gzip", "compression_opts": self.level}
        dataset = group.create_dataset(
            name, shape, stored, chunks=(length, *shape[1:]), shuffle=True, fill_time="never", **filters
        )
        _note_dtype(dataset, wanted)
        self.datasets[part, column] = dataset

    def shard(self) -> HDF5Shard:
        """Return a writer for one task."""
        return HDF5Shard(self)

    def close(self) -> None:
        """End the table; its shards have written it."""


class Writer(CheckpointWriter):
    """Writes the layout to one file."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        h5py = _h5py(f"writing '{staging}'")
        self._compression = options.compression or "none"
        if self._compression not in ("none", "gzip", "lzf"):
            raise UsageError(f"got --compression {self._compression}, expected none, gzip or lzf for HDF5")
        level = options.compression_level
        if level is not None and (self._compression != "gzip" or not 0 <= level <= 9):
            raise UsageError(f"got --compression-level {level}, expected 0 to 9, with --compression gzip, for HDF5")
        self._level = _LEVEL if level is None else level
        self._batch_rows = options.batch_rows
        self._path = staging
        self._file = h5py.File(
            staging, "w", libver=_VERSION, alignment_threshold=512, alignment_interval=_ALIGNMENT, track_order=True
        )
        self._string, self._bytes = h5py.string_dtype("ascii"), h5py.vlen_dtype(np.uint8)
        self._file.attrs[_ATTRIBUTE] = np.bytes_(json.dumps({"layout": 1}))
        for name in ("tables", "variables"):
            self._file.create_group(name, track_order=True)

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> _Hdf5TableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        if self._compression == "none":
            return ContiguousTableWriter(self._file, self._path, schema)
        return ChunkedTableWriter(self._file, schema, self._compression, self._level, self._batch_rows)

    def variable(self, schema: VariableSchema, chunks: Iterable[Array]) -> None:
        """Write a dense variable, uncompressed."""
        group, name = self._file["variables"], safe_name(schema.name)
        if schema.dtype == "string":
            strings = np.empty(schema.shape, object)
            for array in chunks:
                strings[...] = array
            plain = all(b"\0" not in one for one in strings.reshape(-1))
            dataset = group.create_dataset(name, schema.shape, self._string if plain else self._bytes)
            for at in np.ndindex(strings.shape):
                dataset[at] = strings[at] if plain else np.frombuffer(strings[at], np.uint8)
            dataset.attrs["bytes"] = sum(len(one) for one in strings.reshape(-1))
            crc = _string_checksum(strings)
        else:
            dtype = numpy_dtype(schema.dtype)
            dataset = _contiguous(group, name, dtype, schema.shape)
            row = crc = 0
            for array in chunks:
                if not array.size:
                    continue
                array = np.ascontiguousarray(array, dtype)
                crc = extend(crc, array.reshape(-1).view(np.uint8))
                stored = array.view(_stored_dtype(dtype))
                if schema.shape:
                    dataset[row : row + len(array)] = stored
                    row += len(array)
                else:
                    dataset[()] = stored
        dataset.attrs[_ATTRIBUTE] = np.bytes_(json.dumps({"name": schema.name, "dtype": schema.dtype}))
        dataset.attrs[_CHECKSUM] = np.uint32(crc)

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def abort(self) -> None:
        """Close the file."""
        with contextlib.suppress(Exception):
            self._file.close()


def _contiguous(group: Any, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Make a dataset whose place in the file is known from now on; its bytes are whatever is there."""
    import h5py

    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_layout(h5py.h5d.CONTIGUOUS)
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    kind = h5py.h5t.py_create(_stored_dtype(dtype), logical=True)
    dataset = h5py.Dataset(h5py.h5d.create(group.id, name.encode(), kind, h5py.h5s.create_simple(shape), plan))
    _note_dtype(dataset, dtype)
    return dataset


def _stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of HDF5 that holds a number: itself, or an integer of its size for those of `ml_dtypes`."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" or dtype.name.startswith("float8") else dtype


def _note_dtype(dataset: Any, dtype: np.dtype[Any]) -> None:
    if _stored_dtype(dtype) != dtype:
        dataset.attrs["dtype"] = dtype.name  # for others; we do not read it


def _string_checksum(strings: Array) -> int:
    crc = 0
    for one in strings.reshape(-1):
        crc = extend(extend(crc, len(one).to_bytes(8, "little")), one)
    return crc


def _attribute(owner: Any, name: str, doing: str) -> Any:
    """Return an attribute, None if there is none.

    One of variable length lies in the file's global heap, which has no checksum, and a damaged heap keeps the HDF5
    library busy for ever: it is not read. Others lie in the header of their object, which has one.
    """
    if name not in owner.attrs:
        return None
    if owner.attrs.get_id(name).dtype.kind == "O":
        raise CorruptFileError(
            f"{doing}: attribute '{name}' of '{owner.name}' is of variable length, expected a fixed one; write it again"
        )
    return owner.attrs[name]


def _check_heap(file: _File, dataset: Any, doing: str) -> None:
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
    elements = np.frombuffer(os.pread(file.descriptor, size, offset), [("n", "<u4"), ("at", "<u8"), ("number", "<u4")])
    for at in np.unique(elements["at"]).tolist():
        head = os.pread(file.descriptor, 16, at) if 0 < at < file.size else b""
        end = at + int.from_bytes(head[8:16], "little")
        here = at + 16
        sound = head[:4] == b"GCOL" and here <= end <= file.size
        while sound and here + 16 <= end:
            header = os.pread(file.descriptor, 16, here)
            length = int.from_bytes(header[8:16], "little")
            step = 16 + -(-length // 8) * 8 if header[:2] != b"\0\0" else length
            sound = step >= 16 and here + step <= end
            here += step
        if at and not sound:
            raise CorruptFileError(f"{doing}: its strings' heap at byte {at} is damaged, copy the file again")


def _text(attribute: Any) -> str | bytes:
    return attribute if isinstance(attribute, str | bytes) else str(attribute)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _h5py(doing: str) -> Any:
    try:
        import h5py
    except ImportError:
        raise MissingDependencyError(
            f"{doing}: HDF5 needs h5py, which is not installed; run `pip install 'kvtools[formats]'`"
        ) from None
    return h5py


DIALECT = Dialect(
    name=NAME,
    title="an HDF5 file",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="file",
    holds=Holds(
        key_dtypes=KEY_DTYPES,
        value_dtypes=VALUE_DTYPES,
        freq_dtypes=COUNTER_DTYPES,
        version_dtypes=COUNTER_DTYPES,
        extras=None,
        metadata=None,
        variables=True,
    ),
)
