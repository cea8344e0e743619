"""The offline tools on a table of gigabytes, beside `cat` and beside a script that does the same by hand.

``make bench-tools`` runs it. The table (int64 keys, 64 float32 a row, frequencies and versions, four parts) is a
TensorFlow bundle on disk, read once so that the page cache holds it. Every side is a process of its own; a round lets
each run once, in turn, with nothing left to be written to disk by the one before. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asked_rows
import many_tables
import queries
import s3_reads
from machine import file_name, machine

ROOT = Path(__file__).resolve().parent.parent
KVTOOLS = str(Path(sys.executable).parent / "kvtools")
DIM = 64
PARTS = 4
ROW_BYTES = 8 + 4 * DIM + 4 + 4

#: What people write who have no such tool: every tensor through TensorFlow, every row through h5py.
BY_HAND = """
import sys, h5py, numpy as np, tensorflow as tf
reader = tf.train.load_checkpoint(sys.argv[1])
names = sorted(reader.get_variable_to_shape_map())
with h5py.File(sys.argv[2], "w") as file:
    for column in ("keys", "values", "freqs", "versions"):
        parts = [reader.get_tensor(name) for name in names if name.endswith("-" + column)]
        file.create_dataset("emb/" + column, data=np.concatenate(parts))
"""


@dataclass(frozen=True)
class Run:
    """One run of one side."""

    seconds: float
    peak_mebibytes: float


@dataclass(frozen=True)
class Target:
    """What is asked of a side beside another: this many times as fast, or this many times less memory."""

    side: str
    to: str
    at_least: float
    of: str = "seconds"


TARGETS = (
    Target("verify", "cat", 0.5),
    Target("stats", "cat", 0.5),
    Target("migrate to tfplugin", "cat", 0.5),
    Target("migrate to hdf5", "cat", 0.5),
    Target("migrate to tfplugin", "cat and sync", 0.5),
    Target("migrate to hdf5", "cat and sync", 0.5),
    Target("migrate to hdf5", "script by hand", 3),
    Target("migrate to hdf5", "script by hand", 5, "peak_mebibytes"),
)


def write_table(prefix: Path, gigabytes: float) -> int:
    """Write the table; return its rows. In a process of its own: a child's peak memory is no less than its parent's."""
    import numpy as np

    from kvtools.dialects.bundle import BundleWriter

    rows = int(gigabytes * 1e9 / ROW_BYTES) // PARTS
    rng = np.random.default_rng(0)
    block = rng.normal(size=(1 << 16, DIM)).astype(np.float32)
    with BundleWriter(prefix) as writer:
        for part in range(PARTS):
            x = f"emb/part_{part}"
            writer.array(f"{x}-keys", rng.permutation(rows).astype(np.int64) * PARTS + part)
            writer.begin(f"{x}-values", np.dtype(np.float32), (DIM,))
            for start in range(0, rows, len(block)):
                writer.append(block[: rows - start])
            writer.end()
            writer.array(f"{x}-freqs", rng.zipf(1.5, rows).clip(1, 2**31).astype(np.uint32))
            writer.array(f"{x}-versions", rng.integers(1_700_000_000, 1_760_000_000, rows).astype(np.uint32))
            meta = {"layout": 1, "name": "emb", "part": part, "parts": PARTS, "key_dtype": "int64"}
            writer.string(f"{x}-kvmeta", json.dumps({**meta, "value_dtype": "float32", "dim": DIM}).encode())
    return rows * PARTS


def timed(command: Sequence[str]) -> Run:
    """Run a command to its end."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    with ThreadPoolExecutor(1) as pool:
        # What the system tells when it has ended begins at what this process had when it made it.
        peak = pool.submit(_peak_kibibytes, process.pid)
        message = process.stderr.read()
        process.wait()
        took = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"tools.py: {command}: exit {process.returncode}: {message.decode()[-500:]}")
    return Run(took, peak.result() / 1024)


def _peak_kibibytes(process: int) -> int:
    peak = 0
    while True:
        try:
            found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
        except OSError:
            return peak
        if found is None:  # it has ended
            return peak
        peak = int(found[1])
        time.sleep(0.005)


def sides(prefix: Path, work: Path) -> dict[str, list[str]]:
    """The commands, by what they are called in the result."""
    data, out = f"{prefix}.data-00000-of-00001", str(work / "out")
    return {
        "cat": ["sh", "-c", f"cat {data} > {out}"],
        "cat and sync": ["sh", "-c", f"cat {data} > {out} && sync {out}"],
        "inspect": [KVTOOLS, "inspect", str(prefix)],
        "verify": [KVTOOLS, "verify", str(prefix)],
        "stats": [KVTOOLS, "stats", str(prefix)],
        "migrate to tfplugin": [KVTOOLS, "migrate", str(prefix), out, "--to", "tfplugin"],
        "migrate to hdf5": [KVTOOLS, "migrate", str(prefix), f"{out}.h5", "--to", "hdf5", "--compression", "none"],
        "script by hand": [sys.executable, "-c", BY_HAND, str(prefix), f"{out}.h5"],
    }


