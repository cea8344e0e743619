"""The corpus of broken checkpoints: each fault gets a precise message, soon, in little memory, and no traceback.

tests/data/make_broken.py made it and says what is wrong with each. All run in one process whose address space is
limited to little more than what it has before it opens the first.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent.parent / "data"
CASES = runpy.run_path(str(DATA / "make_broken.py"))["CASES"]
ROOM = 512 << 20
SECONDS = 10

PROGRAM = """
import contextlib, io, json, resource, sys, time
import h5py, kvtools.cli.inspect, kvtools.cli.verify, pyarrow.parquet, safetensors
from kvtools.cli.main import main
from kvtools.dialects.detect import dialects

def run(command, path):
    out, err, start = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([command, path])
        except BaseException as error:
            status = f"{type(error).__name__}: {error}"
    return status, out.getvalue(), err.getvalue(), time.process_time() - start

dialects()
sample, room, *paths = sys.argv[1:]
assert run("verify", sample)[0] == 0
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + int(room), size + int(room)))
print(json.dumps([[run("verify", path), run("inspect", path)] for path in paths]))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each case, (status, stdout, stderr, CPU seconds) of `verify` and of `inspect`."""
    paths = [str(DATA / "broken" / name / case.path) for name, case in CASES.items()]
    command = [sys.executable, "-c", PROGRAM, str(DATA / "sample"), str(ROOM), *paths]
    elsewhere = tmp_path_factory.mktemp("elsewhere")  # where no folder is called kvtools
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_the_corpus_is_what_its_script_makes() -> None:
    assert sorted(folder.name for folder in (DATA / "broken").iterdir()) == sorted(CASES)
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_verify_names_the_fault(outcomes: dict[str, Any], name: str) -> None:
    status, out, err, seconds = outcomes[name][0]
    assert status == CASES[name].status, (status, out, err)
    for fragment in CASES[name].says:
        assert fragment in out
    assert "Traceback" not in out + err and "memory" not in err
    assert [line[:18] for line in err.splitlines()] == ["kvtools: verifying"] * (status == 3)
    assert seconds < SECONDS


@pytest.mark.parametrize("name", CASES)
def test_inspect_fails_in_words_or_shows_what_is_there(outcomes: dict[str, Any], name: str) -> None:
    status, out, err, seconds = outcomes[name][1]
    assert status in (0, 1, 3), (status, out, err)
    assert "Traceback" not in out + err and "memory" not in err
    assert (status == 0) == (err == "")
    assert seconds < SECONDS
