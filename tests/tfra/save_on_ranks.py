"""Saves and restores on two ranks, and says so. Run by test_train.py.

python save_on_ranks.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from tfplugin import dynamic_embedding as de

v1 = tf.compat.v1
KEYS = np.arange(-20, 20)
ROWS = np.arange(80, dtype=np.float32).reshape(40, 2)


def own():
    return KEYS % hvd.size() == hvd.rank()


def creator():
    return de.CuckooHashTableCreator(saver=de.FileSystemSaver())


def checkpoint(folder: str) -> None:
    v = de.Variable(dim=2, name="emb", kv_creator=creator())
    w = tf.Variable(1.0)
    v.upsert(KEYS[own()], ROWS[own()])
    saved = de.train.DECheckpoint(v=v, w=w)
    paths = [saved.save(f"{folder}/model") for _ in range(2)]
    assert [Path(path).name for path in paths] == ["model-1", "model-2"], paths
    v.clear()
    v.upsert([1000], [[1.0, 1.0]])
    w.assign(5.0)
    saved.restore(paths[0])
    keys, rows = (x.numpy() for x in v.export())
    order = np.argsort(keys)
    np.testing.assert_array_equal(keys[order], KEYS[own()])
    np.testing.assert_array_equal(rows[order], ROWS[own()])
    assert float(w) == 1.0
    if hvd.rank() == 0:
        names = sorted(path.name for path in Path(f"{folder}/TFRADynamicEmbedding-1").iterdir())
        assert [n for n in names if n.endswith("-keys")] == [f"emb_mht_1of1_rank{r}_size2-keys" for r in (0, 1)], names

    manager = tf.train.CheckpointManager(saved, f"{folder}/managed", 2)
    managed = [manager.save() for _ in range(3)]
    assert manager.latest_checkpoint == managed[-1] and manager.checkpoints == managed[1:]
    assert {path.name for path in Path(f"{folder}/managed").glob("TFRA*")} == {
        f"TFRADynamicEmbedding-{path.rpartition('-')[2]}" for path in managed[1:]
    }
    for path in managed[1:]:
        v.clear()
        saved.restore(path)
        assert sorted(v.export()[0].numpy().tolist()) == KEYS[own()].tolist()


def saver(folder: str) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        v = de.Variable(dim=2, name="emb", kv_creator=creator())
        w = v1.get_variable("w", [1], use_resource=True)
        saved = de.train.DEHvdSaver()
        session.run([w.initializer, v.upsert(KEYS[own()], ROWS[own()])])
        path = saved.save(session, f"{folder}/graph", global_step=7)
        assert path == f"{folder}/graph-7", path
        session.run(v.clear())
        saved.restore(session, path)
        assert sorted(session.run(v.export())[0].tolist()) == KEYS[own()].tolist()


def failure(folder: str) -> None:
    """A rank whose disk is full: all ranks say so."""
    v = de.Variable(dim=2, name="emb", kv_creator=creator())
    if hvd.rank() == 1:

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        os.fsync = full
    try:
        de.train.DECheckpoint(v=v).save(f"{folder}/broken")
    except (OSError, RuntimeError) as error:
        assert "No space left on device" in str(error), error
    else:
        raise AssertionError("saved")


hvd.init()
checkpoint(sys.argv[1])
saver(sys.argv[1])
failure(sys.argv[1])
print(f"rank {hvd.rank()} is done")
