"""A column of a table, wherever its rows lie: what a tensor of a bundle and a run of a raw file have in common."""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import kvtools._checked_io as _checked_io
from kvtools.dialects.chunk import Array
from kvtools.dialects.same_file import SameFile
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.remote.stored import stored, take_runs


class Column(Protocol):
    """Rows of one type along a first dimension; row i is [row_shape]. `BundleTensor` is one."""

    @property
    def name(self) -> str:
        """What messages call the column."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its numbers."""
        ...

    @property
    def rows(self) -> int:
        """How many rows it has."""
        ...

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row; () for a column of numbers."""
        ...

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield copies of all rows in order, `chunk_rows` at a time, checking what checksums there are."""
        ...

    def take(self, rows: Array) -> Array:
        """Copy the rows of these int64 numbers [n], unchecked."""
        ...

    def read(self) -> Array:
        """Return all rows, maybe as a read-only view of a mapped file."""
        ...


class RawColumn:
    """Rows in a file of plain bytes from `offset` on, native-endian, without checksums.

    Args:
        path: the file.
        dtype: the type of its numbers.
        row_shape: the shape of one row.
        offset: the byte at which the first row begins.
        rows: how many rows there are; all that the file holds if None.

    Raises:
        BadInputError: there is no such file.
        CorruptFileError: the file is too short, or what it holds is no whole number of rows.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "keys"
        >>> np.array([7, 9]).tofile(path)
        >>> RawColumn(path, np.dtype(np.int64)).take(np.array([1])).tolist()
        [9]
    """

    direct = True
    """Whether `take` finds each row where it lies."""

    def __init__(
        self,
        path: Path,
        dtype: np.dtype[Any],
        row_shape: tuple[int, ...] = (),
        *,
        offset: int = 0,
        rows: int | None = None,
    ) -> None:
        self.path = path
        self.name = str(path)
        self.dtype = dtype
        self.row_shape = row_shape
        self.row_bytes = dtype.itemsize * math.prod(row_shape)
        self._offset = offset
        try:
            self._same = SameFile(path)
        except OSError as error:
            raise BadInputError(f"opening '{path}': {error.strerror or error}; copy every file") from error
        held = self._same.size - offset
        if rows is None:
            if held < 0 or (held % self.row_bytes if self.row_bytes else held):
                raise CorruptFileError(
                    f"opening '{path}': got {held} bytes of rows, expected a multiple of {self.row_bytes}, a row of"
                    f" {list(row_shape)} {dtype}; the file is truncated, or of another type or width"
                )
            rows = held // self.row_bytes if self.row_bytes else 0
        elif held < rows * self.row_bytes:
            raise CorruptFileError(
                f"opening '{path}': got {held} bytes of rows, expected {rows} rows of {self.row_bytes} bytes;"
                " the file is truncated, copy it again"
            )
        self.rows = rows
        self._descriptor = -1
        self._bytes = stored(path)
        self._mapped: Array | None = None
        self._opening = threading.Lock()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield copies of all rows in order; there is nothing to verify."""
        for piece in self._pieces(chunk_rows):
            self._same.check(self._file())
            yield piece

    def take(self, rows: Array) -> Array:
        """Copy the rows of these int64 numbers [n]."""
        mapped = self._map()
        if not self._bytes.remote or not self.row_bytes:
            taken: Array = mapped[rows]
            return taken
        raw = np.ndarray((self._offset + self.rows * self.row_bytes,), np.uint8, buffer=mapped.base)
        runs = take_runs(self._bytes, raw, self._offset + np.asarray(rows, np.int64) * self.row_bytes, self.row_bytes)
        return np.ndarray((len(runs), *self.row_shape), self.dtype, buffer=runs)

    def read(self) -> Array:
        """Return all rows as a read-only view of the mapped file."""
        self._bytes.keep(self._offset, self._offset + self.rows * self.row_bytes)
        return self._map()

    def _map(self) -> Array:
        size = self.rows * self.row_bytes
        if size:
            self._same.check(self._file())  # where it was cut, a map of it would end the process
        if self._mapped is None:
            data: bytes | mmap.mmap = b""
            if size:
                data = mmap.mmap(self._file(), self._offset + size, access=mmap.ACCESS_READ)
            shape = (self.rows, *self.row_shape)
            self._mapped = np.ndarray(shape, self.dtype, buffer=data, offset=self._offset if size else 0)
        return self._mapped

    def _pieces(self, rows: int) -> Iterator[Array]:
        for start in range(0, self.rows, rows):
            yield self._copy(start, min(start + rows, self.rows))

    def _copy(self, start: int, stop: int) -> Array:
        data = np.empty((stop - start, *self.row_shape), self.dtype)
        view = data.reshape(-1).view(np.uint8)
        offset = self._offset + start * self.row_bytes
        file = self._file()
        with self._bytes.held(offset, offset + view.size, self._offset + self.rows * self.row_bytes):
            done, _ = _checked_io.read(file, view, offset, check=False)
        if done < view.size:
            raise CorruptFileError(
                f"reading '{self.path}': it ends at byte {offset + done}, expected more; it was cut while it was"
                " read, copy it again"
            )
        return data

    def _file(self) -> int:
        with self._opening:
            if self._descriptor < 0:
                self._descriptor = self._same.open()
            return self._descriptor


class CheckedColumn(RawColumn):
    """A `RawColumn` whose bytes have a checksum, which is checked as its last row goes by.

    Args:
        path, dtype, row_shape, offset, rows: see `RawColumn`.
        name: what messages call the column.
        checksum: continues the checksum over bytes.
        start: the checksum of what comes before the rows.
        expected: the checksum at the end.
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype[Any],
        row_shape: tuple[int, ...],
        *,
        offset: int,
        rows: int,
        name: str,
        checksum: Callable[[int, Any], int],
        expected: int,
        start: int = 0,
    ) -> None:
        super().__init__(path, dtype, row_shape, offset=offset, rows=rows)
        self.name = name
        self._checksum = checksum
        self._start = start
        self._expected = expected

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield copies of all rows in order; raises `CorruptFileError` instead of the last if the checksum differs."""
        crc, seen = self._start, 0
        if verify and self.rows == 0:
            self._check(crc)
        for chunk in self._pieces(chunk_rows):
            seen += len(chunk)
            if verify:
                crc = self._checksum(crc, chunk.reshape(-1).view(np.uint8))
                if seen == self.rows:
                    self._check(crc)
            yield chunk

    def _check(self, crc: int) -> None:
        if crc != self._expected:
            raise CorruptFileError(
                f"reading '{self.name}': checksum mismatch: got {crc:#010x}, expected {self._expected:#010x}; the file"
                " is damaged, copy it again from its source"
            )
