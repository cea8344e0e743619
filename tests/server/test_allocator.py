"""Memory that a server has freed is used again, and not given back and taken anew with each answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import resource
from concurrent.futures import ThreadPoolExecutor
from kvtools.server import allocator

allocator.keep_freed_memory()
size, page, around = 10_000 * 32 * 4, resource.getpagesize(), 0

def answer(_):
    made = bytearray(size)
    made[::page] = bytes(-(-size // page))
    return made

with ThreadPoolExecutor(4) as threads:  # answers are made by threads, some at a time, and freed by another
    for _ in range(40):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        list(threads.map(answer, range(8)))
        if _ >= 10:
            around += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(around * page / (30 * 8 * size))
"""


def test_freed_memory_is_used_again(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, check=True)
    assert float(done.stdout) < 0.05  # the part of each answer whose pages were not there before; else it is most
