"""The rows of a chain's members, and what keeps an increment from being taken for all rows."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Sequence

import numpy as np

from kvtools.chain import Member
from kvtools.dialects.chunk import Array
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.errors import BadInputError


def open_member(member: Member, options: OpenOptions | None = None) -> Checkpoint:
    """Open one member as what it is: the tables of an increment have the rows that changed, and no others.

    An increment's keys that went are the `removed_keys` of its tables. Whoever applies one removes first.

    Raises:
        BadInputError, CorruptFileError: see `kvtools.open`.
    """
    return open_checkpoint(member.prefix, dataclasses.replace(options or OpenOptions(), increments=True))


def removed_keys(table: TableReader) -> Array:
    """Return the keys that went, [R] of the table's key type, checked; none for a table that is no increment."""
    if any(extra.name == "deleted_keys" for extra in table.schema.extras):
        return table.extra("deleted_keys").astype(table.key_dtype, copy=False)
    return np.empty(0, table.key_dtype)


def refuse_increments(doing: str, tables: Sequence[TableReader]) -> None:
    """Raise `BadInputError` where a table has only rows that changed, for who would take them for all rows."""
    for table in tables:
        if is_increment(table):
            raise BadInputError(
                f"{doing}: table '{table.schema.name}' is an increment, of keys that changed; put it into its full"
                " checkpoint first, see `kvtools apply`"
            )


def is_increment(table: TableReader) -> bool:
    """Tell whether a table has only the rows that changed since a checkpoint before it."""
    return bool(table.schema.metadata.get("increment"))


def bytes_of(member: Member) -> int:
    """Return how many bytes the files of a member take."""
    files = member.prefix.parent.glob(f"{glob.escape(member.prefix.name)}.data-?????-of-?????")
    return sum(file.stat().st_size for file in (member.index, *files))
