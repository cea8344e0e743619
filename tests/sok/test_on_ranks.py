"""The tests in `collective/`, on 1, 2 and 3 ranks of this machine. One launch runs all of them that were asked for.

The ranks share memory; some tests run once more over Horovod, as ranks of several machines do.

    pytest tests/sok/test_on_ranks.py                        all of them
    pytest tests/sok/test_on_ranks.py -m 'not thorough'      on 2 ranks, without what is marked thorough
    pytest tests/sok/test_on_ranks.py -k 'alltoall and 2'    one file, on 2 ranks
    KVTOOLS_RANKS_K=gradient pytest tests/sok/test_on_ranks.py -k 3      the tests in them that match

To add tests: write `collective/check_SUBJECT.py`, an ordinary test file (`def test_...`). Each rank runs each test, in
the same order. Beside pytest's own fixtures there are `rank`, `size`, `hvd`, `gather` and `shared_path`, explained in
`in_rank.py`. On 1 rank, Horovod cannot be imported: what needs it is skipped by asking for `hvd`.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from locks import locked
from ranks import RanksReport, run_on_ranks

FILES = sorted(path.stem for path in (Path(__file__).parent / "collective").glob("check_*.py"))
#: Files whose tests are the same for two ranks and for more.
OF_SEVERAL_RANKS = {"check_agreed_step", "check_de_keras", "check_pages", "check_plain_tables"}
#: Files that also run where ranks do not share memory, as those of several machines.
OVER_HOROVOD = {"check_conformance", "check_errors", "check_wire_dtype"}


@pytest.fixture(scope="session")
def report_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, str, bool], RanksReport]:
    """The report of a launch, which is made once in a run of pytest, also where that is several processes."""
    mine = tmp_path_factory.getbasetemp()
    shared = mine.parent if hasattr(request.config, "workerinput") else mine

    def of(ranks: int, marks: str, shared_memory: bool) -> RanksReport:
        name = f"{ranks}-ranks-{marks.replace(' ', '-')}{'' if shared_memory else '-over-horovod'}"
        kept = shared / f"{name}.pickle"
        with locked(shared / f"{name}.lock"):
            if not kept.exists():
                asked = [i.callspec.params for i in request.session.items if i.path.name == Path(__file__).name]
                launch = ranks, marks, shared_memory
                files = [p["file"] for p in asked if (p["ranks"], p["marks"], p["shared_memory"]) == launch]
                paths = [Path(__file__).parent / "collective" / f"{file}.py" for file in files]
                keyword = os.environ.get("KVTOOLS_RANKS_K", "")
                env = {"KVTOOLS_SHARED_MEMORY": str(int(shared_memory))}
                folder = tmp_path_factory.mktemp(name)
                report = run_on_ranks(ranks, paths, folder, keyword=keyword, marks=marks, env=env)
                kept.write_bytes(pickle.dumps(report))
            report = pickle.loads(kept.read_bytes())
        assert isinstance(report, RanksReport)
        return report

    return of


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("ranks", "marks", "shared_memory", "file"),
    [
        pytest.param(ranks, marks, shared, file, id=f"{name}-{file}", marks=() if name == "2" else pytest.mark.thorough)
        for name, ranks, marks, shared in (
            ("2", 2, "not thorough", True),
            ("2-thorough", 2, "thorough", True),
            ("1", 1, "not thorough", True),
            ("3", 3, "not thorough", True),
            ("2-over-horovod", 2, "not thorough", False),
        )
        for file in FILES
        if (ranks < 3 or file not in OF_SEVERAL_RANKS) and (shared or file in OVER_HOROVOD)
    ],
)
def test_on_ranks(
    ranks: int, marks: str, shared_memory: bool, file: str, report_of: Callable[[int, str, bool], RanksReport]
) -> None:
    if ranks > 1 and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: run `make setup-horovod`")
    report = report_of(ranks, marks, shared_memory)
    if (marks or "KVTOOLS_RANKS_K" in os.environ) and not report.broken and not report.tests(f"{file}.py"):
        pytest.skip("no test of this file is selected")
    print(report.summary(f"{file}.py"))
    if failures := report.failures(f"{file}.py"):
        pytest.fail(f"on {ranks} ranks:\n{failures}", pytrace=False)
