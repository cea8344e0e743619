"""Puts what run.sh wrote into one file named after the chip and the day: python merge.py FOLDER [TARGET_FOLDER].

The file has the chip's name, the date, how each check ended, the figures of both benchmarks and of PyTorch, how
many times as fast as PyTorch's each step was, and where the time goes, kernel by kernel.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any


def file_name(chip: str, day: datetime.date) -> str:
    """Of the results of a GPU.

    >>> file_name("NVIDIA H200", datetime.date(2026, 1, 2))
    'nvidia-h200-2026-01-02.json'
    """
    return "-".join([*re.sub(r"[^a-z0-9.]+", " ", chip.lower()).split(), f"{day}.json"])


def checks_of(folder: Path) -> dict[str, str]:
    """How each check ended: passed, failed, or unavailable and why."""
    lines = (folder / "checks.txt").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)


def read(path: Path) -> dict[str, Any]:
    """A benchmark's JSON, or why there is none."""
    text = path.read_text() if path.exists() else ""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"unavailable": f"{path.name} is not whole"}


def speedups(ours: dict[str, Any], torch: dict[str, Any]) -> dict[str, float]:
    """Seconds of PyTorch's step over ours, by law of ids; nothing where they were not the same ids."""
    sides = [{row["ids"]: row for row in side.get("results", []) if row["stage"] == "step"} for side in (ours, torch)]
    return {
        law: torch_row["seconds"] / sides[0][law]["seconds"]
        for law, torch_row in sides[1].items()
        if law in sides[0] and sides[0][law]["checksum"] == torch_row["checksum"]
    }


def merge(folder: Path) -> dict[str, Any]:
    """The one object."""
    parts = ("benchmark", "training_step", "torch_step", "kernels")
    table, step, torch, kernels = (read(folder / f"{name}.json") for name in parts)
    return {
        "chip": table.get("device") or step.get("device") or "unknown",
        "date": str(datetime.date.today()),
        "checks": checks_of(folder),
        "table": table,
        "training_step": step,
        "torch_step": torch,
        "kernels": kernels,
        "step_times_as_fast_as_torch": speedups(step, torch),
    }


def main() -> None:
    """Command line."""
    folder = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else folder
    result = merge(folder)
    path = target / file_name(result["chip"], datetime.date.today())
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
