"""The C++ table against a bare gather; inserts; overhead. Runs `kernels/table_benchmark.cc`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def table_engine(repetitions: int) -> dict[str, float]:
    """Builds the benchmark, runs it, and returns what it prints."""
    build = ROOT / "build" / "bench"
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "cmake"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DKVTABLE_PYTHON=OFF", "-DKVTOOLS_CUDA=off", "-DKVTABLE_BUILD_TESTS=ON"]
    subprocess.run([cmake, "-S", str(ROOT), "-B", str(build), *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(
        [cmake, "--build", str(build), "-j", "2", "--target", "table_benchmark"], check=True, stdout=subprocess.DEVNULL
    )
    binary = next(path for path in build.rglob("table_benchmark") if path.is_file() and os.access(path, os.X_OK))
    done = subprocess.run(
        [str(binary), "--threads", "2", "--repetitions", str(repetitions)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return dict(json.loads(done.stdout))
