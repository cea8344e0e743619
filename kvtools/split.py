"""Make several checkpoints of one: by table, by part, by key, or so many rows each.

An output holds tables only: the dense variables stay with the source. What belongs to a table as a whole goes with
every output, but for lists of keys (deleted ones, filtered ones), which go with the first: merged again in this order
(`kvtools.merge`) the outputs are what they came from.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvtools.dialects.chunk import KEYS, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.detect import dialect_named
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.safe_name import safe_name
from kvtools.dialects.writing import WriteOptions
from kvtools.engine import run_all
from kvtools.errors import BadInputError, UsageError
from kvtools.key_list import KeyList
from kvtools.migrate import Account, check_output, write_tables
from kvtools.partition import owners
from kvtools.row_filter import RowFilter
from kvtools.row_mask import RowMask
from kvtools.table_view import MaskedTable, TableView, replace_schema

_LISTS = frozenset({"deleted_keys", "filtered_keys", "filtered_freqs", "filtered_versions"})
_KEY_ROWS = 1 << 18
PLACEHOLDER = "{}"


@dataclass(frozen=True)
class By:
    """How to split: by "table", by "part", by key modulo `number` ("mod"), by `keys` ("keys": those listed, and the
    rest), by a condition ("where": rows that meet it, the rest), or at most `number` rows of each table ("rows")."""

    kind: Literal["table", "part", "mod", "keys", "where", "rows"]
    number: int = 1
    keys: KeyList | None = None
    where: RowFilter | None = None

    def __post_init__(self) -> None:
        if self.number < 1:
            raise UsageError(f"splitting by {self.kind}: got {self.number}, expected 1 or more")
        if (self.kind == "keys") != (self.keys is not None):
            raise UsageError(f"splitting by {self.kind}: a list of keys goes with 'keys', and only with that")
        if (self.kind == "where") != (self.where is not None):
            raise UsageError(f"splitting by {self.kind}: a condition goes with 'where', and only with that")


class PartTable(TableView):
    """One part of a table as a table of one part."""

    def __init__(self, source: TableReader, part: int) -> None:
        super().__init__(source, replace_schema(source, part_rows=(source.schema.part_rows[part],)))
        self._part = part
        self._first = sum(source.schema.part_rows[:part])

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of the part; see `TableReader.read_part`."""
        for chunk in self.source.read_part(self._part, columns, rows, verify):
            yield dataclasses.replace(chunk, part=0)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return self.source.take(self.row_numbers(rows) + self._first, columns)


