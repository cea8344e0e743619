"""Runs pytest on several Horovod ranks of this machine at once, and brings together what each rank saw.

Each rank is a process that runs `in_rank.py` over the same test files. A rank appends what happens to a file of its
own and waits after each test until every rank has ended it: the ranks stay in step, also when one of them fails.
This side follows those files. It ends a run in which nothing moves any more, with the stacks of each rank, and starts
another for the tests that were left, so that one deadlock does not hide the other tests.

    report = run_on_ranks(2, ["tests/sok/collective/check_alltoall.py"], tmp_path)
    assert not report.failures(), report.failures()
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fork_server

from kvtools.horovod_setup.setup import HOROVODRUN

IN_RANK = Path(__file__).with_name("in_rank.py")
START_TIMEOUT = 120.0  # each rank imports TensorFlow
TAIL_LINES = 60


@dataclass
class RankLog:
    """What one rank wrote: the tests it collected, the one it is in, and how those before ended."""

    pid: int = 0
    collected: list[str] = field(default_factory=list)
    current: str | None = None
    outcomes: dict[str, str] = field(default_factory=dict)  # by test: passed, failed, skipped
    reports: dict[str, str] = field(default_factory=dict)  # by test: the traceback, or why it was skipped
    collection_error: str = ""
    finished: bool = False
    output: str = ""

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankLog:
        """Read the files of a rank as far as they are written."""
        log = cls()
        with contextlib.suppress(FileNotFoundError):
            for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    log._take(json.loads(line))
        with contextlib.suppress(FileNotFoundError):
            log.output = (folder / f"rank-{rank}.log").read_text(errors="replace")
        return log

    def _take(self, event: dict[str, object]) -> None:
        kind = event.pop("event")
        if kind == "ended":
            test = str(event["test"])
            self.outcomes[test] = str(event["outcome"])
            self.reports[test] = str(event["report"])
        elif kind == "agreed":
            self.current = None
        else:  # started, in_test, collected, collection_failed, finished: one attribute each
            vars(self).update(event)


@dataclass
class RanksReport:
    """What all ranks saw: for each test its outcome on each rank, None where the rank did not end it."""

    ranks: int
    outcomes: dict[str, list[str | None]] = field(default_factory=dict)
    reports: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # what went wrong outside any test

    def tests(self, file: Path | str | None = None) -> list[str]:
        """The tests that were collected, of one file or of all."""
        return [test for test in self.outcomes if file is None or test.split("::")[0].endswith(Path(file).name)]

    def passed(self, test: str) -> bool:
        """Whether a test passed, or was skipped, on every rank."""
        return all(outcome in ("passed", "skipped") for outcome in self.outcomes[test])

    def failures(self, file: Path | str | None = None) -> str:
        """Say what failed, with the tracebacks of the ranks that failed; empty if nothing did."""
        parts = list(self.broken)
        for test in self.tests(file):
            if not self.passed(test):
                told = ", ".join(f"rank {rank}: {out or 'no end'}" for rank, out in enumerate(self.outcomes[test]))
                parts.append(f"{test} ({told})\n{self.reports.get(test, '')}")
        if not self.tests(file) and not parts:
            parts.append(f"no test was collected from {file or 'the files'}")
        return "\n\n".join(parts)

    def summary(self, file: Path | str | None = None) -> str:
        """One line for each test."""
        return "\n".join(
            f"{'ok  ' if self.passed(test) else 'FAIL'} {test} {'/'.join(str(out) for out in self.outcomes[test])}"
            for test in self.tests(file)
        )


def rank_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a rank: no accelerator, one thread, the same hashes, and no wait without an end."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
        "HOROVOD_LOG_LEVEL": "error",
        "PYTHONHASHSEED": "0",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a second for each rank
        **(extra or {}),
    }


class ForkedRanks:
    """The ranks of a run, each a fork that has imported everything: what `horovodrun` does, for one machine.

    Once a rank has failed the others are ended, as its launcher would.
    """

    def __init__(
        self, ranks: int, script: Path, arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.outputs = [folder / f"printed-{rank}.log" for rank in range(ranks)]
        self._rendezvous: Any = None
        places: list[dict[str, str]] = [{}]
        if ranks > 1:
            from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
            from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
            from horovod.runner.http.http_server import RendezvousServer

            self._rendezvous = RendezvousServer()
            port = self._rendezvous.start()
            slots = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
            self._rendezvous.init(slots)
            common = create_run_env_vars("127.0.0.1", ["lo"], port)
            places = [{**common, **create_slot_env_vars(slot)} for slot in slots]
        self._ranks = [
            fork_server.start(
                script, arguments, {**rank_environment(env), **{k: str(v) for k, v in place.items()}}, output
            )
            for place, output in zip(places, self.outputs, strict=True)
        ]
        self._failed = 0.0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The status of the first rank that failed, 0 where none did; None while any runs."""
        statuses = [rank.poll() for rank in self._ranks]
        if any(status not in (None, 0) for status in statuses):
            if not self._failed:
                self._failed = time.monotonic()
                self._signal(signal.SIGTERM)
            elif time.monotonic() - self._failed > 5:
                self._signal(signal.SIGKILL)
        if self.returncode is None and None not in statuses:
            self.returncode = next((status for status in statuses if status), 0)
            if self._rendezvous is not None:
                self._rendezvous.stop()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """As of `subprocess.Popen`."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("ranks", timeout)
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        """End all ranks."""
        self._signal(signal.SIGKILL)
        self.wait(15)

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)


def fork_on_ranks(
    ranks: int, script: Path | str, *args: str, folder: Path, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """As `launch_on_ranks`, without `horovodrun`, and at once: the ranks have imported TensorFlow.

    `folder` takes what they print; what is returned has it rank after rank.
    """
    place = Path(tempfile.mkdtemp(prefix="ranks-", dir=folder))
    process = ForkedRanks(ranks, Path(script), args, place)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise subprocess.TimeoutExpired(str(script), timeout, _printed(process.outputs)) from error
    return subprocess.CompletedProcess([str(script), *args], process.returncode or 0, _printed(process.outputs))


def _printed(outputs: Sequence[Path]) -> str:
    return "".join(output.read_text(errors="replace") for output in outputs if output.exists())


def rank_command(ranks: int, command: Sequence[str]) -> list[str]:
    """The command that starts `command` on each of `ranks` ranks of this machine."""
    if ranks == 1:
        return [*command]
    return [sys.executable, "-c", HOROVODRUN, "-np", str(ranks), "--gloo", "-H", f"localhost:{ranks}", *command]


def launch_on_ranks(
    ranks: int,
    script: Path | str,
    *args: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 180,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script on each rank, and return its exit status and what all ranks printed (in stdout).

    For what a test inside the ranks cannot show: a rank that dies, a restart, an example. Beyond `timeout` seconds all
    ranks are ended and `subprocess.TimeoutExpired` is raised, with what they printed so far.
    """
    command = rank_command(ranks, [sys.executable, str(script), *args])
    process = subprocess.Popen(
        command,
        env=rank_environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        _end(process)
        raise subprocess.TimeoutExpired(command, timeout, process.communicate()[0]) from error
    return subprocess.CompletedProcess(command, process.returncode, out)


def run_on_ranks(
    ranks: int,
    files: Sequence[Path | str],
    folder: Path,
    *,
    keyword: str = "",
    marks: str = "",
    env: Mapping[str, str] | None = None,
    timeout: float = 180,
    grace: float = 20,
    launches: int = 5,
) -> RanksReport:
    """Run the tests in `files` on `ranks` ranks at once, and return the outcome of each test on each rank.

    With one rank, Horovod is neither used nor importable. `folder` (empty) takes the ranks' files. `keyword` and
    `marks` select tests as pytest's -k and -m do. A test is given up, with the stacks of all ranks, when no rank gets
    anywhere for `timeout` seconds, or one rank failed and the others do not end the test within `grace` seconds more.
    The tests after it run in another launch, of at most `launches` in all.
    """
    report = RanksReport(ranks)
    done: list[str] = []
    for number in range(1, launches + 1):
        place = folder / f"launch-{number}"
        place.mkdir(parents=True)
        (place / "done.json").write_text(json.dumps(done))
        arguments = [str(place), *(str(Path(file).resolve()) for file in files)]
        arguments += [*(["-k", keyword] if keyword else []), *(["-m", marks] if marks else [])]
        process = ForkedRanks(ranks, IN_RANK, arguments, place, env)
        stopped = _follow(process, ranks, place, timeout, grace)
        logs = [RankLog.read(place, rank) for rank in range(ranks)]
        at = _collect(report, logs, stopped, _printed(process.outputs))
        if at is None:
            return report
        done = list(report.outcomes)[: list(report.outcomes).index(at) + 1]
    report.broken.append(f"gave up after {launches} launches, none of which came to its end")
    return report


def _follow(process: ForkedRanks, ranks: int, place: Path, timeout: float, grace: float) -> str:
    """Wait for the end; end it where nothing moves. Return why it was ended, empty if it ended by itself."""
    seen: list[int] = []
    moved = time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        files = [place / f"rank-{rank}.jsonl" for rank in range(ranks)]
        sizes = [file.stat().st_size if file.exists() else 0 for file in files]
        if sizes != seen:
            seen, moved = sizes, time.monotonic()
            continue
        still = time.monotonic() - moved
        if still < min(timeout, grace):
            continue
        logs = [RankLog.read(place, rank) for rank in range(ranks)]
        in_tests = all(log.current is not None for log in logs)
        if _one_failed(logs) and still >= grace:
            why = f"one rank failed, and the others did not end the test within {grace:g} s"
        elif still >= (timeout if in_tests else max(timeout, START_TIMEOUT)):
            why = f"no rank got anywhere for {still:.0f} s"
        else:
            continue
        _show_stacks(place, logs)
        process.kill()
        return why
    return ""


def _one_failed(logs: Sequence[RankLog]) -> bool:
    """Whether some rank has failed the test that it is in."""
    return any(log.current is not None and log.outcomes.get(log.current) == "failed" for log in logs)


def _show_stacks(place: Path, logs: Sequence[RankLog]) -> None:
    """Have each rank that lives write its stacks into its log, and wait until they are there."""
    outputs = [place / f"rank-{rank}.log" for rank, log in enumerate(logs) if log.pid]
    before = [output.stat().st_size for output in outputs]
    for log in logs:
        with contextlib.suppress(ProcessLookupError):
            if log.pid:
                os.kill(log.pid, signal.SIGUSR1)  # faulthandler's
    sizes, deadline = before, time.monotonic() + 15
    while time.monotonic() < deadline:
        time.sleep(0.5)
        seen, sizes = sizes, [output.stat().st_size for output in outputs]
        if seen == sizes and all(size > old for size, old in zip(sizes, before, strict=True)):
            return


def _end(process: subprocess.Popen[str]) -> None:
    # The launcher ends its ranks when it is told to end; it is given the time to.
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _collect(report: RanksReport, logs: Sequence[RankLog], stopped: str, printed: str) -> str | None:
    """Add what a launch brought to the report. Return the test in which it broke off, None if there is no more."""
    for log in logs:
        for test in log.collected:
            report.outcomes.setdefault(test, [None] * report.ranks)
    ended = {test for log in logs for test in log.outcomes}
    for test in sorted(ended, key=list(report.outcomes).index):
        report.outcomes[test] = [log.outcomes.get(test) for log in logs]
        report.reports[test] = "\n".join(
            f"--- rank {rank} ---\n{log.reports[test]}" for rank, log in enumerate(logs) if log.reports.get(test)
        )
    errors = [f"--- rank {rank} ---\n{log.collection_error}" for rank, log in enumerate(logs) if log.collection_error]
    if errors:
        report.broken.append("collecting the tests failed\n" + "\n".join(errors))
        return None
    if all(log.finished for log in logs):
        return None
    at = next((log.current for log in logs if log.current), None)
    tails = "\n".join(
        f"--- output of rank {rank} ---\n" + _tail(log.output) for rank, log in enumerate(logs) if not log.finished
    )
    why = f"{stopped or 'a rank ended in the middle'}\n{tails}\n--- printed outside of tests ---\n{_tail(printed)}"
    if at is None:
        report.broken.append(why)
        return None
    report.outcomes[at] = [log.outcomes.get(at) for log in logs]
    report.reports[at] = "\n".join(filter(None, [report.reports.get(at, ""), why]))
    return at


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL_LINES:])
