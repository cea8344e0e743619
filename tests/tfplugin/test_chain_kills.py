"""Training that is killed at random moments of full and incremental saves: the newest whole chain always restores."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from train_and_be_killed import Counted, after

import tfplugin
from kvtools.chain import members

HERE = Path(__file__).parent


@pytest.fixture
def server():
    """The process that forks those that train."""
    command = [sys.executable, str(HERE / "train_and_be_killed.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()


def train_and_kill(server: subprocess.Popen, folder: Path, seed: int, seconds: float) -> int:
    """Trains in a process, kills it so many seconds after it has restored; returns the step that it had restored."""
    server.stdin.write(f"{folder} {seed}\n")
    server.stdin.flush()
    said = dict(server.stdout.readline().split() for _ in range(2))
    time.sleep(seconds)
    os.kill(int(said["started"]), signal.SIGKILL)
    assert server.stdout.readline() == "ended\n"
    return int(said["restored"])


def check_chain(folder: Path, seed: int) -> int:
    """Restores the chain into another number of parts, compares every row, and returns the step."""
    counted = Counted(1 + (seed + 1) % 4, spilled=seed % 3 == 1)
    manager = tfplugin.CheckpointManager(counted.checkpoint, folder)
    manager.restore_or_initialize()
    step = int(counted.step)
    keys, rows = counted.table.export()
    assert dict(zip(keys.numpy().tolist(), rows.numpy()[:, 0].tolist(), strict=True)) == after(step)
    assert (rows.numpy() == rows.numpy()[:, :1]).all()
    return step


@pytest.mark.thorough
def test_kills_leave_a_chain_that_restores(server, tmp_path):
    random.seed(7)
    reached, kinds = 0, set()
    for kill in range(200):
        assert train_and_kill(server, tmp_path, kill, random.uniform(0.0, 1.2)) == reached
        step = check_chain(tmp_path, kill)
        assert step >= reached
        reached = step
        kinds |= {member.kind for member in members(tmp_path)}
        if kill >= 15 and reached > 30 and kinds == {"full", "delta"}:  # a slow machine comes there in more turns
            break
    assert reached > 30 and kinds == {"full", "delta"}
    hidden = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert len(hidden) <= 4, hidden  # those of the last run, and no heap of them


def test_a_writer_that_dies_at_any_of_its_steps_leaves_the_chain_before_it(tmp_path, monkeypatch):
    """Every place where a kill could fall, without a process: what is on the disk then is what was before, or after."""
    counted = Counted(2)
    manager = tfplugin.CheckpointManager(counted.checkpoint, tmp_path, full_every=0.0, delta_every=0.0, max_to_keep=1)
    counted.train()
    manager.save()
    counted.train()
    seen: list[int] = []
    renamed, unlinked = Path.rename, Path.unlink

    def looked_at(change):
        def one(path, *args, **kwargs):
            done = change(path, *args, **kwargs)
            if path.name.startswith("ckpt"):
                seen.append(check_chain(tmp_path, len(seen)))
            return done

        return one

    monkeypatch.setattr(Path, "rename", looked_at(renamed))
    monkeypatch.setattr(Path, "unlink", looked_at(unlinked))
    manager.save()
    assert sorted(seen) == seen and set(seen) == {1, 2} and len(seen) >= 8
    np.testing.assert_array_equal([member.number for member in members(tmp_path)], [2])
