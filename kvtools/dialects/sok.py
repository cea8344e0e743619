"""The dump of SparseOperationKit 2 (`sok.dump`): a folder of `<table>-key`, `<table>-weight`, `<table>-<Opt>-<slot>`.

Each file is a header of 296 bytes and native-endian rows; see `docs/dialects/sok.md`. The format has no checksums and
does not record how wide a row is: the sizes of the key file and the weight file tell it.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.column import RawColumn
from kvtools.dialects.column_table import ColumnTable, Part
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint, Finding, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.raw_output import RawTableWriter, create_column, named_after_table
from kvtools.dialects.schema import SlotSchema, TableSchema, numpy_dtype
from kvtools.dialects.writing import CheckpointWriter, WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError
from kvtools.remote.stored import open_binary

NAME = "sok"
KEY_DTYPES = ("int64", "int32", "uint32", "uint64")
VALUE_DTYPES = ("float32", "float16", "float64")

_DTYPES = ("int32", "int64", "uint32", "uint64", "float16", "float32", "float64")  # by the number in a header
KEY, EMBEDDING, STATE = range(3)
"""What a header says that its file holds."""
_KINDS = ("keys", "embeddings", "optimizer state")
HEADER_BYTES = 296
_NAME_BYTES, SLOT_BYTES = 256, 32
_KEY_FILE, _WEIGHT_FILE = "-key", "-weight"
_FLATTEN = str.maketrans(dict.fromkeys(string.punctuation, "_"))


@dataclass(frozen=True)
class Header:
    """What stands before the rows of a file; `table` and `slot` are blank where they were not set."""

    table: str
    kind: int
    slot: str
    dtype: str

    def encode(self) -> bytes:
        """Return the 296 bytes; a table name that is too long for its field is left blank."""
        table, slot = self.table.encode("utf-8", "surrogateescape"), self.slot.encode("utf-8", "surrogateescape")
        table = b"" if len(table) > _NAME_BYTES else table
        return b"".join(
            [
                table.rjust(_NAME_BYTES, b" "),
                self.kind.to_bytes(4, "big"),
                slot.rjust(SLOT_BYTES, b" "),
                _DTYPES.index(self.dtype).to_bytes(4, "big"),
            ]
        )


class SokTable(ColumnTable):
    """A table of a dump; `incomplete` says which slots could not be read, and why."""

    incomplete: tuple[str, ...] = ()

    def check(self) -> Iterator[Finding]:
        """Yield the slots that were left out."""
        for message in self.incomplete:
            yield Finding("error", "slot-rows", self.schema.name, message)


def flat_name(name: str) -> str:
    """Return what a table is called in file names: each ASCII punctuation mark is an underscore.

    >>> flat_name("scope/emb:0")
    'scope_emb_0'
    """
    return name.translate(_FLATTEN)


def sniff(source: Source) -> bool:
    """Tell whether a source is a folder with a dump, or one of its files."""
    folder = _folder(source)
    names = set(folder.names)
    for end, other, kind in ((_KEY_FILE, _WEIGHT_FILE, KEY), (_WEIGHT_FILE, _KEY_FILE, EMBEDDING)):
        for name in names:
            pair = name.endswith(end) and name.removesuffix(end) + other in names
            if pair or (name.endswith(end) and is_file(folder.path / name, kind)):
                return True
    return False


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables of a dump.

    Raises:
        BadInputError: a file that belongs to a table is missing.
        CorruptFileError: a header or a size makes no sense.
        UsageError: an option contradicts a header.
    """
    names, folder = _folder(source).names, _folder(source).path
    files: dict[str, list[str]] = {}
    for name in names:
        base, dash, column = name.partition("-")
        if dash:
            files.setdefault(base, []).append(column)
    tables: dict[str, TableReader] = {}
    broken: dict[str, KvtoolsError] = {}
    for base, columns in files.items():
        if not {"key", "weight"} & set(columns) and not any(
            is_file(folder / f"{base}-{column}", STATE) for column in columns
        ):
            continue  # some other file that lies in the folder
        try:
            table = open_table(folder, base, columns, options)
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[base] = error
            continue
        tables[table.schema.name] = table
    return Checkpoint(folder, NAME, dict(sorted(tables.items())), broken=broken)


