"""A rank dies in the middle of a step: the others end with an error that says so, and the run goes on where it was."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import fork_on_ranks, launch_on_ranks

pytest.importorskip("horovod", reason="Horovod is not installed: run `make setup-horovod`")

SCRIPT = Path(__file__).with_name("train_and_die.py")
STEPS = 5
DIED_AFTER = 3  # steps


def _run(folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return fork_on_ranks(2, SCRIPT, str(folder), str(STEPS), folder=folder, timeout=150)


def _ended(folder: Path, rank: int) -> dict[str, Any]:
    ended: dict[str, Any] = pickle.loads((folder / f"ended-{rank}.pickle").read_bytes())
    return ended


def _die(folder: Path, death: str) -> subprocess.CompletedProcess[str]:
    """A run in which rank 1 dies. The launcher fails, and rank 0 has ended with an error that says so."""
    folder.mkdir(exist_ok=True)
    done = launch_on_ranks(2, SCRIPT, str(folder), str(STEPS), death, timeout=300)
    assert done.returncode != 0
    error = _ended(folder, 0)["error"]
    assert error is not None, "rank 0 went on"
    for told in (error, done.stdout):  # before the launcher ended rank 0
        assert "rank 1 has ended, and rank 0 waited for its part of exchange 'sok.keys" in told
    assert not list((folder / "checkpoints").glob(".writing-*"))
    return done


def test_a_killed_rank_ends_the_others_and_a_restart_goes_on_bit_for_bit(tmp_path: Path) -> None:
    dead, uncut = tmp_path / "dead", tmp_path / "uncut"
    _die(dead, "kill")
    assert not (dead / "ended-1.pickle").exists()
    for folder, began in ((dead, DIED_AFTER), (uncut, 0)):
        done = _run(folder)
        assert done.returncode == 0, done.stdout
        assert [(_ended(folder, rank)["began"], _ended(folder, rank)["error"]) for rank in range(2)] == [
            (began, None)
        ] * 2
    for rank in range(2):
        got, expected = _ended(dead, rank), _ended(uncut, rank)
        assert got["dynamic"] == expected["dynamic"]
        np.testing.assert_array_equal(got["static"], expected["static"])


@pytest.mark.thorough
def test_an_exception_on_one_rank_ends_the_others_and_is_in_the_log(tmp_path: Path) -> None:
    done = _die(tmp_path, "raise")
    assert "no more data on this rank" in _ended(tmp_path, 1)["error"]
    assert "no more data on this rank" in done.stdout
    # The step that nobody ended is in no checkpoint.
    assert (tmp_path / "checkpoints" / f"ckpt-{DIED_AFTER}.index").exists()
    assert not (tmp_path / "checkpoints" / f"ckpt-{DIED_AFTER + 1}.index").exists()
