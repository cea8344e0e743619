"""Parquet: a folder per table with a file per part, or a table in one file; and files and datasets from elsewhere.

The layout is specified in `docs/dialects/parquet.md`. Format: https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.arrow_columns import arrow_errors, import_pyarrow
from kvtools.dialects.arrow_input import BatchInput, InputFormat, has_files, open_files
from kvtools.dialects.arrow_output import CONTENTS, BatchFile, BatchFormat, BatchWriter, check_compression, unsealed
from kvtools.dialects.arrow_table import ArrowPart
from kvtools.dialects.chunk import Array
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.same_file import SameFile
from kvtools.dialects.table_record import COUNTER_DTYPES, KEY_DTYPES, VALUE_DTYPES
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import CorruptFileError
from kvtools.remote.stored import for_library

NAME = "parquet"
SUFFIXES = (".parquet", ".parq", ".pq")

_MAGIC = b"PAR1"
_ROW_GROUP_BYTES = 32 << 20
_BUFFER_BYTES = 256 << 10
_COMPRESSIONS = {
    "none": None,
    "snappy": None,
    "lz4": None,
    "gzip": (1, 9),
    "zstd": (1, 22),
    "brotli": (1, 11),
}
_DEFAULT = ("zstd", 1)


def sniff(source: Source) -> bool:
    """Tell whether a source is a Parquet file, or a folder with one in it."""
    return has_files(source, SUFFIXES, _MAGIC)


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables of a Parquet file or folder; see `open_files`."""
    return open_files(source.path, _FORM, options)


class ParquetInput(BatchInput):
    """A Parquet file opened for reading; its batches are its row groups."""

    def __init__(self, path: Path, doing: str, options: OpenOptions) -> None:
        import_pyarrow(doing)
        from pyarrow import parquet

        self.path = path
        with arrow_errors(doing):
            self.same = SameFile(path)
            file = parquet.ParquetFile(for_library(path))
            self.metadata = file.metadata
            self.schema = file.schema_arrow
            groups = [self.metadata.row_group(number) for number in range(self.metadata.num_row_groups)]
            self.batch_rows = [group.num_rows for group in groups]
        # What groups say of their columns is left to the reading of these, which finds damage. pyarrow's `group.column`
        # would end the process where one is damaged: an exception of C++ leaves it.
        if min(self.batch_rows, default=0) < 0:
            raise CorruptFileError(f"{doing}: got a row group of fewer than 0 rows; it is damaged, copy it again")
        told = (self.metadata.metadata or {}).get(CONTENTS.encode())
        self.contents = None if told is None else unsealed(told, doing)

    def part(self, batches: Sequence[int]) -> ArrowPart:
        """Return the rows of these row groups as a part of a table."""
        return ParquetPart(self, batches)


class ParquetPart(ArrowPart):
    """Row groups of one file."""

    def __init__(self, file: ParquetInput, groups: Sequence[int]) -> None:
        self.name = str(file.path)
        self._file = file
        self._groups = list(groups)
        self._starts = np.cumsum([0, *(file.batch_rows[group] for group in self._groups)])
        self.rows = int(self._starts[-1])

    def batches(self, columns: Sequence[str], rows: int, verify: bool) -> Iterator[Any]:
        """Yield all rows; see `ArrowPart.batches`."""
        if self._groups:
            yield from self._iterate(self._groups, columns, rows, verify)

    def take(self, columns: Sequence[str], rows: Array) -> Iterator[tuple[Any, Array, Array]]:
        """Find rows, reading each row group that has one of them; see `ArrowPart.take`."""
        which = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(which).tolist():
            start = int(self._starts[number])
            for batch in self._iterate([self._groups[number]], columns, 1 << 14, False):
                first, last = np.searchsorted(rows, [start, start + batch.num_rows])
                if first < last:
                    yield batch, np.arange(first, last), rows[first:last] - start
                start += batch.num_rows

    def _iterate(self, groups: list[int], columns: Sequence[str], rows: int, verify: bool) -> Iterator[Any]:
        from pyarrow import parquet

        # Buffered and not read ahead: what is held does not grow with a row group's size.
        file = parquet.ParquetFile(
            for_library(self._file.path),
            metadata=self._file.metadata,
            buffer_size=_BUFFER_BYTES,
            pre_buffer=False,
            page_checksum_verification=verify,
        )
        with file:
            self._file.same.check()
            yield from file.iter_batches(rows, row_groups=groups, columns=list(columns), use_threads=False)


class ParquetFile(BatchFile):
    """A Parquet file being written: a batch is a row group."""

    def __init__(self, path: str, schema: Any, options: WriteOptions) -> None:
        from pyarrow import parquet

        compression, level = options.compression or _DEFAULT[0], options.compression_level
        if options.compression is None and level is None:
            level = _DEFAULT[1]
        self._writer = parquet.ParquetWriter(
            path,
            schema,
            compression=compression,
            compression_level=level,
            # Rows of floats have few equal numbers: a dictionary of them costs time and saves nothing.
            use_dictionary=False,
            write_statistics=[column.name for column in schema if not hasattr(column.type, "value_type")],
            write_page_checksum=True,
        )
        self._schema = schema

    def write(self, batch: Any) -> None:
        """Write a row group; its pages have checksums of their own."""
        import pyarrow

        table = pyarrow.Table.from_batches([batch], schema=self._schema)
        self._writer.write_table(table, row_group_size=max(1, batch.num_rows))

    def close(self, contents: str) -> None:
        """Write the footer."""
        self._writer.add_key_value_metadata({CONTENTS: contents})
        self._writer.close()


def writer(staging: str, options: WriteOptions) -> BatchWriter:
    """Start a checkpoint; see `Dialect.write`."""
    import_pyarrow(f"writing '{staging}'")
    check_compression(options, _COMPRESSIONS, "Parquet")
    return BatchWriter(staging, BatchFormat("Parquet", SUFFIXES[0], _ROW_GROUP_BYTES, ParquetFile, options))


_FORM = InputFormat(NAME, "Parquet", "CRC-32", SUFFIXES, ParquetInput, keeps_contents=True)

DIALECT = Dialect(
    name=NAME,
    title="a Parquet file, or a folder of them",
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
