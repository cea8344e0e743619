"""Arrow IPC files (Feather): a folder per table with a file per part, or a table in one file; and files from elsewhere.

The layout is specified in `docs/dialects/arrow.md`. Format: https://arrow.apache.org/docs/format/Columnar.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.arrow_columns import arrow_errors, import_pyarrow, numpy_numbers
from kvtools.dialects.arrow_input import BatchInput, InputFormat, has_files, open_files
from kvtools.dialects.arrow_output import CONTENTS, BatchFile, BatchFormat, BatchWriter, check_compression, unsealed
from kvtools.dialects.arrow_table import ArrowPart
from kvtools.dialects.bundle.checksum import extend
from kvtools.dialects.chunk import Array
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.same_file import SameFile
from kvtools.dialects.table_record import COUNTER_DTYPES, KEY_DTYPES, VALUE_DTYPES
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import CorruptFileError
from kvtools.remote.stored import open_binary, stored

NAME = "arrow"
SUFFIXES = (".arrow", ".feather", ".ipc")

_MAGIC = b"ARROW1"
_BATCH_BYTES = 4 << 20
_COMPRESSIONS = {"none": None, "lz4": None, "zstd": (1, 22)}


def sniff(source: Source) -> bool:
    """Tell whether a source is an Arrow file, or a folder with one in it."""
    return has_files(source, SUFFIXES, _MAGIC)


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables of an Arrow file or folder; see `open_files`."""
    return open_files(source.path, _FORM, options)


class ArrowInput(BatchInput):
    """An Arrow file opened for reading."""

    def __init__(self, path: Path, doing: str, options: OpenOptions) -> None:
        self._pyarrow = import_pyarrow(doing)
        self.path = path
        with arrow_errors(doing):
            self._same = SameFile(path)
            reader = self._pyarrow.ipc.open_file(self._source(mapped=True))
            self.schema = reader.schema
            count = reader.num_record_batches
            told = None
            if self.described or "element" in self.schema.names:
                # The last batch has no rows: it carries what the others are.
                last = reader.get_batch_with_custom_metadata(count - 1) if count else None
                told = last.custom_metadata.get(CONTENTS.encode()) if last and last.custom_metadata else None
            if told is None:
                self.contents = None
                self.batch_rows = [reader.get_batch(number).num_rows for number in range(count)]
            else:
                self.contents = unsealed(told, doing)
                self.batch_rows = [rows for _, rows, _ in self.contents.batches]
        if told is not None and len(self.batch_rows) != count - 1:
            raise CorruptFileError(
                f"{doing}: got {count - 1} batches, expected {len(self.batch_rows)}; the file is damaged"
            )

    def part(self, batches: Sequence[int]) -> ArrowPart:
        """Return the rows of these batches as a part of a table."""
        return BatchesPart(self, batches)

    def reader(self, columns: Sequence[str], *, mapped: bool) -> Any:
        """Open the file again, for these columns: mapped, or read batch by batch into memory of its own."""
        ipc = self._pyarrow.ipc
        source = self._source(mapped=mapped)
        fields = sorted(self.schema.get_field_index(name) for name in columns)
        return ipc.open_file(source, options=ipc.IpcReadOptions(included_fields=fields, use_threads=False))

    def _source(self, *, mapped: bool) -> Any:
        if stored(self.path).remote:
            return self._pyarrow.PythonFile(open_binary(self.path), "r")
        file = self._pyarrow.memory_map(str(self.path)) if mapped else self._pyarrow.OSFile(str(self.path))
        self._same.check()
        return file

    @cached_property
    def all_columns(self) -> dict[str, int]:
        """The place of each column in the file."""
        return {name: number for number, name in enumerate(self.schema.names)}


