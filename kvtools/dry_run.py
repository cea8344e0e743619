"""A writer that writes nothing: rows are read, routed and converted for it as for any other, and dropped.

So a dry run reads every byte that the real one reads, and stumbles over what it would stumble over. Where the format
has each key once, it counts the rows whose key a later one has, as the format's own writer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.schema import TableSchema, VariableSchema
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter, later_rows
from kvtools.key_join import repeated_rows


class DroppingWriter(CheckpointWriter):
    """Takes tables and dense variables, and keeps nothing of them.

    With `keys_once` rows whose key a later one has are counted, in `memory` bytes.
    """

    def __init__(self, *, keys_once: bool, memory: int) -> None:
        self._keys_once = keys_once
        self._memory = memory

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> TableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        if not self._keys_once:
            return _DroppingTable()
        every = (some for _, some in keys())
        return _DroppingTable(len(repeated_rows(every, schema.rows, memory=self._memory)))

    def variable(self, schema: VariableSchema, chunks: Iterable[Array]) -> None:
        """Read a dense variable to its end, which checks its bytes."""
        for _ in chunks:
            pass

    def close(self) -> None:
        """Nothing is open."""


class _DroppingTable(TableWriter):
    random_access: ClassVar[bool] = True
    distributable: ClassVar[bool] = True

    def __init__(self, duplicates: int = 0) -> None:
        self.duplicates = duplicates
        self.losses = (later_rows(duplicates),) if duplicates else ()

    def shard(self) -> ShardWriter:
        return _DroppingShard()

    def extra(self, name: str, array: Array) -> None:
        """Its reader has read it."""

    def close(self) -> None:
        """Nothing is open."""


class _DroppingShard(ShardWriter):
    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Drop the rows."""
