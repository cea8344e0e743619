"""Tables and dense variables written to one HDF5 file."""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from kvtools.dialects.bundle.checksum import extend, of_runs
from kvtools.dialects.bundle.writer import Region, Runs
from kvtools.dialects.bundle_output import BundleShard, plain_columns
from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.hdf5_file import ATTRIBUTE, CHECKSUM, import_h5py, note_dtype, stored_dtype, string_checksum
from kvtools.dialects.safe_name import safe_name
from kvtools.dialects.schema import TableSchema, VariableSchema, numpy_dtype
from kvtools.dialects.table_record import (
    table_json,
)
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter, WriteOptions
from kvtools.errors import UsageError

_VERSION = ("v110", "v110")  # HDF5 1.10, of 2016: its metadata have checksums
_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 20
_LEVEL = 4


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
        self._dataset.attrs[CHECKSUM] = np.uint32(self._crc)

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
        self.group.attrs[ATTRIBUTE] = np.bytes_(table_json(schema))
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
            dataset[...] = array.view(stored_dtype(array.dtype))
        dataset.attrs[CHECKSUM] = np.uint32(extend(0, array.reshape(-1).view(np.uint8)))


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
            self._datasets[region.name].attrs[CHECKSUM] = np.uint32(crc)


class ChunkedTableWriter(_Hdf5TableWriter):
    """A table whose parts are each compressed by one shard."""

    def __init__(self, file: Any, schema: TableSchema, compression: str, level: int, batch_rows: int | None) -> None:
        self.level = level if compression == "gzip" else None
        self.datasets: dict[tuple[int, str], Any] = {}
        self._batch_rows = batch_rows
        super().__init__(file, schema)

    def _column(self, part: int, group: Any, column: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        wanted = numpy_dtype(dtype)
        stored = stored_dtype(wanted)
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
        note_dtype(dataset, wanted)
        self.datasets[part, column] = dataset

    def shard(self) -> HDF5Shard:
        """Return a writer for one task."""
        return HDF5Shard(self)

    def close(self) -> None:
        """End the table; its shards have written it."""


class Writer(CheckpointWriter):
    """Writes the layout to one file."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        h5py = import_h5py(f"writing '{staging}'")
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
        self._file.attrs[ATTRIBUTE] = np.bytes_(json.dumps({"layout": 1}))
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
            crc = string_checksum(strings)
        else:
            dtype = numpy_dtype(schema.dtype)
            dataset = _contiguous(group, name, dtype, schema.shape)
            row = crc = 0
            for array in chunks:
                if not array.size:
                    continue
                array = np.ascontiguousarray(array, dtype)
                crc = extend(crc, array.reshape(-1).view(np.uint8))
                stored = array.view(stored_dtype(dtype))
                if schema.shape:
                    dataset[row : row + len(array)] = stored
                    row += len(array)
                else:
                    dataset[()] = stored
        dataset.attrs[ATTRIBUTE] = np.bytes_(json.dumps({"name": schema.name, "dtype": schema.dtype}))
        dataset.attrs[CHECKSUM] = np.uint32(crc)

    def close(self) -> None:
        """Say how many tables and variables there are, so that one that vanishes is missed, and finish the file."""
        counts = {name: len(self._file[name]) for name in ("tables", "variables")}
        self._file.attrs[ATTRIBUTE] = np.bytes_(json.dumps({"layout": 1, **counts}))
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
    kind = h5py.h5t.py_create(stored_dtype(dtype), logical=True)
    dataset = h5py.Dataset(h5py.h5d.create(group.id, name.encode(), kind, h5py.h5s.create_simple(shape), plan))
    note_dtype(dataset, dtype)
    return dataset
