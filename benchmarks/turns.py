"""Workers that take turns: each library in a process of its own, one working at a time.

A round lets every side of a case work once, in an order that rotates; ratios are taken within a round. So whatever else
the machine does meets all sides alike, and none finds the caches warmer because of its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases.case import Case, Size

WORKER = Path(__file__).resolve().parent / "worker.py"

#: Makes glibc's malloc hold on to what is freed. As it comes, it returns large outputs to the system or not, depending
#: on what else the process ever allocated; if it does, the next call fetches every page anew, which is two thirds of
#: the CPU time of a lookup at dim 128.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_ARENA_MAX": "1"}


class WorkerError(Exception):
    """A worker could not do what it was asked; the message says why."""


class Worker:
    """A process that runs `worker.py`."""

    def __init__(self, python: Path, library: str, threads: int, extra: dict[str, str]) -> None:
        self._name = f"{library}, {threads} threads"
        self._notes = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open while the process runs)
        # Not the caller's: TFRA asks for the legacy Keras, the others must not get it.
        environment = {name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"} | extra
        self._process = subprocess.Popen(
            [str(python), str(WORKER), "--library", library, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._notes,
            env=environment,
            text=True,
        )
        self.versions: dict[str, str] = {}

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Until the library is imported."""
        self.versions = self._read()["versions"]

    def ask(self, do: str, side: str, **arguments: Any) -> dict[str, Any]:
        """Sends one request and waits for its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_read` says what happened
            self._process.stdin.write(json.dumps({"do": do, "side": side, **arguments}) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"the worker of {self._name} ended with {self._process.wait()}: {self._last_notes()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def _last_notes(self) -> str:
        self._notes.seek(0)
        return self._notes.read()[-2000:]

    def stop(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._notes.close()


class Workers:
    """The workers of a run, started when first needed.

    `pythons` names each library's interpreter, `environment` holds variables that all of them get.
    """

    def __init__(self, pythons: dict[str, Path], environment: dict[str, str]) -> None:
        self.pythons = pythons
        self.environment = environment
        self._running: dict[tuple[str, int], Worker] = {}

    def start(self, library: str, threads: int) -> Worker:
        """A new worker, which need not be ready yet."""
        return Worker(self.pythons[library], library, threads, self.environment)

    def of(self, libraries: list[str], threads: int) -> dict[str, Worker]:
        """Workers for these libraries; those that are not there yet start together."""
        new = []
        for library in libraries:
            running = self._running.get((library, threads))
            if running is not None and not running.alive:  # it failed in an earlier case
                self._running.pop((library, threads)).stop()
            if (library, threads) not in self._running:
                self._running[library, threads] = self.start(library, threads)
                new.append((library, threads))
        for key in new:
            try:
                self._running[key].wait_until_ready()
            except WorkerError:
                self._running.pop(key).stop()
                raise
        return {library: self._running[library, threads] for library in libraries}

    def versions(self) -> dict[str, dict[str, str]]:
        """Of what each library's workers imported."""
        return {library: worker.versions for (library, _), worker in self._running.items()}

    def stop(self) -> None:
        """Ends all."""
        for worker in self._running.values():
            worker.stop()
        self._running.clear()


@contextlib.contextmanager
def workers(pythons: dict[str, Path], environment: dict[str, str]) -> Iterator[Workers]:
    """Workers that are gone when the block is left, however it is."""
    crew = Workers(pythons, environment)
    try:
        yield crew
    finally:
        crew.stop()


def measure(crew: Workers, case: Case, size: Size) -> dict[str, Any]:
    """Prepares all sides of a case, lets them take turns, and returns seconds per call, round by round.

    A side that fails is reported with its error and leaves the others alone, as does one whose first result differs.
    """
    sides = {name: side for name, side in case.sides.items() if side.library in crew.pythons}
    by_library = crew.of(sorted({side.library for side in sides.values()}), case.threads)
    results: dict[str, Any] = {name: {} for name in sides}
    calls: dict[str, int] = {}

    def attempt(name: str, do: str, **arguments: Any) -> dict[str, Any] | None:
        worker = by_library[sides[name].library]
        try:
            return worker.ask(do, name, **arguments)
        except WorkerError as error:
            print(f"  {name}: {error}", file=sys.stderr, flush=True)
            results[name]["error"] = str(error)
            calls.pop(name, None)
            return None

    for name, side in sides.items():
        answer = attempt(name, "prepare", work=case.work, case={**case.parameters, **side.changes})
        if answer is None:
            continue
        results[name]["check"] = answer["check"]
        if case.calls is not None:
            calls[name] = case.calls
        else:
            first = attempt(name, "run", calls=1)
            if first is not None:
                calls[name] = max(1, round(size.turn_seconds / max(first["seconds"], 1e-9)))
                calls[name] = min(calls[name], 100_000)
    _compare_checks(results)

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for round_ in range(size.rounds):
        for i in range(len(order)):
            name = order[(i + round_) % len(order)]
            answer = attempt(name, "run", calls=calls[name]) if name in calls else None
            if answer is not None:
                seconds[name].append(answer["seconds"] / calls[name])
    for name in order:
        evaluation = attempt(name, "evaluate") if name in calls else None
        results[name].update(evaluation or {})
    for name in sides:
        attempt(name, "drop")
    for name, times in seconds.items():
        if times and "error" not in results[name]:
            results[name].update(seconds=times, median=statistics.median(times), calls=calls[name])
    return results


def _compare_checks(results: dict[str, Any]) -> None:
    """All sides must have computed the same before any of their speeds counts."""
    checks = {name: result["check"] for name, result in results.items() if result.get("check") is not None}
    if not checks:
        return
    middle = statistics.median(checks.values())
    for name, check in checks.items():
        if abs(check - middle) > 1e-4 * max(abs(middle), 1e-6):
            results[name]["error"] = f"computed {check}, where others have {middle}"
            print(f"  {name}: {results[name]['error']}", file=sys.stderr, flush=True)


def ratio(results: dict[str, Any], of: str, to: str, of_times: bool = False) -> float | None:
    """Median over the rounds of the speed of one side over that of another; of times instead where asked for."""
    if any("seconds" not in results.get(name, {}) for name in (of, to)):
        return None
    pairs = zip(results[of]["seconds"], results[to]["seconds"], strict=True)
    return statistics.median(a / b if of_times else b / a for a, b in pairs)
