"""Where a server's time goes: samples of perf by what they fell into, and system calls counted by strace.

Where perf is not there or may not look, only what the system counts is told: user and system seconds.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.servers import Server, system_share

KERNEL, LOOP, PARSER, PYTHON, NATIVE, LIBC, REST = PARTS = (
    "kernel",
    "uvloop",
    "HTTP parser",
    "Python",
    "kvtools C++",
    "C library",
    "rest",
)
_DSOS = (
    (re.compile(r"\[kernel|\[vdso|\[unknown|^\[k"), KERNEL),
    (re.compile(r"uvloop|^loop\.cpython"), LOOP),
    (re.compile(r"httptools|^parser\.cpython"), PARSER),
    (re.compile(r"^_snapshot|^libkvtable|^_kvtable|^libstdc\+\+"), NATIVE),
    (re.compile(r"^libc[.-]|^ld-|^libm[.-]|^libpthread|^libgcc"), LIBC),
    (re.compile(r"^libpython|^python|\.cpython-"), PYTHON),
)


def part_of(dso: str) -> str:
    """The part that a mapped file belongs to.

    >>> part_of("loop.cpython-311-x86_64-linux-gnu.so"), part_of("[kernel.kallsyms]"), part_of("libpython3.11.so.1.0")
    ('uvloop', 'kernel', 'Python')
    """
    return next((part for pattern, part in _DSOS if pattern.search(dso)), REST)


def shares(report: str) -> dict[str, float]:
    """Shares of the parts, from `perf report --sort dso --stdio -t ';'`.

    >>> shares("# a comment\\n  60.00% ;[kernel.kallsyms]\\n  40.00%;python3.11\\n")["kernel"]
    0.6
    """
    found = dict.fromkeys(PARTS, 0.0)
    for line in report.splitlines():
        percent, _, dso = (words.strip() for words in line.partition(";"))
        if percent.endswith("%") and dso:
            found[part_of(dso)] += float(percent[:-1]) / 100
    return found


def by_perf(server: Server, folder: Path, work: Callable[[], Any]) -> dict[str, float] | None:
    """Shares of the server's CPU time while `work` runs; None: perf is not there, or may not look."""
    if shutil.which("perf") is None:
        return None
    file = folder / "perf.data"
    file.unlink(missing_ok=True)
    command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "1999", "-p", str(server.process), "-o", str(file)]
    recorder = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(0.2)  # until it looks
    try:
        work()
    finally:
        recorder.send_signal(signal.SIGINT)
        recorder.wait()
    if not file.exists():
        return None
    report = ["perf", "report", "-i", str(file), "--stdio", "--sort", "dso", "-t", ";"]
    found = shares(subprocess.run(report, capture_output=True, text=True).stdout)
    return found if sum(found.values()) > 0.5 else None


def by_system(server: Server, work: Callable[[], Any]) -> float:
    """The share of the server's CPU time that it spent in the system while `work` ran."""
    before = system_share(server.process)
    work()
    user, system = (after - earlier for after, earlier in zip(system_share(server.process), before, strict=True))
    return system / (user + system) if user + system else 0.0


def system_calls(server: Server, folder: Path, work: Callable[[], int]) -> dict[str, float] | None:
    """System calls a request by name while `work` runs, which returns how many requests it made; None: no strace."""
    if shutil.which("strace") is None:
        return None
    file = folder / "strace.txt"
    file.unlink(missing_ok=True)
    command = ["strace", "-c", "-f", "-q", "-o", str(file), "-p", str(server.process)]
    tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(0.2)
    try:
        requests = work()
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait()
    if not file.exists() or not requests:
        return None
    return calls(file.read_text(), requests)


def calls(table: str, requests: int) -> dict[str, float] | None:
    """Calls a request by name, from what `strace -c` writes.

    >>> calls("% time seconds usecs/call calls errors syscall\\n 60.0 0.1 2 200 recvfrom\\n 40.0 0.1 2 100 1 write", 50)
    {'recvfrom': 4.0, 'write': 2.0}
    """
    found = {}
    for line in table.splitlines():
        words = line.split()
        if len(words) in (5, 6) and words[0].replace(".", "").isdigit() and words[-1] != "total":
            found[words[-1]] = int(words[3]) / requests
    return dict(sorted(found.items(), key=lambda item: -item[1])) or None
