"""The watch over the servers that have the rows of a model in two halves."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvtools.errors import KvtoolsError
from kvtools.server import split_store


def test_the_servers_of_rows_are_looked_at_again_after_any_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(split_store, "_WATCH_EVERY", 0.001)
    answers: list[Any] = [KvtoolsError("no answer"), RuntimeError("can't start new thread")]

    def check() -> tuple[list[Any], str]:
        if answers:
            raise answers.pop(0)
        return [], ""

    servers = split_store._RowServers(
        SimpleNamespace(folder="ranker", tables={}),  # type: ignore[arg-type]
        SimpleNamespace(check=check, close=lambda: None),  # type: ignore[arg-type]
    )
    servers.away = "no answer"
    servers.watch()
    last = time.monotonic() + 60
    while servers.away:
        assert time.monotonic() < last
        time.sleep(0.001)
    servers.close()
    assert "can't start new thread" in caplog.text
