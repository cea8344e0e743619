"""Which tests run, by grid and by time, asked of pytest itself on a small file."""

import os
import subprocess
import sys
import time
from pathlib import Path

import durations
import pytest

TESTS = """
import pytest

@pytest.fixture(params=["eager", "graph"])
def mode(request):
    return request.param

@pytest.mark.parametrize("dim", [1, 8, 64])
@pytest.mark.parametrize(("key", "value"), [("int64", "float"), ("int64", "half"), ("int32", "float")])
def test_grid(mode, key, value, dim): pass

@pytest.mark.every_case("a", "b")
@pytest.mark.parametrize("c", [0, 1])
@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
def test_every(a, b, c): pass

@pytest.mark.every_case
@pytest.mark.parametrize("a", [0, 1])
def test_all(a, mode): pass

@pytest.mark.parametrize("a", [pytest.param(0, marks=pytest.mark.thorough), 1, 2])
def test_list(a): pass

@pytest.mark.thorough
def test_alone(): pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grids")
    (folder / "test_some.py").write_text(TESTS)
    return folder


def run(folder, *options):
    plugins = ["-p", "grids", "-p", "durations", "-p", "time_limit", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def collected(folder, *options):
    lines = run(folder, "--strict-markers", "--collect-only", *options).splitlines()
    return [line.split("::")[1] for line in lines if "::" in line]


def test_make_test_has_each_value_of_each_parameter_once(folder):
    assert sorted(collected(folder, "-m", "not thorough")) == sorted(
        [
            "test_grid[eager-int64-float-1]",
            *("test_grid[eager-int64-float-8]", "test_grid[eager-int64-float-64]"),
            *("test_grid[eager-int64-half-1]", "test_grid[eager-int32-float-1]"),  # pairs that are listed stay pairs
            "test_grid[graph-int64-float-1]",
            *(f"test_every[{b}-{a}-0]" for a in (0, 1) for b in (0, 1)),
            "test_every[0-0-1]",
            *(f"test_all[{mode}-{a}]" for mode in ("eager", "graph") for a in (0, 1)),
            *("test_list[1]", "test_list[2]"),
        ]
    )


def test_both_parts_make_the_whole(folder):
    parts = [collected(folder, "-m", marks) for marks in ("not thorough", "thorough")]
    assert sorted(parts[0] + parts[1]) == sorted(collected(folder)) and len(collected(folder)) == 18 + 8 + 4 + 3 + 1


def test_a_case_that_is_asked_for_alone_runs(folder):
    assert collected(folder, "test_some.py::test_grid[graph-int32-float-64]", "-m", "not thorough")


def test_what_tests_take_becomes_a_table(folder):
    run(folder, "--costs=test.jsonl", "-m", "not thorough")
    run(folder, "--costs=rest.jsonl", "-m", "thorough")
    page = folder / "page.md"
    page.write_text(f"# Tests\n\n{durations.BEGIN}old\n{durations.END}\nmore\n")
    durations.main(page, folder / "test.jsonl", folder / "rest.jsonl")
    text = page.read_text()
    assert text.startswith(f"# Tests\n\n{durations.BEGIN}| file |") and text.endswith(f"{durations.END}\nmore\n")
    assert "| test_some.py | 17 | 0.0 | 17 | 0.0 |" in text and "old" not in text


def test_what_has_not_begun_in_time_is_left_out_and_counted(folder):
    assert "34 passed" in run(folder, f"--until={time.time() + 3600}")
    printed = run(folder, "--until=1", "-rs")
    assert "34 skipped" in printed and "SKIPPED [34]" in printed and "LEFT OUT" in printed and "passed" not in printed
