"""How soon after its process began a server lives, can answer, has answered, and is warm."""

from __future__ import annotations

import http.client
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
from command_line import KVTOOLS
from serving.forms import BINARY
from serving.servers import StartError

_PATIENCE = 300.0


def start_server(
    snapshot: Path, keys: np.ndarray, dim: int, *, until_warm: bool
) -> tuple[dict[str, float], np.ndarray]:
    """Start `kvtools serve` as it comes, and end it again; returns seconds, and the rows of `keys`.

    The seconds are those from before the process was made until `/livez`, `/readyz`, a lookup of `keys` and, if asked
    for, `/warmz` were answered with 200. Raises `StartError`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [KVTOOLS, "serve", str(snapshot), "--port", str(port), "--json"]
    begin = time.perf_counter()
    seconds: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            for name, path in (("live", "/livez"), ("ready", "/readyz")):
                _until_200(port, path, process, begin)
                seconds[name] = time.perf_counter() - begin
            body = BINARY.body(keys)
            status, answer = _ask(port, "POST", BINARY.path, body, BINARY.headers)
            seconds["first lookup"] = time.perf_counter() - begin
            if status != 200:
                raise StartError(f"a lookup was answered with {status}: {answer[:200]!r}")
            if until_warm:
                _until_200(port, "/warmz", process, begin)
                seconds["warm"] = time.perf_counter() - begin
        finally:
            process.terminate()
    return seconds, BINARY.rows(answer, dim)


def _until_200(port: int, path: str, process: subprocess.Popen[bytes], begin: float) -> None:
    while True:
        try:
            if _ask(port, "GET", path)[0] == 200:
                return
        except ConnectionError:
            pass
        if process.poll() is not None:
            raise StartError("kvtools serve ended; it says why above")
        if time.perf_counter() - begin > _PATIENCE:
            raise StartError(f"{path} was not answered with 200 within {_PATIENCE:g} s")
        time.sleep(0.002)


def _ask(
    port: int, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
