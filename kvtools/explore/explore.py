"""Explore the tables of a checkpoint: survey them, and write the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.schema import VersionUnit
from kvtools.explore.command import ClipSource
from kvtools.explore.page import page_details, render_page
from kvtools.explore.survey import survey_tables
from kvtools.remote.paths import local_path, shown_path
from kvtools.replace_output import check_free, replace_files


@dataclass(frozen=True)
class Written:
    """A page that was written: its bytes, and the tables on it, the largest first."""

    bytes: int
    tables: tuple[str, ...]


def write_page(
    checkpoint: Checkpoint,
    output: Path,
    *,
    source: ClipSource | None = None,
    tables: Sequence[str] = (),
    title: str | None = None,
    points: int = 1000,
    version_unit: VersionUnit | None = None,
    memory: int = DEFAULT_MEMORY,
    workers: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    when: datetime | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write the page about the tables of a checkpoint.

    Args:
        checkpoint: an opened checkpoint, of any dialect.
        output: the HTML file; appears whole or not at all.
        source: what the command on the page clips; the checkpoint by its path if None.
        tables: names of tables, or patterns; all if empty.
        title: what stands above; made from the path if None.
        points: rows of the sample of a large table.
        version_unit: what versions count, where the files do not say.
        memory: bytes to stay within; what needs more goes to temporary files.
        workers: parts at once.
        force: replace an `output` that is there.
        dry_run: do all but leave the page.
        when: the time to show on the page, now if None.
        progress: called as rows are read.

    Raises:
        OutputError: `output` exists, or cannot be written.
        CorruptFileError: the data is damaged.

    Example:
        ```python
        write_page(kvtools.open("model.ckpt-100"), Path("tables.html"))
        ```
    """
    output = Path(local_path(output))
    check_free(output.absolute(), force=force, read=[checkpoint.path])
    readers = largest_first(checkpoint.select(tables))
    surveys = survey_tables(
        readers,
        page_details(len(readers), points=points),
        version_unit=version_unit,
        memory=memory,
        workers=workers,
        progress=progress,
    )
    page = render_page(
        surveys,
        source or ClipSource.of(str(checkpoint.path), checkpoint.dialect),
        title=title or title_of(checkpoint),
        about=f"{shown_path(checkpoint.path)} ({checkpoint.dialect})",
        broken=checkpoint.broken,
        when=when,
    ).encode()
    with replace_files(output, force=force, dry_run=dry_run) as staging:
        staging.write_bytes(page)
    return Written(len(page), tuple(reader.schema.name for reader in readers))


def largest_first(tables: Sequence[TableReader]) -> list[TableReader]:
    """Return tables by their bytes, the largest first."""
    return sorted(tables, key=lambda table: -table.schema.bytes)


def title_of(checkpoint: Checkpoint) -> str:
    """Return what stands above a page about a checkpoint."""
    return f"Tables of {Path(checkpoint.path).name or checkpoint.path}"
