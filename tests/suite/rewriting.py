"""Has each test file rewritten by one worker of a run: pytest alone has every worker rewrite all of them.

pytest keeps what it made of a test file's assertions in `__pycache__`, for runs that come later. Workers of one run
collect the same files in the same order at the same time: where nothing is kept yet, each does all of the work (16
CPU seconds). Here each begins with a share of its own, and then finds what the others made.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def pytest_sessionstart(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    folders = [path for arg in session.config.args if (path := session.config.invocation_params.dir / arg).is_dir()]
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    for file in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        keep_rewritten(file, session.config)


def keep_rewritten(file: Path, config: pytest.Config) -> None:
    """Keep what pytest makes of a test file where its import looks for it, unless it is there."""
    folder = rewrite.get_cache_dir(file)
    kept = folder / (file.stem + rewrite.PYC_TAIL)
    if rewrite.try_makedirs(folder) and rewrite._read_pyc(file, kept) is None:
        source_hash, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, kept)
