"""What long commands say on stderr while they work."""

from __future__ import annotations

import io
import re
import sys
import threading
from pathlib import Path

import pytest

from kvtools.cli import progress
from kvtools.cli.main import main
from kvtools.cli.progress import Heartbeat, interval, progress_bar
from kvtools.cli.terminal import display_width
from kvtools.errors import UsageError


def beats(doing: str, unit: str = "rows") -> tuple[Heartbeat, io.StringIO]:
    log = io.StringIO()
    return Heartbeat(doing, unit, log, clock=iter([0.0, 30.0, 60.0]).__next__), log


def test_a_line_of_a_log_says_what_and_how_far() -> None:
    heartbeat, log = beats("migrating")
    heartbeat.beat()
    heartbeat.update("user\x1b_emb", 500, 0)
    heartbeat.beat()
    assert log.getvalue() == "kvtools: migrating: 30 s\nkvtools: migrating user\\x1b_emb: 500 of 0 rows, 60 s\n"
    heartbeat, log = beats("", "%")
    heartbeat.update("compiling", 25, 100)
    heartbeat.beat()
    assert log.getvalue() == "kvtools: compiling: 25%, 30 s\n"


def test_a_line_of_a_log_says_how_many_tables_are_done() -> None:
    heartbeat, log = beats("reading")
    for table in ("a", "b", "c"):
        heartbeat.update(table, 10, 20)
        heartbeat.update(table, 20, 20)
    heartbeat.beat()
    heartbeat.update("d", 0, 20)
    heartbeat.beat()
    assert log.getvalue().splitlines() == [
        "kvtools: reading c: 20 of 20 rows (100%), after 2 others, 30 s",
        "kvtools: reading d: 0 of 20 rows (0%), after 3 others, 60 s",
    ]


def test_a_log_that_is_closed_stops_no_work() -> None:
    heartbeat, log = beats("migrating")
    log.close()
    heartbeat.beat()


def test_a_line_comes_whether_or_not_the_work_goes_on() -> None:
    said = threading.Event()

    class Log(io.StringIO):
        def flush(self) -> None:
            said.set()

    log = Log()
    with Heartbeat("sorting", "rows", log).beating(0.001):
        assert said.wait(60)
    lines = log.getvalue().splitlines()
    assert lines and set(lines) == {"kvtools: sorting: 0 s"}
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtools-heartbeat"]


def test_no_line_where_none_is_wanted() -> None:
    with Heartbeat("sorting", "rows", io.StringIO()).beating(0) as update:
        update("emb", 1, 2)
        assert not [thread for thread in threading.enumerate() if thread.name == "kvtools-heartbeat"]


@pytest.mark.parametrize(("text", "seconds"), [("", 30.0), ("5", 5.0), ("0.5", 0.5), ("0", 0.0)])
def test_the_environment_says_how_often(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv(progress.INTERVAL, text)
    assert interval() == seconds


@pytest.mark.parametrize("text", ["often", "-1", "nan", "1e300"])
def test_what_is_no_number_of_seconds_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sample_path: Path, text: str
) -> None:
    monkeypatch.setenv(progress.INTERVAL, text)
    with pytest.raises(UsageError, match=f"got KVTOOLS_HEARTBEAT={text} in the environment, expected seconds"):
        interval()
    assert main(["verify", str(sample_path)]) == 2


@pytest.mark.parametrize("color", [True, False])
def test_a_terminal_shows_bars_of_few_tables_at_once(monkeypatch: pytest.MonkeyPatch, color: bool) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", screen := Screen())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("NO_COLOR", "" if color else "1")
    with progress_bar("reading") as update:
        for table in range(30):
            update(f"[emb{table}]", 5, 10)
            update(f"[emb{table}]", 10, 10)
    assert "reading [emb29]" in screen.getvalue()
    assert ("\x1b[3" in screen.getvalue()) == color


@pytest.mark.parametrize(
    ("columns", "encoding", "numbers"), [(80, "utf-8", "12345678/98765432 rows"), (40, "ascii", "12% ")]
)
def test_bars_leave_numbers_whole_and_lines_of_one_line(
    monkeypatch: pytest.MonkeyPatch, columns: int, encoding: str, numbers: str
) -> None:
    class Screen(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    drawn = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", Screen(drawn, encoding=encoding, errors="backslashreplace", newline=""))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    with progress_bar("choosing rows of") as update:
        for table in ("users", "a/scope/" * 20 + "weights", "\x1b[31m\x07 evil", "用户" * 40, "two\nlines", "b\\[c]"):
            update(table, 12_345_678, 98_765_432)
    lines = drawn.getvalue().decode(encoding).split("\n")
    plain = [re.sub(r"\x1b\[[0-9?]*[A-Zhl]", "", line).rpartition("\r")[2] for line in lines]
    widths = [display_width(line) for line in plain]
    assert max(widths) <= columns - len("^C"), "the ^C of Ctrl-C wraps, and a bar stays behind"
    last = plain[-7:-1]
    assert [line.startswith("choosing rows of") for line in last] == [True] * 6
    assert all(numbers in line for line in last)
    assert "\x1b[31m" not in drawn.getvalue().decode(encoding)


def test_a_dumb_terminal_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", screen := Screen())
    monkeypatch.setenv("TERM", "dumb")
    with progress_bar("reading") as update:
        update("emb", 5, 10)
    assert screen.getvalue() == ""
