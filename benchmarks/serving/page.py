"""The result of a run of serve.py as one Markdown page, with what was asked beside what was reached."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from typing import Any

from serving.forms import BINARY, REDIS_MGET, RESP_MGET
from serving.in_process import NATIVE
from serving.python_clients import REFERENCE
from serving.time_split import PARTS

#: keys a request -> keys a second over those of Redis MGET, at least
GOALS = {1: 1.0, 100: 4.0, 1_000: 8.0, 10_000: 8.0}
#: p99 over p50 at 70% load, at most
TAIL = 3.0
#: a server that does nothing and takes as long for it: ideal.cc
IDEAL = "a server that only takes as long"
PERCENTILES = ("p50", "p90", "p99", "p999", "max")
#: part -> whose MGET of Redis it stands beside
BESIDE = {
    "load": ("load", REDIS_MGET.name),
    "wrk": ("redis-benchmark", REDIS_MGET.name),
    "redis-benchmark": ("redis-benchmark", REDIS_MGET.name),
    "python": ("python", REFERENCE),
    "process": ("load", REDIS_MGET.name),
}
_PACKAGES = ("numpy", "uvloop", "httptools", "grpcio", "tensorflow", "tritonclient", "redis", "hiredis")
_PROGRAMS = {"redis": ["redis-server", "--version"], "wrk": ["wrk", "--version"]}


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def versions() -> dict[str, str]:
    """Of packages and programs that took part."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name, command in _PROGRAMS.items():
        if shutil.which(command[0]):
            told = subprocess.run(command, capture_output=True, text=True)
            if number := re.search(r"\d+\.\d+\.\d+", told.stdout + told.stderr):
                found[f"{name} (program)"] = number.group()
    return found


def add_ratios(figures: list[dict[str, Any]]) -> None:
    """Put each figure beside Redis MGET by the same kind of generator; `load` has ratios of its rounds."""
    known = {(one["part"], one["side"], one["keys"], one["connections"]): one for one in figures}
    for one in figures:
        beside = known.get((*BESIDE[one["part"]], one["keys"], one["connections"]))
        if beside is not None and "ratio" not in one:
            one["ratio"] = one["keys_per_second"] / beside["keys_per_second"]
            one["cpu_ratio"] = beside["cpu"] / one["cpu"]


def goals(table: dict[str, Any]) -> list[dict[str, Any]]:
    """What was asked of a table, and what came of it; with the most connections of each size."""
    found = []
    for one in table["figures"]:
        if one["part"] == "load" and one["side"] in (BINARY.name, RESP_MGET.name) and "ratio" in one:
            asked = GOALS.get(one["keys"])
            if asked is not None:
                what = f"{one['side']} / {REDIS_MGET.name}, keys/s"
                where = f"{counted(one['keys'], 'key')}, {counted(one['connections'], 'connection')}"
                found.append(
                    {"what": what, "where": where, "value": one["ratio"], "at_least": asked, "cpu": one["cpu_ratio"]}
                )
    even = [one for one in table["open"] if one["arrivals"] == "even"]
    ideal = {one["keys"]: one["tail"] for one in even if one["side"] == IDEAL}
    for one in even:
        if one["side"] not in (REDIS_MGET.name, IDEAL):
            where = f"{counted(one['keys'], 'key')}, 70% load"
            value = one["tail"]
            judged = {"what": f"{one['side']}, p99 / p50", "where": where, "value": value, "at_most": TAIL}
            found.append(judged | ({"ideal": ideal[one["keys"]]} if one["keys"] in ideal else {}))
    for one in found:
        one["reached"] = one["value"] <= one["at_most"] if "at_most" in one else one["value"] >= one["at_least"]
    return found


