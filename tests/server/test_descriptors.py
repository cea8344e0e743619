"""A server among more clients than it has descriptors for."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from kvtools.server.descriptors import make_room

SAMPLE = Path(__file__).parent.parent / "data" / "sample"


@pytest.mark.parametrize(
    ("limits", "connections", "room", "soft"),
    [
        ((100, 4096), 1000, 1000, 1512),
        ((100, 1000), 1000, 500, 1000),
        ((2000, 4096), 1000, 1000, 2000),
        ((64, 64), 1000, 32, 64),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1000, 1000, None),
        ((100, resource.RLIM_INFINITY), 1000, 1000, 1512),
    ],
)
def test_room_is_made_as_far_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], connections: int, room: int, soft: int | None
) -> None:
    current = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda what: current[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, new: current.append(new))
    assert make_room(connections) == room
    if soft is not None:
        assert current[-1] == (soft, limits[1])


def test_at_the_limit_of_descriptors_service_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "kvtools.cli.main", "serve", str(SAMPLE), "--port", "0", "--json"]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=errors,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96)),
        ) as process,
    ):
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            port = int(url.rpartition(":")[2])
            with contextlib.ExitStack() as stack:
                for _ in range(300):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
                first = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
                with contextlib.suppress(ConnectionError):
                    first.sendall(b"GET /v1/tables HTTP/1.1\r\nHost: a\r\n\r\n")
                    assert first.recv(1000).startswith((b"HTTP/1.1 503", b""))
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/tables", timeout=60) as answer:
                    assert answer.status == 200
                    break
            else:
                pytest.fail("it never answered again")
        finally:
            process.terminate()
    text = log.read_text()
    assert "descriptors suffice for 48 connections, not for 1024" in text
    assert "Traceback" not in text and len(text.splitlines()) < 20
