"""Train a DeepFM on a click log in the shape of Criteo's: 26 sparse features in one key-value variable.

    .venv/bin/python examples/deepfm.py --help

All features share one table. Their ids are hashes that already differ by feature, so no feature needs a table, or a
number of buckets, of its own; a key gets its row when training first meets it.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import quiet_tensorflow  # noqa: F401  (before TensorFlow)
import tensorflow.compat.v1 as tf
from click_log import auc
from criteo_log import DENSE_FEATURES, SPARSE_FEATURES, criteo_log
from deepfm_model import ROW, deepfm

import tfplugin


def main() -> None:
    """Trains, and scores another day's impressions."""
    options = parse_options()
    tf.disable_eager_execution()
    ids = tf.placeholder(tf.int64, [None, SPARSE_FEATURES], "ids")
    dense = tf.placeholder(tf.float32, [None, DENSE_FEATURES], "dense")
    clicks = tf.placeholder(tf.float32, [None], "clicks")
    table = tf.get_kv_variable("ids", embedding_dim=ROW, initializer=tf.random_normal_initializer(stddev=0.01))

    logits = deepfm(tf.nn.embedding_lookup(table, tf.reshape(ids, [-1])), dense, SPARSE_FEATURES)
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicks, logits=logits))
    train = tf.train.AdamOptimizer(options.learning_rate).minimize(loss)
    with tfplugin.inference_mode():  # an id that training never met counts as zeros and gets no row
        scores = deepfm(tf.nn.embedding_lookup(table, tf.reshape(ids, [-1])), dense, SPARSE_FEATURES)
    rows = table.size()

    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        started = time.monotonic()
        for step in range(1, options.steps + 1):
            day = criteo_log(options.seed + step, options.batch)
            feed = {ids: day.ids["all"], dense: day.dense, clicks: day.clicks}
            value, _ = session.run([loss, train], feed)
            if step % 20 == 0 or step == options.steps:
                pace = step / (time.monotonic() - started)
                print(f"step {step:,}  loss {value:.3f}  {session.run(rows):,} rows  {pace:.1f} steps/s", flush=True)
        held_out = criteo_log(options.seed, 20 * options.batch)
        score = session.run(scores, {ids: held_out.ids["all"], dense: held_out.dense})
    best = auc(held_out.clicks, held_out.probability)
    print(f"held-out AUC {auc(held_out.clicks, score):.4f}, best possible {best:.4f}")
    assert np.isfinite(score).all()


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")
    parser.add_argument("--batch", type=int, default=4096, help="examples of a step (default: 4096)")
    parser.add_argument("--learning-rate", type=float, default=0.002, help="of Adam (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0, help="of the click log")
    options = parser.parse_args()
    if options.steps < 1 or options.batch < 1:
        parser.error("--steps and --batch must be positive")
    return options


if __name__ == "__main__":
    main()
