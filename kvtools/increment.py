"""What one increment of a chain says of each table: the rows that changed, whole, and the keys that went.

An increment is small, so its rows are read into memory at once, every byte compared with its checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvtools.chain import Member, Record, fingerprint, record_of
from kvtools.chain_reader import open_member, removed_keys
from kvtools.dialects.chunk import ALL_COLUMNS, Array, Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import TableSchema
from kvtools.dialects.tfplugin import NAME
from kvtools.errors import CorruptFileError


@dataclass(frozen=True)
class TableChanges:
    """What changed in one table: `rows` as they are now, and the keys `removed` [n] of the table's key type.

    Every key of `rows` is in it once. `schema` is the table's, with the rows of this increment.
    """

    schema: TableSchema
    rows: Chunk
    removed: Array

    def __len__(self) -> int:
        return len(self.rows) + len(self.removed)


@dataclass(frozen=True)
class Increment:
    """An increment as it was read: `record` says where in its chain it is, `fingerprint` stands for it."""

    member: Member
    record: Record
    fingerprint: str
    tables: Mapping[str, TableChanges]


def read_record(member: Member) -> tuple[Record | None, str]:
    """Return a member's record, None where it has none, and its fingerprint; see `kvtools.chain.record_of`."""
    return record_of(member), fingerprint(member.prefix)


def read_increment(member: Member, record: Record, mark: str, columns: Columns = ALL_COLUMNS) -> Increment:
    """Read all rows of an increment, of which `read_record` gave `record` and `mark`, in the tables' `columns`.

    Raises:
        BadInputError: a file is missing, or cannot be read.
        CorruptFileError: a checksum differs, a column does not fit the others, or a key comes twice.
    """
    checkpoint = open_member(member, OpenOptions(dialect=NAME))
    tables = {}
    for name, table in checkpoint.tables.items():
        changes = TableChanges(table.schema, _all_rows(table, columns), removed_keys(table))
        _check(member, name, changes)
        tables[name] = changes
    return Increment(member, record, mark, tables)


def _all_rows(table: TableReader, columns: Columns) -> Chunk:
    chunks = list(table.chunks(columns, rows=max(1, table.rows), verify=True))
    if len(chunks) == 1:
        return chunks[0]
    if not chunks:
        return table.take(np.empty(0, np.int64), columns)
    return Chunk(
        np.concatenate([chunk.keys for chunk in chunks]),
        np.concatenate([chunk.values for chunk in chunks]) if columns.values else None,
        {name: np.concatenate([chunk.slots[name] for chunk in chunks]) for name in chunks[0].slots},
        None if chunks[0].freqs is None else np.concatenate([chunk.freqs for chunk in chunks]),
        None if chunks[0].versions is None else np.concatenate([chunk.versions for chunk in chunks]),
    )


def _check(member: Member, name: str, changes: TableChanges) -> None:
    keys = changes.rows.keys
    if changes.removed.dtype != keys.dtype or changes.removed.ndim != 1:
        raise CorruptFileError(
            f"reading '{member.prefix}': the keys that went from table '{name}' are {changes.removed.dtype} of"
            f" {changes.removed.ndim} dimensions, expected {keys.dtype} of one; write the chain again"
        )
    ordered = np.sort(keys)
    if (twice := np.flatnonzero(ordered[1:] == ordered[:-1])).size:
        raise CorruptFileError(
            f"reading '{member.prefix}': table '{name}' has key {ordered[twice[0]]} twice; write the chain again"
        )
