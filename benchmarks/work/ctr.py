"""Train a DeepFM on a generated log, one step a call; then score a held-out day.

case: batch, buckets (rows of the dense table, to which ids are hashed by remainder), log (a folder written by
`write_log`). The log is that of `examples/deepfm.py`, and the model is too, in a graph. One table for all features;
batches are fed, and none comes twice. The optimizer is `tf.compat.v1.train.AdamOptimizer` on all sides, which on a
dense variable decays the moments of every row and moves every row, at each step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from work.prepared import Prepared

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from click_log import auc
from criteo_log import DENSE_FEATURES, SPARSE_FEATURES, criteo_log

LEARNING_RATE = 0.002


def write_log(folder: Path, batch: int, batches: int, held_out: int) -> None:
    """A training log of `batches` batches and a held-out one: arrays that the workers map."""
    for name, seed, count in (("train", 1, batches), ("held_out", 2, held_out)):
        log = criteo_log(seed, batch * count)
        for column, array in (("ids", log.ids["all"]), ("dense", log.dense), ("clicks", log.clicks)):
            np.save(folder / f"{name}_{column}.npy", array.reshape(count, batch, *array.shape[1:]))
        if name == "held_out":
            np.save(folder / "best_auc.npy", auc(log.clicks, log.probability))


def read_log(folder: Path, name: str) -> Iterator[list[np.ndarray]]:
    """The batches of a log: ids, dense features and clicks of each."""
    columns = [np.load(folder / f"{name}_{column}.npy", mmap_mode="r") for column in ("ids", "dense", "clicks")]
    for batch in zip(*columns, strict=True):
        yield [np.array(column) for column in batch]


@contextlib.contextmanager
def prepare(library: Any, case: dict[str, Any]) -> Iterator[Prepared]:
    """Builds the model, takes one step, and yields the step."""
    import tensorflow as tf
    from work.deepfm_model import ROW, deepfm

    v1 = tf.compat.v1
    folder = Path(case["log"])
    with tf.Graph().as_default() as graph:
        ids = v1.placeholder(tf.int64, [None, SPARSE_FEATURES])
        dense = v1.placeholder(tf.float32, [None, DENSE_FEATURES])
        clicks = v1.placeholder(tf.float32, [None])
        normal = v1.random_normal_initializer(stddev=0.01, seed=3)
        table = library.table("features", case["buckets"], ROW, normal)
        keys = library.ids(tf.reshape(ids, [-1]), case["buckets"])

        rows = library.trainable_lookup(table, keys, unique=False)
        logits = deepfm(rows, dense, SPARSE_FEATURES)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicks, logits=logits))
        train = library.optimizer(v1.train.AdamOptimizer(LEARNING_RATE)).minimize(loss)
        scores = deepfm(library.lookup(table, keys, training=False), dense, SPARSE_FEATURES)

        initializer = v1.global_variables_initializer()
    with library.session(graph) as session:
        session.run(initializer)
        step = session.make_callable(train, [ids, dense, clicks])
        score = session.make_callable(scores, [ids, dense])
        # Read before time is taken: what is measured is training, not the disk.
        batches = iter(list(read_log(folder, "train")))
        step(*next(batches))

        def evaluate() -> dict[str, Any]:
            held_out = list(read_log(folder, "held_out"))
            truth = np.concatenate([batch[2] for batch in held_out])
            logit = np.concatenate([score(*batch[:2]) for batch in held_out]).astype(np.float64)
            loss = np.mean(np.logaddexp(0, logit) - truth * logit)
            return {
                "auc": auc(truth, logit),
                "log_loss": float(loss),
                "best_auc": float(np.load(folder / "best_auc.npy")),
            }

        yield Prepared(lambda: step(*next(batches)), evaluate=evaluate)
