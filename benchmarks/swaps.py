"""What clients notice of new versions: `kvtools serve FOLDER --poll 1` under a steady load while versions come.

``make bench-swaps`` runs it. The load is open-loop: the times at which requests are sent are fixed beforehand, and a
latency counts from the time at which its request was to be sent. A server that stalls makes the requests behind the
stall late, too, as it does to real clients. Every vector of every answer is compared with the version that the answer
says it is of.

Versions are made beforehand, three contents in turn, and renamed into the folder one by one by a process of the lowest
priority: what it costs to write them is not what it costs to serve them. A request counts as one in a swap from the
time at which a version lies in the folder to a second after all answers are of it, two seconds at least. All others are
of the steady state, so that both are measured in turns all the time. A part of the steady state as long as each swap,
half an interval later, stands beside them as `quiet`: so much do two samples of the steady state differ.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import gc
import json
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
from command_line import KVTOOLS
from machine import file_name, machine

from kvtools import _snapshot

ROOT = Path(__file__).resolve().parent.parent
OCTETS = "application/octet-stream"
AT_MOST = 1.2  # p99 in swaps over p99 of the steady state
CONTENTS = 3
BASE_CHUNK = 1 << 18
BATCHES = 4096  # requests that are made beforehand, and sent in turns
CONNECTIONS = 32
LEAST_SWAP = 2.0  # s
AFTER_SWAP = 1.0  # s
WARM_UP = 3.0  # s of load that do not count
SPUN = 80e-6  # the last moment before a request is due is not slept, in s
CHECKED_BEFORE = 60e-6  # an answer is checked where so much time is left, in s
FRACTION = 0x007FFFFF  # of a float32
PERCENTILES = (50, 99, 99.9)


def turned(number: int) -> np.uint32:
    """Return the bits that version `number` turns in the fraction of every value."""
    return np.uint32((number % CONTENTS + 1) * 0x2545F5 & FRACTION)


def base_of(chunk: int, rows: int, dim: int) -> np.ndarray:
    """Return rows of no version, float32 as bits: [rows, dim] uint32."""
    return np.random.default_rng(chunk).standard_normal((rows, dim), np.float32).view(np.uint32)


def make_contents(folder: Path, rows: int, dim: int) -> tuple[np.ndarray, list[Path]]:
    """Write what versions have in turns; returns the keys int64 [rows] and the files."""
    keys = np.arange(rows, dtype=np.int64) * 7 - rows
    paths = []
    for number in range(CONTENTS):
        paths.append(folder / f"content-{number}")
        writer = _snapshot.Writer(str(paths[-1]), 1 << 31)
        writer.begin_table("emb", key_dtype="int64", value_dtype="float32", dim=dim, rows=rows)
        writer.add_keys(keys)
        writer.sort_keys()
        for first in range(0, rows, BASE_CHUNK):
            base = base_of(first, min(BASE_CHUNK, rows - first), dim)
            writer.add_rows(first, (base ^ turned(number)).view(np.float32))
        writer.end_table()
        writer.close(json.dumps({"format": "kvtools snapshot", "tables": {}}).encode())
    return keys, paths


def make_batches(keys: np.ndarray, dim: int, size: int) -> tuple[list[bytes], np.ndarray]:
    """Draw keys at random; returns requests, and the rows of no version [batches, size * dim] uint32."""
    rows = np.random.default_rng(1).integers(0, len(keys), (BATCHES, size))
    expected = np.empty((BATCHES, size, dim), np.uint32)
    for first in range(0, len(keys), BASE_CHUNK):
        base = base_of(first, min(BASE_CHUNK, len(keys) - first), dim)
        here = (rows >= first) & (rows < first + len(base))
        expected[here] = base[rows[here] - first]
    head = (
        f"POST /v1/tables/emb:lookup HTTP/1.1\r\nHost: localhost\r\nContent-Type: {OCTETS}\r\nAccept: {OCTETS}\r\n"
        f"Content-Length: {8 * size}\r\n\r\n"
    ).encode()
    return [head + keys[some].tobytes() for some in rows], expected.reshape(BATCHES, -1)


@contextlib.contextmanager
def serving(folder: Path, cpus: set[int], workers: int) -> Iterator[tuple[int, list[int]]]:
    """Serve `folder`, warm: the port, and the processes that serve."""
    command = [KVTOOLS, "serve", str(folder), "--poll", "1", "--port", "0", "--json"]
    command += ["--workers", str(workers)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cpus)
    ) as process:
        try:
            assert process.stdout is not None
            port = int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for _ in range(3000):
                with socket.create_connection(("127.0.0.1", port)) as probe:
                    probe.sendall(b"GET /warmz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                    if probe.recv(1000).startswith(b"HTTP/1.1 200"):
                        break
                time.sleep(0.1)
            yield port, list(map(int, children)) if workers > 1 else [process.pid]
        finally:
            process.terminate()


def memory(processes: list[int], file: str, names: tuple[str, ...]) -> list[int]:
    """Return the sums of some lines of /proc/PID/`file`, in KiB."""
    sums = dict.fromkeys(names, 0)
    for process in processes:
        for line in Path(f"/proc/{process}/{file}").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in sums:
                sums[name] += int(value.split()[0])
    return list(sums.values())


def bring_versions(
    pipe: Pipe, folder: Path, contents: list[Path], processes: list[int], start: float, every: float, last: float
) -> None:
    """Put a version into `folder` every so many seconds until `last`; sends when each came, and the memory used."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    came: list[tuple[int, float]] = []
    samples: list[tuple[float, list[int], list[int]]] = []
    number, due = 2, start
    while due < last:
        while (left := due - time.perf_counter()) > 0:
            time.sleep(min(left, 1.0))
        samples.append((due - start, memory(processes, "status", ("RssAnon", "RssFile")), pss(processes)))
        beside = folder / "next"
        beside.hardlink_to(contents[number % CONTENTS])
        came.append((number, time.perf_counter()))
        beside.rename(folder / f"{number}.kvsnap")
        (folder / f"{number - 2}.kvsnap").unlink(missing_ok=True)
        number, due = number + 1, due + every
    pipe.send((came, samples))


