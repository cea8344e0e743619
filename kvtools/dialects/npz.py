"""Tables in a NumPy archive (`.npz`): arrays `<table>.keys`, `<table>.values`, ..., and "kvtools", what they are.

`numpy.load` opens what is written here. The archive is a zip file with zip64 records of `.npy` members; stored
members are aligned to 64 bytes, so that they can be mapped, and are written in any order, from any process. See
`docs/dialects/npz.md`. Formats: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html and PKWARE's
APPNOTE.TXT, 6.3.10.
"""

from __future__ import annotations

import functools
import io
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.bundle.checksum import ZIP, combine
from kvtools.dialects.bundle.writer import Region
from kvtools.dialects.bundle_output import plain_columns
from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.column import CheckedColumn, Column
from kvtools.dialects.dialect import Dialect, Source
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.named_columns import (
    HOLDS,
    Container,
    ConvertedColumn,
    column_names,
    column_shapes,
    describe_tables,
    described_tables,
    inferred_tables,
    read_description,
    variable_chunks,
    variables_of,
)
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.raw_output import RawTableWriter, crc32
from kvtools.dialects.schema import TableSchema, numpy_dtype
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter, WriteOptions
from kvtools.dialects.zip_archive import Archive, Member, data_offset, opened, zip_errors
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, UsageError
from kvtools.remote.stored import for_library, open_binary

NAME = "npz"
DESCRIPTION = "kvtools"

_SUFFIX = ".npy"
_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_NPY_HEADER_LIMIT = 10_000
_PIECE = 1 << 20


class CompressedColumn:
    """An array that is compressed: read from its start, whichever rows are asked for."""

    def __init__(
        self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, dtype: np.dtype[Any], shape: tuple[int, ...], header: int
    ) -> None:
        self.name = f"{archive.filename}:{info.filename}"
        self.dtype = dtype
        self.rows, self.row_shape = (shape[0], shape[1:]) if shape else (1, ())
        self._archive = archive
        self._info = info
        self._header = header

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield all rows in order; the CRC-32 is checked in any case, as the last row goes by."""
        doing = f"reading array '{self.name}'"
        with zip_errors(doing), self._archive.open(self._info) as file:
            file.read(self._header)
            for start in range(0, self.rows, chunk_rows):
                chunk = np.empty((min(chunk_rows, self.rows - start), *self.row_shape), self.dtype)
                view, done = chunk.reshape(-1).view(np.uint8), 0
                while done < view.size:
                    piece = file.read(min(_PIECE, view.size - done))
                    if not piece:
                        raise zipfile.BadZipFile("it ends too early")
                    view[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
                    done += len(piece)
                if start + len(chunk) == self.rows and file.read(1):
                    raise zipfile.BadZipFile("it is longer than its header says")
                yield chunk
            if self.rows == 0 and file.read(1):
                raise zipfile.BadZipFile("it is longer than its header says")

    def take(self, rows: Array) -> Array:
        """Copy the rows of these numbers; the array is read up to the last of them."""
        taken = np.zeros((len(rows), *self.row_shape), self.dtype)
        step = max(1, _PIECE // max(1, self.dtype.itemsize * math.prod(self.row_shape)))
        start, last = 0, int(rows.max()) if len(rows) else -1
        for chunk in self.chunks(step):
            if start > last:
                break
            here = np.flatnonzero((rows >= start) & (rows < start + len(chunk)))
            taken[here] = chunk[rows[here] - start]
            start += len(chunk)
        return taken

    def read(self) -> Array:
        """Return all rows."""
        return self.take(np.arange(self.rows))


def sniff(source: Source) -> bool:
    """Tell whether a source is a NumPy archive."""
    if source.is_url or not source.path.is_file():
        return False
    if source.path.suffix == ".npz":
        return True
    try:
        with open_binary(source.path) as file:
            if file.read(4) not in _MAGIC:
                return False
        with zipfile.ZipFile(for_library(source.path)) as archive:
            return any(name.endswith(_SUFFIX) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open an archive that kvtools wrote, or a stranger's with arrays called so that they can be told apart.

    Raises:
        BadInputError: nothing in it is a table, or an array is of a kind that is not read.
        CorruptFileError: the archive or an array's header is damaged, or the description contradicts the arrays.
        UsageError: an option contradicts the archive.
    """
    path = source.path
    doing = f"opening '{path}'"
    with zip_errors(doing):
        archive = opened(for_library(path))  # its columns read from it as long as they live
    columns: dict[str, Column] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    refused: dict[str, KvtoolsError] = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(_SUFFIX)
        if name == info.filename:
            continue
        if name in shapes or name in refused:
            raise CorruptFileError(f"{doing}: array '{name}' is there twice; write the archive again")
        try:
            columns[name], shapes[name] = _open_array(path, archive, info)
        except CorruptFileError:
            raise
        except KvtoolsError as error:
            refused[name] = error
    container = Container(path, NAME, options, "CRC-32")
    if DESCRIPTION in columns:
        description = read_description(_description(columns[DESCRIPTION], doing), doing)
        tables, broken = described_tables(description["tables"], columns, container)
        return Checkpoint(path, NAME, dict(sorted(tables.items())), broken=broken)
    tables, used = inferred_tables(columns, container, refused=refused)
    if not tables:
        if refused:
            raise next(iter(refused.values()))
        raise BadInputError(
            f"{doing}: none of its arrays ({', '.join(shapes) or 'there are none'}) can be a table, expected 'keys'"
            " [rows] and 'values' [rows, dim]; save it with such names"
        )
    return Checkpoint(
        path,
        NAME,
        dict(sorted(tables.items())),
        variables=variables_of(columns, shapes, used),
        read_variable=functools.partial(variable_chunks, columns, shapes),
    )