class BatchesPart(ArrowPart):
    """Record batches of one file."""

    def __init__(self, file: ArrowInput, batches: Sequence[int]) -> None:
        self.name = str(file.path)
        self._file = file
        self._numbers = list(batches)
        self._starts = np.cumsum([0, *(file.batch_rows[number] for number in self._numbers)])
        self.rows = int(self._starts[-1])

    def batches(self, columns: Sequence[str], rows: int, verify: bool) -> Iterator[Any]:
        """Yield all rows; see `ArrowPart.batches`."""
        reader = self._file.reader(columns, mapped=False)
        for number in self._numbers:
            batch = self._batch(reader, number)
            if verify and self._file.contents is not None:
                self._verify(batch, number)
            yield batch

    def take(self, columns: Sequence[str], rows: Array) -> Iterator[tuple[Any, Array, Array]]:
        """Find rows in the mapped file; see `ArrowPart.take`."""
        reader = self._file.reader(columns, mapped=True)
        ends = np.searchsorted(rows, self._starts)
        for place in np.flatnonzero(np.diff(ends)).tolist():
            first, last = int(ends[place]), int(ends[place + 1])
            batch = self._batch(reader, self._numbers[place])
            yield batch, np.arange(first, last), rows[first:last] - self._starts[place]

    def _batch(self, reader: Any, number: int) -> Any:
        batch = reader.get_batch(number)
        batch.validate(full=self._file.contents is None)
        if batch.num_rows != self._file.batch_rows[number]:
            raise CorruptFileError(
                f"reading batch {number} of '{self.name}': got {batch.num_rows} rows, expected"
                f" {self._file.batch_rows[number]}; the file is damaged, copy it again"
            )
        return batch

    def _verify(self, batch: Any, number: int) -> None:
        assert self._file.contents is not None
        told = self._file.contents.batches[number][2]
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            place = self._file.all_columns[name]
            expected = told[place] if isinstance(told, list) and place < len(told) else None
            crc = _checksum(column)
            if crc != expected:
                raise CorruptFileError(
                    f"reading batch {number}, column '{name}' of '{self.name}': checksum mismatch: got {crc}, expected"
                    f" {expected}; the file is damaged, copy it again from its source"
                )


class ArrowFile(BatchFile):
    """An Arrow file being written."""

    def __init__(self, path: str, schema: Any, options: WriteOptions) -> None:
        import pyarrow

        compression: Any = None if options.compression in (None, "none") else options.compression
        if compression == "zstd" and options.compression_level is not None:
            compression = pyarrow.Codec("zstd", compression_level=options.compression_level)
        self._schema = schema
        self._sink = pyarrow.OSFile(path, "wb")
        self._writer = pyarrow.ipc.new_file(
            self._sink, schema, options=pyarrow.ipc.IpcWriteOptions(compression=compression, use_threads=False)
        )

    def write(self, batch: Any) -> list[int]:
        """Write a batch; return the CRC-32C of each column's numbers."""
        self._writer.write_batch(batch)
        return [_checksum(column) for column in batch.columns]

    def close(self, contents: str) -> None:
        """Write a batch without rows that carries the contents, and the footer."""
        import pyarrow

        empty = pyarrow.RecordBatch.from_arrays(
            [pyarrow.nulls(0, column.type) for column in self._schema], schema=self._schema
        )
        self._writer.write_batch(empty, custom_metadata={CONTENTS: contents})
        self._writer.close()
        self._sink.close()


def writer(staging: str, options: WriteOptions) -> BatchWriter:
    """Start a checkpoint; see `Dialect.write`."""
    import_pyarrow(f"writing '{staging}'")
    check_compression(options, _COMPRESSIONS, "Arrow")
    return BatchWriter(staging, BatchFormat("Arrow", SUFFIXES[0], _BATCH_BYTES, ArrowFile, options))


def _checksum(column: Any) -> int:
    numbers = column.flatten() if hasattr(column.type, "value_type") else column
    return extend(0, np.ascontiguousarray(numpy_numbers(numbers)).view(np.uint8))


_FORM = InputFormat(NAME, "Arrow", "CRC-32C", SUFFIXES, ArrowInput, keeps_contents=False)

DIALECT = Dialect(
    name=NAME,
    title="an Arrow IPC (Feather) file, or a folder of them",
    sniff=sniff,
    open=open_checkpoint,
    write=writer,
    output="file_or_folder",
    suffixes=SUFFIXES,
    holds=Holds(
        key_dtypes=KEY_DTYPES,
        value_dtypes=VALUE_DTYPES,
        freq_dtypes=COUNTER_DTYPES,
        version_dtypes=COUNTER_DTYPES,
        extras=None,
        metadata=None,
    ),
    compresses=True,
)
