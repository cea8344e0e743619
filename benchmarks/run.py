"""All benchmarks: libraries side by side, the table engine, the command line. One table in benchmarks/results/.

``make bench`` runs it; docs/benchmarks.md says how, and what the figures mean. Every ratio compares two things measured
in the same run, interleaved; speeds alone depend on the machine, which the result names.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cases.ctr
import cases.half
import cases.keras_fit
import cases.lookup
import cases.parts
import cases.pooled
import cases.scaling
import cases.small_batch
import cases.train
import floor
import plots
import report
from cases.case import SIZES, Case, Size
from command_line import command_line
from engine import table_engine
from lock_waits import locks
from machine import file_name, line_transfer, machine
from peers import tfra
from turns import KEEP_MEMORY, WorkerError, Workers, measure, workers

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

#: What --only chooses from, in the order of the run.
SIDE_BY_SIDE: dict[str, Callable[[Size], list[Case]]] = {
    "lookup": cases.lookup.cases,
    "train": cases.train.cases,
    "half": cases.half.cases,
    "parts": cases.parts.cases,
    "pooled": cases.pooled.cases,
    "small": cases.small_batch.cases,
    "scaling": cases.scaling.cases,
}
ALONE: dict[str, Callable[[int], dict[str, Any]]] = {
    "engine": table_engine,
    "locks": locks,
    "command_line": command_line,
}
#: On a log that is written for them.
ON_A_LOG: dict[str, Callable[[Size, Path], list[Case]]] = {"ctr": cases.ctr.cases, "keras": cases.keras_fit.cases}
KINDS = (*SIDE_BY_SIDE, *ON_A_LOG, *ALONE)


def say(text: str) -> None:
    """Progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


def pythons(with_peers: bool) -> dict[str, Path]:
    """The interpreter of each library. Without TFRA where it is not wanted or cannot be had."""
    found = {library: Path(sys.executable) for library in ("kv", "de", "dense")}
    if with_peers:
        try:
            found["tfra"] = tfra.set_up()
        except tfra.PeerError as error:
            say(f"going on without TFRA: {error}")
    return found


def run_cases(crew: Workers, wanted: list[Case], size: Size) -> Iterator[dict[str, Any]]:
    """Measures cases of one kind."""
    before = line_transfer()
    for case in wanted:
        start = time.monotonic()
        sides = measure(crew, case, size)
        # Beside the case itself, so that both meet the same neighbours.
        bandwidth = floor.copy_bandwidth(case.threads, size.copy_mebibytes) if case.floor is not None else None
        result = report.case_result(case, sides, bandwidth)
        if before is not None:
            after = line_transfer()
            result["line_transfer_ns"], before = [before, after], after
        ratios = ", ".join(f"{entry['of']} / {entry['to']} {entry['ratio']:.2f}" for entry in result["ratios"])
        say(f"  {case.group}: {case.title}: {ratios}  ({time.monotonic() - start:.0f} s)")
        yield result


def run_on_log(crew: Workers, make: Callable[[Size, Path], list[Case]], size: Size) -> Iterator[dict[str, Any]]:
    """An end-to-end run, on a log that is written for it."""
    from work.ctr import write_log

    with tempfile.TemporaryDirectory() as folder:
        # As many batches as steps: one in preparation, `rounds` turns, and none comes twice.
        batches = size.ctr["steps"] * size.rounds + 1
        write_log(Path(folder), size.ctr["batch"], batches, size.ctr["held_out"])
        yield from run_cases(crew, make(size, Path(folder)), size)


def failures(result: dict[str, Any]) -> list[str]:
    """Of kvtools itself. A peer that fails is in the table, and no reason to fail."""
    return [
        f"{case['group']}, {case['title']}: {side['error']}"
        for case in result["cases"]
        for name, side in case["sides"].items()
        if "error" in side and name not in ("TFRA", "dense", "tf.gather", "hashed tf.Variable", "hashed Embedding")
    ]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--size", choices=SIZES, default="full", help="how much of everything (default: full)")
    parser.add_argument("--quick", action="store_const", const="quick", dest="size", help="short for --size quick")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (default: by size)")
    parser.add_argument("--no-peers", action="store_true", help="leave TFRA out")
    parser.add_argument(
        "--malloc",
        choices=("keep", "system"),
        default="keep",
        help="of all sides: keep what is freed, or return it to the system as the C library does (default: keep)",
    )
    parser.add_argument("--no-plots", action="store_true", help="draw nothing")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for the .md, the .json and the plots (default: build/benchmarks; of a whole full run "
        "benchmarks/results, and docs/images for the plots)",
    )
    args = parser.parse_args()
    size = SIZES[args.size]
    if args.rounds is not None:
        if args.rounds < 1:
            parser.error("--rounds must be positive")
        size = dataclasses.replace(size, rounds=args.rounds)

    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "size": size.name,
        "rounds": size.rounds,
        "malloc": args.malloc,
        "machine": machine(),
        "versions": {},
        "left_out": [],
        "cases": [],
    }
    with workers(pythons(not args.no_peers), KEEP_MEMORY if args.malloc == "keep" else {}) as crew:
        if "tfra" not in crew.pythons:
            result["left_out"].append("TFRA")
        for kind, make in SIDE_BY_SIDE.items():
            if kind in args.only:
                say(f"{kind} ...")
                if kind == "scaling":
                    result["left_out"] += cases.scaling.left_out(size)
                result["cases"] += run_cases(crew, make(size), size)
        for kind, make_on_log in ON_A_LOG.items():
            if kind in args.only:
                say(f"{kind} ...")
                result["cases"] += run_on_log(crew, make_on_log, size)
        result["versions"] = crew.versions()
    for kind, measure_alone in ALONE.items():
        if kind in args.only:
            say(f"{kind} ...")
            result["table_engine" if kind == "engine" else kind] = measure_alone(size.rounds)

    # Only a whole run goes to the repository by itself: a part has a name of its own, so that it replaces none.
    whole = size.name == "full" and set(args.only) == set(KINDS) and not args.no_peers and args.malloc == "keep"
    to_repository = whole and args.output is None
    output = args.output or (RESULTS if whole else ROOT / "build" / "benchmarks")
    output.mkdir(parents=True, exist_ok=True)
    part = [] if set(args.only) == set(KINDS) else args.only
    stem = file_name(result["machine"], *part, *([] if size.name == "full" else [size.name]))
    (output / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    page = report.markdown(result)
    (output / f"{stem}.md").write_text(page)
    print(page)
    if not args.no_plots:
        plots.draw(result, ROOT / "docs" / "images" if to_repository else output)
    wrong = failures(result)
    for failure in wrong:
        say(f"failed: {failure}")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (WorkerError, subprocess.CalledProcessError) as problem:
        sys.exit(f"run.py: {problem}")
