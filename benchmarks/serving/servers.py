"""The servers, each on a CPU of its own choosing, and what they have used of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from command_line import KVTOOLS
from serving.forms import resp_command
from serving.tables import Table, redis_commands

_PATIENCE = 120.0


class StartError(Exception):
    """A server did not start, or not as it should; the message says why."""


@dataclass(frozen=True)
class Ports:
    """Where a server listens; of what is not there: None."""

    http: int | None = None
    resp: int | None = None
    grpc: int | None = None
    redis: int | None = None


@dataclass(frozen=True)
class Server:
    """A process and its ports."""

    process: int
    ports: Ports

    def cpu_seconds(self) -> float:
        """What its threads have used so far."""
        return cpu_seconds(self.process)


def pinned(cpu: int) -> Callable[[], None]:
    """What a child process calls to stay on one CPU."""
    return lambda: os.sched_setaffinity(0, {cpu})


def cpu_seconds(process: int) -> float:
    """What the threads of a process have used so far."""
    used = 0
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            used += int((task / "schedstat").read_text().split()[0])
    return used / 1e9


def system_share(process: int) -> tuple[float, float]:
    """Seconds of a process as user and as system."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


@contextlib.contextmanager
def kvtools_server(snapshot: Path, cpu: int) -> Iterator[Server]:
    """`kvtools serve` with all its ports, its rows in memory."""
    command = [KVTOOLS, "serve", str(snapshot), "--no-verify", "--json"]
    command += ["--port", "0", "--resp-port", "0"]
    if importlib.util.find_spec("grpc") is not None:
        command += ["--grpc-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=pinned(cpu)) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise StartError("kvtools serve did not start; it says why above")
            told = json.loads(line)
            http = int(told["url"].rpartition(":")[2])
            wait_for(http, "/warmz")
            yield Server(process.pid, Ports(http=http, resp=told["resp_port"], grpc=told.get("grpc_port")))
        finally:
            process.terminate()


@contextlib.contextmanager
def ideal_server(program: Path, request: int, answer: int, seconds: float, cpu: int) -> Iterator[Server]:
    """ideal.cc: requests of so many bytes are answered with so many, after so many seconds of work."""
    command = [str(program), str(request), str(answer), f"{seconds * 1e6:.3f}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=pinned(cpu)) as process:
        assert process.stdout is not None
        try:
            yield Server(process.pid, Ports(http=int(process.stdout.readline())))
        finally:
            process.terminate()


def wait_for(port: int, path: str, interval: float = 0.05) -> None:
    """Until a check is answered with 200."""
    last = time.monotonic() + _PATIENCE
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10):
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > last:
                raise StartError(f"{path} was not answered with 200 within {_PATIENCE:g} s") from None
            time.sleep(interval)


@contextlib.contextmanager
def redis_server(table: Table, cpu: int) -> Iterator[Server]:
    """A Redis with the same keys and rows, which keeps them in memory only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=pinned(cpu)) as process:
        try:
            with _connected(port) as connection:
                for command_bytes in redis_commands(table):
                    assert _asked(connection, command_bytes) == b"+OK\r\n"
                held = int(_asked(connection, resp_command(b"DBSIZE")).strip(b":\r\n"))
                assert held == table.rows, f"Redis has {held} keys of {table.rows}"
            yield Server(process.pid, Ports(redis=port))
        finally:
            process.terminate()


def _connected(port: int) -> socket.socket:
    last = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        except ConnectionRefusedError:
            if time.monotonic() > last:
                raise
            time.sleep(0.05)


def _asked(connection: socket.socket, command: bytes) -> bytes:
    """The one line that answers a command."""
    connection.sendall(command)
    answer = b""
    while not answer.endswith(b"\r\n"):
        answer += connection.recv(4096)
    return answer