def pss(processes: list[int]) -> list[int]:
    """Return how much memory is theirs, what is shared being shared out, in KiB."""
    return memory(processes, "smaps_rollup", ("Pss",))


@dataclass
class Load:
    """What is sent when, and what became of it; times in s of `time.perf_counter`, arrays by number of request."""

    due: np.ndarray
    latency: np.ndarray = field(init=False)
    version: np.ndarray = field(init=False)
    failures: list[str] = field(default_factory=list)
    late: int = 0  # sent over a millisecond after they were due, since the client had no time or no connection

    def __post_init__(self) -> None:
        self.latency = np.full(len(self.due), np.nan)
        self.version = np.zeros(len(self.due), np.int64)

    def run(self, port: int, requests: list[bytes], expected: np.ndarray) -> None:
        """Send every request when it is due, and check every answer."""
        sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        poller = select.epoll()
        by_number = {}
        for one in sockets:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setblocking(False)
            poller.register(one, select.EPOLLIN)
            by_number[one.fileno()] = one
        free = collections.deque(by_number)
        asked: dict[int, int] = {}  # descriptor -> number of the request in hand
        parts: dict[int, bytes] = {}
        unchecked: collections.deque[tuple[int, bytes]] = collections.deque()
        due, latency, clock = self.due.tolist(), self.latency, time.perf_counter
        sent, count = 0, len(due)
        gc.collect()
        gc.disable()
        while sent < count or asked:
            while sent < count and free and due[sent] <= (now := clock()):
                to = free.popleft()
                by_number[to].send(requests[sent % BATCHES])
                asked[to] = sent
                self.late += now - due[sent] > 1e-3
                sent += 1
            left = due[sent] - clock() if sent < count and free else 1.0
            if unchecked and left > CHECKED_BEFORE:
                self._check(*unchecked.popleft(), expected)
                left = 0
            # An epoll sleeps milliseconds; a select of it, microseconds.
            if left > SPUN and not select.select([poller], [], [], left - SPUN)[0]:
                if left == 1.0 and sent == count:
                    break
                continue
            for number, _ in poller.poll(0):
                data = parts.pop(number, b"") + by_number[number].recv(1 << 20)
                end = data.find(b"\r\n\r\n") + 4
                if end < 4 or len(data) < end + length_of(data, end):
                    parts[number] = data
                    continue
                request = asked.pop(number)
                latency[request] = clock() - due[request]
                free.append(number)
                unchecked.append((request, data))
        for request, data in unchecked:
            self._check(request, data, expected)
        gc.enable()
        self.failures += [f"request {request}: no answer" for request in asked.values()]
        for one in sockets:
            one.close()

    def _check(self, request: int, data: bytes, expected: np.ndarray) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            self.failures.append(f"request {request}: {data[:300]!r}")
            return
        at = head.lower().find(b"x-embedding-version: ") + 21
        number = int(head[at:].partition(b"\r\n")[0])
        self.version[request] = number
        rows = np.frombuffer(body, np.uint32)
        right = expected[request % BATCHES]
        if rows.size != right.size or not np.array_equal(rows ^ turned(number), right):
            self.failures.append(f"request {request}: rows that are not those of version {number}")


