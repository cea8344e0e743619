"""Snapshots: keys sorted by their mixed bits, rows in that order, one mapped file (`.kvsnap`), for lookups.

Specified in docs/dialects/snapshot.md; read and written by `kvtools._snapshot`. A snapshot has no optimizer slots:
nobody trains it. `--compression int8` or `int4` keeps float32 rows so, with an offset and a scale each; rows of
integers stay as they are.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np

from kvtools import __version__
from kvtools._snapshot import Snapshot, Table
from kvtools._snapshot import Writer as NativeWriter
from kvtools._snapshot import open as open_native
from kvtools.default_row import with_default_row
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.graph_findings import graph_findings
from kvtools.dialects.interface import Checkpoint, Finding, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import DEFAULT_ROW, ExtraSchema, TableSchema, VersionUnit
from kvtools.dialects.table_record import COUNTER_DTYPES, VALUE_DTYPES, json_object
from kvtools.dialects.tensorflow import bundle_checkpoint, located
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter, WriteOptions, later_rows
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, UsageError
from kvtools.quantized_rows import QUANTIZED, first_unfit
from kvtools.remote.stored import HERE, Stored, open_binary, stored
from kvtools.snapshot import file_errors, utf8_path
from kvtools.split_manifest import SNAPSHOT as SPLIT_SNAPSHOT
from kvtools.split_manifest import SplitModel, is_split

NAME = "snapshot"
SUFFIX = ".kvsnap"

MAGIC = b"\x89KVS\r\n\x1a\n"
_HEADER_BYTES = 128
_KEY_DTYPES = ("int64", "int32", "uint64")
_FORMS = {1: ("int8", "a float32 scale"), 2: ("int8", "an offset and a scale"), 3: ("int4", "an offset and a scale")}
"""Forms of rows by their numbers in the file: what they are, and what each of them has beside."""
_WHOLE = ("int8", "int16", "int32", "int64", "bool")


def sniff(source: Source) -> bool:
    """Tell whether a source is a snapshot, or a model in two halves, of which one is a snapshot."""
    if source.is_url or not (path := file_of(source)).is_file():
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    with open_binary(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def file_of(source: Source) -> Path:
    """Return the snapshot that a source is, or has for its tables."""
    return source.path / SPLIT_SNAPSHOT if is_split(source.path) else source.path


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open a snapshot, whose rows are checked against their checksums whichever way they are read.

    Raises `BadInputError`, or `CorruptFileError` where it is none or a damaged one.
    """
    file = stored(file_of(source))
    if file.remote:
        _keep_description(file_of(source), file)
    with file_errors():
        snapshot = open_native(utf8_path(file_of(source)))
        if not file.remote:
            snapshot.verify_on_use()
    checkpoint = checkpoint_of(source, snapshot, file)
    return _with_dense_half(checkpoint, source.path, snapshot) if is_split(source.path) else checkpoint


def _with_dense_half(checkpoint: Checkpoint, folder: Path, snapshot: Snapshot) -> Checkpoint:
    """Return the checkpoint of a model in two halves with the variables of its dense half, and what checks all of it.

    What is wrong with the dense half is told by the check: whoever wants rows can have them.
    """
    wrong: list[KvtoolsError] = []
    dense: Checkpoint | None = None
    model: SplitModel | None = None
    try:
        model = SplitModel.read(folder)
        dense_source = Source(str(model.dense))
        if dense_source.bundle is not None:
            dense = bundle_checkpoint(NAME, *located(dense_source), {}, ())
        else:
            wrong.append(BadInputError(f"reading '{model.dense}': it has no variables; copy the folder as a whole"))
    except KvtoolsError as error:
        wrong.append(error)

    def check() -> Iterator[Finding]:
        yield from checkpoint.check()
        for error in wrong:
            yield Finding("error", "open", "", str(error))
        if model is not None:
            yield from graph_findings(model.dense, model.manifest)
            if model.fingerprint != snapshot.fingerprint:
                message = f"'{model.snapshot}' is not the snapshot that was exported with the rest of it"
                yield Finding("error", "halves", "", f"{message}; copy the folder as a whole")
        if dense is not None:
            yield from dense.check()
            for variable in dense.bookkeeping:
                try:
                    for _ in dense.read_variable(variable.name):
                        pass
                except KvtoolsError as error:
                    yield Finding("error", "damaged", "", str(error))

    if dense is None:
        return dataclasses.replace(checkpoint, check=check)
    return dataclasses.replace(checkpoint, variables=dense.variables, read_variable=dense.read_variable, check=check)


