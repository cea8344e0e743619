"""HDF5: a group per table, in it a group per part with a dataset per column; and groups of datasets from elsewhere.

The layout is specified in `docs/dialects/hdf5.md`; this file reads and writes version 1 of it. Uncompressed columns
are contiguous: HDF5 says where in the file they lie, and their bytes are read and written past it, by any thread or
process, at the speed of the disk. Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.column_table import ColumnTable, Part
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.hdf5_file import (
    ATTRIBUTE,
    BLOCK_BYTES,
    CHECKSUM,
    NAME,
    DatasetColumn,
    HDF5File,
    attribute,
    check_heap,
    child_of,
    stored_dtype,
    string_checksum,
    text_of,
)
from kvtools.dialects.hdf5_output import Writer
from kvtools.dialects.hdf5_stranger import KEY_NAMES, NEEDED, VALUE_NAMES, open_stranger, pick
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.safe_name import safe_name
from kvtools.dialects.schema import VariableSchema, numpy_dtype
from kvtools.dialects.table_record import (
    COUNTER_DTYPES,
    KEY_DTYPES,
    VALUE_DTYPES,
    json_object,
    table_schema,
)
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError
from kvtools.remote.stored import open_binary

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_OTHERS = (b"PAR1", b"ARRO", b"PK\x03\x04")
_SIGNATURE_AT = (0, *(512 << power for power in range(16)))


def sniff(source: Source) -> bool:
    """Tell whether a source is an HDF5 file: its signature is at byte 0, 512, 1024, 2048, ..."""
    if source.is_url:
        return False
    try:
        size = source.path.stat().st_size
        with open_binary(source.path) as file:
            if _bytes_at(file, 0, 4) in _OTHERS:  # no search of a remote file that begins as another format does
                return False
            return any(_bytes_at(file, at, 8) == _SIGNATURE for at in _SIGNATURE_AT if at < size)
    except OSError:
        return False


def _bytes_at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables and variables of an HDF5 file of ours, or what of another one looks like tables.

    Raises:
        BadInputError: there is no table in it, or it is of a later layout.
        CorruptFileError: it is damaged, or its datasets do not fit together.
    """
    file = HDF5File(source.path, options)
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
        layout = file.layout()
        if layout is not None:
            for name in file.names("tables", layout.get("tables")):
                add(name, lambda name=name: _open_table(file, name))  # type: ignore[misc]
            variables = _variables(file, layout.get("variables"))
        else:
            for group in file.all_groups(broken if options.lenient else None):
                with file.reading(f"group '{group.name}'"):
                    is_table = pick(group, KEY_NAMES) and pick(group, VALUE_NAMES)
                if is_table:
                    add(group.name, lambda group=group: open_stranger(file, group))  # type: ignore[misc]
            if not tables and not broken:
                raise BadInputError(
                    f"opening '{file.path}' as HDF5: {_of_keras(file) or f'got no table in it; {NEEDED}'}"
                )

    def read_variable(name: str) -> Iterator[Array]:
        yield from _variable_chunks(file, *variables[name])

    schemas = tuple(schema for schema, _ in variables.values())
    return Checkpoint(source.path, NAME, tables, schemas, read_variable, broken=broken)


def _of_keras(file: HDF5File) -> str | None:
    """How to get at the checkpoint of tables that a file of Keras has; None: it has none."""
    for group in file.all_groups():
        if group.name.rpartition("/")[2] == "kv_tables" and "tables.index" in group:
            command = (
                "import h5py, pathlib; d = pathlib.Path('kv_tables'); d.mkdir(); [(d / n).write_bytes(x[:].tobytes())"
                f" for n, x in h5py.File('{file.path}')['{group.name}'].items()]"
            )
            return (
                "it is a file of Keras, with a checkpoint of its tables in it;"
                f' `python -c "{command}"` takes that out: name kv_tables/tables'
            )
    return None


