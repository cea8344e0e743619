"""Train a click model, save it as a SavedModel, and say what it answers to the held-out examples.

python -m exporting.train_models tf1|keras LOG FOLDER      (LOG as `work.ctr.write_log` writes it)

FOLDER gets `trained`, the SavedModel with its custom operations, and `held_out.npz`: the inputs, the clicks, and the
probabilities that the training process gave, in batches of `BATCH`. A line of JSON tells what was learnt.

tf1    a graph of TensorFlow 1, wide and deep: weights of ids by Ftrl, whose l1 holds those of no use at zero;
       embeddings by GroupAdam, whose l21 zeroes whole rows; the dense part by Adam
keras  a DeepFM of Keras 3, one table for all features, Adam for it and the dense part
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from work.ctr import read_log

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from click_log import auc
from criteo_log import DENSE_FEATURES, SPARSE_FEATURES

BATCH = 1_000  # of a request whose answer is compared
WIDTH = 16
HIDDEN = (128, 64)
#: Ftrl's l1 and GroupAdam's l21: of the rows that training met, most end at zero.
L1, L21 = 1e-3, 2e-5

Score = Callable[[np.ndarray, np.ndarray], np.ndarray]


def train_tf1(log: Path, folder: Path) -> tuple[Score, int]:
    """The graph of TensorFlow 1; returns how to score, and the rows there are."""
    import quiet_tensorflow  # noqa: F401  (before TensorFlow)
    import tensorflow.compat.v1 as tf

    import tfplugin

    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.set_random_seed(1)
    ids = tf.placeholder(tf.int64, [None, SPARSE_FEATURES], "ids")
    dense = tf.placeholder(tf.float32, [None, DENSE_FEATURES], "dense")
    clicks = tf.placeholder(tf.float32, [None], "clicks")
    normal = tf.random_normal_initializer(stddev=0.01, seed=3)
    wide = tf.get_kv_variable("wide/weight", embedding_dim=1, initializer=tf.zeros_initializer())
    deep = tf.get_kv_variable("deep/embedding", embedding_dim=WIDTH, initializer=normal)

    def logits() -> Any:
        with tf.variable_scope("top", reuse=tf.AUTO_REUSE):
            flat = tf.reshape(ids, [-1])
            weights = tf.reshape(tf.nn.embedding_lookup(wide, flat), [-1, SPARSE_FEATURES])
            rows = tf.reshape(tf.nn.embedding_lookup(deep, flat), [-1, SPARSE_FEATURES * WIDTH])
            x = tf.concat([rows, dense], axis=1)
            for number, width in enumerate((*HIDDEN, 1)):
                kernel = tf.get_variable(
                    f"kernel_{number}", [x.shape[1], width], initializer=tf.glorot_uniform_initializer(number)
                )
                bias = tf.get_variable(f"bias_{number}", [width], initializer=tf.zeros_initializer())
                x = tf.matmul(x, kernel) + bias
                x = tf.nn.relu(x) if number < len(HIDDEN) else x
            return tf.reduce_sum(weights, axis=1) + x[:, 0]

    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicks, logits=logits()))
    ftrl = tf.train.FtrlOptimizer(0.1, l1_regularization_strength=L1)
    group_adam = tfplugin.optimizers.GroupAdam(0.002, l21_regularization_strength=L21)
    train = tf.group(
        ftrl.minimize(loss, var_list=[wide]),
        group_adam.minimize(loss, var_list=[deep]),
        tf.train.AdamOptimizer(0.002).minimize(loss, var_list=tf.trainable_variables("top/")),
    )
    with tfplugin.inference_mode():
        probability = tf.sigmoid(logits(), "probability")
    size = wide.size() + deep.size()

    session = tf.Session()
    session.run(tf.global_variables_initializer())
    step = session.make_callable(train, [ids, dense, clicks])
    for batch in read_log(log, "train"):
        step(*batch)
    inputs = {"ids": ids, "dense": dense}
    tf.saved_model.simple_save(session, str(folder), inputs, {"probability": probability})
    return session.make_callable(probability, [ids, dense]), int(session.run(size))


def train_keras(log: Path, folder: Path) -> tuple[Score, int]:
    """The DeepFM of Keras 3; returns how to score, and the rows there are."""
    import quiet_tensorflow  # noqa: F401  (before TensorFlow)
    import tensorflow as tf

    import tfplugin

    keras = tf.keras
    keras.utils.set_random_seed(1)

    class DeepFM(keras.Model):
        """H. Guo et al., 2017, arXiv:1703.04247: a row is an id's weight in the linear part, then its embedding."""

        def __init__(self) -> None:
            super().__init__()
            normal = tf.random_normal_initializer(stddev=0.01, seed=3)
            self.table = tf.get_kv_variable("features", embedding_dim=1 + WIDTH, initializer=normal)
            self.linear = keras.layers.Dense(1)
            self.deep = keras.Sequential([*(keras.layers.Dense(n, "relu") for n in HIDDEN), keras.layers.Dense(1)])

        def call(self, inputs: Any) -> Any:
            rows = tf.nn.embedding_lookup(self.table, inputs["ids"])
            weights, embeddings = rows[:, :, 0], rows[:, :, 1:]
            # The sum over all pairs of dot products, in linear time.
            pairs = 0.5 * (tf.reduce_sum(embeddings, 1) ** 2 - tf.reduce_sum(embeddings**2, 1))
            flat = tf.concat([tf.reshape(embeddings, [-1, SPARSE_FEATURES * WIDTH]), inputs["dense"]], 1)
            linear = tf.reduce_sum(weights, 1) + self.linear(inputs["dense"])[:, 0]
            return tf.sigmoid(linear + tf.reduce_sum(pairs, 1) + self.deep(flat)[:, 0])

    def samples() -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
        for ids, dense, clicks in read_log(log, "train"):
            yield {"ids": ids, "dense": dense}, clicks

    model = DeepFM()
    model.compile(keras.optimizers.Adam(0.002), "binary_crossentropy")
    tfplugin.apply_in_backward(model.table, keras.optimizers.Adam(0.002))
    inputs = {
        "ids": keras.Input([SPARSE_FEATURES], dtype="int64", name="ids"),
        "dense": keras.Input([DENSE_FEATURES], name="dense"),
    }
    model(inputs)
    signature = (
        {name: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for name, tensor in inputs.items()},
        tf.TensorSpec([None], tf.float32),
    )
    steps = len(np.load(log / "train_clicks.npy", mmap_mode="r"))
    batches = tf.data.Dataset.from_generator(samples, output_signature=signature)
    model.fit(batches, steps_per_epoch=steps, shuffle=False, verbose=0)
    served = {
        name: keras.InputSpec(shape=spec.shape, dtype=spec.dtype.name, name=name) for name, spec in signature[0].items()
    }
    model.export(str(folder), input_signature=[served], verbose=False)
    predict = tf.function(lambda ids, dense: model({"ids": ids, "dense": dense}, training=False), reduce_retracing=True)

    def score(ids: np.ndarray, dense: np.ndarray) -> np.ndarray:
        found: np.ndarray = predict(tf.constant(ids), tf.constant(dense)).numpy()
        return found

    return score, int(model.table.size())


def main() -> None:
    """Train, save, score."""
    kind, log, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    score, rows = {"tf1": train_tf1, "keras": train_keras}[kind](log, folder / "trained")
    seconds = time.monotonic() - start
    columns = zip(*read_log(log, "held_out"), strict=True)
    ids, dense, clicks = (np.concatenate(column) for column in columns)
    whole = len(ids) - len(ids) % BATCH
    ids, dense, clicks = ids[:whole], dense[:whole], clicks[:whole]
    probability = np.concatenate([score(ids[at : at + BATCH], dense[at : at + BATCH]) for at in range(0, whole, BATCH)])
    np.savez(folder / "held_out.npz", ids=ids, dense=dense, clicks=clicks, probability=probability)
    best = float(np.load(log / "best_auc.npy"))
    told = {"rows": rows, "seconds": seconds, "auc": auc(clicks, probability), "best_auc": best, "held_out": whole}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
