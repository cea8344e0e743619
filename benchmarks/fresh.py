"""How soon what training changes is served: `tfplugin.CheckpointManager` and `kvtools serve --follow`, on one machine.

``make bench-fresh`` runs it. A table with Adam's slots is trained beside two dense layers, as fast as the machine
does it; in each second `--changed` other rows are among the ids, so that many change. The trainer writes increments,
a server follows them, and a third process asks the server over HTTP. Once in a while a step gets a key that no other
step has. When that step has ended, the time is noted, and the row's bytes; freshness is from then until an answer has
exactly these bytes. All processes share the processors.

Turns follow each other: of another table alike, which has no manager; with a manager that notes changes and writes
none; with increments and the server stopped (SIGSTOP), each of the three first in its turn; and with increments that
are served. What they differ by is the price for training.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
from command_line import KVTOOLS
from machine import file_name, machine

ROOT = Path(__file__).resolve().parent.parent
OCTETS = "application/octet-stream"
TABLE = "user"
PROBES = 1 << 40  # keys from here on are of one step each
ASKED_EVERY = 0.005  # s
PERCENTILES = (50, 90, 99)
KINDS = ("alone", "increments", "served")


def probe(port: int, dim: int, told: Pipe) -> None:
    """Asks for the rows that it is told of until they are served; sends back how long each took."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": OCTETS, "Accept": OCTETS}
    waiting: dict[int, tuple[float, bytes]] = {}
    answers = 0
    while True:
        while told.poll(0 if waiting else None):
            message = told.recv()
            if message is None:
                told.send((dict.fromkeys(waiting), answers))
                return
            key, ended, row = message
            waiting[key] = ended, row
        keys = np.array(list(waiting), "<i8")
        connection.request("POST", f"/v1/tables/{TABLE}:lookup", keys.tobytes(), headers)
        answer = connection.getresponse()
        body = answer.read()
        now = time.monotonic()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {body[:200]!r}")
        answers += 1
        for key, row in zip(keys.tolist(), np.frombuffer(body, "<f4").reshape(len(keys), dim), strict=True):
            ended, expected = waiting[key]
            if row.tobytes() == expected:
                told.send((key, now - ended))
                del waiting[key]
        time.sleep(ASKED_EVERY)


class Training:
    """Steps of training, and the rows that they change."""

    def __init__(self, rows: int, dim: int, changed: int, every: float) -> None:
        global tf, tfplugin
        import tensorflow as tf
        from trained_table import BATCH, TrainedTable

        import tfplugin

        self.rows, self.changed, self.every, self.batch = rows, changed, every, BATCH
        self.trained = TrainedTable(rows, dim)
        self.random = self.trained.random
        self.next_probe = PROBES

    def run(self, seconds: float, manager: Any, told: Pipe | None, freshness: list[float]) -> dict[str, float]:
        """Train so long, with increments where there is a manager, and probes where somebody is told of them."""
        begun = now = time.monotonic()
        steps, longest, window_ends, probe_due = 0, 0.0, 0.0, begun
        window = shuffled = np.empty(0, np.int64)
        while now < begun + seconds:
            if now >= window_ends:
                # Each of them is in a step before the next ones come, where steps are fast enough.
                wanted = int(self.changed * self.every)
                window = self.random.permutation(np.unique(self.random.integers(0, self.rows, 2 * wanted)))[:wanted]
                window_ends, shuffled = now + self.every, window
            while len(shuffled) < self.batch:
                shuffled = np.concatenate([shuffled, self.random.permutation(window)])
            ids, shuffled = shuffled[: self.batch].copy(), shuffled[self.batch :]
            probed = told is not None and now >= probe_due
            if probed:
                ids[0] = self.next_probe
            self.trained.step(tf.constant(ids))
            if probed and told is not None:
                ended = time.monotonic()
                row = self.trained.table.sparse_read(tf.constant([self.next_probe], tf.int64)).numpy()[0]
                told.send((self.next_probe, ended, row.astype("<f4").tobytes()))
                self.next_probe += 1
                probe_due = ended + self.random.uniform(0.05, 0.15)
            if manager is not None and manager.save_if_due():
                window_ends = 0.0  # an increment has the rows of one window
            while told is not None and told.poll():
                freshness.append(told.recv()[1])
            before, now = now, time.monotonic()
            longest = max(longest, now - before)
            steps += 1
        return {"steps_per_second": steps / (now - begun), "longest_ms": longest * 1e3}


