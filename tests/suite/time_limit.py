"""`pytest --until=TIME`: of a run that a slow machine would not end in time, the rest is skipped, and counted.

    pytest --until=$(($(date +%s) + 1800))    tests that have not begun in half an hour are left out

`.ci/run` gives `make test-rest` a time: a machine that is three times slower than the usual one ends then, too, with
all results so far. Each test that is left out is a skipped one, so the summary of the run says how many there are.
"""

from __future__ import annotations

import time

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "skip the tests that have not begun by then: seconds since 1970, as `date +%%s` prints them"
    parser.addoption("--until", type=float, metavar="TIME", help=help)


@pytest.hookimpl(tryfirst=True)  # before any fixture is made
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip("LEFT OUT: the time of this run is up. This says nothing about the test")
