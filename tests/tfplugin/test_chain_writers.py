"""One writer at a time: a chain that another manager writes to, or has written to, is not written to."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint as tf_checkpoint

import tfplugin
from kvtools.chain import members, newest_chain
from tfplugin.chain import writer_lock

HOLD = """
import pathlib, runpy, sys
lock = runpy.run_path(sys.argv[1])["WriterLock"](pathlib.Path(sys.argv[2]), "ckpt")
lock.hold()
print("held", flush=True)
sys.stdin.read()
"""


def manager_of(folder: Path, **options: object) -> tfplugin.CheckpointManager:
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    return tfplugin.CheckpointManager(checkpoint, folder, **{"delta_every": 0.0, **options})


def names(folder: Path) -> list[str]:
    return [member.prefix.name for member in members(folder)]


def test_a_chain_that_another_process_writes_to_is_left_alone_until_it_ends(tmp_path):
    manager_of(tmp_path).save()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, writer_lock.__file__, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "held\n"
        manager = manager_of(tmp_path)
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
        before = sorted(tmp_path.iterdir())
        for save in (manager.save, manager.save_if_due):
            with pytest.raises(RuntimeError, match=rf"'{tmp_path}': process {other.pid} on .*nothing was saved.*close"):
                save()
        assert sorted(tmp_path.iterdir()) == before
        other.kill()
    manager.save()
    assert names(tmp_path) == ["ckpt-1", "ckpt-2.delta"]
    newest_chain(tmp_path)


def test_two_managers_of_a_process_do_not_break_the_chain(tmp_path):
    first, second = manager_of(tmp_path), manager_of(tmp_path)
    first.save()
    assert second.restore_or_initialize() == str(tmp_path / "ckpt-1")  # who restores alone needs no lock
    with pytest.raises(RuntimeError, match="another manager of this process"):
        second.save()
    manager_of(tmp_path, checkpoint_name="other").save()  # another chain
    first.save()
    first.close()
    with pytest.raises(RuntimeError, match=r"another writer has put 'ckpt-2\.delta' there.*restore_or_initialize"):
        second.save()
    second.restore_or_initialize()
    second.save()
    assert names(tmp_path)[-1] == "ckpt-3.delta"
    second.close()
    with pytest.raises(RuntimeError, match=r"'ckpt-3\.delta'"):
        first.save()
    assert [member.number for member in newest_chain(tmp_path, "ckpt")] == [1, 2, 3]


def test_a_manager_that_nobody_has_any_longer_does_not_stand_in_the_way(tmp_path):
    manager = manager_of(tmp_path)
    manager.myself = manager
    manager.save()
    del manager
    again = manager_of(tmp_path)
    again.restore_or_initialize()
    again.save()
    assert names(tmp_path) == ["ckpt-1", "ckpt-2.delta"]


def test_a_folder_that_another_run_has_filled_meanwhile_is_not_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_lock.WriterLock, "hold", lambda self: None)  # as on a file system without locks
    first, second = manager_of(tmp_path), manager_of(tmp_path)
    first.save()
    for path in tmp_path.glob("ckpt*"):
        path.unlink()
    second.save()
    with pytest.raises(RuntimeError, match="another writer has put 'ckpt-1' there"):
        first.save()
    assert names(tmp_path) == ["ckpt-1"]


def test_the_managers_own_full_in_place_of_its_increment_is_no_other_writers(tmp_path):
    manager = manager_of(tmp_path, full_every=0.0, max_to_keep=1)
    for n in range(3):
        manager.save()
        manager.sync()
        assert names(tmp_path) == [f"ckpt-{n + 1}"]


def test_after_an_increment_that_is_gone_a_full_follows(tmp_path):
    manager = manager_of(tmp_path)
    manager.save()
    for path in Path(manager.save()).parent.glob("ckpt-2.delta.*"):
        path.unlink()
    assert manager.save() == str(tmp_path / "ckpt-3")
    assert [member.number for member in newest_chain(tmp_path)] == [3]


def test_what_was_not_asked_for_yet_is_no_reason_to_warn(tmp_path, monkeypatch):
    saved = tf.train.Checkpoint(v=tf.Variable(1.0), later=tf.Variable(2.0))
    tfplugin.CheckpointManager(saved, tmp_path).save()
    told = []
    monkeypatch.setattr(tf_checkpoint.logging, "warning", lambda *args: told.append(args))
    checkpoint = tf.train.Checkpoint(v=tf.Variable(0.0))
    manager = tfplugin.CheckpointManager(checkpoint, tmp_path)
    manager.restore_or_initialize()
    checkpoint.later = tf.Variable(0.0)  # restored as it comes
    assert float(checkpoint.later) == 2.0
    early = tfplugin.CheckpointManager(tf.train.Checkpoint(v=tf.Variable(0.0)), tmp_path)
    early.restore_or_initialize()
    del early, manager, checkpoint
    gc.collect()
    assert told == []
