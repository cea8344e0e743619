"""Write a TensorFlow bundle of one data file, streaming, in any order.

A tensor whose shape is known gets a place in the file (`reserve`) that is filled run by run, by any thread or
process; the checksums of the runs are put together at the end. A tensor whose row count is not known is appended
(`begin`, `append`, `end`), nothing else being reserved meanwhile. Only the index entries are held in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

import kvtools._checked_io as _checked_io
from kvtools.dialects.bundle import dtypes
from kvtools.dialects.bundle.checksum import extend, masked, of_runs
from kvtools.dialects.bundle.index_table import table_bytes
from kvtools.dialects.bundle.records import (
    HEADER_KEY,
    BundleEntry,
    BundleHeader,
    encode_entry,
    encode_header,
)
from kvtools.dialects.bundle.wire import put_varint

_ALIGNMENT = 64

Runs = list[tuple[int, int, int]]
"""Runs of a tensor's rows that were written: first row, number of rows, CRC-32C of their bytes."""


@dataclass(frozen=True)
class Region:
    """The place of tensor `name` in data file `path`: `rows` rows from byte `offset` on; it can be pickled."""

    name: str
    path: str
    offset: int
    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """How many bytes one row takes."""
        return self.dtype.itemsize * math.prod(self.row_shape)


class RegionWriter:
    """Fills regions of one data file; what one task holds.

    Args:
        path: the file.
        checksum: continues a checksum of runs over bytes; CRC-32C if left out.

    Example: see `BundleWriter`.
    """

    def __init__(self, path: str, checksum: Callable[[int, Any], int] = extend) -> None:
        self._checksum = checksum
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._runs: dict[str, list[list[int]]] = {}  # by tensor, [first row, rows, crc] as they were begun
        self._at: dict[tuple[str, int], list[int]] = {}  # the run that ends at this row of the tensor

    def write(self, region: Region, start: int, rows: npt.NDArray[Any]) -> None:
        """Write rows [n, *row_shape] as rows `start` to `start + n`; raises `ValueError` if they do not fit."""
        if rows.dtype != region.dtype or rows.shape[1:] != region.row_shape or start + len(rows) > region.rows:
            raise ValueError(
                f"writing '{region.name}': got {rows.dtype} rows of shape {rows.shape[1:]} at {start},"
                f" expected {region.rows} {region.dtype} rows of shape {region.row_shape}"
            )
        if len(rows) == 0:
            return
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        run = self._at.pop((region.name, start), None)
        if run is None:
            run = [start, 0, 0]
            self._runs.setdefault(region.name, []).append(run)
        run[1] += len(rows)
        offset = region.offset + start * region.row_bytes
        if self._checksum is extend:
            run[2] = _checked_io.write(self._file, data, offset, run[2])
        else:
            write_fully(self._file, data, offset)
            run[2] = self._checksum(run[2], data)
        self._at[region.name, start + len(rows)] = run

    def finish(self) -> dict[str, Runs]:
        """Close the file; return what was written, for `BundleWriter.absorb`."""
        os.close(self._file)
        return {name: [(first, rows, crc) for first, rows, crc in runs] for name, runs in self._runs.items()}


