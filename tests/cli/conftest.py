from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from kvtools.cli.main import main


class Screen(io.StringIO):
    """A terminal, as far as a command asks."""

    def isatty(self) -> bool:
        return True


@dataclass
class Ran:
    """What a command line came to."""

    status: int
    out: str
    err: str


class CommandLine:
    """Runs `kvtools` in this process, on a terminal of so many columns, or in a pipe where that is None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    @contextlib.contextmanager
    def screen(self, columns: int | None, *, color: bool = False) -> Iterator[io.StringIO]:
        """Let standard output be a terminal, or a pipe."""
        stream = io.StringIO() if columns is None else Screen()
        with self._monkeypatch.context() as patch:
            for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
                patch.delenv(name, raising=False)
            patch.setenv("TERM", "xterm-256color")
            if columns is not None:
                patch.setenv("COLUMNS", str(columns))
            if not color:
                patch.setenv("NO_COLOR", "1")
            patch.setattr(sys, "stdout", stream)
            yield stream

    def __call__(self, arguments: list[str], columns: int | None = None, *, color: bool = False) -> Ran:
        """Run a command; standard error is that of a log."""
        error = io.StringIO()
        with self.screen(columns, color=color) as out, contextlib.redirect_stderr(error):
            status = main(arguments)
        return Ran(status, out.getvalue(), error.getvalue())


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    return CommandLine(monkeypatch)
