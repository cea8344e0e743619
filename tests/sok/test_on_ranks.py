"""The tests in `collective/`, on 1, 2 and 3 ranks of this machine. One launch runs all of them that were asked for.

    pytest tests/sok/test_on_ranks.py                        all of them
    pytest tests/sok/test_on_ranks.py -k 'alltoall and 2'    one file, on 2 ranks
    KVTOOLS_RANKS_K=gradient pytest tests/sok/test_on_ranks.py -k 3      the tests in them that match

To add tests: write `collective/check_SUBJECT.py`, an ordinary test file (`def test_...`). Each rank runs each test, in
the same order. Beside pytest's own fixtures there are `rank`, `size`, `hvd`, `gather` and `shared_path`, explained in
`in_rank.py`. On 1 rank, Horovod cannot be imported: what needs it is skipped by asking for `hvd`.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import RanksReport, run_on_ranks

FILES = sorted(path.stem for path in (Path(__file__).parent / "collective").glob("check_*.py"))


@pytest.fixture(scope="session")
def report_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], RanksReport]:
    """The report of a number of ranks, made once in a run of pytest, also where that is several processes."""
    mine = tmp_path_factory.getbasetemp()
    shared = mine.parent if hasattr(request.config, "workerinput") else mine

    def of(ranks: int) -> RanksReport:
        kept = shared / f"report-of-{ranks}.pickle"
        with (shared / f"report-of-{ranks}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                items = [item for item in request.session.items if item.path.name == Path(__file__).name]
                files = [item.callspec.params["file"] for item in items if item.callspec.params["ranks"] == ranks]
                folder = tmp_path_factory.mktemp(f"ranks-{ranks}-")
                paths = [Path(__file__).parent / "collective" / f"{file}.py" for file in files]
                report = run_on_ranks(ranks, paths, folder, keyword=os.environ.get("KVTOOLS_RANKS_K", ""))
                kept.write_bytes(pickle.dumps(report))
            report = pickle.loads(kept.read_bytes())
        assert isinstance(report, RanksReport)
        return report

    return of


THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=THOROUGH), pytest.param(3, marks=THOROUGH)])
@pytest.mark.parametrize("file", FILES)
def test_on_ranks(file: str, ranks: int, report_of: Callable[[int], RanksReport]) -> None:
    if ranks > 1 and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: run `make setup-horovod`")
    report = report_of(ranks)
    if "KVTOOLS_RANKS_K" in os.environ and not report.broken and not report.tests(f"{file}.py"):
        pytest.skip("KVTOOLS_RANKS_K selects no test of this file")
    print(report.summary(f"{file}.py"))
    if failures := report.failures(f"{file}.py"):
        pytest.fail(f"on {ranks} ranks:\n{failures}", pytrace=False)
