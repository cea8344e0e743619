"""A short run of the fuzzer; `make fuzz` runs it for as long as FUZZ_SECONDS says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz.py"


@pytest.mark.thorough
def test_only_our_errors_come_out_of_changed_files(tmp_path: Path) -> None:
    # The same cases each time, so that this test tells about a change and not about luck.
    command = [sys.executable, str(FUZZ), "--seed", "0", "--workers", "2", "--cases", "1000"]
    environment = {**os.environ, "FUZZ_SECONDS": "120", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