def _keep_description(path: Path, file: Stored) -> None:
    """Have on this machine what opening a remote snapshot reads: its header, and what lies behind the sections."""
    with open_binary(path) as opened:
        header = opened.read(_HEADER_BYTES)
    size = path.stat().st_size
    file.keep(0, _HEADER_BYTES)
    if len(header) == _HEADER_BYTES:
        description, _, checksums = struct.unpack_from("<3Q", header, 24)
        begin = min(description, checksums)
        if begin < size:  # else it is damaged, as opening it will tell
            file.keep(begin, size)
    file.keep(max(0, size - 1), size)


class _Whole:
    """Has all of a remote snapshot brought here before the first row of it is read: it is mapped by compiled code."""

    def __init__(self, file: Stored, snapshot: Snapshot) -> None:
        self._file = file
        self._snapshot = snapshot
        self._lock = threading.Lock()
        self._here = not file.remote

    def __call__(self) -> None:
        if self._here:
            return
        with self._lock:
            if not self._here:
                self._file.keep()
                with file_errors():
                    self._snapshot.verify_on_use()
                self._here = True


def checkpoint_of(source: Source, snapshot: Snapshot, file: Stored = HERE) -> Checkpoint:
    """Return an opened snapshot as a checkpoint."""
    whole = _Whole(file, snapshot)
    path = source.path
    said = json_object(snapshot.description, f"opening '{path}'")
    records = said.get("tables")
    records = records if isinstance(records, dict) else {}
    tables: dict[str, TableReader] = {}
    for table in snapshot.tables:
        try:
            name = table.name.decode()
        except UnicodeDecodeError as error:
            raise CorruptFileError(
                f"opening '{path}': the name {table.name[:40]!r} of a table is no UTF-8; write it again"
            ) from error
        record = records.get(name)
        tables[name] = SnapshotReader(table, name, record if isinstance(record, dict) else {}, whole)
    return Checkpoint(path, NAME, dict(sorted(tables.items())))


class SnapshotReader(TableReader):
    """A table of a snapshot, in the order of the mixed keys; `native` is the compiled table."""

    take_is_checked = True
    direct = True

    def __init__(self, native: Table, name: str, record: dict[str, Any], whole: Callable[[], None]) -> None:
        self.native = native
        self._whole = whole
        unit, metadata = record.get("version_unit"), record.get("metadata")
        extras = (ExtraSchema(DEFAULT_ROW, native.value_dtype, (native.dim,)),)
        notes = []
        rows_as, beside = _FORMS.get(native.row_form, (None, ""))
        if rows_as:
            notes.append(f"its rows are {rows_as} with {beside} each; they are read as float32")
        if native.duplicates:
            notes.append(f"{native.duplicates} rows of its source are left out: a later one has their key")
        self.schema = TableSchema(
            name=name,
            dialect=NAME,
            key_dtype=native.key_dtype,
            value_dtype=native.value_dtype,
            dim=native.dim,
            part_rows=(native.rows,),
            freq_dtype=native.freq_dtype,
            version_dtype=native.version_dtype,
            version_unit=_unit(unit),
            checksums="CRC-32C",
            extras=() if native.default_row is None else extras,
            metadata=metadata if isinstance(metadata, dict) else {},
            rows_as=rows_as,
            notes=tuple(notes),
            bytes=native.bytes,
        )

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield all rows; see `TableReader.read_part`."""
        self._whole()
        wanted = {"values": columns.values, "freqs": columns.freqs, "versions": columns.versions}
        for first in range(0, self.rows, rows):
            with file_errors():
                read = self.native.read(first, min(rows, self.rows - first), **wanted, verify=verify)
            yield _chunk(read)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        self._whole()
        numbers = np.ascontiguousarray(self.row_numbers(rows))
        with file_errors():
            return _chunk(
                self.native.take(numbers, values=columns.values, freqs=columns.freqs, versions=columns.versions)
            )

    def extra(self, name: str) -> Array:
        """Return the row of missing keys."""
        self._whole()
        row = self.native.default_row
        if name != DEFAULT_ROW or row is None:
            raise KeyError(name)
        return row

    def check(self) -> Iterator[Finding]:
        """Yield what is wrong with the directory, by which keys are found; the rest is checked as rows are read."""
        self._whole()
        try:
            with file_errors():
                self.native.verify_directory()
        except CorruptFileError as error:
            yield Finding("error", "checksum", self.schema.name, str(error))


def _chunk(read: tuple[Array, Array | None, Array | None, Array | None]) -> Chunk:
    keys, values, freqs, versions = read
    return Chunk(keys=keys, values=values, freqs=freqs, versions=versions)


def _unit(said: Any) -> VersionUnit:
    for unit in get_args(VersionUnit):
        if said == unit:
            return unit  # type: ignore[no-any-return]
    return "unknown"


class _Shard(ShardWriter):
    """Writes rows of a table, by their numbers."""

    def __init__(self, writer: NativeWriter, quantized: bool) -> None:
        self._writer = writer
        self._quantized = quantized

    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Write a chunk; see `ShardWriter.write`."""
        assert chunk.values is not None
        freqs = None if chunk.freqs is None else np.ascontiguousarray(chunk.freqs)
        versions = None if chunk.versions is None else np.ascontiguousarray(chunk.versions)
        try:
            self._writer.add_rows(start, np.ascontiguousarray(chunk.values), freqs, versions)
        except ValueError as error:
            unfit = first_unfit(chunk.values) if self._quantized else None
            told = str(error)
            if unfit is not None:
                told = told.replace(f"row {start + unfit} has", f"the row of key {chunk.keys[unfit]} has")
            raise BadInputError(told) from error


