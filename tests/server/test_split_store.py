"""The watch over the servers that have the rows of a model in two halves."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtools.client import TimeLimitError
from kvtools.client.errors import MORE_TIME
from kvtools.errors import KvtoolsError
from kvtools.server import split_store
from kvtools.server.protocol_error import ProtocolError
from kvtools.server.settings import Settings


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


def test_requests_wait_less_for_rows_of_a_server_that_is_known_not_to_answer() -> None:
    asked: list[str] = []

    def client(name: str) -> Any:
        def lookup_many(keys: Any, missing: str) -> Any:
            asked.append(name)
            raise TimeLimitError(f"asking shard 1: no answer within 10 s{MORE_TIME}")

        return SimpleNamespace(lookup_many=lookup_many)

    servers: Any = SimpleNamespace(away="", look_soon=lambda: None)
    look_up = split_store._rows_from(client("patient"), client("hasty"), servers)
    signature: Any = SimpleNamespace(lookups=[SimpleNamespace(table=SimpleNamespace(name="user"))])
    for servers.away in ("", "shard 1 does not answer", ""):
        with pytest.raises(ProtocolError, match=r"no answer within 10 s; see whether it hangs, or has too much to do$"):
            look_up(signature, [np.array([1])], Settings())
    assert asked == ["patient", "hasty", "patient"]
