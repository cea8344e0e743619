"""The environments of the engines that kvtools exchanges checkpoints with. `make peers` makes them."""

from __future__ import annotations

import pickle
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def python_of_tfra() -> str:
    """The Python of TFRA's environment, with TensorFlow 2.16."""
    peer = runpy.run_path(str(ROOT / "benchmarks" / "peers" / "tfra.py"))
    if not peer["is_set_up"]():
        pytest.skip("TFRA is not installed: `make peers` makes its environment")
    return str(peer["PYTHON"])


def run(python: str, program: Path, *arguments: object) -> None:
    """Run a program; what it printed is in the error."""
    command = [python, str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{program.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


@pytest.fixture(scope="session")
def tfra(python_of_tfra: str) -> Callable[..., None]:
    """Run a program of tests/peers/tfra/ in TFRA's environment."""
    return lambda program, *arguments: run(python_of_tfra, HERE / "tfra" / program, *arguments)


@pytest.fixture(scope="session")
def ask(python_of_tfra: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Ask models in a process that has TensorFlow alone: 2.16, or the one of "this" environment. See ask.py."""

    def ask(requests: dict[str, Any], tensorflow: str) -> Any:
        folder = tmp_path_factory.mktemp("asked")
        (folder / "requests").write_bytes(pickle.dumps(requests))
        python = python_of_tfra if tensorflow == "2.16" else sys.executable
        run(python, HERE / "ask.py", folder / "requests", folder / "answers")
        return pickle.loads((folder / "answers").read_bytes())

    return ask
