"""A worker that is several: the same requests to each Horovod rank of this machine, all at once.

To `turns.py` it is a worker like others. A request is done when the slowest rank has done it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from turns import WORKER, Worker, WorkerError, Workers

from kvtools.horovod_setup.setup import HOROVODRUN

START_SECONDS = 300.0
ANSWER_SECONDS = 600.0


class RanksWorker(Worker):
    """A process for each rank, all of which run `worker.py`."""

    def __init__(self, ranks: int, threads: int, extra: dict[str, str]) -> None:
        self._name = f"{ranks} ranks, {threads} threads each"
        self._notes = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open while the processes run)
        self._folder = tempfile.TemporaryDirectory(prefix="kvtools-ranks-")
        address = str(Path(self._folder.name) / "socket")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(address)
        self._server.listen(ranks)
        self._server.settimeout(1.0)
        self._connections: list[tuple[TextIO, TextIO]] = []
        worker = [sys.executable, str(WORKER), "--library", "kv", "--threads", str(threads), "--socket", address]
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOROVODRUN, "-np", str(ranks), "--gloo", "-H", f"localhost:{ranks}", *worker],
            stdin=subprocess.DEVNULL,
            stdout=self._notes,
            stderr=self._notes,
            env={**os.environ, "HOROVOD_LOG_LEVEL": "error", **extra},
            text=True,
            start_new_session=True,
        )
        self._ranks = ranks
        self.versions: dict[str, str] = {}

    def wait_until_ready(self) -> None:
        """Until all ranks have found each other."""
        waited = 0.0
        while len(self._connections) < self._ranks:
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                waited += 1.0
                if waited < START_SECONDS and self.alive:
                    continue
                raise WorkerError(f"{self._name} did not start: {self._last_notes()}") from None
            connection.settimeout(ANSWER_SECONDS)
            self._connections.append((connection.makefile("r"), connection.makefile("w")))
        hello = self._read_each()
        self._connections = [self._connections[i] for i in sorted(range(self._ranks), key=lambda i: hello[i]["rank"])]
        self.versions = {**hello[0]["versions"], "horovod": hello[0]["horovod"]}

    def ask(self, do: str, side: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request to all ranks and waits for all. The answer is rank 0's, the seconds those of the slowest."""
        if not self._connections:
            raise WorkerError(f"{self._name} were stopped")
        for _, requests in self._connections:
            try:
                requests.write(json.dumps({"do": do, "side": side, **arguments}) + "\n")
                requests.flush()
            except OSError:  # `_read_each` says what happened
                break
        answers = self._read_each()
        if "seconds" in answers[0]:
            answers[0]["seconds"] = max(answer["seconds"] for answer in answers)
        return answers[0]

    def _read_each(self) -> list[dict[str, Any]]:
        answers = []
        for number, (lines, _) in enumerate(self._connections):
            try:
                line = lines.readline()
            except TimeoutError:
                self.stop()
                raise WorkerError(f"{self._name}: number {number} has not answered for {ANSWER_SECONDS:g} s") from None
            except ConnectionError:
                line = ""
            if not line:
                raise WorkerError(f"{self._name}: number {number} ended: {self._last_notes()}")
            answers.append(json.loads(line))
        errors = [f"rank {number}: {answer['error']}" for number, answer in enumerate(answers) if "error" in answer]
        if errors:
            raise WorkerError("; ".join(errors))
        return answers

    def stop(self) -> None:
        """Ends all processes."""
        for lines, requests in self._connections:
            with contextlib.suppress(OSError):  # a rank that is gone does not take what was left to send
                requests.close()
            lines.close()
        self._connections.clear()
        self._server.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGTERM)  # horovodrun ends its ranks
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._notes.close()
        self._folder.cleanup()


class WorkersWithRanks(Workers):
    """Workers of which the library `ranks` is `kv` on so many ranks, and `3 ranks` on 3."""

    def __init__(self, ranks: int, environment: dict[str, str], most: int = 1) -> None:
        counts = {"ranks": ranks, **{f"{count} ranks": count for count in range(2, most + 1)}}
        super().__init__(dict.fromkeys(["kv", *counts], Path(sys.executable)), environment)
        self._counts = counts

    def start(self, library: str, threads: int) -> Worker:
        """A new worker, which need not be ready yet."""
        if library in self._counts:
            return RanksWorker(self._counts[library], threads, self.environment)
        return super().start(library, threads)
