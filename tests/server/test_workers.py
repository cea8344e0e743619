"""Workers that die, and cannot always be started again: the others serve on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPERVISED = Path(__file__).parent / "supervised_workers.py"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("error", "worker 1 ended with status 1"),
        ("often", "another begins in 0.0 s"),
        ("signal", "worker 1 ended by signal 39"),
        ("fork", "worker 1 cannot be started: [Errno 11] Resource temporarily unavailable; tried again in"),
        ("pipe", "worker 1 cannot be started: [Errno 24] Too many open files; tried again in"),
        pytest.param("listen", "listening on 127.0.0.1: Address already in use", marks=pytest.mark.thorough),
    ],
)
def test_a_worker_that_dies_takes_no_other_along(how: str, said: str) -> None:
    done = subprocess.run([sys.executable, SUPERVISED, how], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(("how", "stream"), [("error", "stderr"), ("print", "stdout")])
def test_a_worker_whose_last_words_nobody_reads_takes_no_other_along(how: str, stream: str) -> None:
    read, write = os.pipe()
    os.close(read)
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with os.fdopen(write, "wb") as nobody:
        command = [sys.executable, SUPERVISED, how]
        done = subprocess.run(command, **{stream: nobody}, env=buffered, timeout=120, check=False)
    assert done.returncode == 0