def clear(work: Path) -> None:
    """Leave nothing of the last side, on disk or on its way there."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    os.sync()


def measure(gigabytes: float, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Make the table and run all sides."""
    with tempfile.TemporaryDirectory(prefix="kvtools-bench-") as folder:
        prefix, work = Path(folder) / "model.ckpt", Path(folder) / "work"
        written = [sys.executable, __file__, "--gigabytes", str(gigabytes), "--write", str(prefix)]
        rows = int(subprocess.run(written, check=True, capture_output=True, text=True).stdout)
        size = Path(f"{prefix}.data-00000-of-00001").stat().st_size
        say(f"{rows:,} rows, {size / 1e9:.2f} GB")
        runs: dict[str, list[Run]] = {}
        for number in range(rounds):
            for name, command in sides(prefix, work).items():
                clear(work)
                runs.setdefault(name, []).append(run := timed(command))
                say(f"  round {number + 1}: {name}: {run.seconds:.2f} s, peak {run.peak_mebibytes:.0f} MiB")
    return {
        "rows": rows,
        "bytes": size,
        "sides": {
            name: {
                "seconds": [run.seconds for run in done],
                "median": statistics.median(run.seconds for run in done),
                "peak_mebibytes": max(run.peak_mebibytes for run in done),
            }
            for name, done in runs.items()
        },
        "ratios": [ratio(target, runs) for target in TARGETS],
    }


def ratio(target: Target, runs: dict[str, list[Run]]) -> dict[str, Any]:
    """What a target comes to: the median of the ratios within a round."""
    pairs = zip(runs[target.to], runs[target.side], strict=True)
    value = statistics.median(getattr(to, target.of) / getattr(of, target.of) for to, of in pairs)
    return {
        "side": target.side,
        "to": target.to,
        "of": target.of,
        "ratio": value,
        "at_least": target.at_least,
        "reached": value >= target.at_least,
    }


def commands(result: dict[str, Any]) -> str:
    """The commands' result as a section of a page."""
    lines = [
        "## Commands",
        "",
        f"A bundle of {result['rows']:,} rows, {result['bytes'] / 1e9:.2f} GB, dim {DIM}, {PARTS} parts, in the page"
        " cache.",
        "",
        "| command | seconds (median) | GB/s | peak memory, MiB |",
        "|---|---|---|---|",
    ]
    for name, side in result["sides"].items():
        speed = "" if name == "inspect" else f"{result['bytes'] / 1e9 / side['median']:.2f}"
        lines.append(f"| {name} | {side['median']:.2f} | {speed} | {side['peak_mebibytes']:.0f} |")
    lines += ["", "| | beside | | ratio | asked | reached |", "|---|---|---|---|---|---|"]
    for entry in result["ratios"]:
        what = "times as fast" if entry["of"] == "seconds" else "times less memory"
        reached = "yes" if entry["reached"] else "**no**"
        lines.append(
            f"| {entry['side']} | {entry['to']} | {what} | {entry['ratio']:.2f} | ≥ {entry['at_least']:g} | {reached} |"
        )
    return "\n".join([*lines, ""])


def markdown(result: dict[str, Any]) -> str:
    """The result as a page: what was measured of the parts, each with its date."""
    on = result["machine"]
    lines = [
        f"# Offline tools: {on['cpu']}, {on['cpus']} CPUs",
        "",
        f"{result['rounds']} rounds; Linux {on['kernel']}, {on['memory_gib']} GiB, Python {on['python']}; load average"
        f" before the run {on['load_before']:.2f}.",
    ]
    for name, tell in MARKDOWN.items():
        if name in result:
            lines += ["", tell(result[name]["found"]).rstrip(), "", f"({result[name]['date']})"]
    return "\n".join([*lines, ""])


MARKDOWN: dict[str, Callable[[Any], str]] = {
    "commands": commands,
    "asked_rows": asked_rows.markdown,
    "queries": queries.markdown,
    "many_tables": many_tables.markdown,
    "s3_reads": s3_reads.markdown,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the table (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="how often every side runs (default: 3)")
    parser.add_argument("--only", nargs="+", choices=MARKDOWN, help="measure these parts (default: all)")
    parser.add_argument("--output", type=Path, help="folder for the .md and .json (default: benchmarks/results)")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        print(write_table(args.write, args.gigabytes))
        return
    on = machine()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    measures: dict[str, Callable[[], Any]] = {
        "commands": lambda: measure(args.gigabytes, args.rounds, say),
        "asked_rows": lambda: asked_rows.measure(say),
        "queries": lambda: queries.measure((args.gigabytes / 10, args.gigabytes), args.rounds, say),
        "many_tables": lambda: many_tables.measure(say),
        "s3_reads": lambda: s3_reads.measure(say),
    }
    output = args.output or ROOT / "benchmarks" / "results"
    output.mkdir(parents=True, exist_ok=True)
    numbers, page = (output / f"{file_name(on, 'tools')}.{ending}" for ending in ("json", "md"))
    kept = json.loads(numbers.read_text()) if numbers.exists() else {}
    result = {**kept, "rounds": args.rounds, "machine": on}
    for name in args.only or measures:
        result[name] = {"date": datetime.date.today().isoformat(), "found": measures[name]()}
        # As each is there: the next one takes minutes, and may fail.
        numbers.write_text(json.dumps(result, indent=1) + "\n")
        page.write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
