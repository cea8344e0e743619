"""A writer that writes nothing: rows are read, routed and converted for it as for any other, and dropped.

So a dry run reads every byte that the real one reads, and stumbles over what it would stumble over. What only the
format's own writer, or who reads its files, finds it does not tell: that a row is left out as a later one has its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.schema import TableSchema, VariableSchema
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter


class DroppingWriter(CheckpointWriter):
    """Takes tables and dense variables, and keeps nothing of them."""

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> TableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        return _DroppingTable()

    def variable(self, schema: VariableSchema, chunks: Iterable[Array]) -> None:
        """Read a dense variable to its end, which checks its bytes."""
        for _ in chunks:
            pass

    def close(self) -> None:
        """Nothing is open."""


class _DroppingTable(TableWriter):
    random_access: ClassVar[bool] = True
    distributable: ClassVar[bool] = True

    def shard(self) -> ShardWriter:
        return _DroppingShard()

    def extra(self, name: str, array: Array) -> None:
        """Its reader has read it."""

    def close(self) -> None:
        """Nothing is open."""


class _DroppingShard(ShardWriter):
    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Drop the rows."""