@contextlib.contextmanager
def serving(chain: Path, cache: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [KVTOOLS, "serve", "--follow", str(chain), "--port", "0", "--json", "--cache", str(cache)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()


def metrics(port: int) -> dict[str, float]:
    """What the server says of following, without the name of its only model."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if line.startswith("kvtools_fol")]
    return {name.partition("{")[0]: float(value) for name, _, value in lines}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Take turns, and tell of each kind what came out."""
    from kvtools.chain import members, record_of

    plain, training = (Training(options.rows, options.dim, options.changed, options.every) for _ in range(2))
    for either in (plain, training):
        either.run(3.0, None, None, [])
    manager = tfplugin.CheckpointManager(
        training.trained.checkpoint, folder / "run", full_every=1e6, delta_every=options.every
    )
    manager.save()
    manager.sync()
    freshness: list[float] = []
    turns: dict[str, list[dict[str, float]]] = {kind: [] for kind in ("without", *KINDS)}
    unserved = [("without", plain, None), ("alone", training, None), ("increments", training, manager)]
    server_seconds = served_seconds = 0.0
    lost = 0
    with serving(folder / "run", folder / "cache") as (server, port):
        for turn in range(options.turns):
            server.send_signal(signal.SIGSTOP)
            for i in range(len(unserved)):
                kind, trained, writer = unserved[(turn + i) % len(unserved)]
                turns[kind].append(trained.run(options.seconds, writer, None, []))
            server.send_signal(signal.SIGCONT)
            training.run(3.0, manager, None, [])  # it catches up
            here, there = multiprocessing.Pipe()
            prober = multiprocessing.get_context("spawn").Process(target=probe, args=(port, options.dim, there))
            prober.start()
            before, began = cpu_seconds(server.pid), time.monotonic()
            turns["served"].append(training.run(options.seconds, manager, here, freshness))
            server_seconds += cpu_seconds(server.pid) - before
            served_seconds += time.monotonic() - began
            last = time.monotonic() + 10
            asked = training.next_probe - PROBES
            while len(freshness) + lost < asked and time.monotonic() < last:
                manager.save_if_due()
                if here.poll(0.05):
                    freshness.append(here.recv()[1])
            here.send(None)
            while not isinstance((message := here.recv())[0], dict):
                freshness.append(message[1])
            lost += len(message[0])
            prober.join()
        manager.sync()
        told = metrics(port)
    records = [record for member in members(folder / "run") if member.kind == "delta" and (record := record_of(member))]
    rows = [sum(table.rows for table in record.tables.values()) for record in records]
    apart = [after.time - before.time for before, after in itertools.pairwise(records)]

    def median(kind: str, name: str) -> float:
        return statistics.median(turn[name] for turn in turns[kind])

    steps = {kind: round(median(kind, "steps_per_second"), 1) for kind in turns}
    return {
        "freshness_ms": {
            **{f"p{p}": round(float(np.percentile(freshness, p)) * 1e3) for p in PERCENTILES},
            "largest": round(max(freshness) * 1e3),
        },
        "probes": len(freshness),
        "lost": lost,
        "rows_an_increment": statistics.median(rows),
        "seconds_between_increments": round(statistics.median(apart), 3),
        "steps_per_second": steps,
        "longest_step_ms": {kind: round(median(kind, "longest_ms"), 1) for kind in turns},
        "price_percent": {kind: round(100 * (1 - steps[kind] / steps["without"]), 1) for kind in KINDS},
        "server_cpu_percent": round(100 * server_seconds / served_seconds, 1),
        "server": told,
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the page of results."""
    on, given = result["machine"], result["options"]
    fresh, steps, longest = result["freshness_ms"], result["steps_per_second"], result["longest_step_ms"]
    price, folds = result["price_percent"], result["server"]["kvtools_follow_folds_total"]
    rows = [
        f"# Fresh serving: {on['cpu']}, {on['cpus']} CPUs",
        "",
        f"{result['date']}; Linux {on['kernel']}, Python {on['python']}; load average before the run"
        f" {on['load_before']:.2f}. {given['rows']:,} x {given['dim']} with Adam's slots; {given['changed']:,} changed"
        f" rows a second; an increment every {given['every']:g} s; {given['turns']} turns of {given['seconds']:g} s of"
        " each kind. Trainer, server and client share all CPUs. Method: `benchmarks/fresh.py`, `../NOTES.md`.",
        "",
        "| from the end of a step to its row in an answer over HTTP, ms | p50 | p90 | p99 | largest |",
        "|---|---|---|---|---|",
        f"| {result['probes']:,} rows, {result['lost']} never seen | {fresh['p50']} | {fresh['p90']} | {fresh['p99']} |"
        f" {fresh['largest']} |",
        "",
        "| training | steps/s | price | longest step, ms |",
        "|---|---|---|---|",
        f"| without a manager | {steps['without']} | | {longest['without']} |",
        f"| changes noted, none written | {steps['alone']} | {price['alone']}% | {longest['alone']} |",
        f"| increments written | {steps['increments']} | {price['increments']}% | {longest['increments']} |",
        f"| and served | {steps['served']} | {price['served']}% | {longest['served']} |",
        "",
        f"- {result['rows_an_increment']:,.0f} rows an increment, {result['seconds_between_increments']} s apart",
        f"- the server took {result['server_cpu_percent']}% of a CPU, and made {folds:.0f} files of increments",
    ]
    return "\n".join(rows) + "\n"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--changed", type=int, default=50_000, help="rows a second")
    parser.add_argument("--every", type=float, default=0.5, help="seconds from one increment to the next")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a turn")
    parser.add_argument("--folder", type=Path, help="where the files go, a disk (default: the system's temporary one)")
    parser.add_argument("--output", type=Path, help="folder for the .md and .json (default: benchmarks/results)")
    options = parser.parse_args()
    on = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(options, Path(folder))
    given = {name: getattr(options, name) for name in ("rows", "dim", "changed", "every", "turns", "seconds")}
    result = {"date": datetime.date.today().isoformat(), "machine": on, "options": given, **result}
    output = options.output or ROOT / "benchmarks" / "results"
    output.mkdir(parents=True, exist_ok=True)
    stem = file_name(on, "fresh")
    (output / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / f"{stem}.md").write_text(markdown(result))
    print(markdown(result))
    return 1 if result["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
