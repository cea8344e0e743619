"""What a long command says on stderr while it works: a bar where somebody is watching, a line now and then in a log."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from kvtools.cli import terminal
from kvtools.cli.layout import shown
from kvtools.cli.shared_options import shared
from kvtools.errors import UsageError

INTERVAL = "KVTOOLS_HEARTBEAT"
"""The variable of the environment that says how many seconds pass between two lines of a log; 0 for no lines."""

_USUAL = 30.0  # s
_MOST_BARS = 8

Update = Callable[[str, int, int], None]


@contextlib.contextmanager
def progress_bar(doing: str, unit: str = "rows") -> Iterator[Update]:
    """Give a function to call with (table, rows done, rows in all).

    A terminal shows a bar for each table; a log gets a line every 30 seconds (see `Heartbeat`); with `--quiet`, nothing
    is said. Work that is counted in something other than rows says so by `unit`.
    """
    if shared().quiet:
        yield _say_nothing
    elif terminal.can_redraw(sys.stderr):
        with _bars(doing, unit) as update:
            yield update
    else:
        with Heartbeat(doing, unit, sys.stderr).beating(interval()) as update:
            yield update


def _say_nothing(table: str, done: int, total: int) -> None:
    pass


def interval() -> float:
    """Return the seconds between two lines of a log; raises `UsageError` if the environment says what is no number."""
    text = os.environ.get(INTERVAL, "")
    try:
        seconds = float(text) if text else _USUAL
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise UsageError(f"got {INTERVAL}={text} in the environment, expected seconds, or 0 for no lines")
    return seconds


class Heartbeat:
    """Lines that tell a log what is being done, and how far it is.

    >>> heartbeat = Heartbeat("migrating", "rows", sys.stdout, clock=iter([0.0, 60.0]).__next__)
    >>> heartbeat.update("user_emb", 1_200_000, 4_800_000)
    >>> heartbeat.beat()
    kvtools: migrating user_emb: 1,200,000 of 4,800,000 rows (25%), 60 s
    """

    def __init__(self, doing: str, unit: str, out: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._doing, self._unit, self._out, self._clock = doing, unit, out, clock
        self._began = clock()
        self._at: tuple[str, int, int] | None = None
        self._through: set[str] = set()

    def update(self, table: str, done: int, total: int) -> None:
        """Note how far the work is."""
        self._at = (table, done, total)
        if done >= total:
            self._through.add(table)

    def beat(self) -> None:
        """Write a line."""
        seconds = f"{self._clock() - self._began:.0f} s"
        if self._at is None:
            line = f"{self._doing.strip() or 'working'}: {seconds}"
        else:
            table, done, total = self._at
            if self._unit == "%":
                far = f"{done}%"
            else:
                share = f" ({100 * done // total}%)" if total else ""
                far = f"{done:,} of {total:,} {self._unit}{share}"
            others = len(self._through - {table})
            before = f", after {others:,} other{'s' if others > 1 else ''}" if others else ""
            line = f"{f'{self._doing} {shown(table)}'.strip()}: {far}{before}, {seconds}"
        with contextlib.suppress(OSError, ValueError):  # a log that is gone, or closed, stops no work
            print(f"kvtools: {line}", file=self._out, flush=True)

    @contextlib.contextmanager
    def beating(self, interval: float) -> Iterator[Update]:
        """Write a line every `interval` seconds, none if it is 0, whether the work calls `update` meanwhile or not."""
        if not interval:
            yield self.update
            return
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(interval):
                self.beat()

        thread = threading.Thread(target=beat, name="kvtools-heartbeat", daemon=True)
        thread.start()
        try:
            yield self.update
        finally:
            ended.set()
            thread.join(1)  # whoever does not read the log stops no work


@contextlib.contextmanager
def _bars(doing: str, unit: str) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        console=Console(stderr=True, no_color=not terminal.has_color(sys.stderr)),
        transient=True,
    ) as bar:
        tasks: dict[str, TaskID] = {}
        through: list[str] = []

        def update(table: str, done: int, total: int) -> None:
            if table not in tasks:
                while through and len(tasks) >= _MOST_BARS:  # a thousand bars fit on no terminal
                    bar.remove_task(tasks.pop(through.pop(0)))
                tasks[table] = bar.add_task(f"{doing} {table}".strip().replace("[", "\\["), total=total)
            bar.update(tasks[table], completed=done)
            if done >= total and table not in through:
                through.append(table)

        yield update