def counted(number: int, what: str) -> str:
    """So many of something.

    >>> counted(1, "connection"), counted(1000, "key")
    ('1 connection', '1,000 keys')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def markdown(result: dict[str, Any], picture: str | None) -> str:
    """The page."""
    on = result["machine"]
    lines = [
        f"# The lookup server: {on['cpu']}, {on['cpus']} CPUs",
        "",
        f"{result['date']}, {result['rounds']} rounds of {result['seconds']:g} s; Linux {on['kernel']},"
        f" {on['memory_gib']} GiB, Python {on['python']}; load average before the run {on['load_before']:.2f};"
        f" it took {result['took'] / 60:.1f} minutes.",
        "",
        ", ".join(f"{name} {number}" for name, number in result["versions"].items()) + ".",
        "",
        f"Servers have CPU {result['cpus']['servers']} for themselves, generators CPU {result['cpus']['generators']}:"
        " Redis and kvtools are asked on the same core, one at a time. keys/s are as seen by the generator; CPU is the"
        " server's, of all its threads, for one request. A ratio is over Redis MGET by the same kind of generator: wrk"
        " over redis-benchmark, Python over redis-py with hiredis, what is without a server over load.cc."
        " `docs/benchmarks.md` says how to read this.",
    ]
    if picture:
        lines += ["", f"![Keys a second by keys a request]({picture})"]
    for table in result["tables"]:
        lines += _table(table)
    return "\n".join(lines) + "\n"


def _table(table: dict[str, Any]) -> list[str]:
    lines = ["", f"## {table['rows']:,} rows x {table['dim']}"]
    lines += ["", *(f"- left out: {note}" for note in table["left_out"])] if table["left_out"] else []
    if judged := goals(table):
        lines += ["", "### What was asked", ""]
        lines += ["| | | measured | asked | reached | ratio of CPU | an ideal server |", "|---" * 7 + "|"]
        for one in judged:
            asked = f"≤ {one['at_most']:g}" if "at_most" in one else f"≥ {one['at_least']:g}"
            cpu = f"{one['cpu']:.2f}" if "cpu" in one else ""
            reached = "yes" if one["reached"] else "**no**"
            ideal = f"{one['ideal']:.2f}" if "ideal" in one else ""
            line = f"| {one['what']} | {one['where']} | {one['value']:.2f} | {asked} | {reached} | {cpu} | {ideal} |"
            lines.append(line)
    for size in dict.fromkeys(one["keys"] for one in table["figures"]):
        lines += _figures(size, [one for one in table["figures"] if one["keys"] == size])
    if table["open"]:
        lines += _open(table["open"])
    if table["split"]:
        lines += _split(table)
    return lines


def _figures(size: int, figures: list[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        f"### {counted(size, 'key')} a request",
        "",
        "| by | side | connections | keys/s | / Redis MGET | CPU, µs | CPU / | p50, µs | p99, µs |",
    ]
    lines += ["|---" * 9 + "|"]
    for one in figures:
        ratios = [f"{one[name]:.2f}" if name in one else "" for name in ("ratio", "cpu_ratio")]
        by = "load.cc" if one["part"] == "load" else "in process" if one["part"] == "process" else one["part"]
        lines.append(
            f"| {by} | {one['side']} | {one['connections']} | {one['keys_per_second']:,.0f} | {ratios[0]} |"
            f" {one['cpu'] * 1e6:,.1f} | {ratios[1]} | {one['p50'] * 1e6:,.0f} | {one['p99'] * 1e6:,.0f} |"
        )
    return lines


def _open(runs: list[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "### At 70% load",
        "",
        "Requests are due at 70% of what the closed loop reached, at even or at Poisson times; a request's time counts"
        " from when it was due; medians of the rounds. `unanswered` would say that the load was too much. Even a server"
        " whose every answer takes the same time has p99 / p50 of 4.3 with Poisson times (a queue M/D/1)."
        f" `{IDEAL}` is that server: it does nothing for the time that an answer over HTTP takes. Its p99 is the"
        " machine's: of a processor that is taken away for milliseconds, and of the queue that this leaves.",
        "",
        "| side | keys | arrivals | requests/s | p50, µs | p90, µs | p99, µs | p99.9, µs | max, µs | p99 / p50 |"
        " unanswered |",
        "|---" * 11 + "|",
    ]
    for one in runs:
        times = " | ".join(f"{one[name] * 1e6:,.0f}" for name in PERCENTILES)
        lines.append(
            f"| {one['side']} | {one['keys']:,} | {one['arrivals']} | {one['rate']:,.0f} | {times} |"
            f" {one['tail']:.2f} | {one['unanswered']} |"
        )
    return lines


def _split(table: dict[str, Any]) -> list[str]:
    runs = table["split"]
    alone = {one["keys"]: one["cpu"] for one in table["figures"] if one["side"] == NATIVE}
    lines = [
        "",
        "### Where the time goes",
        "",
        "Microseconds of the server's CPU for one request; the parts by samples of perf, `system` as the system counts"
        " it. 0 keys: a lookup of nothing, or PING. `lookup alone`: the compiled table in a process without a server.",
        "",
        "| side | keys | CPU | " + " | ".join(PARTS) + " | system | lookup alone | system calls a request |",
        "|---" * (len(PARTS) + 6) + "|",
    ]
    for one in runs:
        parts = [f"{one['parts'][part] * one['cpu'] * 1e6:,.1f}" if one["parts"] else "" for part in PARTS]
        calls = ", ".join(f"{name} {number:.2f}" for name, number in (one["calls"] or {}).items() if number >= 0.05)
        native = f"{alone[one['keys']] * 1e6:,.1f}" if one["keys"] in alone else ""
        lines.append(
            f"| {one['side']} | {one['keys']:,} | {one['cpu'] * 1e6:,.1f} | {' | '.join(parts)} |"
            f" {one['system']:.0%} | {native} | {calls} |"
        )
    return lines
