"""Tables in a safetensors file: tensors `<table>.keys`, `<table>.values`, ..., and what they are in `__metadata__`.

The file is a length (8 bytes, little-endian), a JSON header, and the tensors' bytes without a gap; see
`docs/dialects/safetensors.md`. Format: https://github.com/huggingface/safetensors#format. The header is read and
written here, because a table is streamed and its checksums are known only when it was written; the library opens what
is written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtools.dialects.bundle.checksum import extend
from kvtools.dialects.bundle.writer import Region
from kvtools.dialects.chunk import Array
from kvtools.dialects.column import CheckedColumn, Column, RawColumn
from kvtools.dialects.dense_tables import tables_among
from kvtools.dialects.dialect import Dialect, Source
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.named_columns import (
    HOLDS,
    Container,
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
from kvtools.dialects.raw_output import RawTableWriter
from kvtools.dialects.schema import TableSchema, VariableSchema, numpy_dtype
from kvtools.dialects.table_record import is_count
from kvtools.dialects.writing import CheckpointWriter, WriteOptions
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.remote.stored import open_binary

NAME = "safetensors"

_METADATA = "__metadata__"
_DESCRIPTION = "kvtools"
_LENGTH_BYTES = 8
_HEADER_LIMIT = 100_000_000  # the format's own
_ALIGNMENT = 64
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}
_CODES = {name: code for code, name in _DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """An entry of the header; `offset` and `size` are bytes, counted from the end of the header."""

    code: str
    shape: tuple[int, ...]
    offset: int
    size: int


def sniff(source: Source) -> bool:
    """Tell whether a source is a safetensors file."""
    if source.is_url or not source.path.is_file():
        return False
    if source.path.suffix == ".safetensors":
        return True
    try:
        with open_binary(source.path) as file:
            start = file.read(_LENGTH_BYTES + 1)
        length, size = int.from_bytes(start[:_LENGTH_BYTES], "little"), source.path.stat().st_size
    except OSError:
        return False
    return start[_LENGTH_BYTES:] == b"{" and 2 <= length <= min(_HEADER_LIMIT, size - _LENGTH_BYTES)


def read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str], int]:
    """Return the tensors, the metadata, and the byte at which the tensors begin.

    Raises:
        BadInputError: the file cannot be read.
        CorruptFileError: the header is malformed, or contradicts itself or the file's size; each way in which it can
            is a case of its own in `docs/dialects/safetensors.md`.
    """
    doing = f"reading the header of '{path}'"

    def corrupt(got: str, expected: str) -> CorruptFileError:
        return CorruptFileError(f"{doing}: got {got}, expected {expected}; the file is damaged, copy it again")

    try:
        size = path.stat().st_size
        with open_binary(path) as file:
            start = file.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if len(start) < _LENGTH_BYTES:
                raise corrupt(f"a file of {size} bytes", f"at least {_LENGTH_BYTES}")
            if length > _HEADER_LIMIT:
                raise corrupt(f"a header of {length} bytes", f"at most {_HEADER_LIMIT}, the format's limit")
            if length > size - _LENGTH_BYTES:
                raise corrupt(f"a header of {length} bytes in a file of {size}", "one that fits")
            text = file.read(length)
    except OSError as error:
        raise BadInputError(f"{doing}: {error.strerror or error}") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_twins)
        if not isinstance(header, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise corrupt(f"no JSON object of different names ({error})", "one in UTF-8") from error
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt(f"a '{_METADATA}' that is {_short(metadata)}", "an object of texts")
    tensors = {name: _tensor(name, entry, corrupt) for name, entry in header.items()}
    held, end = size - _LENGTH_BYTES - length, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise corrupt(f"tensor '{name}' at byte {tensor.offset}, which {what}", f"byte {end}")
        end += tensor.size
        if end > held:
            raise corrupt(f"tensor '{name}' that ends at byte {end}", f"at most {held}, all that the file has")
    if end != held:
        raise corrupt(f"{held} bytes of tensors", f"{end}, the end of the last one")
    return tensors, metadata, _LENGTH_BYTES + length


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(name for name in found if names.count(name) > 1)}' is there twice")
    return found


def _tensor(name: str, entry: Any, corrupt: Callable[[str, str], CorruptFileError]) -> Tensor:
    code, shape, offsets = (
        entry.get(f) if isinstance(entry, dict) else None for f in ("dtype", "shape", "data_offsets")
    )
    if not isinstance(code, str):
        raise corrupt(f"tensor '{name}' that is {_short(entry)}", "an object with dtype, shape and data_offsets")
    if not isinstance(shape, list) or not all(map(is_count, shape)):
        raise corrupt(f"tensor '{name}' of shape {_short(shape)}", "a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)) or offsets[0] > offsets[1]:
        raise corrupt(f"tensor '{name}' at {_short(offsets)}", "data_offsets [begin, end]")
    size = offsets[1] - offsets[0]
    if code in _DTYPES and size != numpy_dtype(_DTYPES[code]).itemsize * math.prod(shape):
        expected = numpy_dtype(_DTYPES[code]).itemsize * math.prod(shape)
        raise corrupt(f"tensor '{name}' of {size} bytes", f"{expected:.20g} for {code} {_short(shape)}")
    return Tensor(code, tuple(shape), offsets[0], size)


def _short(value: Any) -> str:
    return json.dumps(value)[:80]


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open a file that kvtools wrote, or a stranger's with tensors called so that they can be told apart.

    Raises:
        BadInputError: nothing in it is a table.
        CorruptFileError: the header is damaged, or the description contradicts it.
        UsageError: an option contradicts the file.
    """
    path = source.path
    doing = f"opening '{path}'"
    tensors, metadata, start = read_header(path)
    described = _DESCRIPTION in metadata
    description = read_description(metadata[_DESCRIPTION], doing) if described else {"tables": []}
    checksums = checksums_of(description, doing)
    columns, unknown = open_columns(path, tensors, start, checksums)
    container = Container(path, NAME, options, "CRC-32C" if tensors.keys() <= checksums.keys() and tensors else None)
    if described:
        tables, broken = described_tables(description["tables"], columns, container)
        return Checkpoint(path, NAME, dict(sorted(tables.items())), broken=broken)
    tables, used = inferred_tables(columns, container, tables_among)
    if not tables:
        raise BadInputError(
            f"{doing}: none of its tensors ({', '.join(tensors) or 'there are none'}) can be a table, expected 'keys'"
            " [rows] and 'values' [rows, dim]; save it with such names"
        )
    shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def read_variable(name: str) -> Iterator[Array]:
        if name not in columns:
            raise BadInputError(
                f"reading tensor '{name}' of '{path}': its type is {tensors[name].code}, expected one of"
                f" {', '.join(_DTYPES)}; leave it out, or save it as one of them"
            )
        return variable_chunks(columns, shapes, name)

    return Checkpoint(
        path,
        NAME,
        dict(sorted(tables.items())),
        variables=(*variables_of(columns, shapes, used), *unknown),
        read_variable=read_variable,
    )


