"""The tasks of a cluster, each a process of its own: forks of one that has imported TensorFlow and the plugin.

with Tasks(tmp_path) as tasks:
    servers = [tasks.start(SERVER, cluster, str(i)) for i in (0, 1)]
    for server in servers:
        server.wait_for_line("ready")
    result = tasks.start(WORKER, cluster).result()
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import fork_server
from ranks import rank_environment


class Task:
    """A program that runs, and what it prints."""

    def __init__(self, program: str, arguments: tuple[str, ...], folder: Path) -> None:
        script, self._output = folder / "program.py", folder / "printed"
        script.write_text(program)
        self._output.touch()
        environment = rank_environment()
        del environment["TF_NUM_INTRAOP_THREADS"]  # a task has all processors
        self._process = fork_server.start(script, arguments, environment, self._output)

    def wait_for_line(self, line: str, timeout: float = 240) -> None:
        """Wait until it has printed a line."""
        end = time.monotonic() + timeout
        while line not in self._printed().splitlines():
            assert self._process.poll() is None and time.monotonic() < end, self._printed()[-3000:]
            time.sleep(0.01)

    def wait(self, timeout: float = 240) -> str:
        """Wait until it has ended, well, and return what it printed."""
        end = time.monotonic() + timeout
        while (status := self._process.poll()) is None:
            assert time.monotonic() < end, f"it runs for {timeout:g} s:\n{self._printed()[-3000:]}"
            time.sleep(0.01)
        assert status == 0, self._printed()[-3000:]
        return self._printed()

    def result(self, timeout: float = 240) -> Any:
        """The JSON that it printed last, once it has ended."""
        documents = [line for line in self.wait(timeout).splitlines() if line.startswith(("{", '"'))]
        return json.loads(documents[-1])

    def kill(self) -> None:
        """End it, if it runs, and wait until it has ended."""
        while self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            time.sleep(0.01)

    def _printed(self) -> str:
        return self._output.read_text(errors="replace")


class Tasks(contextlib.ExitStack):
    """Starts tasks, and ends those that run at the end."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def start(self, program: str, *arguments: str) -> Task:
        """Run a program, with `sys.argv[1:]` as given."""
        task = Task(program, arguments, Path(tempfile.mkdtemp(prefix="task-", dir=self._folder)))
        self.callback(task.kill)
        return task
