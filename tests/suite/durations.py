"""What each test file takes, in CPU seconds: a run's summary names the dearest files, and docs/testing.md lists all.

CPU seconds are those of the process, of the processes that it waited for and of ranks that were forked, while a test
and its fixtures ran: on a busy machine they stay nearly what they are alone, where seconds of the clock do not.
Importing a file is not in them.

    pytest --costs=costs.jsonl                         write a line of JSON for each test
    python tests/suite/durations.py PAGE TEST REST     write PAGE's table from the lines of two runs

`make test` and `make test-all` write their lines to build/, and `make test-durations` the table of docs/testing.md.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

COST = "cost"  # the name of a report's property: [CPU seconds, seconds]
SHOWN = 10
SHOWN_FROM = 60.0  # CPU seconds of a run; short ones are left alone
BEGIN, END = "<!-- make test-durations -->\n", "<!-- end -->\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write what each test takes, a line of JSON each")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(Costs(None if is_worker else config.getoption("--costs")), "costs")


class Costs:
    """Adds up what the tests of each file take, in all processes of a run."""

    def __init__(self, out: str | None) -> None:
        self.out = Path(out) if out else None
        if self.out is not None:
            self.out.write_text("")
        self.cpu: Counter[str] = Counter()
        self.clock: Counter[str] = Counter()
        self.last = 0.0, 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self.last = used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        now = used()
        report.user_properties.append((COST, [now[0] - self.last[0], now[1] - self.last[1]]))
        self.last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == COST:
                cpu, clock = value
                file = report.nodeid.split("::")[0]
                self.cpu[file] += cpu
                self.clock[file] += clock
                if self.out is not None:
                    line = {"test": report.nodeid, "phase": report.when, "outcome": report.outcome}
                    with self.out.open("a") as file_out:
                        file_out.write(json.dumps({**line, "cpu": round(cpu, 4), "clock": round(clock, 4)}) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = self.cpu.total()
        if total < SHOWN_FROM:
            return
        terminalreporter.section(f"the dearest files of {total:.0f} CPU seconds")
        for file, cpu in self.cpu.most_common(SHOWN):
            terminalreporter.line(f"{cpu:7.1f} CPU s {self.clock[file]:7.1f} s  {file}")


def used() -> tuple[float, float]:
    """CPU seconds of this process and of its children that have ended, and the time."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    forks = sys.modules.get("fork_server")  # of tests/sok: not children of this process
    of_forks = forks.cpu_seconds() if forks is not None else 0.0
    return sum(each.ru_utime + each.ru_stime for each in both) + of_forks, time.monotonic()


def table(test: str, rest: str) -> str:
    """A Markdown table of the files, the dearest first, from what `--costs` wrote in both runs."""
    columns = [Counter[str](), Counter[str]()]
    tests = [Counter[str](), Counter[str]()]
    for run, text in enumerate((test, rest)):
        for line in text.splitlines():
            cost = json.loads(line)
            file = cost["test"].split("::")[0]
            columns[run][file] += cost["cpu"]
            tests[run][file] += cost["phase"] == "setup"
    rows = ["| file | tests | `make test`, CPU s | tests | `make test-all` adds, CPU s |", "|---|---:|---:|---:|---:|"]
    every = columns[0] | columns[1]
    for file in sorted(every, key=lambda file: -columns[0][file] - columns[1][file]):
        first, second = (f"{tests[run][file]} | {columns[run][file]:.1f}" for run in (0, 1))
        rows.append(f"| {file} | {first} | {second} |")
    first, second = (f"{tests[run].total()} | {columns[run].total():.0f}" for run in (0, 1))
    rows.append(f"| all | {first} | {second} |")
    return "\n".join(rows) + "\n"


def main(page: str, test: str, rest: str) -> None:
    text = Path(page).read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    Path(page).write_text(before + BEGIN + table(Path(test).read_text(), Path(rest).read_text()) + END + after)


if __name__ == "__main__":
    main(*sys.argv[1:])
