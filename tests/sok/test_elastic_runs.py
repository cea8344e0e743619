"""Elastic runs of Horovod: ranks end and begin while others go on, from the last checkpoint and with new variables."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_training import keys_of
from ranks import rank_environment

from kvtools.horovod_setup.setup import HOROVODRUN

pytest.importorskip("horovod", reason="Horovod is not installed: run `make setup-horovod`")

HERE = Path(__file__).parent
STEPS = 14


def test_what_was_made_for_ranks_of_before_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "stale_ranks.py")], env=rank_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["at first"] == got["anew"] == [[2, 2]]
    for call in ("traced", "lookup_sparse", "all2all_dense_embedding"):
        assert "Horovod was started again, with other ranks. Make the variables anew" in got[call], call
    # Horovod itself takes these errors for the end of the training.
    assert got["ended"] == "RuntimeError: of the program's own"
    assert got["times"] == 3


@pytest.mark.thorough
@pytest.mark.parametrize(("what", "began", "ended"), [("die", 2, 1), ("grow", 1, 2)])
def test_training_goes_on_with_the_ranks_that_there_are(what: str, began: int, ended: int, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("".join(f"{host}:1\n" for host in ("localhost", "127.0.0.1")[:began]))
    discover = tmp_path / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat '{tmp_path}/hosts'\n")
    discover.chmod(0o755)
    launcher = [sys.executable, "-c", HOROVODRUN, "-np", str(began), "--min-np", "1", "--max-np", "2"]
    launcher += ["--network-interface", "lo", "--host-discovery-script", str(discover)]
    done = subprocess.run(
        [*launcher, sys.executable, str(HERE / "elastic_training.py"), str(tmp_path), str(STEPS), what],
        env=rank_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
    sizes = [int((tmp_path / f"step-{step}").read_text()) for step in range(STEPS)]
    assert (sizes[0], sizes[-1]) == (began, ended)
    # By hand: rows begin at 0, and each time that a key is looked up adds 1.
    expected = collections.Counter(
        key for step, size in enumerate(sizes) for rank in range(size) for key in keys_of(step, rank)
    )
    rows = {}
    for rank in range(ended):
        keys, values = json.loads((tmp_path / f"rows-{rank}.json").read_text())
        rows.update(zip(keys, values, strict=True))
    assert rows == {key: [count] * 3 for key, count in expected.items()}
