"""The benchmark of swaps for a minute: a real server under open-loop load, a version every few seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.thorough
def test_no_request_fails_in_half_a_minute_of_swaps_and_memory_stays_flat(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "swaps.py"), "--minutes", "0.5", "--rate", "200", "--rows", "400000"]
    command += ["--keys", "50", "--every", "3", "--output", str(tmp_path), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert not result["failures"] and result["vectors"] == result["requests"] * 50
    assert len(result["swaps"]) >= 8
    mapped = [sample["mapped"] for sample in result["memory"]]
    anonymous = [sample["anonymous"] for sample in result["memory"]]
    version = 400_000 * (16 * 4 + 8) >> 10  # KiB: two of them are mapped in a swap, and never three
    assert max(mapped) < mapped[0] + 2 * version
    assert max(anonymous[3:]) < anonymous[2] + 8192


def test_a_request_is_in_a_swap_until_all_answers_are_of_the_new_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import swaps

    load = swaps.Load(np.arange(0, 20, 0.01))
    load.latency[:] = 1e-3
    load.version[:] = 1 + (load.due >= 6.5)
    load.latency[(load.due >= 5) & (load.due < 7.5)] = 2e-3
    result = swaps.judged(load, [(2, 5.0)], 10.0)
    (swap,) = result["swaps"]
    assert swap["served_after"] == pytest.approx(1.5) and swap["seconds"] == pytest.approx(2.49)
    assert result["steady"]["p99"] == pytest.approx(1000) and result["swap"]["p50"] == pytest.approx(2000)
    assert result["ratio"] == pytest.approx(2) and not result["reached"] and not load.failures
    assert result["quiet"]["p99"] == pytest.approx(1000)
    swaps.judged(load, [(3, 15.0)], 10.0)
    assert load.failures == ["version 3 was never served"]