def _open_array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[Column, tuple[int, ...]]:
    doing = f"opening array '{info.filename}' of '{path}'"
    if info.flag_bits & 1:
        raise BadInputError(f"{doing}: it is encrypted, expected a plain archive; unpack it and save it again")
    with zip_errors(doing), archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise BadInputError(f"{doing}: its npy format is {version}, expected (1, 0) or (2, 0); save it again")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_column, dtype = read(file, max_header_size=_NPY_HEADER_LIMIT)
        header = file.tell()
    if dtype.hasobject or dtype.names or dtype.subdtype or dtype.kind not in "biufS":
        raise BadInputError(f"{doing}: it is of type {dtype}, expected plain numbers; save it without objects")
    if by_column and len(shape) > 1:
        raise BadInputError(
            f"{doing}: it is stored column by column, expected rows; save it with numpy.ascontiguousarray"
        )
    expected = header + dtype.itemsize * math.prod(shape)
    if info.file_size != expected or any(size < 0 for size in shape):
        raise CorruptFileError(
            f"{doing}: it has {info.file_size} bytes, expected {expected} for {dtype} {list(shape)}; the archive is"
            " damaged, copy it again"
        )
    column: Column
    if info.compress_type == zipfile.ZIP_STORED:
        offset = data_offset(path, info, doing)
        with open_binary(path) as raw:
            raw.seek(offset)
            head = raw.read(header)
        column = CheckedColumn(
            path,
            dtype,
            shape[1:],
            offset=offset + header,
            rows=shape[0] if shape else 1,
            name=f"{path}:{info.filename}",
            checksum=crc32,
            start=zlib.crc32(head),
            expected=info.CRC,
        )
    else:
        column = CompressedColumn(archive, info, dtype, shape, header)
    if not dtype.isnative:
        native = dtype.newbyteorder("=")
        column = ConvertedColumn(column, native, functools.partial(_as_native, dtype=native))
    return column, shape


def _as_native(stored: Array, dtype: np.dtype[Any]) -> Array:
    return stored.astype(dtype)


def _description(column: Column, doing: str) -> bytes:
    if column.dtype.kind != "S" or column.rows != 1 or column.row_shape:
        raise CorruptFileError(f"{doing}: array '{DESCRIPTION}' is {column.dtype}, expected one text; write it again")
    (text,) = column.chunks(1)
    return bytes(text.reshape(-1)[0])


def _npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return what stands before the rows of an array; bfloat16, which NumPy lacks, is uint16 there."""
    stored = np.dtype(np.uint16) if dtype.name == "bfloat16" else dtype
    buffer = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(stored), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


class _StoredTable(RawTableWriter):
    """A table whose arrays are stored as they are."""

    def __init__(self, archive: Archive, schema: TableSchema) -> None:
        self._archive = archive
        self._headers: dict[str, tuple[Member, bytes]] = {}
        regions = {}
        names = column_names(schema)
        for name in names.values():
            archive.claim(name)
        for place, (dtype_name, shape) in column_shapes(schema).items():
            name, dtype = names[place], numpy_dtype(dtype_name)
            header = _npy_header(dtype, shape)
            size = len(header) + dtype.itemsize * math.prod(shape)
            member = archive.begin(name, zipfile.ZIP_STORED, size, size)
            archive.write(header, member.data)
            self._headers[name] = (member, header)
            regions[place] = Region(name, str(archive.path), member.data + len(header), shape[0], shape[1:], dtype)
        super().__init__(regions, ZIP)

    def close(self) -> None:
        """Write the arrays' headers; raises `ValueError` if rows are missing."""
        super().close()
        for name, (member, header) in self._headers.items():
            crc = combine(zlib.crc32(header), self.checksums[name], member.size - len(header), ZIP)
            self._archive.end(member, crc)


