"""`sok.lookup_sparse` over Horovod ranks of this machine, beside the exchange that it cannot do without.

``make bench-sok`` runs it. One call for all tables, a call for each, and `hvd.alltoall` alone take turns on the ranks;
the same lookup in a process without Horovod stands beside them. Then one call on 1 rank and more, and a table with a
capacity beside one without.
docs/benchmarks.md says how to read the figures. Needs Horovod (``make setup-horovod``).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import cases.exchange
import report
from cases.case import SIZES
from horovod_ranks import WorkersWithRanks
from machine import file_name, machine
from turns import KEEP_MEMORY, WorkerError, measure

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("exchange", "overlap", "scaling", "bounded")
#: On how many ranks `scaling` is measured.
MOST_RANKS = 4


def say(text: str) -> None:
    """Progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--size", choices=SIZES, default="full", help="how much of everything (default: full)")
    parser.add_argument("--quick", action="store_const", const="quick", dest="size", help="short for --size quick")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (default: by size)")
    parser.add_argument("--ranks", type=int, default=2, help="Horovod ranks (default: 2)")
    parser.add_argument("--threads", type=int, help="of each rank (default: its share of the CPUs)")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only cases with this in their title")
    parser.add_argument("--json", action="store_true", help="print the JSON in place of the page")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for the .md and the .json (default: build/benchmarks; of a whole full run benchmarks/results)",
    )
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks must be at least 2")
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds must be positive")
    if {"exchange", "overlap", "scaling"} & set(args.only) and importlib.util.find_spec("horovod") is None:
        raise SystemExit("sok.py: Horovod is not installed: run `make setup-horovod`")
    size = SIZES[args.size]
    if args.rounds is not None:
        size = dataclasses.replace(size, rounds=args.rounds)
    threads = args.threads or max(1, len(os.sched_getaffinity(0)) // args.ranks)

    wanted = cases.exchange.cases(size, args.ranks, threads) if "exchange" in args.only else []
    wanted += cases.exchange.overlap_cases(size, args.ranks, threads) if "overlap" in args.only else []
    most = 2 if size.name == "tiny" else MOST_RANKS
    wanted += cases.exchange.scaling_cases(size, most) if "scaling" in args.only else []
    wanted += cases.exchange.bounded_cases(size) if "bounded" in args.only else []
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "size": size.name,
        "rounds": size.rounds,
        "ranks": args.ranks,
        "malloc": "keep",
        "machine": machine(),
        "versions": {},
        "left_out": [],
        "cases": [],
    }
    crew = WorkersWithRanks(args.ranks, KEEP_MEMORY, most)
    try:
        for case in wanted:
            if args.filter not in case.title:
                continue
            start = time.monotonic()
            done = report.case_result(case, measure(crew, case, size), None)
            result["cases"].append(done)
            ratios = ", ".join(f"{entry['of']} / {entry['to']} {entry['ratio']:.2f}" for entry in done["ratios"])
            say(f"  {case.group}: {case.title}: {ratios}  ({time.monotonic() - start:.0f} s)")
        result["versions"] = crew.versions()
    finally:
        crew.stop()

    whole = (
        size.name == "full" and set(args.only) == set(PARTS) and args.ranks == 2 and not (args.filter or args.threads)
    )
    output = args.output or ROOT / ("benchmarks/results" if whole else "build/benchmarks")
    output.mkdir(parents=True, exist_ok=True)
    stem = file_name(result["machine"], *(["sok"] if size.name == "full" else ["sok", size.name]))
    text = json.dumps(result, indent=1) + "\n"
    page = report.markdown(result)
    (output / f"{stem}.json").write_text(text)
    (output / f"{stem}.md").write_text(page)
    print(text if args.json else page)
    wrong = [f"{c['title']}, {n}: {s['error']}" for c in result["cases"] for n, s in c["sides"].items() if "error" in s]
    for failure in wrong:
        say(f"failed: {failure}")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkerError as problem:
        sys.exit(f"sok.py: {problem}")