def _folder(source: Source) -> Source:
    """Return the folder of a source that is one file of a dump, else the source itself."""
    if source.is_url or not source.path.is_file():
        return source
    kinds = (KEY, EMBEDDING, STATE)
    return Source(str(source.path.parent)) if any(is_file(source.path, kind) for kind in kinds) else source


def is_file(path: Path, kind: int) -> bool:
    """Tell whether a file of a dump is at a path, of this kind."""
    try:
        return _read_header(path, "", kind) is not None
    except KvtoolsError:
        return False


def _read_header(path: Path, doing: str, kind: int) -> Header:
    allowed = KEY_DTYPES if kind == KEY else VALUE_DTYPES
    try:
        with open_binary(path) as file:
            data = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise BadInputError(f"{doing}: there is no '{path.name}'; copy every file of the dump") from None
    except OSError as error:
        raise BadInputError(f"{doing}: reading '{path}': {error.strerror or error}") from error
    if len(data) < HEADER_BYTES:
        raise CorruptFileError(
            f"{doing}: '{path}' has {len(data)} bytes, expected a header of {HEADER_BYTES}; copy it again"
        )
    got_kind, number = int.from_bytes(data[256:260], "big"), int.from_bytes(data[292:296], "big")
    if got_kind != kind:
        raise CorruptFileError(
            f"{doing}: the header of '{path}' says kind {got_kind}, expected {kind} ({_KINDS[kind]}); it is no file of"
            " a dump, or damaged"
        )
    if number >= len(_DTYPES) or _DTYPES[number] not in allowed:
        got = _DTYPES[number] if number < len(_DTYPES) else f"type {number}"
        raise CorruptFileError(
            f"{doing}: the header of '{path}' says {got}, expected {' or '.join(allowed)} for {_KINDS[kind]}; it is"
            " no file of a dump, or damaged"
        )
    names = [text.decode("utf-8", "surrogateescape").lstrip(" ") for text in (data[:256], data[260:292])]
    return Header(names[0], kind, names[1], _DTYPES[number])


def _elements(path: Path, doing: str, dtype: str) -> int:
    size, itemsize = path.stat().st_size - HEADER_BYTES, numpy_dtype(dtype).itemsize
    if size % itemsize:
        raise CorruptFileError(
            f"{doing}: '{path}' has {size} bytes after its header, expected a multiple of {itemsize}, {dtype}; it is"
            " truncated, copy it again"
        )
    return size // itemsize


def open_table(folder: Path, base: str, columns: list[str], options: OpenOptions) -> SokTable:
    """Open the table whose files are `base`-key, `base`-weight and `base`-<each of `columns`>.

    Raises: see `open_checkpoint`.
    """
    doing = f"opening table '{base}' of '{folder}'"
    key_path, weight_path = folder / f"{base}{_KEY_FILE}", folder / f"{base}{_WEIGHT_FILE}"
    keys, weights = _read_header(key_path, doing, KEY), _read_header(weight_path, doing, EMBEDDING)
    rows, numbers = _elements(key_path, doing, keys.dtype), _elements(weight_path, doing, weights.dtype)
    notes = []
    if rows == 0 and numbers == 0:
        dim = options.dim or 1
        notes.append(f"it has no rows to tell its width: taken as {dim}; --dim says another")
    elif rows == 0 or numbers == 0 or numbers % rows:
        raise CorruptFileError(
            f"{doing}: '{weight_path.name}' holds {numbers} {weights.dtype} for {rows} keys in '{key_path.name}',"
            " expected the same number for each key; the files are truncated, or of different dumps"
        )
    else:
        dim = numbers // rows
        notes.append(f"the width {dim} is that of {numbers} numbers for {rows} keys; the format does not record it")
    name = keys.table if keys.table and flat_name(keys.table) == base else base
    slots: dict[str, RawColumn] = {}
    schemas, incomplete = [], []
    for column in columns:
        if column in ("key", "weight"):
            continue
        path = folder / f"{base}-{column}"
        state = _read_header(path, doing, STATE)
        slot = _slot_name(column, state.slot)
        held = _elements(path, doing, state.dtype)
        if held != rows * dim:
            if held > rows * dim or held % dim:
                raise CorruptFileError(
                    f"{doing}: '{path.name}' holds {held} {state.dtype}, expected {rows * dim} for {rows} rows of"
                    f" {dim}; the files are truncated, or of different dumps"
                )
            incomplete.append(
                f"slot {slot} was left out: '{path.name}' holds {held // dim} rows for {rows} keys and does not say"
                " for which; rows that were looked up and never trained have no state"
            )
            continue
        schemas.append(SlotSchema(slot, dim, state.dtype))
        slots[slot] = RawColumn(path, numpy_dtype(state.dtype), (dim,), offset=HEADER_BYTES, rows=rows)
    part = Part(
        rows,
        RawColumn(key_path, numpy_dtype(keys.dtype), offset=HEADER_BYTES, rows=rows),
        RawColumn(weight_path, numpy_dtype(weights.dtype), (dim,), offset=HEADER_BYTES, rows=rows),
        slots,
    )
    schema = TableSchema(
        name=name,
        dialect=NAME,
        key_dtype=keys.dtype,
        value_dtype=weights.dtype,
        dim=dim,
        part_rows=(rows,),
        slots=tuple(schemas),
        notes=(*notes, *incomplete),
        bytes=sum((folder / f"{base}-{column}").stat().st_size for column in columns),
    )
    table = SokTable(schema, [part])
    table.incomplete = tuple(incomplete)
    return table