def length_of(data: bytes, end: int) -> int:
    """Return the length of the body that a head, up to `end`, tells."""
    at = data.index(b"content-length: ", 0, end) + 16
    return int(data[at : data.index(b"\r\n", at)])


def percentiles(latency: np.ndarray) -> dict[str, float]:
    """Return percentiles and the largest, in us."""
    if len(latency) == 0:
        return {}
    named = {f"p{p:g}": float(v) * 1e6 for p, v in zip(PERCENTILES, np.percentile(latency, PERCENTILES), strict=True)}
    return {**named, "largest": float(latency.max()) * 1e6, "requests": len(latency)}


def judged(load: Load, came: list[tuple[int, float]], every: float) -> dict[str, Any]:
    """Tell requests in swaps from the others."""
    answered = ~np.isnan(load.latency)
    in_swap = np.zeros(len(load.due), bool)
    in_quiet = np.zeros(len(load.due), bool)
    swaps = []
    for number, at in came:
        of_it = answered & (load.version >= number)
        if not of_it.any():
            load.failures.append(f"version {number} was never served")
            continue
        older = answered & (load.version < number)
        last = load.due[older].max() if older.any() else at
        end = max(last + AFTER_SWAP, at + LEAST_SWAP)
        here = (load.due >= at) & (load.due < end)
        in_swap |= here
        in_quiet |= (load.due >= at + every / 2) & (load.due < at + every / 2 + end - at)
        figures = percentiles(load.latency[here & answered])
        swaps.append({"version": number, "served_after": load.due[of_it].min() - at, "seconds": end - at, **figures})
    in_quiet &= ~in_swap
    steady = percentiles(load.latency[answered & ~in_swap])
    swap = percentiles(load.latency[answered & in_swap])
    quiet = percentiles(load.latency[answered & in_quiet])
    result = {"steady": steady, "quiet": quiet, "swap": swap, "swaps": swaps}
    if steady and swap:
        result["ratio"] = swap["p99"] / steady["p99"]
        result["quiet_ratio"] = quiet["p99"] / steady["p99"] if quiet else None
        result["reached"] = result["ratio"] <= AT_MOST
    return result


