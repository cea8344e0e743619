"""Tables made of other tables: what clip, cast, reshard, merge, split and rename write is a view of what they read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import Checkpoint, TableReader, Unmatched
from kvtools.dialects.schema import TableSchema, VersionUnit, row_bytes
from kvtools.errors import BadInputError, UsageError
from kvtools.row_mask import RowMask


class TableView(TableReader):
    """A table that is another one, but for its schema; what else differs is for a subclass to say."""

    def __init__(self, source: TableReader, schema: TableSchema) -> None:
        self.source = source
        self.schema = schema

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        return self.source.read_part(part, columns, rows, verify)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return self.source.take(rows, columns)

    def extra(self, name: str) -> Array:
        """Return an extra array; see `TableReader.extra`."""
        return self.source.extra(name)

    def unmatched(self) -> Unmatched:
        """Return what of the source's slots does not fit its rows; see `TableReader.unmatched`."""
        return self.source.unmatched()


class MaskedTable(TableView):
    """The rows of a table that a mask keeps, in their order and in their parts."""

    def __init__(self, source: TableReader, mask: RowMask) -> None:
        rows = mask.kept_rows()
        schema = dataclasses.replace(source.schema, part_rows=rows, bytes=sum(rows) * row_bytes(source.schema))
        super().__init__(source, schema)
        self.mask = mask

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows kept of one part; a part of which nothing is kept is not read."""
        if not self.schema.part_rows[part]:
            return
        at = 0
        for chunk in self.source.read_part(part, columns, rows, verify):
            kept = self.mask.get(part, at, len(chunk))
            at += len(chunk)
            if kept.all():
                yield chunk
            elif kept.any():
                yield chunk.take(np.flatnonzero(kept))

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return self.source.take(self.mask.rows_of(self.row_numbers(rows)), columns)


def with_version_unit(tables: Sequence[TableReader], unit: VersionUnit) -> list[TableReader]:
    """Return tables whose versions count `unit` where they do not say what they count; the others as they are.

    Raises:
        UsageError: there is no such table: all versions say what they count.
    """
    told: list[TableReader] = [
        TableView(table, dataclasses.replace(table.schema, version_unit=unit))
        if table.schema.has_versions and table.schema.version_unit == "unknown"
        else table
        for table in tables
    ]
    if all(one is table for one, table in zip(told, tables, strict=True)):
        have = ", ".join(
            f"'{table.schema.name}' {table.schema.version_unit if table.schema.has_versions else 'has none'}"
            for table in tables
        )
        raise UsageError(
            f"reading versions as {unit}: no table has versions that do not say what they count ({have}); leave"
            " --version-unit out"
        )
    return told


def changed_tables(
    checkpoint: Checkpoint, names: Sequence[str], change: Callable[[TableReader], TableReader]
) -> list[TableReader]:
    """Return all tables of a checkpoint, those of these names (all if none) changed, the others as they are.

    Raises:
        UnknownTableError: the checkpoint has no such table.
        BadInputError: it has no table at all.
    """
    chosen = {table.schema.name for table in checkpoint.select(names)}
    if not chosen:
        raise BadInputError(
            f"changing '{checkpoint.path}': it has no key-value table that kvtools knows; see `kvtools inspect`"
        )
    return [change(table) if name in chosen else table for name, table in checkpoint.tables.items()]


def unmatched_of(sources: Sequence[TableReader], labels: Sequence[str]) -> Unmatched:
    """Return what of the slots of several tables does not fit their rows, each with its table's label."""
    found = [(label, source.unmatched()) for source, label in zip(sources, labels, strict=True)]
    return Unmatched(
        tuple(f"{label}: {line}" for label, lines in found for line in lines.left_out),
        tuple(f"{label}: {line}" for label, lines in found for line in lines.made_up),
    )


def rows_below(table: TableReader) -> int:
    """Return how many rows the table has that others are views of, as clipped and repaired ones are."""
    while isinstance(table, TableView):
        table = table.source
    return table.rows


def replace_schema(table: TableReader, **fields: Any) -> TableSchema:
    """Return the schema of a table with these fields, its bytes counted anew."""
    schema = dataclasses.replace(table.schema, **fields)
    return dataclasses.replace(schema, bytes=schema.rows * row_bytes(schema))
