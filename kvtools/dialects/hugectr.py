"""What HugeCTR saves of an embedding: a folder with `key`, `emb_vector` and, of localized ones, `slot_id`.

All are numbers without a header: int64 keys, and float32 rows and uint64 slot ids in the same order. The width of a row
is not recorded; see `docs/dialects/hugectr.md`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.column import Column, RawColumn
from kvtools.dialects.column_table import ColumnTable, Part
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.raw_output import RawTableWriter, create_column, named_after_table
from kvtools.dialects.schema import SlotSchema, TableSchema, numpy_dtype
from kvtools.dialects.writing import CheckpointWriter, WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, UsageError

NAME = "hugectr"
KEYS, VALUES, SLOT_IDS = "key", "emb_vector", "slot_id"
SLOT_ID = SlotSchema(SLOT_IDS, 1, "int64")

_FOLDERS_SNIFFED = 1_000
_SAVED = re.compile(r"(?P<prefix>.*)_sparse_(?P<step>\d+)\.model", re.S)


def sniff(source: Source) -> bool:
    """Tell whether a source is a folder with such files, or with folders that have them, or is one of the files."""
    return not source.is_url and next(_folders(_root(source), _FOLDERS_SNIFFED), None) is not None


def _root(source: Source) -> Path:
    """Return the folder of a source that is one of the files, else the source itself."""
    one = source.path.name in (KEYS, VALUES, SLOT_IDS) and source.path.is_file()
    return source.path.parent if one else source.path


def _folders(root: Path, most: int | None = None) -> Iterator[Path]:
    """Yield the folders with files of a table, the root among them, in the order of their names.

    `most` is how many folders are looked at.
    """
    left, seen = [root], 0
    while left and seen != most:
        folder = left.pop()
        seen += 1
        try:
            with os.scandir(folder) as entries:
                below = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:
            continue
        if below.get(VALUES) is False:
            yield folder  # that its keys are missing, opening it tells
        left += sorted((folder / name for name, is_dir in below.items() if is_dir and name[0] != "."), reverse=True)


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables of all folders below one.

    Raises:
        BadInputError: a table's `key` is missing.
        CorruptFileError: the files' sizes contradict each other.
        UsageError: `--dim` contradicts the sizes.
    """
    root = _root(source)
    tables: dict[str, TableReader] = {}
    broken: dict[str, KvtoolsError] = {}
    for folder in _folders(root):
        name = root.resolve().name if folder == root else folder.relative_to(root).as_posix()
        try:
            tables[name] = open_table(folder, name, options)
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[name] = error
    return Checkpoint(root, NAME, dict(sorted(tables.items())), broken=broken)


def open_table(folder: Path, name: str, options: OpenOptions) -> ColumnTable:
    """Open the files of one embedding; raises as `open_checkpoint` does."""
    doing = f"opening table '{name}' of '{folder}'"
    paths = {file: folder / file for file in (KEYS, VALUES, SLOT_IDS) if (folder / file).is_file()}
    if KEYS not in paths:
        raise BadInputError(f"{doing}: there is no '{KEYS}' beside '{VALUES}'; copy every file of the folder")
    sizes = {file: path.stat().st_size for file, path in paths.items()}
    said = " and ".join(f"'{file}' has {size} bytes" for file, size in sizes.items())
    rows, rest = divmod(sizes[KEYS], 8)
    numbers, odd = divmod(sizes[VALUES], 4)
    if rest or odd or (numbers % rows if rows else numbers) or (rows and not numbers):
        raise CorruptFileError(
            f"{doing}: {said}, which is no number of int64 keys with as many float32 rows; a file is truncated, copy it"
            " again"
        )
    if sizes.get(SLOT_IDS, 8 * rows) != 8 * rows:
        raise CorruptFileError(f"{doing}: {said}, expected 8 bytes for each of {rows} keys; copy the folder again")
    dim = numbers // rows if rows else options.dim or 1
    if dim < 1 or options.dim not in (None, dim):
        raise UsageError(f"{doing}: {said}, which are rows of {dim}, got --dim {options.dim}; leave it out")
    notes = []
    if not rows and options.dim is None:
        notes.append("it has no rows to tell its width: taken as 1; --dim says another")
    states = _optimizer_states(folder)
    if states is not None:
        notes.append(
            f"optimizer states in '{states.name}' are left out: they lie in the order of each GPU's memory, and neither"
            " the number of GPUs nor the optimizer is recorded"
        )
    slots: tuple[SlotSchema, ...] = ()
    slot_columns: dict[str, Column] = {}
    if SLOT_IDS in paths:
        slots = (SLOT_ID,)
        slot_columns = {SLOT_IDS: RawColumn(paths[SLOT_IDS], np.dtype(np.int64), (1,), rows=rows)}
        notes.append(f"'{SLOT_IDS}' is read as a slot: it says to which slot of the input a key belongs")
    schema = TableSchema(
        name=name,
        dialect=NAME,
        key_dtype="int64",
        value_dtype="float32",
        dim=dim,
        part_rows=(rows,),
        slots=slots,
        notes=tuple(notes),
        bytes=sum(sizes.values()),
    )
    keys = RawColumn(paths[KEYS], np.dtype(np.int64), rows=rows)
    values = RawColumn(paths[VALUES], np.dtype(np.float32), (dim,), rows=rows)
    return ColumnTable(schema, [Part(rows, keys, values, slot_columns)])


def _optimizer_states(folder: Path) -> Path | None:
    """Return the file of optimizer states that HugeCTR saved beside a folder, if it is there."""
    found = _SAVED.fullmatch(folder.name)
    if found is None:
        return None
    path = folder.with_name(f"{found['prefix']}_opt_sparse_{found['step']}.model")
    return path if path.is_file() else None


class Writer(CheckpointWriter):
    """Writes a folder for each table."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        self._folder = Path(staging)

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> RawTableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        doing = f"writing table '{schema.name}' as {NAME}"
        words = schema.name.split("/")
        if any(word in ("", KEYS, VALUES, SLOT_IDS) or word[0] == "." for word in words):
            raise BadInputError(
                f"{doing}: its name has a part that no folder of it can be called, one that is empty, begins with a dot"
                f" or is {KEYS}, {VALUES} or {SLOT_IDS}; rename it first, see `kvtools rename`"
            )
        places: dict[str, tuple[str, str, tuple[int, ...]]] = {"keys": (KEYS, schema.key_dtype, (schema.rows,))}
        places["values"] = (VALUES, schema.value_dtype, (schema.rows, schema.dim))
        places.update(
            {f"slot:{slot.name}": (slot.name, slot.dtype, (schema.rows, slot.width)) for slot in schema.slots}
        )
        regions = {}
        folder = self._folder.joinpath(*words)
        with named_after_table(doing, schema.name):
            folder.mkdir(parents=True, exist_ok=True)
            for place, (file, dtype, shape) in places.items():
                regions[place] = create_column(folder / file, b"", numpy_dtype(dtype), shape)
        return RawTableWriter(regions)

    def close(self) -> None:
        """Finish; the files are whole already."""


DIALECT = Dialect(
    name=NAME,
    title="folders that HugeCTR saves its embeddings in: key, emb_vector and slot_id",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="folder",
    holds=Holds(
        key_dtypes=("int64",),
        value_dtypes=("float32",),
        only_slots=(SLOT_ID,),
        many_parts=False,
        empty_dim=False,
    ),
)
