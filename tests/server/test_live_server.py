"""A real server in a process of its own, and requests that no client library would send."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from requests_to_port import raw

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
SAMPLE = Path(__file__).parent.parent / "data" / "sample"
LOOKUP = "/v1/tables/ads/emb:lookup"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    command = [
        sys.executable,
        "-m",
        "kvtools.cli.main",
        "serve",
        str(SAMPLE),
        "--port",
        "0",
        "--max-keys",
        "1000",
    ]
    cwd = tmp_path_factory.mktemp("server")
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line + process.stderr.read()
        yield int(found[1])
        assert process.poll() is None, "the server died"
        process.terminate()
        assert process.wait(120) is not None
        assert "Traceback" not in process.stderr.read()


def request(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def alive(port: int) -> bool:
    return request(port, "GET", "/healthz") == (200, b'{"status":"ok"}')


def test_lookup(port: int) -> None:
    status, body = request(port, "POST", LOOKUP, b'{"keys": [-7, 99]}')
    assert status == 200
    assert json.loads(body) == {"embeddings": [[2, 2.125, 2.25, 2.375], [0, 0, 0, 0]], "found": [True, False]}


def test_binary(port: int) -> None:
    octets = "application/octet-stream"
    status, body = request(port, "POST", LOOKUP, np.array([-7]).tobytes(), Content_Type=octets, Accept=octets)
    assert (status, np.frombuffer(body, "<f4").tolist()) == (200, [2, 2.125, 2.25, 2.375])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0" * 100,
        b"[" * 30_000,
        b'{"keys": [1e400]}',
        b'{"keys": "' + b"x" * 20_000 + b'"}',
        b'{"keys":[1,]}',
    ],
    ids=["empty", "zeros", "deep", "huge", "string", "comma"],
)
def test_bad_bodies(port: int, body: bytes) -> None:
    status, answer = request(port, "POST", LOOKUP, body)
    assert 400 <= status < 500 and "error" in json.loads(answer)
    assert alive(port)


def test_oversized_body_is_cut_short(port: int) -> None:
    assert raw(
        port,
        b"POST "
        + LOOKUP.encode()
        + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 200000\r\n\r\n"
        + b"1" * 200_000,
    ).startswith(b"HTTP/1.1 413")
    assert alive(port)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST " + LOOKUP.encode() + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{",
        b"POST " + LOOKUP.encode() + b" HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST " + LOOKUP.encode() + b" HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/tables/%00%ff%2e%2e/:lookup HTTP/1.0\r\nContent-Length: 0\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
    ids=["nothing", "tls", "version", "short", "negative", "chunks", "path", "long"],
)
def test_broken_requests_do_not_bring_it_down(port: int, data: bytes) -> None:
    answer = raw(port, data)
    assert b"HTTP/1.1 5" not in answer
    assert alive(port)


def test_many_clients_at_once(port: int) -> None:
    failures: list[object] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            keys = rng.choice([-7, 0, 5, 99], 500)
            status, body = request(port, "POST", LOOKUP, json.dumps({"keys": keys.tolist()}).encode())
            found = json.loads(body).get("found")
            if status != 200 or found != (keys != 99).tolist():
                failures.append((status, body[:200]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
