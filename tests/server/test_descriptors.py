"""A server among more clients than it has descriptors for."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
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


def test_room_is_made_for_every_port(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [(100, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: current[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, new: current.append(new))
    assert make_room(1000, ports=3) == 1000 and current[-1] == (3512, 4096)
    assert make_room(2000, ports=3) == (4096 - 512) // 3


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
            last = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/tables", timeout=60) as answer:
                    assert answer.status == 200
                    break
                assert time.monotonic() < last, "it never answered again"
                time.sleep(0.01)
        finally:
            process.terminate()
    text = log.read_text()
    assert "descriptors suffice for 48 connections, not for 1,024" in text
    assert "Traceback" not in text and len(text.splitlines()) < 20


@pytest.mark.thorough
@pytest.mark.parametrize("port", ["url", "grpc_port", "resp_port"])
def test_connections_to_one_port_leave_room_for_the_others(tmp_path: Path, port: str) -> None:
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("grpc_health")
    log = tmp_path / "log"
    command = [sys.executable, "-m", "kvtools.cli.main", "serve", str(SAMPLE), "--json", "--cache", str(tmp_path / "c")]
    for option in ("--port", "--grpc-port", "--resp-port"):
        command += [option, "0"]
    # By a shell: Python code between fork and exec does not go with a gRPC that runs in this process.
    limited = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *command]
    with (
        log.open("wb") as errors,
        subprocess.Popen(limited, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            told["url"] = int(told["url"].rpartition(":")[2])

            def http_answers() -> bool:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{told['url']}/livez", timeout=60) as answer:
                        return bool(answer.status == 200)
                except OSError:
                    return False

            def grpc_answers() -> bool:
                with grpc.insecure_channel(f"127.0.0.1:{told['grpc_port']}") as channel:
                    try:
                        return bool(channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60))
                    except grpc.RpcError:
                        return False

            def redis_answers() -> bool:
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", told["resp_port"]), timeout=60) as connection,
                ):
                    connection.sendall(b"PING\r\n")
                    return connection.recv(100) == b"+PONG\r\n"
                return False

            answers = {"url": http_answers, "grpc_port": grpc_answers, "resp_port": redis_answers}
            with contextlib.ExitStack() as stack:
                for _ in range(400):
                    with contextlib.suppress(OSError):
                        stack.enter_context(socket.create_connection(("127.0.0.1", told[port]), timeout=60))
                for name, ask in answers.items():
                    assert name == port or ask(), f"{name} is starved by {port}"
            last = time.monotonic() + 60
            while not answers[port]():
                assert time.monotonic() < last, "it never answered again"
                time.sleep(0.01)
        finally:
            process.terminate()
    assert process.returncode == 0
    text = log.read_text()
    assert "descriptors suffice for 42 connections to each port, not for 1,024" in text
    assert "Traceback" not in text and len(text.splitlines()) < 10
