"""A side of a comparison: a SavedModel in a process of its own, asked over pipes; and turns between several."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]


class SideError(Exception):
    """A process ended before it had answered; it says above why."""


@dataclass(frozen=True)
class Model:
    """What a side loads.

    Attributes:
        folder: a SavedModel.
        tfplugin: whether it has our operations.
        how: as `model_process` has it.
    """

    folder: Path
    tfplugin: bool = False
    how: str = "session"


def environment() -> dict[str, str]:
    """Where the modules of the benchmarks are found, from whatever folder."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    }


def told_by(module: str, *arguments: object) -> dict[str, Any]:
    """Run a module of the benchmarks to its end; return the object that its last line is. Raises `SideError`."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    # In the repository's folder, `-m` would import the sources of kvtools and not what is installed.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=BENCHMARKS)
    if done.returncode:
        raise SideError(f"{module} {' '.join(map(str, arguments))} failed; it says why above")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


class Side:
    """A process, from its start until `close`."""

    def __init__(self, model: Model) -> None:
        self.model = model
        kind = "tfplugin" if model.tfplugin else "stock"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "exporting.model_process", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=BENCHMARKS,
        )

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"the process with '{self.model.folder}' ended; it says why above")
        told: dict[str, Any] = json.loads(line)
        return told

    def ready(self) -> str:
        """Wait until it has imported TensorFlow; return of which version."""
        return str(self._read()["tensorflow"])

    def ask(self, **what: Any) -> dict[str, Any]:
        """Have it do something; see `model_process`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._read()

    def load(self, requests: Path) -> dict[str, Any]:
        """Load the model and ask for one example."""
        return self.ask(do="load", folder=str(self.model.folder), how=self.model.how, requests=str(requests))

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._process.communicate()


@contextlib.contextmanager
def sides(models: Mapping[str, Model]) -> Iterator[dict[str, Side]]:
    """Start a process for each model, and end them all; none has loaded its model yet."""
    started: dict[str, Side] = {}
    try:
        for name, model in models.items():
            started[name] = Side(model)
        for side in started.values():
            side.ready()
        yield started
    finally:
        for side in started.values():
            side.close()


def in_turns(
    asked: Mapping[str, Side], requests: Mapping[str, Path], batch: int, rounds: int, seconds: float
) -> dict[str, float]:
    """Requests a second of each side, each of `batch` examples: medians over rounds in which each has its turn."""
    names = list(asked)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        at = number % len(names)
        for name in (*names[at:], *names[:at]):
            told = asked[name].ask(do="run", requests=str(requests[name]), batch=batch, seconds=seconds)
            rates[name].append(told["per_second"])
    return {name: statistics.median(rates[name]) for name in names}


def bytes_of(folder: Path, files: Sequence[str] = ("**/*",)) -> int:
    """The size of a folder on disk."""
    return sum(path.stat().st_size for pattern in files for path in folder.glob(pattern) if path.is_file())
