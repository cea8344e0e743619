"""`de.train`: checkpoints that all ranks save together."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from ranks import fork_on_ranks

from tfplugin import dynamic_embedding as de

KEYS = np.array([0, -1, 7])
ROWS = np.random.default_rng(0).normal(size=(len(KEYS), 2)).astype(np.float32)


def made():
    return de.Variable(dim=2, name="emb", kv_creator=de.CuckooHashTableCreator(saver=de.FileSystemSaver()))


def test_one_process_saves_and_restores_and_folders_go_with_their_checkpoints(tmp_path):
    v = made()
    v.upsert(KEYS, ROWS)
    checkpoint = de.train.DECheckpoint(v=v)
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), 2)
    for _ in range(4):
        path = manager.save()
    folders = sorted(p.name for p in tmp_path.glob("TFRADynamicEmbedding*"))
    assert folders == [f"TFRADynamicEmbedding-{Path(kept).name.removeprefix('ckpt-')}" for kept in manager.checkpoints]
    assert len(folders) == 2
    w = made()
    de.train.Checkpoint(v=w).restore(path)
    np.testing.assert_array_equal(w.lookup(KEYS), ROWS)
    assert de.train.DECheckpoint(v=w).write(str(tmp_path / "other")) == str(tmp_path / "other")
    assert (tmp_path / "TFRADynamicEmbedding").is_dir()


def test_one_process_saves_a_graph(tmp_path):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        v = made()
        saver = de.train.DEHvdSaver([v])
        session.run(v.upsert(KEYS, ROWS))
        path = saver.save(session, str(tmp_path / "m"), global_step=3)
        session.run(v.clear())
        saver.restore(session, path)
        np.testing.assert_array_equal(session.run(v.lookup(KEYS)), ROWS)


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_two_ranks_save_and_restore_their_own_rows_and_fail_together(tmp_path):
    script = Path(__file__).with_name("save_on_ranks.py")
    done = fork_on_ranks(2, script, str(tmp_path), folder=tmp_path, timeout=170)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "rank 0 is done" in done.stdout and "rank 1 is done" in done.stdout
