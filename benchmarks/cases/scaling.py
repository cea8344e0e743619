"""How speed changes with threads, rows and dim: a lookup, and a training step with Adam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cases.case import Case, Comparison, Side, Size

DIM = 16  # where threads vary
NARROW = 8  # where rows vary, so that many of them fit
TFRA_ROWS = 10_000_000  # more take TFRA too long to fill


def available_bytes() -> int:
    """Of memory, by the system's own estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("no MemAvailable in /proc/meminfo")


def needed_bytes(rows: int, dim: int) -> int:
    """Of memory for the tables of a case together: each library's with Adam's slots and an overhead."""
    return rows * (3 * dim * 4 + 64) * 2


def _pair(size: Size, group: str, what: str, x: int, table: dict[str, Any], threads: int = 2) -> list[Case]:
    """The lookup and the training step of one point of a curve."""
    tfra = {"TFRA": Side("tfra")} if table["rows"] <= TFRA_ROWS else {}
    common = {**table, "batch": size.batch, "batches": size.batches, "parts": 1}
    lookup = Case(
        group=group,
        title=f"lookup, {what}",
        work="lookup",
        parameters={**common, "ids": "uniform", "training": True, "way": "function", "x": x},
        sides={"kv": Side("kv"), "tf.gather": Side("dense"), **tfra},
        items=size.batch,
        comparisons=(Comparison("kv", "tf.gather"), Comparison("kv", "TFRA")),
        threads=threads,
    )
    # A dense variable takes no part: its Adam updates every row at each step.
    train = Case(
        group=group,
        title=f"train with Adam, {what}",
        work="train",
        parameters={**common, "ids": "unique", "optimizer": "Adam", "x": x},
        sides={"kv": Side("kv"), **tfra},
        items=size.batch,
        comparisons=(Comparison("kv", "TFRA"),),
        threads=threads,
    )
    return [lookup, train]


def cases(size: Size) -> list[Case]:
    """All points that fit into memory; `left_out` names the others."""
    table = {"rows": size.scaling_table, "dim": DIM}
    cases = []
    for threads in size.scaling_threads:
        cases += _pair(size, "threads", f"{threads} threads" if threads > 1 else "1 thread", threads, table, threads)
    for rows in size.scaling_rows:
        if needed_bytes(rows, NARROW) <= available_bytes():
            cases += _pair(size, "rows", f"{rows:,} rows", rows, {"rows": rows, "dim": NARROW})
    for dim in size.scaling_dims:
        cases += _pair(size, "dims", f"dim {dim}", dim, {"rows": size.scaling_table, "dim": dim})
    return cases


def left_out(size: Size) -> list[str]:
    """What was not measured, and why."""
    return [
        f"{rows:,} rows need about {needed_bytes(rows, NARROW) / 2**30:.0f} GiB, "
        f"{available_bytes() / 2**30:.0f} GiB are available"
        for rows in size.scaling_rows
        if needed_bytes(rows, NARROW) > available_bytes()
    ]