def markdown(result: dict[str, Any]) -> str:
    """Return what a page shows."""
    on, options = result["machine"], result["options"]
    lines = [
        f"# Swaps: {on['cpu']}, {on['cpus']} CPUs",
        "",
        f"{result['date']}; Linux {on['kernel']}, Python {on['python']}; load average before the run"
        f" {on['load_before']:.2f}. {options['rows']:,} x {options['dim']}, {options['rate']} requests/s of"
        f" {options['keys']} keys at fixed times, a version every {options['every']:g} s for {options['minutes']:g}"
        f" minutes; server on CPUs {options['server_cpus']}, client on {options['client_cpus']},"
        f" {options['workers']} worker(s). Method: `benchmarks/swaps.py`, `../NOTES.md`.",
        "",
        "| latency from the intended time, us | requests | p50 | p99 | p99.9 | largest |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("steady", "quiet", "swap"):
        if one := result[name]:
            figures = " | ".join(f"{one[p]:,.0f}" for p in ("p50", "p99", "p99.9", "largest"))
            lines.append(f"| {name} | {one['requests']:,} | {figures} |")
    if "ratio" in result:
        reached = "reached" if result["reached"] else "**not reached**"
        lines += [
            "",
            f"- p99, swap / steady: {result['ratio']:.2f} (at most {AT_MOST:g}: {reached});"
            f" quiet / steady: {result['quiet_ratio'] or float('nan'):.2f}",
        ]
    swaps = result["swaps"]
    if swaps:
        after = sorted(swap["served_after"] for swap in swaps)
        lines.append(f"- versions: {len(swaps)}, served {after[0]:.2f} to {after[-1]:.2f} s after they came")
    first, *_, last = [{name: one[name] >> 10 for name in ("anonymous", "mapped", "pss")} for one in result["memory"]]
    most = max(one["anonymous"] for one in result["memory"]) >> 10
    lines += [
        f"- {result['requests']:,} requests, {result['vectors']:,} vectors compared, {len(result['failures'])} failed;"
        f" {result['late']} sent over 1 ms late",
        f"- MiB of memory before the first swap and before the last: anonymous {first['anonymous']} and"
        f" {last['anonymous']} (at most {most}), mapped {first['mapped']} and {last['mapped']}, PSS {first['pss']} and"
        f" {last['pss']}",
    ]
    lines += [f"- FAILED: {failure}" for failure in result["failures"][:20]]
    return "\n".join(lines) + "\n"


def measure(options: argparse.Namespace, folder: Path, client: set[int], server: set[int]) -> dict[str, Any]:
    """Serve, ask and swap."""
    keys, contents = make_contents(folder, options.rows, options.dim)
    requests, expected = make_batches(keys, options.dim, options.keys)
    del keys
    versions = folder / "versions"
    versions.mkdir()
    (versions / "1.kvsnap").hardlink_to(contents[1 % CONTENTS])
    os.sched_setaffinity(0, client)
    with serving(versions, server, options.workers) as (port, processes):
        time.sleep(2)
        start = time.perf_counter() + 1
        seconds = options.minutes * 60
        here, there = multiprocessing.get_context("fork").Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=bring_versions,
            args=(
                there,
                versions,
                contents,
                processes,
                start + WARM_UP + options.every / 2,
                options.every,
                start + WARM_UP + seconds - options.every / 2,
            ),
        )
        process.start()
        # A little early or late each: nothing in the server may run in step with them.
        count = int((WARM_UP + seconds) * options.rate)
        due = start + (np.arange(count) + np.random.default_rng(2).random(count) * 0.5) / options.rate
        load = Load(due)
        load.run(port, requests, expected)
        came, samples = here.recv()
        process.join()
    first = int(WARM_UP * options.rate)
    load.due, load.latency, load.version = load.due[first:], load.latency[first:], load.version[first:]
    result = judged(load, came, options.every)
    return {
        **result,
        "requests": count,
        "vectors": count * options.keys,
        "failures": load.failures,
        "late": load.late,
        "memory": [
            {"at": at, "anonymous": anonymous, "mapped": mapped, "pss": pss}
            for at, (anonymous, mapped), (pss,) in samples
        ],
    }


def cpus_of(text: str) -> set[int]:
    """Read "0,1"."""
    return {int(one) for one in text.split(",")}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=int, default=1500, help="requests a second")
    parser.add_argument("--rows", type=int, default=1_500_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--keys", type=int, default=100, help="of a request")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two versions")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--client-cpus", type=cpus_of, help="such as 1 (default: all)")
    parser.add_argument("--server-cpus", type=cpus_of, help="such as 0,1 (default: all)")
    parser.add_argument("--folder", type=Path, help="where the files go, a disk (default: the system's temporary one)")
    parser.add_argument("--output", type=Path, help="folder for the .md and .json (default: benchmarks/results)")
    parser.add_argument("--name", default="", help="of this run, part of the files' name")
    options = parser.parse_args()
    client = options.client_cpus or os.sched_getaffinity(0)
    server = options.server_cpus or os.sched_getaffinity(0)
    on = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(options, Path(folder), client, server)
    given = {name: getattr(options, name) for name in ("minutes", "rate", "rows", "dim", "keys", "every", "workers")}
    given.update(client_cpus=",".join(map(str, sorted(client))), server_cpus=",".join(map(str, sorted(server))))
    result = {"date": datetime.date.today().isoformat(), "machine": on, "options": given, **result}
    output = options.output or ROOT / "benchmarks" / "results"
    output.mkdir(parents=True, exist_ok=True)
    stem = file_name(on, "swaps", *filter(None, [options.name]))
    (output / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / f"{stem}.md").write_text(markdown(result))
    print(markdown(result))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