class BundleWriter:
    """Writes `<prefix>.data-00000-of-00001`, and `<prefix>.index` when it is closed without an error.

    Example:
        >>> import tempfile
        >>> prefix = Path(tempfile.mkdtemp()) / "model.ckpt"
        >>> with BundleWriter(prefix) as writer:
        ...     writer.begin("emb-keys", np.dtype(np.int64), ())
        ...     writer.append(np.array([7, 9]))
        ...     writer.end()
        ...     region = writer.reserve("emb-values", np.dtype(np.float32), (2, 1))
        ...     shard = RegionWriter(region.path)
        ...     shard.write(region, 1, np.float32([[2]]))
        ...     shard.write(region, 0, np.float32([[1]]))
        ...     writer.absorb(shard.finish())
        >>> from kvtools.dialects.bundle.reader import Bundle
        >>> Bundle(prefix).tensor("emb-values").read().tolist()
        [[1.0], [2.0]]
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.data_path = f"{prefix}.data-00000-of-00001"
        self._file = os.open(self.data_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._entries: dict[bytes, BundleEntry] = {}
        self._regions: dict[str, Region] = {}
        self._runs: dict[str, Runs] = {}
        self._offset = 0
        self._name = ""
        self._dtype: np.dtype[Any] = np.dtype(np.uint8)
        self._row_shape: tuple[int, ...] = ()
        self._start = self._crc = 0

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def close(self) -> None:
        """Sync the data file and write the index; raises `ValueError` if a reserved tensor was not filled."""
        try:
            for region in self._regions.values():
                self._add_region(region)
            os.ftruncate(self._file, self._offset)
            os.fsync(self._file)
        finally:
            os.close(self._file)
        self._write_index()

    def abort(self) -> None:
        """Close the data file; there is no index, so no checkpoint."""
        os.close(self._file)

    def has(self, name: str) -> bool:
        """Return whether tensor `name` has a place."""
        return name in self._regions

    def reserve(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Region:
        """Give tensor `name` of `shape` [rows, ...] a place; all its rows are to be written by `RegionWriter`s."""
        self._align()
        region = Region(name, self.data_path, self._offset, shape[0], shape[1:], dtype)
        if name in self._regions:
            raise ValueError(f"writing '{self.prefix}': tensor '{name}' is written twice")
        self._regions[name] = region
        self._offset += region.rows * region.row_bytes
        return region

    def absorb(self, written: dict[str, Runs]) -> None:
        """Take over what a `RegionWriter` wrote."""
        for name, runs in written.items():
            self._runs.setdefault(name, []).extend(runs)

    def array(self, name: str, array: npt.NDArray[Any]) -> None:
        """Write a numeric tensor of any shape, a scalar included."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._align()
        write_fully(self._file, data, self._offset)
        self._add(name, dtypes.dtype_number(array.dtype), array.shape, self._offset, data.size, extend(0, data))
        self._offset += data.size

    def begin(self, name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> None:
        """Start tensor `name` of shape [rows appended, *row_shape]; its first byte is aligned to 64."""
        self._align()
        self._name, self._dtype, self._row_shape = name, dtype, row_shape
        self._start, self._crc = self._offset, 0

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Append rows [n, *row_shape] of the tensor's type; raises `ValueError` for any other."""
        if rows.dtype != self._dtype or rows.shape[1:] != self._row_shape:
            raise ValueError(
                f"appending to '{self._name}': got {rows.dtype} rows of shape {rows.shape[1:]},"
                f" expected {self._dtype} rows of shape {self._row_shape}"
            )
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        self._crc = _checked_io.write(self._file, data, self._offset, self._crc)
        self._offset += data.size

    def end(self) -> None:
        """Finish the tensor that `begin` started."""
        size = self._offset - self._start
        row_bytes = self._dtype.itemsize * math.prod(self._row_shape)
        rows = size // row_bytes if row_bytes else 0
        number = dtypes.dtype_number(self._dtype)
        self._add(self._name, number, (rows, *self._row_shape), self._start, size, self._crc)

    def string(self, name: str, value: bytes) -> None:
        """Write a scalar string tensor."""
        self.strings(name, [value], ())

    def strings(self, name: str, values: Sequence[bytes], shape: tuple[int, ...]) -> None:
        """Write a string tensor of any shape from its strings in row-major order."""
        lengths, crc = bytearray(), 0
        for value in values:
            lengths += put_varint(len(value))
            crc = extend(crc, len(value).to_bytes(4 if len(value) < 1 << 32 else 8, "little"))
        checksum = masked(crc).to_bytes(4, "little")
        text = b"".join(values)
        data = np.frombuffer(bytes(lengths) + checksum + text, np.uint8)
        write_fully(self._file, data, self._offset)
        crc = extend(extend(crc, checksum), text)
        self._add(name, dtypes.STRING, shape, self._offset, data.size, crc)
        self._offset += data.size

    def _align(self) -> None:
        self._offset += -self._offset % _ALIGNMENT

    def _add_region(self, region: Region) -> None:
        runs, row = sorted(self._runs.get(region.name, [])), 0
        for first, count, _ in runs:
            if first != row:
                break
            row += count
        if row != region.rows:
            raise ValueError(f"writing '{region.name}': rows {row} on of {region.rows} were not written once each")
        crc = of_runs((crc, count * region.row_bytes) for _, count, crc in runs)
        shape, size = (region.rows, *region.row_shape), region.rows * region.row_bytes
        self._add(region.name, dtypes.dtype_number(region.dtype), shape, region.offset, size, crc)

    def _add(self, name: str, dtype: int, shape: tuple[int, ...], offset: int, size: int, crc: int) -> None:
        key = name.encode("utf-8", "surrogateescape")
        if key in self._entries:
            raise ValueError(f"writing '{self.prefix}': tensor '{name}' is written twice")
        self._entries[key] = BundleEntry(dtype, shape, offset=offset, size=size, crc32c=masked(crc))

    def _write_index(self) -> None:
        records = [(HEADER_KEY, encode_header(BundleHeader()))]
        records += [(key, encode_entry(entry)) for key, entry in sorted(self._entries.items())]
        with Path(f"{self.prefix}.index").open("wb") as file:
            file.write(table_bytes(records))
            file.flush()
            os.fsync(file.fileno())


def write_fully(file: int, data: npt.NDArray[np.uint8], offset: int) -> None:
    """Write all of `data` at `offset` of an open file; a single call of the system may write less."""
    while len(data):
        count = os.pwrite(file, data, offset)  # type: ignore[arg-type]
        data, offset = data[count:], offset + count
