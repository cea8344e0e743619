"""Processors, memory and pages: what tables are fast on."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvtools.doctor.check import Check

#: What the engine's fast paths need (kernels/src/base/instruction_set.cc), best first.
_INSTRUCTION_SETS = {
    "AVX-512": ("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx2", "f16c"),
    "AVX2": ("avx2", "f16c"),
}
_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def check_machine(root: Path = Path("/")) -> Iterator[Check]:
    """What is there; `root` is where `proc` and `sys` are looked for."""
    yield _processors(root)
    yield _instruction_set(root)
    yield from _memory(root)
    yield _huge_pages(root)


def _processors(root: Path) -> Check:
    allowed = len(os.sched_getaffinity(0))
    value = f"{allowed} of {os.cpu_count() or allowed}, {_model(root)}"
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max" and int(quota) / int(period) < allowed:
            return Check(
                "processors",
                "warning",
                f"{value}; the container may use {int(quota) / int(period):g} of them",
                "threads are made for all processors: give the container whole ones (cpusets), or pin it with taskset",
            )
    return Check("processors", "ok", value)


def _model(root: Path) -> str:
    names = re.findall(r"^model name\s*: (.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return names[0].strip() if names else "of an unknown kind"


def _instruction_set(root: Path) -> Check:
    flags = set(next(iter(re.findall(r"^flags\s*: (.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)), "").split())
    best = next((name for name, needed in _INSTRUCTION_SETS.items() if flags.issuperset(needed)), None)
    held = os.environ.get("KVTABLE_ISA")
    if held is not None:
        return Check("instructions", "note", f"{best or 'baseline'}, held to KVTABLE_ISA={held}", "unset KVTABLE_ISA")
    if best is None:
        return Check(
            "instructions",
            "warning",
            "neither AVX2 nor AVX-512: training steps and conversions run at the baseline's speed",
            "run on a processor of the last ten years; in a virtual machine, pass the host's processor through",
        )
    return Check("instructions", "ok", best)


def _memory(root: Path) -> Iterator[Check]:
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    sizes = {name: int(kib) << 10 for name, kib in lines}
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    value = f"{_gib(free)} free of {_gib(total)}"
    with contextlib.suppress(OSError, ValueError):
        limit = int((root / "sys/fs/cgroup/memory.max").read_text())  # "max" is no number
        value += f"; the container may use {_gib(limit)}"
    yield Check("memory", "ok", value)
    if _text(root / "proc/sys/vm/overcommit_memory").strip() == "2":
        yield Check(
            "overcommit",
            "warning",
            "vm.overcommit_memory is 2: tables ask for address space before they use it, and may be refused it",
            "sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio",
        )


def _huge_pages(root: Path) -> Check:
    modes = re.findall(r"\[(\w+)\]", _text(root / _PAGES.relative_to("/") / "enabled"))
    if not modes:
        return Check("huge pages", "note", "this kernel says nothing of them", "")
    if modes[0] == "never":
        return Check(
            "huge pages",
            "warning",
            "never: large tables are looked up in more slowly",
            f"as root: echo madvise > {_PAGES}/enabled",
        )
    return Check("huge pages", "ok", f"{modes[0]}: large tables get them")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
