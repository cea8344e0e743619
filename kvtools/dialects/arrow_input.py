"""Open files of record batches, Parquet or Arrow, as tables: ours by their descriptions, others by their columns."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.arrow_columns import DESCRIPTION, arrow_errors, arrow_schema, column_map, numpy_numbers
from kvtools.dialects.arrow_output import EXTRAS, PART, Contents, read_extra
from kvtools.dialects.arrow_table import ArrowPart, ArrowTable, stranger_table
from kvtools.dialects.bundle.checksum import extend
from kvtools.dialects.chunk import ALL_COLUMNS, Array
from kvtools.dialects.dialect import Source
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.safe_name import safe_name
from kvtools.dialects.schema import ExtraSchema, TableSchema
from kvtools.dialects.table_files import FOLDER_MARK, files_below, group_files, has_file, other_files
from kvtools.dialects.table_record import table_schema
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError
from kvtools.remote.stored import open_binary

_OTHERS_TOLD = 3


class BatchInput(ABC):
    """One file opened for reading: `schema` is its Arrow schema with metadata, `batch_rows` the rows of its batches.

    `contents` is what its end tells, where it is ours.
    """

    path: Path
    schema: Any
    batch_rows: Sequence[int]
    contents: Contents | None

    @abstractmethod
    def part(self, batches: Sequence[int]) -> ArrowPart:
        """Return the rows of these batches, in this order, as a part of a table."""

    @property
    def described(self) -> bool:
        """Whether the file has a description of its table."""
        return DESCRIPTION in (self.schema.metadata or {})


@dataclass(frozen=True)
class InputFormat:
    """How files of one format are found and opened, and what `checksums` the columns of ours have.

    The text that `open` is given begins its messages. `keeps_contents`: a program that reads a file of ours and writes
    another may carry along what its end tells.
    """

    name: str
    title: str
    checksums: str
    suffixes: tuple[str, ...]
    open: Callable[[Path, str, OpenOptions], BatchInput]
    keeps_contents: bool


def has_files(source: Source, suffixes: tuple[str, ...], magic: bytes) -> bool:
    """Tell whether a source is a file that begins with `magic`, or a folder with one that ends in `suffixes`."""
    if source.is_url:
        return False
    try:
        if source.path.is_dir():  # a TensorFlow checkpoint's folder may have such files beside it
            return source.location is None and has_file(source.path, suffixes)
        with open_binary(source.path) as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


def open_files(path: Path, form: InputFormat, options: OpenOptions) -> Checkpoint:
    """Open the tables of a file, or of the files of a folder.

    Raises:
        BadInputError: there is no table, or it cannot be told what its columns are.
        CorruptFileError: a file is damaged, or the files of a table do not fit together.
    """
    files = files_below(path, form.suffixes) if path.is_dir() else [path]
    if not files:
        raise BadInputError(f"opening '{path}' as {form.title}: got no file ending in {' or '.join(form.suffixes)}")
    if path.is_dir() and options.dialect is None:
        _check_alone(path, files, form)
    tables: dict[str, TableReader] = {}
    broken: dict[str, KvtoolsError] = {}
    ours: dict[str, list[tuple[TableSchema, BatchInput]]] = {}
    others: list[Path] = []
    opened: dict[Path, BatchInput] = {}
    for file in files:
        try:
            doing = f"opening '{file}' as {form.title}"
            with arrow_errors(doing):
                found = opened[file] = form.open(file, doing, options)
                schema = _described(found, form, doing)
            if schema is not None:
                ours.setdefault(schema.name, []).append((schema, found))
            else:
                others.append(file)
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[str(file.relative_to(path)) if file != path else file.stem] = error
    groups = group_files(path, others) if path.is_dir() else {path.name.split(".")[0]: others} if others else {}

    def add(name: str, make: Callable[[], TableReader]) -> None:
        try:
            if name in tables:
                raise BadInputError(f"opening '{path}' as {form.title}: two tables are called '{name}'; rename one")
            with arrow_errors(f"opening table '{name}' of '{path}'"):
                tables[name] = make()
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[name] = error

    is_ours = (path / FOLDER_MARK).exists()
    for name, members in ours.items():
        told = _told_files(path, [found.path for _, found in members]) if path.is_dir() and not is_ours else []
        add(name, lambda members=members, told=told: _our_table(members, form, told))  # type: ignore[misc]
    for name, group in groups.items():
        inputs = [opened[file] for file in group]
        told = _told_files(path, group) if path.is_dir() else []
        add(name, lambda name=name, inputs=inputs, told=told: _other_table(name, inputs, form, options, told))  # type: ignore[misc]
    return Checkpoint(path, form.name, tables, broken=broken)


def _check_alone(folder: Path, files: Sequence[Path], form: InputFormat) -> None:
    """Raise `BadInputError` where a folder has other files, too: it may be anything that has such a file in it."""
    others = other_files(folder, form.suffixes, _OTHERS_TOLD + 1)
    if not others:
        return

    def told(some: Sequence[Path]) -> str:
        names = ", ".join(f"'{file.relative_to(folder)}'" for file in some[:_OTHERS_TOLD])
        return names + ", ..." * (len(some) > _OTHERS_TOLD)

    raise BadInputError(
        f"opening '{folder}': it has {form.title} files ({told(files)}) among others ({told(others)}), so it is not"
        f" taken for tables; name the file or folder that is meant, or say --dialect {form.name}, which leaves all"
        " other files aside"
    )


def _described(found: BatchInput, form: InputFormat, doing: str) -> TableSchema | None:
    """Return the table that a file says it holds, or None: it says nothing, or was rewritten since then.

    Many programs that read a file and write another carry the description along, which the columns no longer follow.
    """
    if not found.described or found.contents is None:
        return None
    text = found.schema.metadata[DESCRIPTION]
    if extend(0, text) != found.contents.table_crc:
        raise CorruptFileError(f"{doing}: checksum mismatch in its description; the file is damaged, copy it again")
    schema = table_schema(text, form.name, doing)
    expected = [(column.name, column.type) for column in arrow_schema(schema, ALL_COLUMNS)]
    if [rows for _, rows, _ in found.contents.batches] == list(found.batch_rows) and expected == [
        (column.name, column.type) for column in found.schema
    ]:
        return schema
    if not form.keeps_contents:
        raise CorruptFileError(
            f"{doing}: its columns are not those of its description; the file is damaged, copy it again from its source"
        )
    return None


def _our_table(members: list[tuple[TableSchema, BatchInput]], form: InputFormat, notes: Sequence[str]) -> TableReader:
    schema, first = members[0]
    doing = f"opening table '{schema.name}' from '{first.path}'"
    for other, found in members[1:]:
        if other != schema:
            raise CorruptFileError(
                f"{doing}: the description in '{found.path}' differs; the files are of different tables or times, write"
                " them again"
            )
    parts: dict[int, list[ArrowPart]] = {}
    for _, found in members:
        metadata = found.schema.metadata
        assert found.contents is not None
        by_part: dict[int, list[int]] = {}
        for number, (part, _, _) in enumerate(found.contents.batches):
            by_part.setdefault(part, []).append(number)
        only = metadata.get(PART.encode())
        for part in [int(only)] if only is not None and only.isdigit() else range(schema.parts):
            parts.setdefault(part, []).append(found.part(by_part.pop(part, [])))
        if by_part:
            raise CorruptFileError(f"{doing}: '{found.path}' has rows of part {min(by_part)}, expected none")
    ordered = []
    for part, rows in enumerate(schema.part_rows):
        found_parts = parts.pop(part, [])
        if len(found_parts) != 1:
            fault = "is there twice" if found_parts else "is missing"
            raise BadInputError(f"{doing}: part {part} of {schema.parts} {fault}; copy every file of the table, once")
        if found_parts[0].rows != rows:
            raise CorruptFileError(
                f"{doing}: got {found_parts[0].rows} rows in part {part} ('{found_parts[0].name}'), expected {rows};"
                " the file is of another time, write the table again"
            )
        ordered.append(found_parts[0])
    if parts:
        raise CorruptFileError(f"{doing}: got a part {min(parts)}, expected {schema.parts} parts; write it again")
    extras = {extra.name: _extra(first, extra, schema, form) for extra in schema.extras}
    schema = dataclasses.replace(schema, checksums=form.checksums, notes=(*schema.notes, *notes))
    return ArrowTable(schema, ordered, column_map(schema), extras)


def _extra(found: BatchInput, extra: ExtraSchema, schema: TableSchema, form: InputFormat) -> Callable[[], Array]:
    doing = f"reading '{extra.name}' of table '{schema.name}' from '{found.path}'"

    def read() -> Array:
        if PART.encode() not in found.schema.metadata:
            assert found.contents is not None
            return read_extra(found.contents.extra(extra.name, doing), extra.dtype, extra.shape, doing)
        path = found.path.parent / EXTRAS / f"{safe_name(extra.name)}{form.suffixes[0]}"
        if not path.is_file():
            raise BadInputError(f"{doing}: there is no '{path}'; copy every file of the table")
        return _flat_file(path, extra, form, doing)

    return read


def _flat_file(path: Path, extra: ExtraSchema, form: InputFormat, doing: str) -> Array:
    file = form.open(path, doing, OpenOptions())
    pieces = []
    with arrow_errors(doing):
        for batch in file.part(range(len(file.batch_rows))).batches(["element"], 1 << 18, True):
            pieces.append(numpy_numbers(batch.column(0)))
    stored = np.concatenate([np.ascontiguousarray(piece).view(np.uint8) for piece in pieces] or [np.empty(0, np.uint8)])
    return read_extra(stored, extra.dtype, extra.shape, doing)


def _told_files(folder: Path, files: Sequence[Path]) -> list[str]:
    first, last = (f"'{file.relative_to(folder)}'" for file in (files[0], files[-1]))
    return [
        f"its rows are those of {first}"
        if len(files) == 1
        else f"its rows are those of {first} to {last}, {len(files)} files"
    ]


def _other_table(
    name: str, files: Sequence[BatchInput], form: InputFormat, options: OpenOptions, notes: Sequence[str]
) -> TableReader:
    first = files[0]
    doing = f"opening '{first.path}' as a table"
    for other in files[1:]:
        if not first.schema.equals(other.schema):
            raise BadInputError(
                f"{doing}: the columns of '{other.path}' differ, expected the same in all files of a table; open them"
                " one by one"
            )
    parts = [file.part(range(len(file.batch_rows))) for file in files]
    if first.described:
        notes = [*notes, "a description of kvtools' is left aside: the file was changed since"]
    return stranger_table(name, form.name, first.schema, parts, options, doing, notes)
