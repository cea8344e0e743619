"""What changed in tables since another checkpoint: rows that came and went, norms that drifted, frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.diff import TableDiff, compare_tables
from kvtools.engine import Engine
from kvtools.errors import BadInputError
from kvtools.remote.paths import shown_path
from kvtools.stats import TableStats, table_stats

_MOVERS = 5
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class TableChange:
    """A table before: what its rows were like, and how rows differ now; `refused` says why they were not compared."""

    before: TableStats
    diff: TableDiff | None
    refused: str = ""


@dataclass(frozen=True)
class Changes:
    """What changed since the checkpoint at `path`: by table, and the names of tables that came or went."""

    path: str
    tables: dict[str, TableChange]
    added: tuple[str, ...]
    removed: tuple[str, ...]


def changes_since(
    old: Checkpoint,
    new: Checkpoint,
    names: Sequence[str],
    *,
    memory: int = DEFAULT_MEMORY,
    workers: int | None = None,
    engine: Engine = "local",
    progress: Progress | None = None,
) -> Changes:
    """Return what changed in these tables of `new` since `old`.

    Args:
        old: the checkpoint before.
        new: the one after.
        names: tables of `new`.
        memory: bytes to stay within; what needs more goes to temporary files.
        workers: parts at once.
        engine: where statistics are counted.
        progress: called as rows are read.

    Raises:
        CorruptFileError: the rows of a table are damaged.

    Example:
        ```python
        changes = changes_since(kvtools.open("model.ckpt-100"), kvtools.open("model.ckpt-200"), ["user_emb"])
        print(changes.tables["user_emb"].diff.added)
        ```
    """
    both = [name for name in names if name in old.tables]
    stats = table_stats(
        [old.tables[name] for name in both], fine=True, memory=memory, workers=workers, engine=engine, progress=progress
    )
    tables = {}
    for name in both:
        diff, refused = None, ""
        try:
            diff = compare_tables(
                old.tables[name], new.tables[name], memory=memory, top=_MOVERS, workers=workers, progress=progress
            )
        except BadInputError as error:
            refused = str(error)
        tables[name] = TableChange(stats[name], diff, refused)
    return Changes(
        path=shown_path(old.path),
        tables=tables,
        added=tuple(name for name in names if name not in old.tables),
        removed=tuple(name for name in old.tables if name not in new.tables),
    )


def describe_change(change: TableChange, after: TableStats) -> str:
    """Say in a sentence or two what changed in a table."""
    diff, told = change.diff, []
    if diff is not None:
        rows = f"{diff.added:,} rows came and {diff.removed:,} went"
        stayed = diff.changed + diff.unchanged
        rows += f"; of the {stayed:,} that stayed {diff.changed:,} changed" if stayed else ""
        values = diff.columns.get("values")
        if values is not None and values.changed and values.relative_change:
            rows += f", their values by {100 * values.relative_change:.3g}% of their norm"
        told.append(f"{rows}.")
    old, new = change.before.fine.get("l2"), after.fine.get("l2")
    if old is not None and new is not None and old.rows and new.rows:
        medians = [one.quantile(0.5) or 0.0 for one in (old, new)]
        told.append(f"The median norm went from {medians[0]:.3g} to {medians[1]:.3g}.")
    if change.before.freqs is not None and after.freqs is not None:
        told.append(f"Lookups went from {change.before.freqs.total:,} to {after.freqs.total:,}.")
    return " ".join(told)
