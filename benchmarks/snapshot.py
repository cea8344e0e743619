"""Snapshots: lookups on one thread beside an index in NumPy and a plain gather; building, opening, starting, cold keys.

``make bench-snapshot`` runs it. Keys are drawn at random from those of the table; every side answers the same batches,
in turns and on one CPU, and copies the rows. "numpy index" is what a NumPy service does: scrambled keys, sorted, a
directory, and `values[rows]`; "gather" is `values[rows]` with the rows known. The cold figures are of a file whose
pages were dropped from the cache; those of the start are of `kvtools serve` over that file, from before its process was
made.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import file_name, machine
from serving.servers import StartError
from serving.start import start_server

from kvtools import _snapshot
from kvtools.array_table import ArrayTable
from kvtools.migrate import write_tables

ROOT = Path(__file__).resolve().parent.parent
BATCHES = (100, 1_000, 65_536)
COLD_KEYS = 1_000
#: million keys a second at the least, in batches of at least 1,000; of which table
NATIVE_GOAL, NATIVE_ROWS, NATIVE_DIM = 12.0, 20_000_000, 16
#: seconds until `kvtools serve` over the cold table lives, at most
LIVE_GOAL = 1.0
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class NumpyIndex:
    """From keys to rows: scrambled keys, sorted, with a directory over their top bits."""

    def __init__(self, keys: np.ndarray) -> None:
        scrambled = scramble(keys)
        self.rows = np.argsort(scrambled, kind="stable")
        self.scrambled = scrambled[self.rows]
        bits = max(1, (len(keys) - 1).bit_length())
        self.shift = np.uint64(64 - bits)
        starts = np.searchsorted(self.scrambled, np.arange(1 << bits, dtype=np.uint64) << self.shift)
        self.starts = np.append(starts, len(keys)).astype(np.uint32)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The row of each key, -1 where there is none."""
        rows = np.full(len(keys), -1, np.int64)
        wanted = scramble(keys)
        bucket = (wanted >> self.shift).astype(np.int64)
        place, end = self.starts[bucket].astype(np.int64), self.starts[bucket + 1].astype(np.int64)
        pending = np.flatnonzero(place < end)
        while len(pending):
            at = place[pending]
            candidate, target = self.scrambled[at], wanted[pending]
            hit = candidate == target
            rows[pending[hit]] = self.rows[at[hit]]
            pending = pending[candidate < target]
            place[pending] += 1
            pending = pending[place[pending] < end[pending]]
        return rows


def scramble(keys: np.ndarray) -> np.ndarray:
    """64 mixed bits of each key."""
    mixed = keys.view(np.uint64)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        mixed = (mixed ^ (mixed >> shift)) * multiplier
    return mixed ^ (mixed >> SHIFTS[2])


def rate(use: Callable[[np.ndarray], Any], batches: list[np.ndarray], seconds: float) -> float:
    """Million keys a second."""
    for batch in batches[:2]:
        use(batch)
    done, number, start = 0, 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        done += len(batches[number % len(batches)])
        use(batches[number % len(batches)])
        number += 1
    return done / (time.perf_counter() - start) / 1e6


