"""Versions swapped under a real server while clients ask."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from requests_to_port import get_json

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
OCTETS = "application/octet-stream"
LOOKUP = "/v1/tables/emb:lookup"
SWAPS = 12


class Asker(threading.Thread):
    """Asks over one connection until told to stop, and notes what is wrong with the answers."""

    def __init__(self, port: int, seed: int, stop: threading.Event) -> None:
        super().__init__()
        self._port, self._stop_asking, self._rng = port, stop, np.random.default_rng(seed)
        self.seen: list[int] = []
        self.failures: list[Any] = []
        self.answers = 0

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        headers = {"Content-Type": OCTETS, "Accept": OCTETS}
        while not self._stop_asking.is_set():
            keys = self._rng.integers(0, 200, int(self._rng.integers(1, 300)))
            try:
                connection.request("POST", LOOKUP, keys.astype("<i8").tobytes(), headers)
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(error)
                return
            if answer.status != 200:
                self.failures.append((answer.status, body[:200]))
                continue
            self.answers += 1
            rows = np.frombuffer(body, "<f4").reshape(len(keys), -1)
            version = int(rows[0, 0]) // 1000
            if answer.headers["X-Embedding-Version"] != str(version):
                self.failures.append(("another version than it says", version))
            if not np.array_equal(rows, np.repeat(version * 1000 + keys[:, None], rows.shape[1], 1)):
                self.failures.append(("rows of several versions, or wrong ones", version))
            if not self.seen or self.seen[-1] != version:
                self.seen.append(version)
        connection.close()


def until(condition: Callable[[], bool], what: str) -> None:
    last = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < last, f"never: {what}"
        time.sleep(0.01)


@pytest.mark.parametrize("workers", [1, 2])
def test_swaps_that_nobody_notices(
    serve: Callable[..., Any], write_version: Callable[..., Path], tmp_path: Path, workers: int
) -> None:
    folder = tmp_path / "m"
    write_version(folder, 1)
    server = serve(folder, "--poll", "0.05", "--workers", workers)
    stop = threading.Event()
    askers = [Asker(server.port, seed, stop) for seed in range(4)]
    for asker in askers:
        asker.start()
    try:
        for number in range(2, SWAPS + 2):
            write_version(folder, number)
            until(
                lambda number=number: all(asker.failures or asker.seen[-1:] == [number] for asker in askers),
                f"version {number} on every connection",
            )
    finally:
        stop.set()
        for asker in askers:
            asker.join()
    assert not [asker.failures for asker in askers if asker.failures]
    for asker in askers:
        assert asker.seen == sorted(set(asker.seen)), "no way back to an older version"
        assert asker.answers > SWAPS
    pid = server.process.pid
    serving = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if workers > 1 else [str(pid)]
    for process in serving:
        maps = Path(f"/proc/{process}/maps")
        until(lambda maps=maps: f"{folder}/{SWAPS + 1}.kvsnap" in maps.read_text(), "the newest is mapped")
        until(
            lambda maps=maps: (
                not any(f"{folder}/{number}.kvsnap" in maps.read_text() for number in range(1, SWAPS + 1))
            ),
            "old versions are unmapped",
        )


def test_hangup_looks_for_versions_now(
    serve: Callable[..., Any], write_version: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    write_version(folder, 1)
    server = serve(folder)
    write_version(folder, 2)
    server.process.send_signal(1)
    until(lambda: "version 2 is served" in server.stderr(), "version 2")
    assert get_json(server.port, "/readyz") == (200, {"status": "ready"})


def test_waiting_for_the_first_version(
    serve: Callable[..., Any], write_version: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    server = serve(folder, "--wait", "--poll", "0.05")
    assert server.line.startswith("serving no model yet")
    assert get_json(server.port, "/livez")[0] == 200
    code, answer = get_json(server.port, "/readyz")
    assert code == 503 and answer["error"]["code"] == "not_ready"
    assert get_json(server.port, "/v1/tables")[0] == 503
    write_version(folder, 1)
    until(lambda: get_json(server.port, "/readyz")[0] == 200, "ready")
    until(lambda: get_json(server.port, "/warmz")[0] == 200, "warm")
