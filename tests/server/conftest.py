"""A `kvtools serve` in a process of its own, and versions for it to serve."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from version_files import write_snapshot


@pytest.fixture
def write_version() -> Callable[..., Path]:
    return write_snapshot


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
def _serve(folder: Path, *arguments: Any) -> Iterator[Server]:
    command = [sys.executable, "-m", "kvtools.cli.main", "serve", *map(str, arguments)]
    if "--port" not in arguments:
        command += ["--port", "0"]
    command += ["--cache", str(folder / "cache")]
    errors = folder / "stderr.txt"
    file: IO[str]
    with errors.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, cwd=folder)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"https?://127\.0\.0\.1:(\d+)", line)
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
        yield lambda *arguments: stack.enter_context(_serve(tmp_path, *arguments))
