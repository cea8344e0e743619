"""Write a TensorFlow bundle of one data file, streaming: a tensor's rows are appended as they come.

Only the index entries are held in memory; the shape of a tensor is taken from what was appended, so that its
row count need not be known beforehand.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.dialects.bundle import dtypes
from kvtools.dialects.bundle.checksum import extend, masked
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


class BundleWriter:
    """Writes `<prefix>.data-00000-of-00001`, and `<prefix>.index` when it is closed without an error.

    Example:
        >>> import tempfile
        >>> prefix = Path(tempfile.mkdtemp()) / "model.ckpt"
        >>> with BundleWriter(prefix) as writer:
        ...     writer.begin("emb-keys", np.dtype(np.int64), ())
        ...     writer.append(np.array([7, 9]))
        ...     writer.end()
        >>> from kvtools.dialects.bundle.reader import Bundle
        >>> Bundle(prefix).tensor("emb-keys").read().tolist()
        [7, 9]
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self._file = Path(f"{prefix}.data-00000-of-00001").open("wb")  # noqa: SIM115  closed in __exit__
        self._entries: dict[bytes, BundleEntry] = {}
        self._offset = 0
        self._name = ""
        self._dtype: np.dtype[Any] = np.dtype(np.uint8)
        self._row_shape: tuple[int, ...] = ()
        self._rows = 0
        self._crc = 0

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
        if error is None:
            self._write_index()

    def begin(self, name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> None:
        """Start tensor `name` of shape [rows appended, *row_shape]; its first byte is aligned to 64."""
        self._file.write(bytes(-self._offset % _ALIGNMENT))
        self._offset += -self._offset % _ALIGNMENT
        self._name, self._dtype, self._row_shape = name, dtype, row_shape
        self._rows = self._crc = 0

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Append rows [n, *row_shape] of the tensor's type; raises `ValueError` for any other."""
        if rows.dtype != self._dtype or rows.shape[1:] != self._row_shape:
            raise ValueError(
                f"appending to '{self._name}': got {rows.dtype} rows of shape {rows.shape[1:]},"
                f" expected {self._dtype} rows of shape {self._row_shape}"
            )
        data = np.ascontiguousarray(rows).tobytes()
        self._crc = extend(self._crc, data)
        self._file.write(data)
        self._rows += len(rows)

    def end(self) -> None:
        """Finish the tensor that `begin` started."""
        row_bytes = self._dtype.itemsize * math.prod(self._row_shape)
        size = self._rows * row_bytes
        self._add(
            self._name,
            BundleEntry(
                dtypes.dtype_number(self._dtype),
                (self._rows, *self._row_shape),
                offset=self._offset,
                size=size,
                crc32c=masked(self._crc),
            ),
        )
        self._offset += size

    def string(self, name: str, value: bytes) -> None:
        """Write a scalar string tensor."""
        lengths = len(value).to_bytes(4 if len(value) < 1 << 32 else 8, "little")
        crc = extend(0, lengths)
        checksum = masked(crc).to_bytes(4, "little")
        data = put_varint(len(value)) + checksum + value
        self._file.write(data)
        crc = extend(extend(crc, checksum), value)
        self._add(name, BundleEntry(dtypes.STRING, (), offset=self._offset, size=len(data), crc32c=masked(crc)))
        self._offset += len(data)

    def _add(self, name: str, entry: BundleEntry) -> None:
        key = name.encode("utf-8", "surrogateescape")
        if key in self._entries:
            raise ValueError(f"writing '{self.prefix}': tensor '{name}' is written twice")
        self._entries[key] = entry

    def _write_index(self) -> None:
        records = [(HEADER_KEY, encode_header(BundleHeader()))]
        records += [(key, encode_entry(entry)) for key, entry in sorted(self._entries.items())]
        with Path(f"{self.prefix}.index").open("wb") as file:
            file.write(table_bytes(records))
            file.flush()
            os.fsync(file.fileno())
