"""How the server begins and ends: signals, workers that die, requests in hand."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports
from requests_to_port import refuses
from version_files import write_snapshot

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from kvtools.errors import BadInputError, KvtoolsError
from kvtools.server import run, spinning
from kvtools.server.settings import Settings
from kvtools.server.sources import ModelSource
from kvtools.server.versions import Versions

SAMPLE = Path(__file__).parent.parent / "data" / "sample"
LOOKUP = "/v1/tables/ads/emb:lookup"
BODY = b'{"keys": [-7, 99]}'
HEAD = b"POST " + LOOKUP.encode() + b" HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(BODY)


def ask(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", LOOKUP, BODY)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def children(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(condition: Callable[[], bool], what: str) -> None:
    last = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < last, f"never: {what}"
        time.sleep(0.01)


def test_nobody_can_connect_before_there_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []
    [port] = free_ports(1)

    def load(self: Versions) -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
        refused.append(port)
        raise BadInputError("enough")

    monkeypatch.setattr(Versions, "load", load)
    before = signal.getsignal(signal.SIGHUP)
    try:
        with pytest.raises(BadInputError, match="enough"):
            run.serve([ModelSource("m", str(SAMPLE))], Settings(port=port))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert refused


@pytest.mark.parametrize("workers", [1, 2])
def test_requests_in_hand_are_answered_at_the_end(serve: Callable[..., Any], workers: int) -> None:
    server = serve(SAMPLE, "--workers", workers)
    stop = threading.Event()
    wrong: list[Any] = []
    answered = [0]

    def work() -> None:
        while not stop.is_set():
            try:
                if (status := ask(server.port)) != 200:
                    wrong.append(status)
                answered[0] += 1
            except (ConnectionError, http.client.RemoteDisconnected):
                return  # refused, or closed before anything was said: another server may be asked
            except (OSError, http.client.HTTPException) as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    # A request whose body comes after the signal is one in hand, too.
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as slow:
        slow.sendall(HEAD + BODY[:5])
        until(lambda: answered[0] > 20, "answers")
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        slow.sendall(BODY[5:])
        answer = b""
        while chunk := slow.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert server.process.wait(60) == 0
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    made, got, ended = server.stderr().splitlines()
    assert "INFO: made a snapshot of " in made
    assert got.endswith(" INFO: got SIGTERM: ending; requests in hand get 30 s")
    assert ended.endswith(" INFO: ended")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_half_sent_request_does_not_keep_the_process(serve: Callable[..., Any], workers: int) -> None:
    server = serve(SAMPLE, "--grace", "0.3", "--workers", workers)
    half = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(8)]
    for number, connection in enumerate(half):
        connection.sendall(HEAD[:20] if number % 2 else HEAD + BODY[:5])
    assert ask(server.port) == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    for connection in half:
        connection.close()


def test_a_second_signal_ends_it_at_once(serve: Callable[..., Any]) -> None:
    server = serve(SAMPLE, "--grace", "600")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as half:
        half.sendall(HEAD + BODY[:5])
        assert ask(server.port) == 200
        server.process.send_signal(signal.SIGINT)

        until(lambda: refuses(server.port), "it does not accept")
        status = None
        while status is None:  # one that comes soon after the first is the same one
            server.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = server.process.wait(0.1)
        assert status == -signal.SIGINT


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_closed_terminal_ends_it(workers: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtools.cli.main", "serve", str(SAMPLE), "--port", "0", "--workers", workers]
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execv(sys.executable, command)
    line = b""
    while b"http://" not in line:
        line += os.read(terminal, 4096)
    os.close(terminal)
    until(lambda: gone(pid), "it ends")
    os.waitpid(pid, 0)


def test_the_address_is_taken(serve: Callable[..., Any], tmp_path: Path) -> None:
    server = serve(SAMPLE, "--workers", "2")
    command = [sys.executable, "-m", "kvtools.cli.main", "serve", str(SAMPLE), "--port", str(server.port)]
    command += ["--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1, "a shared port is not shared with another server"
    assert f"listening on 127.0.0.1:{server.port}: Address already in use" in done.stderr


def test_a_worker_that_dies_is_started_again(serve: Callable[..., Any]) -> None:
    server = serve(SAMPLE, "--workers", "2", "--json")
    assert json.loads(server.line)["models"][0]["tables"] == 3
    before = children(server.process.pid)
    assert len(before) == 2
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    until(lambda: len(children(server.process.pid) - {victim}) == 2, "two workers")
    for _ in range(40):  # a connection to the dead one's socket waits for the new one
        assert ask(server.port) == 200
    assert "ended by SIGKILL" in server.stderr()
    until(lambda: " answers again, as process " in server.stderr(), "it says so")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert all(gone(pid) for pid in before)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_other_protocols_begin_and_end_with_it(serve: Callable[..., Any], workers: str) -> None:
    grpc = pytest.importorskip("grpc")
    health = pytest.importorskip("grpc_health.v1.health_pb2")
    ports = ("--grpc-port", "0", "--resp-port", "0")
    server = serve(SAMPLE, *ports, "--workers", workers, "--json", "--grace", "5")
    told = json.loads(server.line)
    with socket.create_connection(("127.0.0.1", told["resp_port"]), timeout=60) as redis:
        redis.sendall(b"PING\r\n")
        assert redis.recv(100) == b"+PONG\r\n"
        with grpc.insecure_channel(f"127.0.0.1:{told['grpc_port']}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            answer = health.HealthCheckResponse.FromString(check(b"", timeout=60))
        assert answer.status == health.HealthCheckResponse.SERVING
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert redis.recv(100) == b""
    for port in (told["grpc_port"], told["resp_port"]):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
    assert "Traceback" not in server.stderr()


def test_workers_end_with_their_supervisor(serve: Callable[..., Any]) -> None:
    server = serve(SAMPLE, "--workers", "2")
    workers = children(server.process.pid)
    server.process.kill()
    until(lambda: all(gone(pid) for pid in workers), "the workers end")


def test_what_is_changed_at_one_worker_is_changed_at_all(
    serve: Callable[..., Any], write_version: Callable[..., Path], tmp_path: Path
) -> None:
    for number in (6, 7):
        write_version(tmp_path / "m", number)
    server = serve(tmp_path / "m", "--workers", "2", "--admin", "--versions", "all")

    def request(method: str, path: str, body: bytes = b"") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            return connection.getresponse().status
        finally:
            connection.close()

    labelled = ("POST", "/v1/models/default/labels/stable:predict", b'{"instances": [1]}')
    assert request(*labelled) == 400, "as TensorFlow Serving answers an unknown label"
    assert request("PUT", "/admin/models/default/labels/stable", b'{"version": 6}') == 200
    until(lambda: [request(*labelled) for _ in range(20)] == [200] * 20, "both workers know the label")


@pytest.mark.parametrize("workers", ["1", "3"])
def test_what_keeps_it_from_starting_is_told_once(workers: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/3").symlink_to(tmp_path / "gone")
    damaged = write_snapshot(tmp_path / "d", 7)
    content = bytearray(damaged.read_bytes())
    content[3 * 4096] ^= 1
    damaged.write_bytes(content)
    for path, says in (
        (
            "m",
            "serving 'm': there is no version in this folder (a folder or snapshot whose name is a number);"
            " '3' is none: it is a link to nothing; --wait",
        ),
        ("d", "serving 'd': version 7: verifying 'd/7.kvsnap': table 'emb', its rows from byte 0 on"),
    ):
        command = [sys.executable, "-m", "kvtools.cli.main", "serve", path, "--workers", workers, "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"kvtools: {says}")


def test_all_lines_of_the_log_have_one_form(serve: Callable[..., Any]) -> None:
    server = serve(SAMPLE)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GARBAGE\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    lines = server.stderr().splitlines()
    form = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} kvtools\[\d+\] (INFO|WARNING): \S")
    assert len(lines) == 4 and all(form.match(line) for line in lines), lines


def test_the_line_at_the_start_counts_as_people_do() -> None:
    model = {"name": "m", "version": 1, "versions": [1], "path": "exported", "tables": 1, "rows": 1_500_000}
    line = run._line(Settings(port=80), {"models": [model], "waiting": []})
    assert line.startswith("serving 1 table, 1,500,000 rows of exported at http://127.0.0.1:80 (")
    line = run._line(Settings(port=80), {"models": [model, model], "waiting": ["c"], "grpc_port": 8500})
    assert line.startswith(
        "serving 2 models, 2 tables, 3,000,000 rows at http://127.0.0.1:80, gRPC at port 8500, waiting"
    )
    assert "waiting for a version of 'c' (" in line
    line = run._line(Settings(port=80), {"models": [{**model, "versions": [1, 2, 4]}], "waiting": []})
    assert line.startswith("serving 1 table, 1,500,000 rows of exported, and 2 older versions at http://127.0.0.1:80 (")
    whole = {"name": "m", "version": 1, "versions": [1], "path": "models/4", "tables": 0, "rows": 0}
    line = run._line(Settings(port=80), {"models": [whole], "waiting": []})
    assert line.startswith("serving the whole model of models/4 at http://127.0.0.1:80 (")
    line = run._line(Settings(port=80), {"models": [whole, whole], "waiting": []})
    assert line.startswith("serving 2 whole models at http://127.0.0.1:80 (")


class _OlderSpin:
    """As of a C++ module that was built before a Spin could be told whether it is bounded."""

    def __init__(self, seconds: float, call_soon: Callable[..., Any]) -> None:
        self.seconds, self.call_soon = seconds, call_soon


@pytest.mark.parametrize("ports", [{}, {"resp_port": 0, "grpc_port": 0}], ids=["HTTP", "all"])
def test_an_older_module_is_told_before_anything_is_listened_on(
    monkeypatch: pytest.MonkeyPatch, ports: dict[str, int]
) -> None:
    monkeypatch.setattr(spinning, "Spin", _OlderSpin)
    told = []
    monkeypatch.setattr(run, "_line", lambda *what: told.append(what) or "")
    before = signal.getsignal(signal.SIGHUP)
    try:
        with pytest.raises(KvtoolsError, match=r"'.*_snapshot.*' is of another version than the Python.*; install"):
            run.serve([ModelSource("m", str(SAMPLE))], Settings(port=0, **ports))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not told
