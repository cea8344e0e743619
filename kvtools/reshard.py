"""Change the number of parts of tables: each row goes to the part that the dialect's rule says owns its key."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvtools.dialects.detect import dialect_named
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import Progress
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import UsageError
from kvtools.migrate import Account, write_tables
from kvtools.table_view import changed_tables


def reshard(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    parts: int,
    *,
    to: str | None = None,
    tables: Sequence[str] = (),
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Account:
    """Write a checkpoint whose tables have `parts` parts.

    Which rows a part holds depends on their keys only, not on the parts that there were; within a part, rows keep the
    order in which they are read. Nothing is read twice but the keys, which are counted first.

    Args:
        checkpoint: what to read.
        output: where to write it.
        parts: how many parts; 1 or more.
        to: the dialect to write; that of `checkpoint` if None.
        tables: which tables to change; all if empty. The others, and the dense variables, are written as they are.
        options: what to ask of the writer.
        workers: how many parts to work on at once.
        progress: called as rows are written.

    Raises:
        UsageError: fewer than one part, or the dialect has no parts or no writer.
        OutputError: `output` exists, or cannot be written.

    Example:
        ```python
        account = reshard(kvtools.open("model.ckpt-100"), "model-8.ckpt-100", 8)
        print(account.tables[0].part_rows)
        ```
    """
    dialect = dialect_named(to or checkpoint.dialect)
    if parts > 1 and dialect.write is not None and not dialect.holds.many_parts:
        raise UsageError(
            f"resharding '{checkpoint.path}' to {parts} parts: a table in {dialect.name} is always one part"
        )
    chosen = {table.schema.name: parts for table in checkpoint.select(tables)}
    return write_tables(
        changed_tables(checkpoint, tables, lambda table: table),
        output,
        dialect,
        beside=checkpoint,
        parts=chosen,
        options=options,
        workers=workers,
        progress=progress,
    )


def balance(part_rows: Sequence[int]) -> float:
    """Return the rows of the largest part over the mean of all: 1 is even; 1 for no rows at all.

    >>> balance([10, 10, 40])
    2.0
    """
    rows = sum(part_rows)
    return max(part_rows) * len(part_rows) / rows if rows else 1.0
