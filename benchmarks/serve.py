"""What lookups of `kvtools serve` cost, beside Redis MGET on the same core: every protocol, four generators, one run.

``make bench-serve`` runs it. The servers have one CPU for themselves, the generators another; a server that is not
asked sleeps. Every side's rows are compared with the table before its time counts. benchmarks/serving/ has the parts:

load             load.cc: raw requests over kept connections, the sides in turns; what the goals are judged by
wrk              the HTTP forms by wrk
redis-benchmark  MGET and pipelines of GETs, of Redis and of our port for its protocol
python           clients in Python, from an array of keys to an array of rows
process          without a server: the compiled table, and the exported SavedModel in TensorFlow
open             requests that are due at 70% of what the closed loop reached, whatever became of those before; and
                 the same of a server that does nothing but take as long (ideal.cc): what the machine adds to any
split            where the server's time goes: samples of perf, system calls counted by strace
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from machine import file_name, machine
from serving import page, picture, python_clients, time_split
from serving.forms import BINARY, FORMS, LOOKUP_JSON, REDIS_GETS, REDIS_MGET, RESP_MGET, Form, resp_command
from serving.generators import GeneratorError, Generators, Load, compile_program, warm, write_requests
from serving.servers import Server, StartError, ideal_server, kvtools_server, pinned, redis_server
from serving.tables import Table, make_table

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("load", "wrk", "redis-benchmark", "python", "process", "open", "split")
TABLES = ("1500000x16", "5000000x32")
SIZES = (1, 100, 1_000, 10_000)
OPEN_SIZES = (1, 100, 1_000)
OPEN_LOAD = 0.7
OPEN_FORMS = (BINARY, RESP_MGET, REDIS_MGET)
KEYS_DRAWN = 200_000


def say(text: str) -> None:
    """Progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Measurement:
    """One table: what is there to be asked, and the figures so far."""

    table: Table
    folder: Path
    options: argparse.Namespace
    generators: Generators
    kvtools: Server
    redis: Server | None
    cpus: tuple[int, int]
    ideal: Path

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        self.connections: list[int] = self.options.connections
        self.drawn: dict[int, np.ndarray] = {
            size: rng.integers(0, self.table.rows, (max(20, min(5000, KEYS_DRAWN // size)), size))
            for size in self.options.keys
        }
        self.forms = [form for form in FORMS if self.server(form) is not None]
        self.figures: list[dict[str, Any]] = []
        self.open: list[dict[str, Any]] = []
        self.split: list[dict[str, Any]] = []
        self.left_out: list[str] = [] if self.redis else ["everything beside Redis: redis-server is not installed"]
        for form in self.forms:
            for size, batches in self.drawn.items():
                requests = [form.request(batch) for batch in batches]
                write_requests(self.file(form, size), requests, form.replies(size))

    def server(self, form: Form) -> Server | None:
        """Who answers a form."""
        return self.redis if form.port == "redis" else self.kvtools

    def file(self, form: Form, size: int) -> Path:
        """The requests of a form."""
        return self.folder / f"{FORMS.index(form)}-{size}"

    def add(self, part: str, side: str, size: int, connections: int, load: Load, **more: Any) -> None:
        """Keep a figure, and say it."""
        figure = {"part": part, "side": side, "keys": size, "connections": connections}
        figure |= {"keys_per_second": load.per_second * size, **asdict(load), **more}
        self.figures.append(figure)
        say(
            f"  {part}: {side}, {size} keys, {connections} connections: {figure['keys_per_second']:,.0f} keys/s,"
            f" CPU {load.cpu * 1e6:.1f} us, p50 {load.p50 * 1e6:.0f} us, p99 {load.p99 * 1e6:.0f} us"
        )

    def check(self) -> None:
        """Compare the rows of every form with the table's. Raises SystemExit."""
        for form in self.forms:
            for size, batches in self.drawn.items():
                answer = ask_once(self.server(form), form, batches[0])
                rows = form.rows(answer, self.table.dim)
                if not np.array_equal(rows, self.table.values[batches[0]]):
                    raise SystemExit(f"serve.py: {form.name}, {size} keys: other rows than the table's")

    def run_load(self) -> None:
        """All forms in turns."""
        for size in self.drawn:
            for connections in self.connections:
                rounds: dict[str, list[Load]] = {form.name: [] for form in self.forms}
                for _ in range(self.options.rounds):
                    for form in self.forms:
                        rounds[form.name].append(self.closed(form, size, connections))
                for name, loads in rounds.items():
                    self.add("load", name, size, connections, middle(loads), **ratios(loads, rounds, REDIS_MGET.name))

    def closed(self, form: Form, size: int, connections: int) -> Load:
        """One run of load.cc."""
        server = self.server(form)
        assert server is not None
        return self.generators.closed(server, form, self.file(form, size), connections, self.options.seconds)

    def run_wrk(self) -> None:
        """HTTP by wrk."""
        if shutil.which("wrk") is None:
            self.left_out.append("wrk: it is not installed (Debian: apt-get install wrk)")
            return
        for size in self.drawn:
            for connections in self.connections:
                for form in (BINARY, LOOKUP_JSON):
                    load = self.generators.wrk(self.kvtools, self.file(form, size), connections, self.options.seconds)
                    self.add("wrk", form.name, size, connections, load)

    def run_redis_benchmark(self) -> None:
        """MGET and pipelines by redis-benchmark."""
        if shutil.which("redis-benchmark") is None:
            self.left_out.append("redis-benchmark: it is not installed (Debian: apt-get install redis-tools)")
            return
        for size in self.drawn:
            for connections in self.connections:
                for form in (REDIS_MGET, RESP_MGET, REDIS_GETS):
                    server = self.server(form)
                    if server is None or (form is REDIS_GETS and size == 1):
                        continue
                    # It takes a number of requests: a short run tells how many are a run's.
                    requests = 50
                    for seconds in (self.options.seconds / 4, 2 * self.options.seconds):
                        load = self.generators.redis_benchmark(
                            server, form, size, self.table.rows, connections, requests
                        )
                        requests = int(load.per_second * seconds)
                    load = self.generators.redis_benchmark(server, form, size, self.table.rows, connections, requests)
                    self.add("redis-benchmark", form.name, size, connections, load)

    def save_keys(self) -> tuple[Path, dict[int, Path]]:
        """The table's values and the keys that are asked for, as files for other processes."""
        values = self.folder / "values.npy"
        np.save(values, self.table.values)
        files = {size: self.folder / f"keys-{size}.npy" for size in self.drawn}
        for size, file in files.items():
            np.save(file, self.drawn[size])
        return values, files

    def run_python(self) -> None:
        """Clients in Python, in a process on the generators' CPU."""
        values, files = self.save_keys()
        file = self.folder / "task.json"
        servers = [self.kvtools, self.redis]
        file.write_text(
            python_clients.task(servers, self.table.dim, files, values, self.connections, self.options.seconds)
        )
        for told in lines_of([sys.executable, "-m", "serving.python_clients", str(file)], self.cpus[1]):
            if "left_out" in told:
                self.left_out.append(told["left_out"])
            else:
                load = Load(*(told[name] for name in ("per_second", "cpu", "p50", "p99", "requests")))
                self.add("python", told["side"], told["keys"], told["connections"], load)

    def run_process(self) -> None:
        """Without a server, on the servers' CPU."""
        values, files = self.save_keys()
        model = str(self.table.saved_model) if self.table.saved_model.exists() else "-"
        if model == "-":
            self.left_out.append("the SavedModel in process: TensorFlow is not installed")
        command = [sys.executable, "-m", "serving.in_process", str(self.table.snapshot), model]
        command += [str(2 * self.options.seconds), str(values), *map(str, files.values())]
        for told in lines_of(command, self.cpus[0]):
            load = Load(*(told[name] for name in ("per_second", "cpu", "p50", "p99", "requests")))
            self.add("process", told["side"], told["keys"], 1, load)

    def run_open(self) -> None:
        """Requests that are due at 70% of the capacity."""
        connections = max(self.connections)
        for size in [size for size in OPEN_SIZES if size in self.drawn]:
            for form in OPEN_FORMS:
                server = self.server(form)
                if server is None:
                    continue
                capacity = middle([self.closed(form, size, connections) for _ in range(self.options.rounds)]).per_second
                sides = {form.name: server}
                with contextlib.ExitStack() as stack:
                    if form is BINARY:
                        sides[page.IDEAL] = stack.enter_context(self.as_fast(form, size, capacity))
                    for arrivals in ("even", "poisson"):
                        self.run_open_sides(sides, form, size, connections, capacity, arrivals)

    @contextlib.contextmanager
    def as_fast(self, form: Form, size: int, capacity: float) -> Iterator[Server]:
        """A server that does nothing, and takes as long for it as one that answers so many requests a second."""
        request, answer = len(form.request(self.drawn[size][0])), 4 * self.table.dim * size
        connections = max(self.connections)
        with ideal_server(self.ideal, request, answer, 0, self.cpus[0]) as idle:
            rounds = [
                self.generators.closed(idle, form, self.file(form, size), connections, self.options.seconds)
                for _ in range(self.options.rounds)
            ]
        work = max(0.0, 1 / capacity - 1 / middle(rounds).per_second)
        with ideal_server(self.ideal, request, answer, work, self.cpus[0]) as server:
            yield server

    def run_open_sides(
        self, sides: dict[str, Server], form: Form, size: int, connections: int, capacity: float, arrivals: str
    ) -> None:
        """Servers in turns."""
        rate, seconds = OPEN_LOAD * capacity, 2 * self.options.seconds
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(self.options.rounds):
            for name, server in sides.items():
                told = self.generators.open(server, form, self.file(form, size), connections, seconds, rate, arrivals)
                rounds[name].append(told)
        for name, of_it in rounds.items():
            one: dict[str, Any] = {"side": name, "keys": size, "arrivals": arrivals}
            one |= {"connections": connections, "capacity": capacity, "rate": rate, "rounds": of_it}
            one |= {each: statistics.median(told[each] for told in of_it) for each in page.PERCENTILES}
            one["tail"] = statistics.median(told["p99"] / told["p50"] for told in of_it)
            one["unanswered"] = sum(told["unanswered"] for told in of_it)
            self.open.append(one)
            say(
                f"  open: {name}, {size} keys, {arrivals}: {rate:,.0f} requests/s, p50 {one['p50'] * 1e6:.0f} us,"
                f" p99 {one['p99'] * 1e6:.0f} us"
            )

    def run_split(self) -> None:
        """Where the time goes."""
        connections = max(self.connections)
        for name in ("perf", "strace"):
            if shutil.which(name) is None:
                self.left_out.append(f"where the time goes, by {name}: it is not installed")
        empty = self.folder / "empty"
        for form in (BINARY, RESP_MGET):
            server = self.server(form)
            assert server is not None
            nothing = form.request(np.empty(0, np.int64)) if form is BINARY else resp_command(b"PING")
            write_requests(empty, [nothing], 1)
            for size in (0, *self.drawn):
                file = self.file(form, size) if size else empty

                def work(seconds: float, file: Path = file, form: Form = form, server: Server = server) -> Load:
                    return self.generators.closed(server, form, file, connections, seconds)

                seconds = self.options.seconds
                load = work(seconds)
                system = time_split.by_system(server, lambda: work(2 * seconds))  # noqa: B023
                parts = time_split.by_perf(server, self.folder, lambda: work(2 * seconds))  # noqa: B023
                counted = time_split.system_calls(server, self.folder, lambda: work(seconds).requests)  # noqa: B023
                one = {"side": form.name, "keys": size, "connections": connections, "cpu": load.cpu}
                self.split.append(one | {"system": system, "parts": parts, "calls": counted})
                say(f"  split: {form.name}, {size} keys: CPU {load.cpu * 1e6:.1f} us, system {system:.0%}, {parts}")


def ask_once(server: Server | None, form: Form, keys: np.ndarray) -> bytes:
    """The body of the answer to one request, or the replies to it."""
    import http.client
    import socket

    assert server is not None
    if form.port == "http":
        connection = http.client.HTTPConnection("127.0.0.1", server.ports.http)
        body = form.body(keys)
        connection.request("POST", form.path, body, form.all_headers(body))
        answer = connection.getresponse()
        read = answer.read()
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"serve.py: {form.name}: {answer.status} {read[:300]!r}")
        return read
    with socket.create_connection(("127.0.0.1", getattr(server.ports, form.port))) as channel:
        # QUIT is answered last, and closes the connection.
        channel.sendall(form.request(keys) + resp_command(b"QUIT"))
        read = b""
        while piece := channel.recv(1 << 20):
            read += piece
    if not read.endswith(b"+OK\r\n") or read[:1] == b"-":
        raise SystemExit(f"serve.py: {form.name}: {read[:300]!r}")
    return read[: -len(b"+OK\r\n")]


def middle(loads: list[Load]) -> Load:
    """The median of each figure."""
    return Load(*(statistics.median(getattr(load, field.name) for load in loads) for field in fields(Load)))


def ratios(loads: list[Load], rounds: dict[str, list[Load]], to: str) -> dict[str, float]:
    """Requests a second over those of another side, and the same of CPU: medians of the ratios within a round."""
    if to not in rounds:
        return {}
    pairs = list(zip(loads, rounds[to], strict=True))
    return {
        "ratio": statistics.median(of.per_second / other.per_second for of, other in pairs),
        "cpu_ratio": statistics.median(other.cpu / of.cpu for of, other in pairs),
    }


def lines_of(command: list[str], cpu: int) -> Iterator[dict[str, Any]]:
    """The objects that a child process prints, a line each. Raises SystemExit if it fails."""
    paths = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TF_CPP_MIN_LOG_LEVEL": "3"}
    # In the repository's folder, `-m` would import the sources of kvtools and not what is installed.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=pinned(cpu), env=environment, cwd=ROOT / "benchmarks"
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            yield json.loads(line)
    if child.returncode:
        raise SystemExit(f"serve.py: {' '.join(command[1:3])} failed; it says why above")


def measure(
    rows: int, dim: int, options: argparse.Namespace, programs: dict[str, Path], cpus: tuple[int, int]
) -> dict[str, Any]:
    """Everything about one table."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtools-bench-", dir=options.folder)))
        with_model = "process" in options.only and page.installed("tensorflow")
        table = make_table(folder, rows, dim, with_saved_model=with_model)
        say(f"{rows:,} rows x {dim}: written after {time.monotonic() - began:.0f} s")
        kvtools = stack.enter_context(kvtools_server(table.snapshot, cpus[0]))
        redis = stack.enter_context(redis_server(table, cpus[0])) if shutil.which("redis-server") else None
        generators = Generators(cpus[1], programs["load"])
        task = Measurement(table, folder, options, generators, kvtools, redis, cpus, programs["ideal"])
        say(f"  servers are up after {time.monotonic() - began:.0f} s")
        task.check()
        if redis is not None:
            size = max(task.drawn)
            warm(generators, redis, REDIS_MGET, task.file(REDIS_MGET, size), rows)
        runs: dict[str, Callable[[], None]] = {
            "load": task.run_load,
            "wrk": task.run_wrk,
            "redis-benchmark": task.run_redis_benchmark,
            "open": task.run_open,
            "split": task.run_split,
            "python": task.run_python,
            "process": task.run_process,
        }
        for part, run in runs.items():
            if part in options.only:
                start = time.monotonic()
                run()
                say(f"  {part}: {time.monotonic() - start:.0f} s")
        page.add_ratios(task.figures)
        return {
            "rows": rows,
            "dim": dim,
            "seconds": time.monotonic() - began,
            "figures": task.figures,
            "open": task.open,
            "split": task.split,
            "left_out": task.left_out,
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), metavar="ROWSxDIM", help=f"default: {TABLES}")
    parser.add_argument("--rows", type=int, help="rows of every table, in place of its own: for a short run")
    parser.add_argument("--keys", type=int, nargs="+", default=list(SIZES), help="keys a request")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=0.4, help="of each run of a side (default: 0.4)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side of `load` (default: 3)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--folder", type=Path, help="where the tables are written (default: the system's temporary one)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for the .md and .json (default: build/benchmarks; of a whole run benchmarks/results)",
    )
    options = parser.parse_args()
    allowed = sorted(os.sched_getaffinity(0))
    cpus = allowed[0], allowed[min(1, len(allowed) - 1)]
    if len(allowed) < 2:
        say("serve.py: one CPU only: generators and servers share it, and what they see is no server's speed")
    on = machine()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            programs = {name: compile_program(Path(folder), name) for name in ("load", "ideal")}
            tables = []
            for told in options.tables:
                rows, _, dim = told.partition("x")
                tables.append(measure(options.rows or int(rows), int(dim), options, programs, cpus))
        except (GeneratorError, StartError) as problem:
            raise SystemExit(f"serve.py: {problem}") from None
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": on,
        "cpus": {"servers": cpus[0], "generators": cpus[1]},
        "versions": page.versions(),
        "seconds": options.seconds,
        "rounds": options.rounds,
        "took": time.monotonic() - began,
        "tables": tables,
    }
    whole = all(getattr(options, name) == parser.get_default(name) for name in ("tables", "rows", "keys", "only"))
    output = options.output or ROOT / ("benchmarks/results" if whole else "build/benchmarks")
    output.mkdir(parents=True, exist_ok=True)
    stem = file_name(on, "serve")
    drawn = picture.draw(result, output / f"{stem}.png")
    (output / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = page.markdown(result, drawn.name if drawn else None)
    (output / f"{stem}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
