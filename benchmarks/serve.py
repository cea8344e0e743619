"""What a lookup over HTTP costs: `kvtools serve` and, where redis-server is installed, MGET, on one table.

A client with a raw keep-alive socket asks for 1 to 10,000 keys a request. The CPU time of the server's process counts,
so that a client in Python, and whatever else the machine does, takes little part in the figures; keys/s of CPU is what
one core would give if it did nothing else. `make bench-serve` prints the table that benchmarks/NOTES.md has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtools import _snapshot
from kvtools.lookup_frame import MEDIA_TYPE, TableKeys, encode_request

OCTETS = "application/octet-stream"
TICKS = os.sysconf("SC_CLK_TCK")


def make_snapshot(path: Path, rows: int, dim: int) -> np.ndarray:
    """Write a table `emb` of float32 rows; returns its keys int64 [rows]."""
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, rows + rows // 50, np.int64))[:rows]
    writer = _snapshot.Writer(str(path), 1 << 30)
    writer.begin_table("emb", key_dtype="int64", value_dtype="float32", dim=dim, rows=len(keys))
    writer.add_keys(keys)
    writer.sort_keys()
    for first in range(0, len(keys), 1 << 18):
        count = min(1 << 18, len(keys) - first)
        writer.add_rows(first, rng.normal(size=(count, dim)).astype(np.float32))
    writer.end_table()
    writer.close(json.dumps({"format": "kvtools snapshot", "tables": {}}).encode())
    return keys


@contextmanager
def serving(path: Path) -> Iterator[tuple[int, int]]:
    """A server over `path`: its port and process."""
    command = [sys.executable, "-m", "kvtools.cli.main", "serve", str(path), "--port", "0", "--no-verify", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
        for _ in range(600):  # rows that are not in memory are looked up by threads
            with socket.create_connection(("127.0.0.1", port)) as probe:
                probe.sendall(b"GET /warmz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                if probe.recv(1000).startswith(b"HTTP/1.1 200"):
                    break
            time.sleep(0.1)
        try:
            yield port, process.pid
        finally:
            process.terminate()


@contextmanager
def redis(keys: np.ndarray, dim: int) -> Iterator[tuple[int, int]]:
    """A Redis with the same keys (8 bytes each) and rows."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            client = Client(port, wait=True)
            row = bytes(4 * dim)
            for first in range(0, len(keys), 10_000):
                some = keys[first : first + 10_000]
                client.ask(resp([b"MSET", *(part for key in some for part in (key.tobytes(), row))]), redis_answer)
            yield port, process.pid
        finally:
            process.terminate()


def resp(words: list[bytes]) -> bytes:
    """A command in Redis' protocol."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


class Client:
    """One connection, one request at a time."""

    def __init__(self, port: int, *, wait: bool = False) -> None:
        for _ in range(100):
            try:
                self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
                break
            except ConnectionRefusedError:
                if not wait:
                    raise
                time.sleep(0.1)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray(1 << 26)

    def ask(self, request: bytes, whole: Callable[[bytearray, int], bool]) -> int:
        """Send a request and read until `whole(buffer, bytes)`; returns how many bytes came."""
        self.socket.sendall(request)
        got, view = 0, memoryview(self.buffer)
        while True:
            count = self.socket.recv_into(view[got:])
            assert count, "the server closed the connection"
            got += count
            if whole(self.buffer, got):
                return got


def http_answer(buffer: bytearray, got: int) -> bool:
    """Whether an HTTP answer is whole."""
    end = buffer.find(b"\r\n\r\n", 0, min(got, 1000))
    if end < 0:
        return False
    assert buffer.startswith(b"HTTP/1.1 200"), bytes(buffer[:got])
    at = buffer.find(b"content-length: ", 0, end)
    if at < 0:  # chunked
        return bytes(buffer[got - 5 : got]) == b"0\r\n\r\n"
    length = int(buffer[at + 16 : buffer.index(b"\r\n", at)])
    return got >= end + 4 + length


def redis_answer(buffer: bytearray, got: int) -> bool:
    """Whether an answer of OK, or a list of strings of one length, is whole."""
    if buffer[:1] != b"*":
        return buffer[got - 2 : got] == b"\r\n"
    end = buffer.index(b"\r\n")
    size = buffer.find(b"\r\n", end + 2)
    if size < 0:
        return False
    each = size - end + int(buffer[end + 3 : size]) + 2
    return got >= end + 2 + each * int(buffer[1:end])


def http(line: str, body: bytes, **headers: str) -> bytes:
    """A request."""
    fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{line} HTTP/1.1\r\nHost: 127.0.0.1\r\n{fields}Content-Length: {len(body)}\r\n\r\n".encode() + body


FORMS: dict[str, Callable[[np.ndarray], bytes]] = {
    "binary": lambda keys: http("POST /v1/tables/emb:lookup", keys.tobytes(), Content_Type=OCTETS, Accept=OCTETS),
    "JSON": lambda keys: http("POST /v1/tables/emb:lookup", json.dumps({"keys": keys.tolist()}).encode()),
    "frame": lambda keys: http(
        "POST /v1/tables:lookup", encode_request([TableKeys("emb", keys)]), Content_Type=MEDIA_TYPE, Accept=MEDIA_TYPE
    ),
}


def cpu_seconds(process: int) -> float:
    """What a process has used so far, its threads included."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(
    port: int, process: int, requests: list[bytes], whole: Callable[[bytearray, int], bool], seconds: float
) -> tuple[float, float, float]:
    """Ask for `seconds` of the server's CPU; returns its CPU per request, and median and 99th percentile in s."""
    client = Client(port)
    for request in requests[:5]:
        client.ask(request, whole)
    began, walls = cpu_seconds(process), []
    last = time.monotonic() + 20 * seconds
    while cpu_seconds(process) - began < seconds and time.monotonic() < last:
        for request in requests:
            start = time.perf_counter()
            client.ask(request, whole)
            walls.append(time.perf_counter() - start)
    client.socket.close()
    return (cpu_seconds(process) - began) / len(walls), *np.percentile(walls, [50, 99])  # type: ignore[return-value]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_500_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--keys", type=int, nargs="+", default=[1, 100, 1000, 10_000])
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU of the server per figure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.kvsnap"
        keys = make_snapshot(path, options.rows, options.dim)
        rng = np.random.default_rng(1)
        drawn = {n: [rng.choice(keys, n) for _ in range(50)] for n in options.keys}
        print(f"{options.rows} rows x {options.dim}, one connection; CPU is the server's\n")
        print("| | keys | CPU us/request | keys/s of CPU | p50 us | p99 us |\n|---|---|---|---|---|---|")

        def show(name: str, n: int, figures: tuple[float, float, float]) -> None:
            cpu, p50, p99 = figures
            print(
                f"| {name} | {n} | {cpu * 1e6:.1f} | {n / cpu / 1e6:.3g} M | {p50 * 1e6:.0f} | {p99 * 1e6:.0f} |",
                flush=True,
            )

        with serving(path) as (port, process):
            for name, form in FORMS.items():
                for n, batches in drawn.items():
                    requests = [form(batch) for batch in batches]
                    show(name, n, measure(port, process, requests, http_answer, options.seconds))
        if shutil.which("redis-server") is None:
            print("\nredis-server is not installed: no figures of MGET beside these", file=sys.stderr)
            return
        with redis(keys, options.dim) as (port, process):
            for n, batches in drawn.items():
                requests = [resp([b"MGET", *(key.tobytes() for key in batch)]) for batch in batches]
                show("Redis MGET", n, measure(port, process, requests, redis_answer, options.seconds))


if __name__ == "__main__":
    main()
