"""The example of the KvVariable page, in graph mode: look up, train with Ftrl, save, restore. Runs in seconds.

    python examples/kv_variable.py
    python examples/kv_variable.py --ids ids.txt --checkpoint checkpoint/model.ckpt

The page's program, with only `import tfplugin` put in front. What it prints is then held against what stock TensorFlow
makes of the same ids in a dense variable; and the checkpoint is restored into another number of parts, too.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import quiet_tensorflow  # noqa: F401  (before TensorFlow)
import tensorflow.compat.v1 as tf

import tfplugin  # noqa: F401  (makes tf.get_kv_variable available)

WIDTH = 64


def main() -> None:
    """Trains one table in five parts, and restores it into five and into two."""
    options = parse_options()
    tf.disable_eager_execution()
    ids = np.array([1, 2, 3, 6, 8, 9]) if options.ids is None else np.loadtxt(options.ids, np.int64, ndmin=1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or Path(folder) / "model.ckpt"
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        with tf.Graph().as_default(), tf.Session() as session:
            table, rows, train = build(ids, parts=5)
            session.run(tf.global_variables_initializer())
            loss = [session.run([tf.reduce_sum(rows), train])[0] for _ in range(options.steps)]
            print(f"sum of the rows {loss[0]:.2f} before training, {session.run(tf.reduce_sum(rows)):.2f} after")
            path = tf.train.Saver().save(session, str(checkpoint))
            print("model saved in file", path)
            trained, keys = session.run(rows), session.run(table.size())
        for parts in (5, 2):
            with tf.Graph().as_default(), tf.Session() as session:
                _, rows, _ = build(ids, parts)
                tf.train.Saver().restore(session, path)
                assert np.array_equal(session.run(rows), trained), f"restored into {parts} parts, rows differ"
    difference = np.abs(trained - dense(ids, options.steps)).max()
    assert keys == len(np.unique(ids)) and difference < 1e-5, f"{keys} rows, {difference} off a dense variable"
    print(f"{keys} rows as a dense variable's to {difference:.0e}; restored into 5 parts and 2, bit for bit")


def build(ids: np.ndarray, parts: int) -> tuple[object, tf.Tensor, tf.Operation]:
    """The page's graph: the table, its rows of `ids` and a step of training."""
    with tf.variable_scope("test", reuse=tf.AUTO_REUSE):
        table = tf.get_kv_variable(
            "kv_embedding",
            embedding_dim=WIDTH,
            key_dtype=tf.int64,
            initializer=tf.ones_initializer(),
            partitioner=tf.fixed_size_partitioner(num_shards=parts),
        )
    rows = tf.nn.embedding_lookup(table, tf.convert_to_tensor(ids, tf.int64))
    return table, rows, ftrl(rows)


def ftrl(rows: tf.Tensor) -> tf.Operation:
    """The page's step of training."""
    optimizer = tf.train.FtrlOptimizer(0.005, l1_regularization_strength=0.025, l2_regularization_strength=0.00001)
    return optimizer.apply_gradients(optimizer.compute_gradients(tf.reduce_sum(tf.add(rows, 1.0))))


def dense(ids: np.ndarray, steps: int) -> np.ndarray:
    """The rows that stock TensorFlow trains, of a variable with a row for each different id."""
    distinct, rows_of = np.unique(ids, return_inverse=True)
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable("dense", [len(distinct), WIDTH], initializer=tf.ones_initializer(), use_resource=True)
        rows = tf.nn.embedding_lookup(table, tf.constant(rows_of))
        train = ftrl(rows)
        session.run(tf.global_variables_initializer())
        for _ in range(steps):
            session.run(train)
        return session.run(rows)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=Path, help="a text file of integers, one in a line (default: the page's six)")
    parser.add_argument("--checkpoint", type=Path, help="where to save (default: a folder that goes again)")
    parser.add_argument("--steps", type=int, default=20, help="of training (default: 20)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be positive")
    return options


if __name__ == "__main__":
    main()
