"""Versions of a model whose every row tells which version it is of."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

ROWS = 200
DIM = 4


def expected_rows(number: int, keys: Any) -> Any:
    """The rows of `keys` in version `number`: version and key, in numbers that float32 has exactly."""
    return np.repeat((number * 1000 + np.asarray(keys, np.float32))[:, None], DIM, axis=1).astype(np.float32)


@pytest.fixture
def write_version(save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any) -> Callable[..., Path]:
    """Write a version of the table `emb`, keys 0 to 199, beside its place, and rename it."""
    template = make_sample("emb", rows=8, dim=DIM, slots=())
    template.keys = np.arange(ROWS)
    template.freqs = template.versions = None

    def write(folder: Path, number: int, *, name: str | None = None, says: int | None = None) -> Path:
        template.values = expected_rows(number if says is None else says, template.keys)
        beside, place = folder.parent / f"beside-{number}", folder / (name or str(number))
        save_plain(beside / "model", table_tensors(template))
        folder.mkdir(exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        beside.rename(place)
        return place

    return write


@dataclass
class Server:
    """A `kvtools serve` in a process of its own."""

    process: subprocess.Popen[str]
    port: int
    line: str
    errors: Path

    def stderr(self) -> str:
        return self.errors.read_text()


@contextlib.contextmanager
def _serve(folder: Path, *arguments: Any, env: dict[str, str] | None = None) -> Iterator[Server]:
    command = [sys.executable, "-m", "kvtools.cli.main", "serve", *map(str, arguments)]
    if "--port" not in arguments:
        command += ["--port", "0"]
    errors = folder / "stderr.txt"
    file: IO[str]
    with errors.open("w") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, env={**os.environ, **(env or {})}
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line + errors.read_text()
        yield Server(process, int(found[1]), line, errors)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start `kvtools serve` with arguments; it is killed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(_serve(tmp_path, *arguments, **options))