class RunTable(TableView):
    """Rows `start` to `stop` of a table, counted along all parts.

    A reader goes through a part from its first row: what is before `start` is passed over without its checksums, and
    what comes after `stop` is not read. Whoever makes such tables checks the whole one once.
    """

    def __init__(self, source: TableReader, start: int, stop: int) -> None:
        ends = np.cumsum([0, *source.schema.part_rows])
        inside = np.clip(ends, start, stop)
        super().__init__(source, replace_schema(source, part_rows=tuple(np.diff(inside).tolist())))
        self._start = start
        self._skipped = inside[:-1] - ends[:-1]  # rows of each part before the run

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part that are in the run."""
        left = self.schema.part_rows[part]
        skip = int(self._skipped[part])
        if not left:
            return
        for chunk in self.source.read_part(part, columns, rows, False):
            if skip >= len(chunk):
                skip -= len(chunk)
                continue
            piece = chunk.take(slice(skip, skip + left))
            skip, left = 0, left - len(piece)
            yield piece
            if not left:
                return

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return self.source.take(self.row_numbers(rows) + self._start, columns)


class ShardTable(TableView):
    """A table of which it is recorded that it has the keys of floor-mod `number` of `of`, and no others."""

    def __init__(self, source: TableReader, number: int, of: int) -> None:
        shard = {"rule": "floor_mod", "number": number, "of": of}
        super().__init__(
            source, dataclasses.replace(source.schema, metadata={**source.schema.metadata, "shard": shard})
        )


class WithoutLists(TableView):
    """A table without the lists of keys that belong to it as a whole."""

    def __init__(self, source: TableReader) -> None:
        extras = tuple(extra for extra in source.schema.extras if extra.name not in _LISTS)
        super().__init__(source, dataclasses.replace(source.schema, extras=extras))


def split(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    by: By,
    *,
    to: str | None = None,
    tables: Sequence[str] = (),
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Account]:
    """Write several checkpoints of the tables of one, each of which appears whole or not at all.

    Args:
        checkpoint: what to read.
        output: where to write: a name with `{}` in it, in whose place comes the name of each piece, or a folder, made
            if need be, in which the pieces are. See `piece_names`.
        by: how to split.
        to: the dialect to write; that of `checkpoint` if None.
        tables: which tables; all if empty. The others are in no piece.
        options: what to ask of the writer.
        workers: how many parts to work on at once.
        progress: called as rows are written, with the piece before the table.

    Returns:
        The account of each piece.

    Raises:
        OutputError: a piece exists already, or cannot be written; the pieces before it are there.
        BadInputError: there is nothing to split; or a table changed meanwhile, so that its pieces are not its rows.

    Example:
        ```python
        split(kvtools.open("model.ckpt-100"), "shards/{}.ckpt", By("mod", 4))  # shards/mod-0-of-4.ckpt, ...
        ```
    """
    options = options or WriteOptions()
    chosen = checkpoint.select(tables)
    if not chosen:
        raise BadInputError(f"splitting '{checkpoint.path}': it has no key-value table; see `kvtools inspect`")
    dialect = dialect_named(to or checkpoint.dialect)
    if by.where is not None:
        for table in chosen:
            by.where.columns_of(table)  # what is wrong with it is told before anything is written
    names = piece_names(chosen, by)
    several = by.kind != "table" and len(chosen) > 1
    suffix = "" if several and dialect.output == "file_or_folder" else "".join(dialect.suffixes[:1])
    paths = [_path(os.fspath(output), name, suffix) for name in names]
    for path in paths:
        check_output(path, dialect, force=options.force)
    if by.kind == "rows" and len(names) > 1:
        _check_checksums(chosen, progress)
    accounts = []
    masks: dict[str, RowMask] = {}
    rows: Counter[str] = Counter()
    for number, (name, path) in enumerate(zip(names, paths, strict=True)):
        pieces = _pieces(chosen, by, number, options.memory, workers, masks)
        rows.update({piece.schema.name: piece.rows for piece in pieces})
        if number == len(names) - 1:
            _check_sums(chosen, rows, checkpoint, path)
        accounts.append(
            write_tables(
                pieces if by.kind == "table" or number == 0 else [WithoutLists(piece) for piece in pieces],
                path,
                dialect,
                options=options,
                workers=workers,
                progress=_named(progress, name),
            )
        )
    return accounts


def piece_names(tables: Sequence[TableReader], by: By) -> list[str]:
    """Return what the pieces are called, in order.

    table   the table's name, with what no file may be called written as in a URL: ads%2Femb
    part    part-00000-of-00003, ...
    mod     mod-0-of-4, ...
    keys    listed, rest
    where   matching, rest
    rows    rows-00000-of-00007, ...
    """
    if by.kind == "table":
        return [safe_name(table.schema.name) for table in tables]
    if by.kind == "keys":
        return ["listed", "rest"]
    if by.kind == "where":
        return ["matching", "rest"]
    if by.kind == "mod":
        return [f"mod-{number}-of-{by.number}" for number in range(by.number)]
    count = max(table.parts if by.kind == "part" else max(1, -(-table.rows // by.number)) for table in tables)
    return [f"{by.kind}-{number:05d}-of-{count:05d}" for number in range(count)]


def _check_sums(tables: Sequence[TableReader], rows: Counter[str], checkpoint: Checkpoint, last: str) -> None:
    """Raise `BadInputError` where the pieces of a table have not the rows that it has."""
    for table in tables:
        name = table.schema.name
        if rows[name] != table.rows:
            raise BadInputError(
                f"splitting '{checkpoint.path}': table '{name}' has {table.rows:,} rows, and its pieces"
                f" {rows[name]:,}: it changed while it was read; '{last}' is not written, and the pieces before it"
                " are no good"
            )


def _pieces(
    tables: Sequence[TableReader],
    by: By,
    number: int,
    memory: int,
    workers: int | None,
    masks: dict[str, RowMask],
) -> list[TableReader]:
    """Return the tables of piece `number`; `masks` keeps what one piece tells of the next."""
    if by.kind == "table":
        return [tables[number]]
    if by.kind == "part":
        return [PartTable(table, number) for table in tables if number < table.parts]
    if by.kind == "rows":
        return [
            RunTable(table, number * by.number, (number + 1) * by.number)
            for table in tables
            if number == 0 or number * by.number < table.rows
        ]

    def wanted(chunk: Chunk) -> Array:
        if by.where is not None:
            return by.where.mask(chunk)
        if by.keys is not None:
            return by.keys.contains(chunk.keys)
        return np.asarray(owners(chunk.keys, by.number, "floor_mod") == number)

    if by.kind in ("keys", "where") and number:
        return [MaskedTable(table, masks[table.schema.name].others()) for table in tables]
    pieces = []
    for table in tables:
        masks[table.schema.name] = mask = _mask(table, by, wanted, memory, workers)
        pieces.append(MaskedTable(table, mask))
    return list(pieces) if by.kind != "mod" else [ShardTable(piece, number, by.number) for piece in pieces]


def _mask(table: TableReader, by: By, wanted: Callable[[Chunk], Array], memory: int, workers: int | None) -> RowMask:
    mask = RowMask(table.schema.part_rows, memory=memory)
    columns = KEYS if by.where is None else by.where.columns_of(table)
    rows = table.chunk_rows(columns) if columns.values or columns.slots else _KEY_ROWS

    def read(part: int) -> None:
        at = 0
        for chunk in table.chunks(columns, rows=rows, part=part):
            mask.put(part, at, wanted(chunk))
            at += len(chunk)

    for _ in run_all(read, range(table.parts), workers=workers):
        pass
    return mask


def _check_checksums(tables: Sequence[TableReader], progress: Progress | None) -> None:
    """Read all of the tables once, so that runs of them can be read without."""
    for table in tables:
        done = 0
        for chunk in table.chunks():
            done += len(chunk)
            if progress:
                progress(f"checksums of {table.schema.name}", done, table.rows)


def _path(output: str, name: str, suffix: str) -> str:
    if PLACEHOLDER in output:
        return output.replace(PLACEHOLDER, name)
    if "://" in output:
        raise UsageError(f"splitting to '{output}': a URL is no folder; say where the name of a piece comes with {{}}")
    return str(Path(output) / f"{name}{suffix}")


def _named(progress: Progress | None, piece: str) -> Progress | None:
    if progress is None:
        return None

    def report(table: str, done: int, total: int) -> Any:
        return progress(f"{piece}: {table}", done, total)

    return report
