"""Train a Keras DeepFM on a generated log, an epoch of `steps` batches a call.

case: batch, steps, buckets (rows of the dense layer, to which ids are hashed by remainder), log (a folder written by
`work.ctr.write_log`), loop (by a training loop by hand, whose lookups update their rows in the backward pass). Model,
optimizer and batches are the same on all sides; what is measured has Keras's `fit`, its progress and its metrics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from work.ctr import LEARNING_RATE, SPARSE_FEATURES, read_log
from work.prepared import Prepared

WIDTH, HIDDEN = 16, (128, 64)


def _model(keras: Any, embedding: Any) -> Any:
    """The model of `examples/deepfm_model.py` in layers of Keras, over rows [n, features, 1 + WIDTH]."""
    import tensorflow as tf

    class DeepFM(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = embedding
            self.linear = keras.layers.Dense(1)
            self.hidden = [keras.layers.Dense(width, "relu") for width in HIDDEN]
            self.score = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            ids, dense = inputs
            rows = self.embedding(ids)
            weights, embeddings = rows[:, :, 0], rows[:, :, 1:]
            linear = tf.reduce_sum(weights, axis=1, keepdims=True) + self.linear(dense)
            pairs = tf.square(tf.reduce_sum(embeddings, axis=1)) - tf.reduce_sum(tf.square(embeddings), axis=1)
            x = tf.concat([tf.reshape(embeddings, [-1, SPARSE_FEATURES * WIDTH]), dense], axis=1)
            for layer in self.hidden:
                x = layer(x)
            return linear + 0.5 * tf.reduce_sum(pairs, axis=1, keepdims=True) + self.score(x)

    return DeepFM()


def _epochs(folder: Path, steps: int) -> Iterator[Any]:
    """Datasets of `steps` batches, after one of a single batch, in memory before time is taken."""
    import tensorflow as tf

    ids, dense, clicks = (np.stack(column) for column in zip(*read_log(folder, "train"), strict=True))
    ranges = [(0, 1), *((start, start + steps) for start in range(1, len(ids) - steps + 1, steps))]
    options = tf.data.Options()
    options.autotune.enabled = False
    with tf.device("CPU:0"):
        made = [
            tf.data.Dataset.from_tensor_slices(((ids[a:b], dense[a:b]), clicks[a:b, :, None])).with_options(options)
            for a, b in ranges
        ]
    return iter([dataset.prefetch(1) for dataset in made])


@contextlib.contextmanager
def prepare(library: Any, case: dict[str, Any]) -> Iterator[Prepared]:
    """Builds the model, takes one step, and yields an epoch."""
    import tensorflow as tf

    keras = tf.keras
    keras.utils.set_random_seed(1)
    model = _model(keras, library.keras_embedding(case["buckets"], 1 + WIDTH))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    epochs = _epochs(Path(case["log"]), case["steps"])
    if case.get("loop"):
        step = library.keras_loop(model, keras.optimizers.Adam(LEARNING_RATE), loss)

        def epoch() -> None:
            for inputs, clicks in next(epochs):
                step(inputs, clicks)

    else:
        model.compile(library.keras_optimizer(keras.optimizers.Adam(LEARNING_RATE)), loss)

        def epoch() -> None:
            model.fit(next(epochs), verbose=0)

    epoch()
    yield Prepared(epoch)
