"""One rank of a run that `ranks.py` started: runs pytest over the files named, in step with the other ranks.

    in_rank.py FOLDER FILE... [-k EXPRESSION]

The ranks agree through files in FOLDER, and not through Horovod: they still do when Horovod is what failed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RANK = int(os.environ.get("HOROVOD_RANK", "0"))
SIZE = int(os.environ.get("HOROVOD_SIZE", "1"))


class PeerFailedError(Exception):
    """Another rank failed the test in which this rank waits for it."""


class InStep:
    """A pytest plugin: tells what happens on this rank, and waits for the others at the end of each test.

    Its fixtures are what a test on ranks has beside pytest's own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events = (folder / f"rank-{RANK}.jsonl").open("a")
        self._done = set(json.loads((folder / "done.json").read_text()))
        self._phases: list[pytest.TestReport] = []
        self._step = 0  # tests that all ranks have ended
        self._gathers = 0  # within this step; a test that fails leaves out some

    @pytest.fixture(scope="session")
    def rank(self) -> int:
        """The number of this rank."""
        return RANK

    @pytest.fixture(scope="session")
    def size(self) -> int:
        """How many ranks there are."""
        return SIZE

    @pytest.fixture
    def gather(self) -> Callable[[Any], list[Any]]:
        """`gather(value)` gives the values of all ranks, in their order, on every rank; Horovod has no part in it."""
        return self._gather

    @pytest.fixture
    def shared_path(self) -> Path:
        """An empty folder that is the same on all ranks, new for each test (`tmp_path` is each rank's own)."""
        path = self.folder / f"shared-{self._step}"
        path.mkdir(exist_ok=True)
        return path

    @pytest.fixture(scope="session")
    def hvd(self) -> Any:
        """Horovod's module for TensorFlow, initialised; on a single rank the test is skipped."""
        if SIZE == 1:
            pytest.skip("a single rank has no Horovod")
        import horovod.tensorflow

        horovod.tensorflow.init()
        return horovod.tensorflow

    @pytest.fixture(scope="session", autouse=True)
    def _horovod_started(self) -> None:
        if SIZE > 1 and "tensorflow" in sys.modules:  # a test file imported it
            import horovod.tensorflow

            horovod.tensorflow.init()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell("collection_failed", collection_error=report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        mine = [item.nodeid for item in session.items]
        self.tell("collected", collected=mine)
        of_ranks = self._gather(None if session.testsfailed else mine)
        if None in of_ranks:  # that rank has told why
            raise pytest.UsageError("a rank could not collect its tests")
        for rank, theirs in enumerate(of_ranks):
            if theirs != mine:
                only = ", ".join(sorted(set(mine) ^ set(theirs))[:5]) or "none"
                different = f"ranks {RANK} and {rank} collected different tests, or in another order; one has {only}"
                self.tell("collection_failed", collection_error=different)
                raise pytest.UsageError(different)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._phases = []
        self.tell("in_test", current=item.nodeid)
        result = yield
        outcome, report = self._outcome()
        self.tell("ended", test=item.nodeid, outcome=outcome, report=report)
        self._end_step(outcome)
        self.tell("agreed")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._phases.append(report)

    def tell(self, event: str, **what: object) -> None:
        """Append to what the process that started the ranks reads."""
        self._events.write(json.dumps({"event": event, **what}) + "\n")
        self._events.flush()

    def _outcome(self) -> tuple[str, str]:
        failed = [phase for phase in self._phases if phase.failed]
        if failed:
            texts = [f"(in {phase.when})\n{phase.longreprtext}\n" for phase in failed]
            printed = [f"{name}:\n{text}\n" for name, text in failed[-1].sections]
            return "failed", "".join(texts + printed)
        skipped = [phase for phase in self._phases if phase.skipped]
        return ("skipped", skipped[0].longreprtext) if skipped else ("passed", "")

    def _gather(self, value: Any) -> list[Any]:
        self._gathers += 1
        name = f"gather-{self._step}-{self._gathers}"
        fresh = self.folder / f".{name}-{RANK}"
        fresh.write_bytes(pickle.dumps(value))
        fresh.replace(self.folder / f"{name}-{RANK}")
        files = [self.folder / f"{name}-{rank}" for rank in range(SIZE)]
        while not all(file.exists() for file in files):
            for rank, file in enumerate(files):
                ended = self.folder / f"ended-{self._step}-{rank}"
                if ended.exists() and not file.exists():
                    raise PeerFailedError(f"rank {rank} ended this test before it came to this gather")
            time.sleep(0.002)
        return [pickle.loads(file.read_bytes()) for file in files]

    def _end_step(self, outcome: str) -> None:
        """Wait until every rank has ended the test. Whoever started the ranks ends this wait if one never does."""
        (self.folder / f"ended-{self._step}-{RANK}").write_text(outcome)
        ended = [self.folder / f"ended-{self._step}-{rank}" for rank in range(SIZE)]
        while not all(file.exists() for file in ended):
            time.sleep(0.002)
        self._step += 1
        self._gathers = 0


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    log = (folder / f"rank-{RANK}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    if SIZE == 1:  # it must do without
        for module in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
            del sys.modules[module]
        sys.modules["horovod"] = None  # type: ignore[assignment]
    plugin = InStep(folder)
    plugin.tell("started", pid=os.getpid())
    options = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-rN", "--basetemp", str(folder / f"tmp-{RANK}")]
    status = pytest.main([*options, *arguments[1:]], plugins=[plugin])
    plugin.tell("finished", finished=True)
    # A failed test is in the files; a status other than 0 would have the launcher end the other ranks.
    return int(status) if status == pytest.ExitCode.INTERNAL_ERROR else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
