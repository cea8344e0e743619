"""The environments of the engines that kvtools exchanges checkpoints with. `make peers` makes them."""

from __future__ import annotations

import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tfra() -> Callable[..., None]:
    """Run a program of tests/peers/tfra/ in TFRA's environment."""
    peer = runpy.run_path(str(ROOT / "benchmarks" / "peers" / "tfra.py"))
    if not peer["is_set_up"]():
        pytest.skip("TFRA is not installed: `make peers` makes its environment")

    def run(program: str, *arguments: object) -> None:
        command = [str(peer["PYTHON"]), str(ROOT / "tests" / "peers" / "tfra" / program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{program} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"

    return run