def open_columns(
    path: Path, tensors: Mapping[str, Tensor], start: int, checksums: Mapping[str, int]
) -> tuple[dict[str, Column], list[VariableSchema]]:
    """Return the columns of a file's tensors, and those of types that NumPy lacks, which cannot be read."""
    columns: dict[str, Column] = {}
    unknown: list[VariableSchema] = []
    for name, tensor in tensors.items():
        if tensor.code not in _DTYPES:
            unknown.append(VariableSchema(name, tensor.code.lower(), tensor.shape, tensor.size))
            continue
        rows, row_shape = (tensor.shape[0], tensor.shape[1:]) if tensor.shape else (1, ())
        dtype, offset = numpy_dtype(_DTYPES[tensor.code]), start + tensor.offset
        if name in checksums:
            columns[name] = CheckedColumn(
                path,
                dtype,
                row_shape,
                offset=offset,
                rows=rows,
                name=f"{path}:{name}",
                checksum=extend,
                expected=checksums[name],
            )
        else:
            columns[name] = column = RawColumn(path, dtype, row_shape, offset=offset, rows=rows)
            column.name = f"{path}:{name}"
    return columns, unknown


def checksums_of(description: dict[str, Any], doing: str) -> dict[str, int]:
    """Return the CRC-32C of each tensor that a description has one of; `doing` begins the message if it is damaged."""
    found = description.get("crc32c", {})
    try:
        return {name: int(checksum, 16) for name, checksum in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise CorruptFileError(
            f"{doing}: 'crc32c' of its description is {_short(found)}, expected hexadecimal numbers; write it again"
        ) from None


class Writer(CheckpointWriter):
    """Writes a file: the header's length is known from the plan, its checksums when all tables were written."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        self._path = Path(staging)
        self._tensors: dict[str, Tensor] = {}
        self._schemas: list[TableSchema] = []
        self._start = 0
        self._tables: list[RawTableWriter] = []

    def plan(self, schemas: Sequence[TableSchema]) -> None:
        """Give each tensor its place: those of the widest numbers first, so that all are aligned."""
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for schema in schemas:
            names = column_names(schema)
            for place, (dtype, shape) in column_shapes(schema).items():
                if names[place] in shapes or names[place] == _METADATA:
                    raise BadInputError(
                        f"writing table '{schema.name}' as {NAME}: two tensors would be called '{names[place]}'; rename"
                        " a table"
                    )
                check_dtype(dtype, f"writing table '{schema.name}' as {NAME}: its {place}")
                shapes[names[place]] = dtype, shape
        self._schemas = list(schemas)
        self._tensors, offset = placed(shapes)
        self._start = len(self._header(dict.fromkeys(shapes, 0)))
        with self._path.open("xb") as file:
            file.truncate(self._start + offset)

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> RawTableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        names, regions = column_names(schema), {}
        for place, (dtype, shape) in column_shapes(schema).items():
            tensor = self._tensors[names[place]]
            if (tensor.code, tensor.shape) != (_CODES[dtype], shape):
                raise ValueError(f"writing '{names[place]}': planned {tensor}, got {dtype} {shape}")
            offset = self._start + tensor.offset
            regions[place] = Region(names[place], str(self._path), offset, shape[0], shape[1:], numpy_dtype(dtype))
        self._tables.append(RawTableWriter(regions))
        return self._tables[-1]

    def close(self) -> None:
        """Write the header, the checksums being known."""
        checksums = {name: crc for table in self._tables for name, crc in table.checksums.items()}
        header = self._header(checksums)
        if len(header) != self._start:
            raise ValueError(f"writing '{self._path}': the header has {len(header)} bytes, planned {self._start}")
        with self._path.open("r+b") as file:
            file.write(header)
            file.flush()
            os.fsync(file.fileno())

    def _header(self, checksums: dict[str, int]) -> bytes:
        """Return what stands before the tensors."""
        crc32c = {name: f"{checksums[name]:08x}" for name in sorted(checksums)}
        return header_bytes(
            self._tensors, {_DESCRIPTION: describe_tables(self._schemas, crc32c=crc32c)}, self._path.name
        )


def check_dtype(dtype: str, what: str, advice: str = "leave it out, or write another dialect") -> None:
    """Raise `BadInputError` for a type that the format has not; `what` begins the message, `advice` ends it."""
    if dtype not in _CODES:
        raise BadInputError(f"{what} is {dtype}, expected one of {', '.join(_CODES)}; {advice}")


def placed(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, Tensor], int]:
    """Give tensors of these types and shapes their places, those of the widest numbers first, so that all are aligned.

    Returns them, and how many bytes they take.
    """
    tensors: dict[str, Tensor] = {}
    offset = 0
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -numpy_dtype(item[1][0]).itemsize):
        size = numpy_dtype(dtype).itemsize * math.prod(shape)
        tensors[name] = Tensor(_CODES[dtype], shape, offset, size)
        offset += size
    return tensors, offset


def header_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], file: str) -> bytes:
    """Return the length and the header, padded so that the tensors begin at a multiple of 64 bytes.

    Raises:
        BadInputError: it would be longer than the format allows.
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    for name, tensor in tensors.items():
        offsets = [tensor.offset, tensor.offset + tensor.size]
        entries[name] = {"dtype": tensor.code, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > _HEADER_LIMIT:
        raise BadInputError(
            f"writing '{file}': its header would have {len(text)} bytes, expected at most"
            f" {_HEADER_LIMIT}; write fewer tables to a file"
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


DIALECT = Dialect(
    name=NAME,
    title="a safetensors file of keys and values",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="file",
    suffixes=(".safetensors",),
    holds=HOLDS,
)
