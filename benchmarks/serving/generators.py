"""Load from other programs: load.cc, wrk and redis-benchmark, each on a CPU that the servers do not use."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.forms import Form
from serving.servers import Server, pinned

HERE = Path(__file__).resolve().parent


class GeneratorError(Exception):
    """A generator failed; the message has what it said."""


@dataclass(frozen=True)
class Load:
    """What came of a load: requests a second as seen by the generator, the server's CPU seconds a request, and
    seconds that half, and 99 of 100, of the requests took at most. `requests` were made in all, warming up included."""

    per_second: float
    cpu: float
    p50: float
    p99: float
    requests: int


def compile_program(folder: Path, name: str) -> Path:
    """Compile `load` or `ideal`; returns the program."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise GeneratorError("no C++ compiler: install g++")
    program = folder / name
    subprocess.run([compiler, "-std=c++17", "-O2", "-o", str(program), str(HERE / f"{name}.cc")], check=True)
    return program


def write_requests(path: Path, requests: Sequence[bytes], replies: int) -> None:
    """Write what load.cc and wrk.lua send."""
    with path.open("wb") as file:
        file.write(b"%d\n" % len(requests))
        file.writelines(b"%d %d\n" % (len(request), replies) for request in requests)
        file.writelines(requests)


def _output(command: Sequence[str], cpu: int) -> str:
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=pinned(cpu))
    if done.returncode:
        raise GeneratorError(f"{Path(command[0]).name}: {(done.stderr or done.stdout)[-500:].strip()}")
    return done.stdout


@dataclass(frozen=True)
class Generators:
    """Where they run, and the program that load.cc was compiled to."""

    cpu: int
    load: Path

    def closed(self, server: Server, form: Form, requests: Path, connections: int, seconds: float) -> Load:
        """Each connection has one request under way at any time."""
        command = self._load_command(server, form, requests, connections, seconds)
        before = server.cpu_seconds()
        told = json.loads(_output(command, self.cpu))
        used = server.cpu_seconds() - before
        return Load(told["requests"] / told["seconds"], used / told["all"], told["p50"], told["p99"], told["all"])

    def open(
        self, server: Server, form: Form, requests: Path, connections: int, seconds: float, rate: float, arrivals: str
    ) -> dict[str, Any]:
        """Requests are due at `rate` a second, whatever became of those before; times count from then on."""
        command = self._load_command(server, form, requests, connections, seconds)
        told: dict[str, Any] = json.loads(_output([*command, f"{rate:.3f}", arrivals], self.cpu))
        return told

    def _load_command(self, server: Server, form: Form, requests: Path, connections: int, seconds: float) -> list[str]:
        port = getattr(server.ports, form.port)
        return [str(self.load), str(port), str(requests), form.protocol, str(connections), str(seconds)]

    def wrk(self, server: Server, requests: Path, connections: int, seconds: float) -> Load:
        """One thread of wrk; it takes whole seconds."""
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(HERE / "wrk.lua")]
        command += [f"http://127.0.0.1:{server.ports.http}", "--", str(requests)]
        before = server.cpu_seconds()
        told = json.loads(_output(command, self.cpu).splitlines()[-1])
        used = server.cpu_seconds() - before
        if told["errors"] or not told["requests"]:
            raise GeneratorError(f"wrk: {told}")
        return Load(told["requests"] / told["seconds"], used / told["all"], told["p50"], told["p99"], told["all"])

    def redis_benchmark(
        self, server: Server, form: Form, keys: int, rows: int, connections: int, requests: int
    ) -> Load:
        """Random keys of all rows; a pipeline of GETs where the form has one."""
        pipeline = form.replies(keys)
        port = getattr(server.ports, form.port)
        count = max(requests, 20) * pipeline
        command = ["redis-benchmark", "-p", str(port), "-c", str(connections), "-n", str(count), "-r", str(rows)]
        command += ["-P", str(pipeline), "--csv"]
        command += ["GET", "__rand_int__"] if pipeline > 1 else ["MGET", *["__rand_int__"] * keys]
        before = server.cpu_seconds()
        start = time.perf_counter()
        output = _output(command, self.cpu)
        took = time.perf_counter() - start
        used = server.cpu_seconds() - before
        (row,) = list(csv.reader(io.StringIO(output)))[1:]
        # test, rps, avg, min, p50, p95, p99, max; times in ms
        rate = float(row[1])
        if not math.isfinite(rate):  # so few that they took no millisecond
            rate = count / took
        return Load(
            rate / pipeline, used / count * pipeline, float(row[4]) / 1e3, float(row[6]) / 1e3, count // pipeline
        )


def warm(generators: Generators, server: Server, form: Form, requests: Path, rows: int) -> None:
    """Let Redis end what it began when it was filled (it moves its keys to a larger table a step a command)."""
    last = time.monotonic() + max(0.2, min(6.0, rows / 1e6))
    while time.monotonic() < last:
        generators.closed(server, form, requests, 1, 0.5 if rows > 100_000 else 0.05)
