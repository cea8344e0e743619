"""Folders that TFRA's `FileSystemSaver` and `save_to_file_system` write: the bytes of each table and nothing else.

    <name>_mht_<i>of<devices>_rank<r>_size<processes>-keys       i from 1, r from 0
    <name>_mht_<i>of<devices>_rank<r>_size<processes>-values     both without _rank_size where a table saved itself

The files have no header: keys [rows] and values [rows, dim] as they lie in memory. Types are not recorded; the width
follows from the sizes. The saver puts the folder `TFRADynamicEmbedding` or `TFRADynamicEmbedding-<step>` beside the
checkpoint, in which markers stand for the tables. Specified in `docs/dialects/tfra.md`.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvtools.dialects.bundle import Bundle
from kvtools.dialects.bundle.writer import write_fully
from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.column import RawColumn
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import TableSchema, numpy_dtype
from kvtools.dialects.tensorflow import bundle_checkpoint
from kvtools.dialects.tfra import (
    KEY_DTYPES,
    MARKERS,
    VALUE_DTYPES,
    Places,
    StoredTable,
    check_types,
    column_type,
    join_tables,
    partition_rule,
    stored_tables,
    table_columns,
)
from kvtools.dialects.tfra_names import of_file, of_path, of_scope, status_of
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter, WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError
from kvtools.remote.stored import open_binary, read_bytes

NAME = "tfra_files"
FOLDER = "TFRADynamicEmbedding"
_FILE = re.compile(
    r"(?P<base>.+?)(?:_mht_(?P<i>\d{1,6})of(?P<n>\d{1,6})(?:_rank(?P<rank>\d{1,6})_size(?P<size>\d{1,6}))?)?"
    r"-(?P<what>keys|values)",
    re.S,
)
_MARKER = re.compile(
    r"(?:(?P<path>(?:.*/)?tables_of_[^/]+)/\d+/\.ATTRIBUTES/table|(?P<scoped>.+)_mht_\d+of\d+)-shard_upsert_restore",
    re.S,
)
_STEP = re.compile(r"-(\d+)$")
_STRING_BYTES = 24
_SAMPLED_STRINGS = 64


@dataclass(frozen=True)
class _Shard:
    """One device of one process: what the names of its two files say. `named` is False for a name of a user's own."""

    device: int
    devices: int
    rank: int
    ranks: int
    named: bool


RECORD = "kvtools.json"
"""A file that kvtools writes beside the tables' and TFRA does not read: names, types and widths."""


@dataclass(frozen=True)
class Entry:
    """What is recorded of the files of one base: the table's name, which of its columns they are, and types."""

    table: str
    column: str
    key_dtype: str
    value_dtype: str
    dim: int

    def agrees(self, options: OpenOptions) -> bool:
        """Whether the options do not ask for something else."""
        if self.column in ("freqs", "versions"):
            return True
        return (
            options.key_dtype in (None, self.key_dtype)
            and options.value_dtype in (None, self.value_dtype)
            and options.dim in (None, self.dim)
        )


