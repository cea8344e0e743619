"""What is served of a chain at one moment: a snapshot, and over it the rows that changed since. Immutable.

Each increment becomes a level over the tables (`kernels/src/snapshot/snapshot_level.h`), and a store with it is another
store: requests that have taken the old one go on with it. Levels are merged when a newer one has grown to a share of
the next older one, so there are few of them, and a row is copied a few times before it gets into a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtools._snapshot import Level
from kvtools.chain import ChainError
from kvtools.increment import Increment, TableChanges
from kvtools.server.store import StoredTable, TableStore, lookup_errors

_MERGED_FROM = 3
"""A level is merged with the next older one unless that has more than so many times its rows."""


@dataclass(frozen=True)
class _Over:
    """A level, and the last increment that is in it."""

    level: Level
    upto: int


class FollowedTable(StoredTable):
    """A table of a snapshot, `base`, with what changed since: `over`, levels of which the first is the newest."""

    def __init__(self, base: StoredTable, over: tuple[_Over, ...], rows: int) -> None:
        table = base.table.overlaid([each.level for each in over], rows) if over else base.table
        schema = dataclasses.replace(
            base.schema,
            part_rows=(rows,),
            bytes=base.schema.bytes + sum(each.level.bytes for each in over),
            freq_dtype=None,
            version_dtype=None,
        )
        super().__init__(table, schema, base.file)
        self.base = base
        self.over = over

    def with_changes(self, changes: TableChanges, sequence: int, kept_apart: int) -> FollowedTable:
        """Return the table after the increment `sequence`; levels up to `kept_apart` are not merged with newer ones.

        Raises:
            ChainError: the changes are of another table.
        """
        _check_fits(self, changes)
        if not len(changes):
            return self
        values = changes.rows.values
        assert values is not None
        keys, removed = np.ascontiguousarray(changes.rows.keys), np.ascontiguousarray(changes.removed)
        with lookup_errors(self):
            born = int(np.count_nonzero(self.table.find(keys) < 0))
            gone = int(np.count_nonzero(self.table.find(np.unique(removed)) >= 0))
        level = self.base.table.level(keys, np.ascontiguousarray(values), removed)
        over = _merged((_Over(level, sequence), *self.over), kept_apart)
        return FollowedTable(self.base, over, self.table.rows + born - gone)

    def on(self, base: StoredTable, sequence: int) -> FollowedTable:
        """Return the same rows over a file that has all changes up to `sequence` already."""
        return FollowedTable(base, tuple(each for each in self.over if each.upto > sequence), self.table.rows)


def _check_fits(table: StoredTable, changes: TableChanges) -> None:
    mine, theirs = table.schema, changes.schema
    for what in ("key_dtype", "value_dtype", "dim"):
        if (got := getattr(theirs, what)) != (expected := getattr(mine, what)):
            raise ChainError(
                f"table '{mine.name}': the increment has {what} {got}, expected {expected}; what is served stays until"
                " there is a newer full",
                "other-table",
            )


def _merged(over: tuple[_Over, ...], kept_apart: int) -> tuple[_Over, ...]:
    newest, *older = over
    while older and newest.level.entries * _MERGED_FROM >= older[0].level.entries and older[0].upto > kept_apart:
        newest = _Over(older.pop(0).level.under(newest.level), newest.upto)
    return (newest, *older)


class FollowedStore(TableStore):
    """The tables of a chain after one of its members.

    Args:
        base: the snapshot below.
        base_sequence: the member that it is of.
        sequence: the last member that is applied.
        path: of the chain, for messages.
        tables: as they are then; those of `base` if None.
        mark: the fingerprint of the last member.
    """

    def __init__(
        self,
        base: TableStore,
        base_sequence: int,
        sequence: int,
        path: Path,
        mark: str,
        tables: Mapping[str, FollowedTable] | None = None,
    ) -> None:
        if tables is None:
            tables = {name: FollowedTable(table, (), table.table.rows) for name, table in base.tables.items()}
        self.base = base
        self.base_sequence = base_sequence
        self.sequence = sequence
        self.export = None
        self.path = path
        self.dialect = base.dialect
        self.fingerprint = hashlib.sha256(f"{base.fingerprint} {mark}".encode()).hexdigest()
        self.snapshot = base.snapshot
        self.file = base.file
        self.mark = mark
        self.followed = tables
        self.tables = dict(tables)

    def with_increment(self, increment: Increment, kept_apart: int = -1) -> FollowedStore:
        """Return the store after the next increment: all tables of it, or an error and nothing.

        Raises:
            ChainError: it is not of these tables.
        """
        unknown = sorted(increment.tables.keys() - self.followed.keys())
        if unknown:
            raise ChainError(
                f"'{increment.member.prefix}' has a table '{unknown[0]}', which the full has not; what is served stays"
                " until there is a newer full",
                "other-table",
            )
        sequence = increment.record.sequence
        tables = dict(self.followed)
        for name, changes in increment.tables.items():
            tables[name] = tables[name].with_changes(changes, sequence, kept_apart)
        return FollowedStore(self.base, self.base_sequence, sequence, Path(self.path), increment.fingerprint, tables)

    def on(self, base: TableStore, sequence: int) -> FollowedStore:
        """Return the same rows over another file, which has all members up to `sequence`."""
        tables = {name: table.on(base.tables[name], sequence) for name, table in self.followed.items()}
        return FollowedStore(base, sequence, self.sequence, Path(self.path), self.mark, tables)

    @property
    def rows_over(self) -> int:
        """How many rows and marks of removed keys lie over the file."""
        return sum(each.level.entries for table in self.followed.values() for each in table.over)

    @property
    def bytes_over(self) -> int:
        """How many bytes of memory they take."""
        return sum(table.table.level_bytes for table in self.followed.values())

    def discard(self) -> bool:
        """Remove the snapshot below, if it was made for this: another one has taken its place."""
        return self.base.discard()
