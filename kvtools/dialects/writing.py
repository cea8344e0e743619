"""What a dialect's writer is: a checkpoint made of tables and dense variables, each table filled shard by shard.

Whoever writes (`kvtools.migrate`) takes care of what all writers share: the schema is one that the dialect holds, the
number of rows of every part is known beforehand, rows come already routed to their part, and the path is a staging
place that is renamed when the writer has closed without an error.

    with dialect.write(staging, options) as writer:
        writer.plan(schemas)
        table = writer.table(schema)              # once per table; one table at a time
        shard = table.shard()                     # one per task, maybe in another process
        shard.write(part, start, chunk)           # rows start .. start + n of a part
        table.absorb(shard.finish())              # back where the table is
        table.close()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar

from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.options import DEFAULT_MEMORY
from kvtools.dialects.schema import TableSchema, VariableSchema
from kvtools.errors import UsageError


@dataclass(frozen=True)
class WriteOptions:
    """What a user may ask of a writer. `compression` and `compression_level` are the format's own names and default
    to what the dialect thinks best; `batch_rows` is the rows of a row group, HDF5 chunk or pipeline. `partition` is the
    rule by which parts own keys (`kvtools.partition`), where that is not to be the dialect's usual one. `rows_as` says
    of which tables the rows are kept as "int8" or "int4", in a dialect that has such rows. With `dry_run` everything is
    read and nothing written (`kvtools.dry_run`)."""

    compression: str | None = None
    compression_level: int | None = None
    batch_rows: int | None = None
    partition: str | None = None
    memory: int = DEFAULT_MEMORY
    force: bool = False
    rows_as: Mapping[str, str] = field(default_factory=dict)
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch_rows", 1), ("memory", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"making options of a writer: got {name}={value}, expected {least} or more")


class ShardWriter(ABC):
    """Writes rows of a table; what one task holds. Where its table is `distributable`, it can be pickled."""

    @abstractmethod
    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Write the chunk's columns as rows `start` to `start + len(chunk)` of `part`.

        Within one shard, the rows of a part come in order and without gaps from the first `start` on.
        """

    def finish(self) -> Any:
        """End this shard; return what `TableWriter.absorb` needs to know, a value that can be pickled."""
        return None


def later_rows(duplicates: int) -> str:
    """Say what is left out where a key is kept once."""
    return f"{duplicates} rows: a later row has their key, and only the last one counts"


class TableWriter(ABC):
    """One table being written.

    random_access   rows may be written anywhere: several shards may fill different runs of one part. Otherwise
                    each part is written by one shard, from its first row to its last.
    distributable   shards may be pickled and filled in other processes that see the same file system.
    duplicates      rows that are not kept because a later one has their key, where the layout has a key once only.
    losses          what else is lost, which only the writer finds; read when the table is closed.
    """

    random_access: ClassVar[bool] = False
    distributable: ClassVar[bool] = False
    duplicates: int = 0
    losses: tuple[str, ...] = ()

    @abstractmethod
    def shard(self) -> ShardWriter:
        """Return a writer for one task."""

    def absorb(self, result: Any) -> None:  # noqa: B027  most writers have nothing to take over
        """Take over what a shard's `finish` returned."""

    def extra(self, name: str, array: Array) -> None:
        """Write an array of `schema.extras`."""
        raise NotImplementedError(f"this dialect holds no '{name}'")

    @abstractmethod
    def close(self) -> None:
        """End the table: all rows of all parts were written."""


class CheckpointWriter(ABC):
    """A checkpoint being written to a staging place; a context manager that syncs and closes its files.

    exact    what is read back is what was given, number for number.
    """

    exact: bool = True

    def plan(self, schemas: Sequence[TableSchema]) -> None:  # noqa: B027  most layouts need no table of contents
        """Take notice of all tables that will come, before the first, for a layout that begins with what is in it.

        The schemas are those that `table` gets, but for `part_rows` where the dialect has many parts.
        """

    @abstractmethod
    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> TableWriter:
        """Start a table.

        Args:
            schema: what will be written; the dialect holds all of it, `part_rows` is exact.
            keys: streams (part, keys [n]) of the rows in the order in which they will come, for a layout that must
                know them beforehand; each call reads the source again.
        """

    def variable(self, schema: VariableSchema, chunks: Iterable[Array]) -> None:
        """Write a dense variable from its rows; see `Checkpoint.read_variable`."""
        raise NotImplementedError("this dialect holds no dense variables")

    @abstractmethod
    def close(self) -> None:
        """Finish and sync all files; only called when no error happened."""

    def abort(self) -> None:  # noqa: B027  nothing to release unless a writer says so
        """Release what is open after an error; the staging place is removed by the caller."""

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()
