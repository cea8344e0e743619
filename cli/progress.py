"""A progress bar on stderr, when somebody is watching."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(doing: str, unit: str = "rows") -> Iterator[Callable[[str, int, int], None] | None]:
    """Give a function to call with (table, rows done, rows in all), or None if stderr is no terminal.

    Work that is counted in something other than rows says so by `unit`.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        tasks: dict[str, object] = {}

        def update(table: str, done: int, total: int) -> None:
            if table not in tasks:
                tasks[table] = bar.add_task(f"{doing} {table}".strip().replace("[", "\\["), total=total)
            bar.update(tasks[table], completed=done)  # type: ignore[arg-type]

        yield update