def sniff(source: Source) -> bool:
    """Tell whether a source is such a folder, or a checkpoint beside which there should be one."""
    if folder_of(source) is not None:
        return True
    return source.bundle is not None and any(name.endswith(MARKERS) for name in source.bundle.entries)


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables of a folder, and, where a checkpoint was named, the tables and dense variables in that.

    Raises:
        BadInputError: a file is missing, there is no folder, or its keys are strings.
        CorruptFileError: the sizes of files contradict each other or the options.
    """
    folder = folder_of(source)
    if folder is None:
        raise BadInputError(
            f"opening '{source.text}': its tables were saved beside it by TFRA's FileSystemSaver, and there is no"
            f" folder '{FOLDER}' with their files; copy it there, or name the folder that the saver's save_path was"
        )
    stored: list[StoredTable] = []
    broken: dict[str, KvtoolsError] = {}
    files = _files(folder)
    recorded = _recorded(folder)
    for base, shards in files.items():
        known, entry = options, recorded.get(base)
        if entry is not None and entry.agrees(options):
            known = OpenOptions(key_dtype=entry.key_dtype, value_dtype=entry.value_dtype, dim=entry.dim)
        elif status_of(base, files) is not None:
            known = dataclasses.replace(options, value_dtype="int32", dim=1)
        try:
            stored.append(_open_stored(folder, base, shards, known))
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[base] = error
    columns = {base: (entry.table, entry.column) for base, entry in recorded.items()}
    location = source.location
    # What was asked for of the types was asked for of the files; the bundle's are known.
    joining = OpenOptions(memory=options.memory, lenient=options.lenient)
    if location is None or source.bundle is None or source.path == folder:
        tables = join_tables(NAME, stored, joining, broken, columns)
        return Checkpoint(folder, NAME, dict(sorted(tables.items())), broken=broken)
    in_bundle, used, more = stored_tables(source.bundle, joining)
    names = _names(source.bundle)
    for table in stored:
        table.saved = dataclasses.replace(table.saved, name=names.get(table.saved.base, table.saved.name))
    tables = join_tables(NAME, [*stored, *in_bundle], joining, broken, columns)
    return bundle_checkpoint(NAME, location, source.bundle, tables, used, {**broken, **more})


def _names(bundle: Bundle) -> dict[str, str]:
    """Return the names, with "/", of the tables that markers stand for, by what their files are called."""
    marked = [match for match in map(_MARKER.fullmatch, bundle.entries) if match]
    tables = [of_path(match["path"]) if match["path"] else of_scope(match["scoped"]) for match in marked]
    return {table.base: table.name for table in tables}


def folder_of(source: Source) -> Path | None:
    """Return the folder with the files of a source, None if there is none."""
    if source.is_url:
        return None
    if _has_tables(source.path):
        return source.path
    location = source.location
    if location is None:
        return source.path / FOLDER if _has_tables(source.path / FOLDER) else None
    if source.bundle is None or not any(name.endswith(MARKERS) for name in source.bundle.entries):
        return None
    step = _STEP.search(location.prefix.name)
    names = [f"{FOLDER}-{step[1]}", f"{FOLDER}-{int(step[1]):08d}", FOLDER] if step else [FOLDER]
    folders = [location.prefix.parent / name for name in names]
    return next((folder for folder in folders if _has_tables(folder)), None)


def _has_tables(folder: Path) -> bool:
    try:
        names = {entry.name for entry in os.scandir(folder)} if folder.is_dir() else set()
    except OSError:
        return False
    return any(
        "_mht_" in name or _is_pair(name.removesuffix("-keys"), names) for name in names if _FILE.fullmatch(name)
    )


def _is_pair(base: str, names: set[str]) -> bool:
    """Tell whether a table has its files there, and they are not two slots of a table that sok dumped."""
    return f"{base}-values" in names and not {f"{base}-key", f"{base}-weight"} <= names


def _files(folder: Path) -> dict[str, dict[_Shard, dict[str, Path]]]:
    """Return the files of a folder by table, shard and "keys" or "values"."""
    found: dict[str, dict[_Shard, dict[str, Path]]] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match and path.is_file():
            shard = _Shard(
                int(match["i"] or 1) - 1,
                int(match["n"] or 1),
                int(match["rank"] or 0),
                int(match["size"] or 1),
                match["rank"] is not None,
            )
            found.setdefault(match["base"], {}).setdefault(shard, {})[match["what"]] = path
    return found


def _recorded(folder: Path) -> dict[str, Entry]:
    """Return what is recorded in a folder that kvtools wrote, by base."""
    path = folder / RECORD
    try:
        return entries_of(read_bytes(path), f"reading '{path}'") if path.is_file() else {}
    except OSError as error:
        raise BadInputError(f"reading '{path}': {error.strerror or error}") from error


def entries_of(text: bytes, doing: str) -> dict[str, Entry]:
    """Return what a record says, by base."""
    try:
        entries = {base: Entry(**entry) for base, entry in json.loads(text)["tables"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(
            f"{doing}: it is damaged ({type(error).__name__}); remove it, and say which types there are with"
            " --key-dtype and --value-dtype"
        ) from error
    for base, entry in entries.items():
        texts = (entry.table, entry.column, entry.key_dtype, entry.value_dtype)
        if not all(isinstance(text, str) for text in texts) or type(entry.dim) is not int or entry.dim < 1:
            raise CorruptFileError(f"{doing}: what it says of '{base}' makes no sense; remove it")
    return entries


def record_of(entries: Mapping[str, Entry]) -> str:
    """Return the text of a record."""
    return json.dumps({"tables": {base: dataclasses.asdict(entry) for base, entry in entries.items()}}, indent=1)


def _open_stored(
    folder: Path, base: str, shards: Mapping[_Shard, Mapping[str, Path]], options: OpenOptions
) -> StoredTable:
    doing = f"opening table '{base}' of '{folder}'"
    layouts = {(shard.devices, shard.ranks, shard.named) for shard in shards}
    if len(layouts) > 1:
        told = " and ".join(f"{devices} devices of {ranks} processes" for devices, ranks, _ in sorted(layouts))
        raise BadInputError(
            f"{doing}: got files of {told}, expected those of one save; move the older ones to another folder"
        )
    devices, ranks, _ = layouts.pop()
    ordered = sorted(shards, key=lambda shard: (shard.rank, shard.device))
    numbers = [(shard.rank, shard.device) for shard in ordered]
    # No more than the files that there are is listed: the numbers come from names.
    wanted = [(number // devices, number % devices) for number in range(min(devices * ranks, len(numbers) + 1))]
    if numbers != wanted:
        missing = next((number for number in wanted if number not in numbers), None)
        fault = (
            f"device {missing[1] + 1} of {devices} of process {missing[0]} is missing"
            if missing
            else "a number is too high"
        )
        raise BadInputError(
            f"{doing}: got the files of {len(numbers)} of {devices * ranks} shards, {fault}; copy every file"
        )
    for pair in shards.values():
        for what in ("keys", "values"):
            if what not in pair:
                there = next(iter(pair.values()))
                raise BadInputError(f"{doing}: there is '{there.name}' and no file of its {what}; copy every file")
    files = [(shards[shard]["keys"], shards[shard]["values"]) for shard in ordered]
    _refuse_strings(doing, [keys for keys, _ in files], options)
    key_dtype, value_dtype = options.key_dtype or "int64", options.value_dtype or "float32"
    sizes = [(_size(keys), _size(values)) for keys, values in files]
    if key_dtype not in KEY_DTYPES or value_dtype not in VALUE_DTYPES:
        raise BadInputError(
            f"{doing}: keys of {key_dtype} and values of {value_dtype} were asked for, expected"
            f" {' or '.join(KEY_DTYPES)} and {' or '.join(VALUE_DTYPES)}; see --key-dtype and --value-dtype"
        )
    dim, notes = _width(doing, files, sizes, key_dtype, value_dtype, options)
    keys = [RawColumn(path, numpy_dtype(key_dtype)) for path, _ in files]
    values = [RawColumn(path, numpy_dtype(value_dtype), (dim,)) for _, path in files]
    return StoredTable(
        of_file(base),
        key_dtype,
        value_dtype,
        dim,
        tuple(column.rows for column in keys),
        [*keys],
        [*values],
        sum(key_bytes + value_bytes for key_bytes, value_bytes in sizes),
        notes,
        routed=ranks == 1 or devices == 1,
    )


def _width(
    doing: str,
    files: Sequence[tuple[Path, Path]],
    sizes: Sequence[tuple[int, int]],
    key_dtype: str,
    value_dtype: str,
    options: OpenOptions,
) -> tuple[int, tuple[str, ...]]:
    """Return how wide rows are, as the sizes of the files say, and what was assumed."""
    assumed = [f"keys are taken as {key_dtype}"] if options.key_dtype is None else []
    assumed += [f"values are taken as {value_dtype}"] if options.value_dtype is None else []
    notes = [f"{' and '.join(assumed)}: the files record no types"] if assumed else []
    key_bytes, number_bytes = numpy_dtype(key_dtype).itemsize, numpy_dtype(value_dtype).itemsize
    widths: dict[int, Path] = {}
    for (keys, values), (held, value_bytes) in zip(files, sizes, strict=True):
        if held % key_bytes:
            raise CorruptFileError(
                f"{doing}: '{keys.name}' has {held} bytes, expected a multiple of {key_bytes}, the size of a"
                f" {key_dtype}; say which type keys have with --key-dtype, or copy the file again"
            )
        rows = held // key_bytes
        if value_bytes % (rows * number_bytes or 1) or (rows == 0) != (value_bytes == 0):
            raise CorruptFileError(
                f"{doing}: '{values.name}' has {value_bytes} bytes for {rows} {key_dtype} keys, expected a multiple of"
                f" {rows * number_bytes}, a {value_dtype} for each; say which types there are with --key-dtype and"
                " --value-dtype, or copy the file again"
            )
        if rows:
            widths.setdefault(value_bytes // (rows * number_bytes), values)
    if len(widths) > 1:
        told = " and ".join(f"{width} wide in '{path.name}'" for width, path in widths.items())
        raise CorruptFileError(
            f"{doing}: rows are {told}, expected one width; the files are of different saves, or one was cut: copy them"
            " again"
        )
    if not widths:
        if options.dim is None:
            notes.append("there are no rows: the width is not known, 1 is assumed")
        return options.dim or 1, tuple(notes)
    dim = next(iter(widths))
    if options.dim is not None and options.dim != dim:
        raise CorruptFileError(
            f"{doing}: {dim * number_bytes} bytes a row are {dim} numbers of {value_dtype}, and {options.dim} were"
            " asked for; give another --dim, --key-dtype or --value-dtype"
        )
    return dim, tuple(notes)


def _refuse_strings(doing: str, paths: Sequence[Path], options: OpenOptions) -> None:
    """Raise `BadInputError` if keys are strings: what is in the files then are pointers of a process that is gone."""
    if options.key_dtype != "string" and (options.key_dtype or not any(_holds_strings(path) for path in paths[:1])):
        return
    raise BadInputError(
        f"{doing}: its keys are strings, of which TFRA's files hold the bytes of objects in memory, not the text; save"
        " the table to a checkpoint (without FileSystemSaver), or hash its keys to int64. If the keys are numbers, say"
        " so with --key-dtype"
    )


def _holds_strings(path: Path) -> bool:
    """Tell whether a file of keys looks like TensorFlow's strings, objects of 24 bytes.

    A short one is a byte of four times its length, the text, and zeros. A long one is four times its length and one,
    its capacity, and a pointer, 8 bytes each. Distinct numbers do not look like that row after row.
    """
    if _size(path) % _STRING_BYTES or not _size(path):
        return False
    with open_binary(path) as file:
        records = np.frombuffer(file.read(_STRING_BYTES * _SAMPLED_STRINGS), np.uint8).reshape(-1, _STRING_BYTES)
    lengths = records[:, :1] >> 2
    text = np.arange(1, _STRING_BYTES) <= lengths
    graphic = np.where(text, records[:, 1:] >= 0x20, records[:, 1:] == 0).all(axis=1)
    short = (records[:, 0] & 3 == 0) & graphic & (lengths[:, 0] > 0) & (lengths[:, 0] < _STRING_BYTES - 1)
    size, capacity, pointer = records.view(np.uint64).T
    long = (size & 3 == 1) & (size >> 2 <= capacity) & (capacity < 1 << 32) & (pointer >> 32 > 0) & (pointer >> 48 == 0)
    return bool((short | long).all())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise BadInputError(f"opening '{path}': {error.strerror or error}; copy every file") from error


@dataclass(frozen=True)
class _Target:
    path: str
    row_bytes: int


class FilesShard(ShardWriter):
    """Writes rows of a table to their places in its files."""

    def __init__(self, targets: Mapping[tuple[int, str], Sequence[_Target]]) -> None:
        self._targets = targets

    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Write a chunk; see `ShardWriter.write`."""
        for column, rows in table_columns(chunk).items():
            data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
            for target in self._targets[part, column]:
                # Opened for each chunk: there may be more parts than a process may have files open.
                file = os.open(target.path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    write_fully(file, data, start * target.row_bytes)
                finally:
                    os.close(file)


class FilesTable(TableWriter):
    """One table of a folder being written, its slots and status beside it."""

    random_access: ClassVar[bool] = True
    distributable: ClassVar[bool] = True

    def __init__(self, folder: Path, schema: TableSchema, places: Mapping[str, str], entries: dict[str, Entry]) -> None:
        self._targets: dict[tuple[int, str], list[_Target]] = {}
        key_bytes = numpy_dtype(schema.key_dtype).itemsize
        for column, place in places.items():
            base = of_path(place).base if "tables_of_" in place.split("/")[-1] else place.split("/")[-1]
            if base in entries:
                raise BadInputError(
                    f"writing table '{schema.name}' as {NAME}: its name makes files '{base}', as table"
                    f" '{entries[base].table}' does; rename one, see `kvtools rename`"
                )
            dtype, width = column_type(schema, column)
            entries[base] = Entry(schema.name, column, schema.key_dtype, dtype.name, width)
            for part, rows in enumerate(schema.part_rows):
                stem = f"{folder}/{base}_mht_{part + 1}of{schema.parts}_rank0_size1"
                try:
                    self._place(part, "keys", f"{stem}-keys", key_bytes, rows)
                    self._place(part, column, f"{stem}-values", width * dtype.itemsize, rows)
                except (ValueError, UnicodeError) as error:
                    raise BadInputError(
                        f"writing table '{schema.name}' as {NAME}: its name cannot be a file's ({error}); see"
                        " `kvtools rename`"
                    ) from error
                except OSError as error:
                    if error.errno != errno.ENAMETOOLONG:
                        raise
                    raise BadInputError(
                        f"writing table '{schema.name}' as {NAME}: its name is too long for a file's; see"
                        " `kvtools rename`"
                    ) from error

    def _place(self, part: int, column: str, path: str, row_bytes: int, rows: int) -> None:
        with Path(path).open("xb") as file:
            file.truncate(rows * row_bytes)
        self._targets.setdefault((part, column), []).append(_Target(path, row_bytes))

    def shard(self) -> FilesShard:
        """Return a writer for one task."""
        return FilesShard(self._targets)

    def close(self) -> None:
        """End the table."""


class Writer(CheckpointWriter):
    """Writes a folder that `load_from_file_system` of TFRA's variables loads."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        self._folder = Path(staging)
        self._places = Places()
        self._entries: dict[str, Entry] = {}

    def plan(self, schemas: Sequence[TableSchema]) -> None:
        """Note which tables are status of which; see `CheckpointWriter.plan`."""
        self._places = Places(schema.name for schema in schemas)

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> FilesTable:
        """Start a table; see `CheckpointWriter.table`."""
        check_types(schema)
        return FilesTable(self._folder, schema, self._places.of(schema), self._entries)

    def close(self) -> None:
        """Write the record."""
        (self._folder / RECORD).write_text(record_of(self._entries))


DIALECT = Dialect(
    name=NAME,
    title="TensorFlow Recommenders Addons: folder of FileSystemSaver or save_to_file_system",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="folder",
    holds=Holds(
        key_dtypes=KEY_DTYPES,
        value_dtypes=VALUE_DTYPES,
        slot_width_is_dim=True,
        slot_dtype_is_value=True,
        freq_dtypes=("int32",),
        version_dtypes=("int32",),
        version_units=("seconds",),
        partition=partition_rule,
        metadata=frozenset({"tfra"}),
        status_tables=True,
    ),
)
