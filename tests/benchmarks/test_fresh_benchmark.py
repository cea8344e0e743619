"""The benchmark of fresh serving for some seconds: real training, a real server, every probe is served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("uvicorn")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.thorough
def test_every_row_that_a_step_changes_is_served(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "fresh.py"), "--rows", "20000", "--dim", "8", "--changed", "5000"]
    command += ["--turns", "1", "--seconds", "3", "--output", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert result["lost"] == 0 and result["probes"] > 5
    assert result["server"]["kvtools_follow_refused_total"] == 0
    assert "Fresh serving" in path.with_suffix(".md").read_text()