def _slot_name(column: str, slot: str) -> str:
    """Return "Adam.m" for the file of column "Adam-m", whose header says slot "m"."""
    optimizer = column.removesuffix(f"-{slot}")
    if slot and optimizer != column:
        return f"{optimizer}.{slot}"
    return column.replace("-", ".", 1)


class Writer(CheckpointWriter):
    """Writes a dump to a folder."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        self._folder = Path(staging)
        self._names: dict[str, str] = {}  # table by its name in file names

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> RawTableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        doing = f"writing table '{schema.name}' as {NAME}"
        base, rows = flat_name(schema.name), schema.rows
        if base in self._names:
            raise BadInputError(
                f"{doing}: its files would be called '{base}-...', as those of table '{self._names[base]}'; rename"
                " one, see `kvtools rename`"
            )
        self._names[base] = schema.name
        files = {
            "keys": ("key", Header(schema.name, KEY, "", schema.key_dtype), (rows,)),
            "values": ("weight", Header(schema.name, EMBEDDING, "", schema.value_dtype), (rows, schema.dim)),
        }
        for slot in schema.slots:
            optimizer, dot, name = slot.name.partition(".")
            column = f"{optimizer}-{name}" if dot else slot.name
            header = Header(schema.name, STATE, name if dot else slot.name, slot.dtype)
            taken = {"key", "weight", "keys", "values", *(file[0] for file in files.values())}  # -keys is of TFRA
            too_long = len(header.slot.encode("utf-8", "surrogateescape")) > SLOT_BYTES
            if "/" in column or column in taken or too_long or _slot_name(column, header.slot) != slot.name:
                raise BadInputError(
                    f"{doing}: slot '{slot.name}' has no place in the format, expected a name such as 'Adam.m', the"
                    f" part after the dot of {SLOT_BYTES} bytes at the most; leave it out, or write another dialect"
                )
            files[f"slot:{slot.name}"] = (column, header, (rows, slot.width))
        regions = {}
        for place, (column, header, shape) in files.items():
            path = self._folder / f"{base}-{column}"
            with named_after_table(doing, path.name):
                regions[place] = create_column(path, header.encode(), np.dtype(header.dtype), shape)
        return RawTableWriter(regions)

    def close(self) -> None:
        """Finish; the files are whole already."""


DIALECT = Dialect(
    name=NAME,
    title="a dump of SparseOperationKit 2 (sok.dump): a folder of <table>-key and <table>-weight",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="folder",
    holds=Holds(
        key_dtypes=KEY_DTYPES,
        value_dtypes=VALUE_DTYPES,
        slot_width_is_dim=True,
        many_parts=False,
        empty_dim=False,
    ),
)
