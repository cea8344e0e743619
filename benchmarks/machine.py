"""What the figures were taken on."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, Any]:
    """CPU, memory, system, and how busy it was before the run."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "transparent_hugepages": huge.read_text().strip() if huge.exists() else "unknown",
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "real_time": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
    }


def line_transfer() -> float | None:
    """Nanoseconds that a cache line takes from one processor to another now: 40 to 80 where they share a cache.

    None on a machine of one processor, and where there is no compiler to make what measures it.
    """
    if len(os.sched_getaffinity(0)) < 2 or (program := _line_transfer_program()) is None:
        return None
    return float(subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout)


@functools.cache
def _line_transfer_program() -> Path | None:
    program = ROOT / "build" / "line_transfer"
    program.parent.mkdir(exist_ok=True)
    source = ROOT / "benchmarks" / "kernels" / "line_transfer.cc"
    try:
        subprocess.run(["c++", "-std=c++17", "-O2", "-pthread", source, "-o", program], check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return program


def file_name(on: dict[str, Any], *kind: str) -> str:
    """Of the results of a machine, without an ending.

    >>> file_name({"cpu": "Intel(R) Xeon(R) @ 2.5GHz", "cpus": 2}, "sok")
    'intel-xeon-2.5ghz-2cpu-sok'
    """
    cpu = re.sub(r"\(r\)|[^a-z0-9.]+", " ", on["cpu"].lower()).split()
    return "-".join([*cpu, f"{on['cpus']}cpu", *kind])
