"""The benchmarks in C++: the table against a bare gather, inserts, overhead; its locks under many threads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def _built(name: str) -> Path:
    """A benchmark in C++, built."""
    build = ROOT / "build" / "bench"
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "cmake"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DKVTABLE_PYTHON=OFF", "-DKVTOOLS_CUDA=off", "-DKVTABLE_BUILD_TESTS=ON"]
    subprocess.run([cmake, "-S", str(ROOT), "-B", str(build), *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", str(build), "-j", "2", "--target", name], check=True, stdout=subprocess.DEVNULL)
    return next(path for path in build.rglob(name) if path.is_file() and os.access(path, os.X_OK))


def _printed(command: list[str]) -> dict[str, Any]:
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def table_engine(repetitions: int) -> dict[str, float]:
    """Builds the benchmark, runs it, and returns what it prints."""
    return _printed([str(_built("table_benchmark")), "--threads", "2", "--repetitions", str(repetitions)])


def lock_benchmark(points: str, *, shards: str = "8", rounds: int = 3, **flags: object) -> dict[str, Any]:
    """Lookups beside steps on one table and apart, of the threads that `points` names: ``"1+0,1+1"``."""
    more = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    binary = str(_built("lock_benchmark"))
    return _printed([binary, "--points", points, "--shards", shards, "--rounds", str(rounds), *more])