class _Table(TableWriter):
    """A table being written: its keys are there already."""

    random_access: ClassVar[bool] = True

    def __init__(self, writer: NativeWriter, quantized: bool, duplicates: int, losses: tuple[str, ...]) -> None:
        self._writer = writer
        self._quantized = quantized
        self.duplicates = duplicates
        self.losses = losses

    def shard(self) -> _Shard:
        """Return a writer for one task."""
        return _Shard(self._writer, self._quantized)

    def extra(self, name: str, array: Array) -> None:
        """Write the row of missing keys."""
        self._writer.set_default_row(np.ascontiguousarray(array))

    def close(self) -> None:
        """Put the rows in their places."""
        self._writer.end_table()


class Writer(CheckpointWriter):
    """Writes a snapshot."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        if options.compression not in (None, "none", *QUANTIZED):
            raise UsageError(
                f"writing {NAME}: got --compression {options.compression}, expected none, {' or '.join(QUANTIZED)}"
            )
        if options.compression_level is not None or options.batch_rows is not None:
            option = "--compression-level" if options.compression_level is not None else "--batch-rows"
            raise UsageError(f"writing {NAME}: it has no {option}; leave the option out")
        self._all_as = options.compression if options.compression in QUANTIZED else None
        self._rows_as = dict(options.rows_as)
        self.exact = not (self._all_as or self._rows_as)
        self._writer = NativeWriter(utf8_path(staging), options.memory)
        self._tables: dict[str, dict[str, Any]] = {}

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> TableWriter:
        """Sort the keys of a table; see `CheckpointWriter.table`."""
        rows_as = self._rows_as.get(schema.name, self._all_as) if schema.value_dtype not in _WHOLE else None
        if rows_as and schema.value_dtype != "float32":
            raise UsageError(
                f"writing table '{schema.name}' as {NAME}: its values are {schema.value_dtype}, expected float32 with"
                f" --compression {rows_as}; cast them first, see `kvtools cast`"
            )
        try:
            self._writer.begin_table(
                schema.name,
                key_dtype=schema.key_dtype,
                value_dtype=schema.value_dtype,
                dim=schema.dim,
                rows=schema.rows,
                rows_as=rows_as or "",
                freq_dtype=schema.freq_dtype or "",
                version_dtype=schema.version_dtype or "",
            )
            for _, some in keys():
                self._writer.add_keys(np.ascontiguousarray(some))
            duplicates = self._writer.sort_keys()
        except ValueError as error:
            raise BadInputError(str(error)) from error
        self._tables[schema.name] = {"version_unit": schema.version_unit, "metadata": dict(schema.metadata)}
        losses = []
        if duplicates:
            losses.append(later_rows(duplicates))
        return _Table(self._writer, bool(rows_as), duplicates, tuple(losses))

    def close(self) -> None:
        """Write the description and the header, and sync the file."""
        said = {"format": "kvtools snapshot", "written_by": f"kvtools {__version__}", "tables": self._tables}
        self._writer.close(json.dumps(said).encode())

    def abort(self) -> None:
        """Close the file."""
        self._writer.abort()


DIALECT = Dialect(
    name=NAME,
    title="a snapshot of kvtools (.kvsnap), for lookups",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="file",
    suffixes=(SUFFIX,),
    completed=with_default_row,
    holds=Holds(
        key_dtypes=_KEY_DTYPES,
        value_dtypes=(*VALUE_DTYPES, "bool"),
        slots=False,
        freq_dtypes=COUNTER_DTYPES,
        version_dtypes=COUNTER_DTYPES,
        many_parts=False,
        extras=frozenset({DEFAULT_ROW}),
        metadata=None,
        key_bytes=8,
        keys_once=True,
    ),
    compresses=True,
)
