"""Retries and hedging against servers that really fail: stopped, killed in mid-answer, busy, and not there."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lookup_servers import real_server, relay, server_process
from test_client import Waiting

from kvtools.array_table import ArrayTable
from kvtools.client import Client, UnavailableError
from kvtools.migrate import write_tables
from kvtools.server.catalog import static_catalog
from kvtools.server.observer import Observer
from kvtools.server.request import RequestError
from kvtools.server.store import TableStore

ROWS, DIM = 100, 64
VALUES = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)


@pytest.fixture(params=[Client, Waiting], ids=["threads", "asyncio"])
def make_client(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    with contextlib.ExitStack() as stack:
        yield lambda *servers, **options: stack.enter_context(request.param(*servers, **options))


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "a.kvsnap"
    write_tables([ArrayTable("a", np.arange(ROWS), VALUES)], path, "snapshot")
    return path


@pytest.fixture(scope="module")
def healthy(snapshot: Path) -> Iterator[str]:
    with real_server(static_catalog(TableStore(snapshot))) as url:
        yield url


class Busy(Observer):
    """Refuses the first lookups, as a server does that has too much to do; notes when each came."""

    def __init__(self, status: int, retry_after: str, times: int) -> None:
        self.status, self.retry_after, self.left = status, retry_after, times
        self.at: list[float] = []

    def authorize(self, headers: Any, tables: Any) -> None:
        if tables:
            self.at.append(time.monotonic())
            self.left -= 1
            if self.left >= 0:
                raise RequestError(self.status, "too_busy", "busy", {"Retry-After": self.retry_after})


def check(client: Any, keys: Any) -> None:
    embeddings, found = client.lookup("a", keys)
    assert found.all() and np.array_equal(embeddings, VALUES[keys])


@pytest.mark.thorough
def test_a_stopped_server_is_hedged(make_client: Any, snapshot: Path, healthy: str) -> None:
    with server_process(snapshot) as (process, url):
        known = make_client([url, healthy], hedge=0.02, timeout=30)
        for _ in range(4):
            check(known, np.arange(ROWS))
        process.send_signal(signal.SIGSTOP)
        for client in (known, make_client([url, healthy], hedge=0.02, timeout=30)):
            for _ in range(3):
                check(client, np.arange(ROWS))
        process.send_signal(signal.SIGCONT)
        check(make_client(url), np.arange(ROWS))


@pytest.mark.thorough
def test_a_server_killed_in_mid_answer(make_client: Any, snapshot: Path, healthy: str) -> None:
    keys = np.resize(np.arange(ROWS), 65536)  # 16 MiB of rows
    with (
        server_process(snapshot) as (process, url),
        relay(int(url.rpartition(":")[2]), 1 << 16, process.kill) as through,
    ):
        client = make_client([through, healthy], backoff=0.001, timeout=30)
        for _ in range(2):  # one of them goes to the one that dies
            check(client, keys)
        assert process.wait(30) == -signal.SIGKILL
        alone = make_client(through, backoff=0.001)
        with pytest.raises(UnavailableError, match=f"asking {through} for /v1/tables: {through}: ."):
            alone.tables()


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_left_alone_for_as_long_as_it_says(
    make_client: Any, snapshot: Path, healthy: str, status: int
) -> None:
    busy = Busy(status, "60", times=10**6)
    with real_server(static_catalog(TableStore(snapshot)), observer=busy) as url:
        client = make_client([url, healthy])
        for _ in range(6):
            check(client, np.arange(ROWS))
        assert len(busy.at) == 1
        with pytest.raises(UnavailableError, match=f"{url} said {status}: .*busy") as error:
            make_client(url, timeout=30).lookup("a", [1])
        assert error.value.retry_after == 60 and len(busy.at) == 2  # A retry could not come in time.


def test_a_busy_server_is_asked_again_no_sooner_than_it_says(make_client: Any, snapshot: Path) -> None:
    busy = Busy(503, "1", times=1)
    with real_server(static_catalog(TableStore(snapshot)), observer=busy) as url:
        check(make_client(url, backoff=0.001), np.arange(ROWS))
    first, second = busy.at
    assert second - first >= 1


def test_when_all_replicas_are_down_each_is_named(make_client: Any, snapshot: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        gone = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (one, two)]
    busy = Busy(503, "60", times=10**6)
    with real_server(static_catalog(TableStore(snapshot)), observer=busy) as url:
        client = make_client([*gone, url], retries=2, backoff=0.001, timeout=30)
        with pytest.raises(UnavailableError) as error:
            client.lookup("a", [1, 2])
    said = str(error.value)
    assert said.startswith(f"asking {gone[0]} and {gone[1]} and {url} for 2 keys of table 'a': ")
    assert f"{url} said 503: busy" in said
    with pytest.raises(UnavailableError) as error:
        make_client(gone, backoff=0.001).tables()
    assert all(f"{one}: [Errno 111] Connection refused" in str(error.value) for one in gone)
