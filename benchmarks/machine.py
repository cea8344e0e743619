"""What the figures were taken on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any


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
    }


def file_name(on: dict[str, Any], *kind: str) -> str:
    """Of the results of a machine, without an ending.

    >>> file_name({"cpu": "Intel(R) Xeon(R) @ 2.5GHz", "cpus": 2}, "sok")
    'intel-xeon-2.5ghz-2cpu-sok'
    """
    cpu = re.sub(r"\(r\)|[^a-z0-9.]+", " ", on["cpu"].lower()).split()
    return "-".join([*cpu, f"{on['cpus']}cpu", *kind])