class _Deflater:
    """One array being compressed to a file of its own, until its length is known."""

    def __init__(self, path: Path, level: int, header: bytes) -> None:
        self.path = path
        self.crc = self.size = self.packed_size = 0
        self._file = path.open("w+b")
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self.write(np.frombuffer(header, np.uint8))

    def write(self, rows: Array) -> None:
        """Append rows."""
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        self.crc = zlib.crc32(data, self.crc)
        self.size += len(data)
        self.packed_size += self._file.write(self._compressor.compress(data))

    def move_to(self, archive: Archive, name: str) -> None:
        """Append what was compressed to the archive, and remove the file."""
        self.packed_size += self._file.write(self._compressor.flush())
        member = archive.begin(name, zipfile.ZIP_DEFLATED, self.size, self.packed_size)
        self._file.seek(0)
        at = member.data
        while piece := self._file.read(_PIECE):
            archive.write(piece, at)
            at += len(piece)
        self._file.close()
        self.path.unlink()
        archive.end(member, self.crc)


class _DeflatedShard(ShardWriter):
    """Compresses the rows of a table, from the first to the last."""

    def __init__(self, deflaters: Mapping[str, _Deflater]) -> None:
        self._deflaters = deflaters

    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Write a chunk; see `ShardWriter.write`."""
        for place, rows in plain_columns(chunk).items():
            self._deflaters[place].write(rows)


class _DeflatedTable(TableWriter):
    """A table whose arrays are compressed: each to a file beside the archive, and appended to it at the end."""

    def __init__(self, archive: Archive, schema: TableSchema, level: int) -> None:
        self._archive = archive
        self._schema = schema
        self._names = column_names(schema)
        for name in self._names.values():
            archive.claim(name)
        self._deflaters = {
            place: _Deflater(
                archive.path.with_name(f"{archive.path.name}.{number}.deflate"),
                level,
                _npy_header(numpy_dtype(dtype), shape),
            )
            for number, (place, (dtype, shape)) in enumerate(column_shapes(schema).items())
        }

    def shard(self) -> _DeflatedShard:
        """Return the writer of the one task that writes the table."""
        return _DeflatedShard(self._deflaters)

    def extra(self, name: str, array: Array) -> None:
        """Write an extra array."""
        self._deflaters[f"extra:{name}"].write(array)

    def close(self) -> None:
        """Append all arrays to the archive; raises `ValueError` if rows are missing."""
        for place, (dtype, shape) in column_shapes(self._schema).items():
            deflater = self._deflaters[place]
            expected = len(_npy_header(numpy_dtype(dtype), shape)) + numpy_dtype(dtype).itemsize * math.prod(shape)
            if deflater.size != expected:
                raise ValueError(f"writing '{self._names[place]}': got {deflater.size} bytes, expected {expected}")
            deflater.move_to(self._archive, self._names[place])


class Writer(CheckpointWriter):
    """Writes an archive."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        compression = options.compression or "none"
        if compression not in ("none", "deflate"):
            raise UsageError(f"writing {NAME}: got --compression {compression}, expected none or deflate")
        level = options.compression_level
        if level is not None and (compression == "none" or not 0 <= level <= 9):
            raise UsageError(f"writing {NAME}: got --compression-level {level}, expected 0 to 9, with deflate")
        self._level = None if compression == "none" else 6 if level is None else level
        self._archive = Archive(Path(staging), _SUFFIX)
        self._archive.claim(DESCRIPTION)
        self._schemas: list[TableSchema] = []

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> TableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        self._schemas.append(schema)
        if self._level is None:
            return _StoredTable(self._archive, schema)
        return _DeflatedTable(self._archive, schema, self._level)

    def close(self) -> None:
        """Write the description and the directory."""
        text = np.array(describe_tables(self._schemas).encode())
        data = _npy_header(text.dtype, ()) + text.tobytes()
        member = self._archive.begin(DESCRIPTION, zipfile.ZIP_STORED, len(data), len(data))
        self._archive.write(data, member.data)
        self._archive.end(member, zlib.crc32(data))
        self._archive.close()

    def abort(self) -> None:
        """Close the file."""
        self._archive.abort()


DIALECT = Dialect(
    name=NAME,
    title="a NumPy archive (.npz) of keys and values",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="file",
    suffixes=(".npz",),
    holds=HOLDS,
    compresses=True,
)
