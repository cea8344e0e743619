"""What a long command says on stderr while it works: a bar where somebody is watching, a line now and then in a log."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from kvtools.cli import terminal
from kvtools.cli.layout import shown
from kvtools.cli.shared_options import shared
from kvtools.errors import UsageError

INTERVAL = "KVTOOLS_HEARTBEAT"
"""The variable of the environment that says how many seconds pass between two lines of a log; 0 for no lines."""

_USUAL = 30.0  # s
_MOST_BARS = 8
_LEAST_BAR = 4
_ROOM_FOR_BARS = 60  # characters of a line; narrower terminals get a percentage

if TYPE_CHECKING:
    from rich.progress import Progress

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
    from rich.progress import TaskID

    with _drawn_bars(unit) as bar:
        tasks: dict[str, TaskID] = {}
        through: list[str] = []

        def update(table: str, done: int, total: int) -> None:
            if table not in tasks:
                while through and len(tasks) >= _MOST_BARS:  # a thousand bars fit on no terminal
                    bar.remove_task(tasks.pop(through.pop(0)))
                tasks[table] = bar.add_task(f"{doing} {shown(table)}".strip(), total=total)
            bar.update(tasks[table], completed=done)
            if done >= total and table not in through:
                through.append(table)

        yield update


def _drawn_bars(unit: str) -> Progress:
    """Make lines of a table's name, a bar and numbers: where not all of it fits, the bar and then the name give way."""
    from rich.console import Console, RenderableType
    from rich.constrain import Constrain
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column
    from rich.text import Text

    console = Console(stderr=True, no_color=not terminal.has_color(sys.stderr))

    def encodable(text: str) -> str:  # what stderr would escape in writing would be longer than the line was made for
        return text.encode(console.encoding, "backslashreplace").decode(console.encoding)

    class Bars(Progress):
        def get_renderable(self) -> RenderableType:
            # A terminal adds the ^C of Ctrl-C to a line, and must not wrap it.
            return Constrain(super().get_renderable(), max(1, console.width - len("^C")))

    class Name(ProgressColumn):
        max_refresh = None

        def get_table_column(self) -> Column:
            return Column(min_width=1)

        def render(self, task: Task) -> Text:
            whole = encodable("…") == "…"
            return Text(encodable(task.description), no_wrap=True, overflow="ellipsis" if whole else "crop")

    rest: tuple[ProgressColumn, ...] = (TaskProgressColumn(),)
    if console.width >= _ROOM_FOR_BARS:
        rest = (BarColumn(table_column=Column(min_width=_LEAST_BAR)), MofNCompleteColumn(), TextColumn(unit))
    time_left = TimeRemainingColumn(table_column=Column(no_wrap=True, overflow="crop"))
    return Bars(Name(), *rest, time_left, console=console, transient=True)