def measure_lookups(rows: int, dim: int, folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Keys a second of each side and batch."""
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, rows))  # none is drawn twice, but for a chance of 1 in 10^5
    rng.shuffle(keys)
    values = rng.random((len(keys), dim), np.float32)
    path = folder / "a.kvsnap"
    start = time.perf_counter()
    write_tables([ArrayTable("emb", keys, values)], path, "snapshot")
    built = time.perf_counter() - start
    snapshot = _snapshot.open(str(path))
    snapshot.populate()
    (table,) = snapshot.tables
    index = NumpyIndex(keys)

    def by_numpy(batch: np.ndarray) -> np.ndarray:
        return values[index.find(batch)]

    result: dict[str, Any] = {"rows": len(keys), "dim": dim, "build_seconds": built, "bytes": snapshot.bytes}
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # one thread, whatever else could take part
    expected = by_numpy(keys[:100])
    assert np.array_equal(table.lookup(keys[:100])[0], expected)
    for size in BATCHES:
        picked = [rng.integers(0, len(keys), size) for _ in range(max(4, 1 << 20 >> size.bit_length()) % 4096 or 4)]
        asked = [keys[rows_of] for rows_of in picked]
        sides: dict[str, list[float]] = {"snapshot": [], "numpy index": [], "gather": []}
        for _ in range(rounds):
            sides["snapshot"].append(rate(table.lookup, asked, seconds))
            sides["numpy index"].append(rate(by_numpy, asked, seconds))
            sides["gather"].append(rate(values.__getitem__, picked, seconds))
        result[f"batch {size}"] = {side: statistics.median(rates) for side, rates in sides.items()}
    os.sched_setaffinity(0, allowed)
    path.unlink()
    return result


def drop_from_cache(path: Path) -> None:
    """Let the system forget the file's pages."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def read_into_cache(path: Path) -> None:
    """Let the system have all of the file in memory."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def first_lookups(path: Path, asked: np.ndarray) -> dict[str, float]:
    """Milliseconds of what is done first with a cold file. It is not mapped any more at the end: no page of a mapped
    file can be dropped."""
    result = {}

    def timed(what: str, use: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        got = use()
        result[what] = (time.perf_counter() - start) * 1e3
        return got

    snapshot = timed("open, cold: ms", lambda: _snapshot.open(str(path)))
    (table,) = snapshot.tables
    timed(f"the first {COLD_KEYS} keys: ms", lambda: table.lookup(asked[0]))
    timed(f"the next {COLD_KEYS} keys: ms", lambda: table.lookup(asked[1]))
    timed("populate: ms", snapshot.populate)
    timed(f"{COLD_KEYS} keys, warm: ms", lambda: table.lookup(asked[2]))
    timed("verify: ms", snapshot.verify)
    return result


def measure_cold(rows: int, folder: Path, rounds: int) -> dict[str, Any]:
    """Building and opening a table of many rows of dim 2, its first keys, and the start of a server over it."""
    keys = np.arange(rows) * 7
    values = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    path = folder / "a.kvsnap"
    start, cpu = time.perf_counter(), time.process_time()
    write_tables([ArrayTable("emb", keys, values)], path, "snapshot")
    result: dict[str, Any] = {
        "rows": rows,
        "build_seconds": time.perf_counter() - start,
        "build_cpu_seconds": time.process_time() - cpu,
        "bytes": path.stat().st_size,
    }
    asked = np.random.default_rng(1).choice(rows, (3, COLD_KEYS)) * 7
    drop_from_cache(path)
    result |= first_lookups(path, asked)
    expected = values[asked[0] // 7]
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "in the page cache": []}
    for state, runs in starts.items():
        for number in range(rounds):
            drop_from_cache(path) if state == "cold" else read_into_cache(path)
            seconds, got = start_server(path, asked[0], 2, until_warm=number == 0)
            if not np.array_equal(got, expected):
                raise StartError("the server gave other rows than the table's")
            runs.append(seconds)
            print(f"start, {state}: {seconds}", file=sys.stderr, flush=True)
    result["starts"] = starts
    path.unlink()
    return result


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What was asked, and what came of it."""
    found = []
    for one in result["lookups"]:
        if (one["rows"], one["dim"]) == (NATIVE_ROWS, NATIVE_DIM):
            for size in [size for size in BATCHES if size >= 1_000]:
                what = f"{one['rows']:,} rows x {one['dim']}, one thread, {size:,} keys a lookup: M keys/s"
                found.append({"what": what, "value": one[f"batch {size}"]["snapshot"], "at_least": NATIVE_GOAL})
    if result["cold"]:
        for state, runs in result["cold"]["starts"].items():
            what = f"kvtools serve over {result['cold']['rows']:,} rows, {state}: seconds until it lives"
            found.append({"what": what, "value": statistics.median(run["live"] for run in runs), "at_most": LIVE_GOAL})
    for one in found:
        one["reached"] = one["value"] <= one["at_most"] if "at_most" in one else one["value"] >= one["at_least"]
    return found


def markdown(result: dict[str, Any]) -> str:
    """What a page shows."""
    on = result["machine"]
    lines = [
        f"# Snapshots: {on['cpu']}, {on['cpus']} CPUs",
        "",
        f"{result['date']}, {result['rounds']} rounds; Linux {on['kernel']}, {on['memory_gib']} GiB, Python"
        f" {on['python']}; load average before the run {on['load_before']:.2f}.",
    ]
    if judged := goals(result):
        lines += ["", "## What was asked", "", "| | measured | asked | reached |", "|---|---|---|---|"]
        for one in judged:
            asked = f"≤ {one['at_most']:g}" if "at_most" in one else f"≥ {one['at_least']:g}"
            lines.append(f"| {one['what']} | {one['value']:.2f} | {asked} | {'yes' if one['reached'] else '**no**'} |")
    lines += ["", "## Lookups", "", "Million keys a second, one thread on one CPU.", ""]
    lines += ["| rows x dim | keys a lookup | snapshot | numpy index | gather | build |", "|---|---|---|---|---|---|"]
    for one in result["lookups"]:
        for size in BATCHES:
            sides = one[f"batch {size}"]
            lines.append(
                f"| {one['rows']:,} x {one['dim']} | {size:,} | {sides['snapshot']:.1f} | {sides['numpy index']:.1f} |"
                f" {sides['gather']:.1f} | {one['build_seconds']:.1f} s |"
            )
    if cold := result["cold"]:
        lines += ["", f"## {cold['rows']:,} rows x 2", ""]
        told = {what.replace("_", " "): number for what, number in cold.items() if what not in ("rows", "starts")}
        lines += [
            f"- {what}: {number:,.0f}" if what == "bytes" else f"- {what}: {number:,.1f}"
            for what, number in told.items()
        ]
        lines += ["", "`kvtools serve` over it: seconds since before the process was made, medians.", ""]
        lines += [
            f"| the file | lives | is ready | has answered {COLD_KEYS:,} keys | is warm (first round) |",
            "|---|---|---|---|---|",
        ]
        for state, runs in cold["starts"].items():
            cells = [statistics.median(run[name] for run in runs) for name in ("live", "ready", "first lookup")]
            lines.append(f"| {state} | " + " | ".join(f"{cell:.3f}" for cell in [*cells, runs[0]["warm"]]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", default=["1500000x16", "20000000x16"], help="ROWSxDIM each")
    parser.add_argument(
        "--cold-rows", type=int, default=100_000_000, help="of the table that is built and opened; 0: none"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often every side runs (default: 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run (default: 2)")
    parser.add_argument("--folder", type=Path, help="where the files go, a disk (default: the system's temporary one)")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for the .md and .json (default: build/benchmarks; of a whole run benchmarks/results)",
    )
    args = parser.parse_args()
    on = machine()
    lookups = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for table in args.tables:
            rows, _, dim = table.partition("x")
            lookups.append(measure_lookups(int(rows), int(dim), Path(folder), args.rounds, args.seconds))
            print(json.dumps(lookups[-1]), file=sys.stderr, flush=True)
        cold = measure_cold(args.cold_rows, Path(folder), args.rounds) if args.cold_rows else {}
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": on,
        "rounds": args.rounds,
        "lookups": lookups,
        "cold": cold,
    }
    whole = all(getattr(args, name) == parser.get_default(name) for name in ("tables", "cold_rows"))
    output = args.output or ROOT / ("benchmarks/results" if whole else "build/benchmarks")
    output.mkdir(parents=True, exist_ok=True)
    stem = file_name(on, "snapshot")
    (output / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / f"{stem}.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    try:
        main()
    except StartError as problem:
        sys.exit(f"snapshot.py: {problem}")