def _open_table(file: HDF5File, name: str) -> TableReader:
    group = file.file["tables"][name]
    doing = f"opening table '/tables/{name}' of '{file.path}'"
    if not isinstance(group, file.h5py.Group):
        raise CorruptFileError(f"{doing}: it is no group; write it again")
    if ATTRIBUTE not in group.attrs:
        raise CorruptFileError(f"{doing}: it has no attribute '{ATTRIBUTE}'; the file was written in part")
    schema = table_schema(text_of(attribute(group, ATTRIBUTE, doing)), NAME, doing)

    def column(part: Any, name: str, dtype: str, shape: tuple[int, ...]) -> DatasetColumn:
        dataset = child_of(part, name)
        if not isinstance(dataset, file.h5py.Dataset):
            raise CorruptFileError(
                f"{doing}: got no dataset '{part.name}/{name}', which its description tells of; write it again"
            )
        wanted = numpy_dtype(dtype)
        stored = stored_dtype(wanted)
        if dataset.dtype != stored or dataset.shape != shape:
            raise CorruptFileError(
                f"{doing}: got dataset '{dataset.name}' of {dataset.dtype} {list(dataset.shape or ())}, expected"
                f" {stored} {list(shape)}, as its description says; write it again"
            )
        return DatasetColumn(file, dataset, wanted)

    parts = []
    for number, rows in enumerate(schema.part_rows):
        part = child_of(group, f"part_{number}")
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


def _variables(file: HDF5File, expected: Any) -> dict[str, tuple[VariableSchema, Any]]:
    found: dict[str, tuple[VariableSchema, Any]] = {}
    for link in file.names("variables", expected):
        doing = f"opening variable '{link}' of '{file.path}'"
        with file.reading(f"variable '{link}'"):
            dataset = file.file["variables"][link]
        if not isinstance(dataset, file.h5py.Dataset) or ATTRIBUTE not in dataset.attrs:
            raise CorruptFileError(f"{doing}: it has no attribute '{ATTRIBUTE}'; the file was written in part")
        record = json_object(text_of(attribute(dataset, ATTRIBUTE, doing)), doing)
        name, dtype = record.get("name"), record.get("dtype")
        if not isinstance(name, str) or not isinstance(dtype, str) or dataset.shape is None:
            raise CorruptFileError(f"{doing}: its description lacks a name or type; the file is damaged, copy it again")
        if dtype == "string":
            size = int(attribute(dataset, "bytes", doing) or 0)
        else:
            with contextlib.suppress(TypeError):
                if dataset.dtype != stored_dtype(numpy_dtype(dtype)):
                    raise CorruptFileError(
                        f"{doing}: got {dataset.dtype}, expected {dtype} as its description says; write it again"
                    )
            size = DatasetColumn(file, dataset, numpy_dtype(dtype)).size
        found[name] = VariableSchema(name, dtype, tuple(dataset.shape), size), dataset
    return found


def _variable_chunks(file: HDF5File, schema: VariableSchema, dataset: Any) -> Iterator[Array]:
    if schema.dtype != "string":
        column = DatasetColumn(file, dataset, numpy_dtype(schema.dtype))
        if not schema.shape or not column.row_bytes:
            yield column.read()
            return
        yield from column.chunks(max(1, BLOCK_BYTES // column.row_bytes))
        return
    doing = f"reading variable '{schema.name}' of '{file.path}'"
    with file.reading(f"variable '{schema.name}'"):
        check_heap(file, dataset, doing)
        read = np.asarray(dataset[()], object)
    strings = np.empty(schema.shape, object)
    strings.reshape(-1)[:] = [one if isinstance(one, bytes) else np.asarray(one).tobytes() for one in read.reshape(-1)]
    expected = attribute(dataset, CHECKSUM, doing)
    if expected is not None and int(expected) != string_checksum(strings):
        raise CorruptFileError(f"{doing}: checksum mismatch; the file is damaged, copy it again")
    yield strings


DIALECT = Dialect(
    name=NAME,
    title="an HDF5 file",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="file",
    suffixes=(".h5", ".hdf5"),
    holds=Holds(
        key_dtypes=KEY_DTYPES,
        value_dtypes=VALUE_DTYPES,
        freq_dtypes=COUNTER_DTYPES,
        version_dtypes=COUNTER_DTYPES,
        extras=None,
        metadata=None,
        variables=True,
    ),
    compresses=True,
)
