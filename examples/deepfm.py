"""Train a DeepFM with Keras on a log in Criteo's format: compile, fit, predict, save, load.

    python examples/deepfm.py                       # a generated log
    python examples/deepfm.py --data train.txt      # Criteo's, or yours in its format

A line of the log is 0 or 1, 13 integers and 26 strings. The strings go into the model as they are: no vocabulary, no
number of buckets, no lookup layer to adapt. A value gets its row when training first meets it, and the model's Adam
trains rows and dense weights alike. Beside it learns the same network without the strings.

H. Guo, R. Tang, Y. Ye, Z. Li, X. He: DeepFM: A Factorization-Machine based Neural Network for CTR Prediction, 2017,
arXiv:1703.04247.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import quiet_tensorflow  # noqa: F401  (before TensorFlow)
import tensorflow as tf
from click_log import auc
from criteo_log import DENSE_FEATURES, SPARSE_FEATURES, write_tsv

from tfplugin.keras import EmbeddingCollection, FeatureConfig, TableConfig

keras = tf.keras

WIDTH = 16  # of an embedding
HIDDEN = (128, 64)
DENSE = [f"I{number}" for number in range(1, DENSE_FEATURES + 1)]
SPARSE = [f"C{number}" for number in range(1, SPARSE_FEATURES + 1)]


def main() -> None:
    """Trains both models, scores the lines behind those that they saw, saves and loads."""
    options = parse_options()
    keras.utils.set_random_seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder) / "train.txt"
        if options.data is None:
            print(f"writing {options.examples + options.held_out:,} lines to {data.name}", flush=True)
            write_tsv(data, options.seed, options.examples + options.held_out)
        train, held_out, clicks = read(data, options)

        baseline = compiled(dense_only(), options)
        baseline.fit(train.map(numbers), shuffle=False, verbose=2)
        model = compiled(deepfm(), options)
        model.fit(train, shuffle=False, verbose=2)
        rows = {name: int(table.size()) for name, table in model.get_layer("rows").tables.items()}
        print(f"{sum(rows.values()):,} values got a row: {rows['C1']:,} of C1 to {rows['C26']:,} of C26", flush=True)

        without = baseline.predict(held_out.map(numbers), verbose=0)[:, 0]
        score = model.predict(held_out, verbose=0)[:, 0]
        model.save(f"{folder}/deepfm.keras")
        loaded = keras.models.load_model(f"{folder}/deepfm.keras")
        assert np.array_equal(loaded.predict(held_out, verbose=0)[:, 0], score), "loaded, it predicts otherwise"
    with_ids, without = auc(clicks, score), auc(clicks, without)
    if options.data is None and len(clicks) >= 10_000:
        assert with_ids > without + 0.02, f"AUC {with_ids:.4f}, and {without:.4f} without ids: they taught it nothing"
    print(f"held-out AUC {with_ids:.3f}, {without:.3f} without the strings; loaded from .keras it predicts the same")


def deepfm() -> keras.Model:
    """The model: 13 numbers and 26 strings in, the probability of a click out."""
    inputs = {name: keras.Input((), dtype="float32", name=name) for name in DENSE}
    inputs |= {name: keras.Input((), dtype="string", name=name) for name in SPARSE}
    # A row is the weight of a value in the linear part, then its embedding.
    tables = {name: TableConfig(name, embedding_dim=1 + WIDTH, initializer=normal()) for name in SPARSE}
    rows = EmbeddingCollection({name: FeatureConfig(name, table) for name, table in tables.items()}, name="rows")(
        {name: inputs[name] for name in SPARSE}
    )
    rows = keras.ops.stack([rows[name] for name in SPARSE], axis=1)  # [batch, SPARSE_FEATURES, 1 + WIDTH]
    weights, embeddings = rows[:, :, 0], rows[:, :, 1:]
    dense = logarithms(inputs)
    linear = keras.ops.sum(weights, axis=1, keepdims=True) + keras.layers.Dense(1, name="linear")(dense)
    # The sum over all pairs of dot products, in linear time.
    pairs = keras.ops.square(keras.ops.sum(embeddings, axis=1)) - keras.ops.sum(keras.ops.square(embeddings), axis=1)
    pairs = 0.5 * keras.ops.sum(pairs, axis=1, keepdims=True)
    deep = perceptron(keras.ops.concatenate([keras.layers.Flatten()(embeddings), dense], axis=1))
    return keras.Model(inputs, keras.ops.sigmoid(linear + pairs + deep), name="deepfm")


def dense_only() -> keras.Model:
    """The baseline, which sees the numbers alone."""
    inputs = {name: keras.Input((), dtype="float32", name=name) for name in DENSE}
    return keras.Model(inputs, keras.ops.sigmoid(perceptron(logarithms(inputs))), name="dense_only")


def numbers(columns: dict, click: tf.Tensor) -> tuple[dict, tf.Tensor]:
    """What the baseline takes of a batch."""
    return {name: columns[name] for name in DENSE}, click


def normal() -> keras.initializers.Initializer:
    """What a value's row begins with."""
    return keras.initializers.RandomNormal(stddev=0.01, seed=3)


def logarithms(inputs: dict) -> keras.KerasTensor:
    """The 13 numbers, [batch, 13], as everybody takes Criteo's counts; a few of them are -1 and -2."""
    dense = keras.ops.stack([inputs[name] for name in DENSE], axis=1)
    return keras.ops.log1p(keras.ops.maximum(dense, 0.0))


def perceptron(x: keras.KerasTensor) -> keras.KerasTensor:
    """A plain multi-layer perceptron; gives [batch, 1]."""
    for width in HIDDEN:
        x = keras.layers.Dense(width, "relu")(x)
    return keras.layers.Dense(1)(x)


def compiled(model: keras.Model, options: argparse.Namespace) -> keras.Model:
    """The model with its optimizer: nothing about it is special."""
    model.compile(keras.optimizers.Adam(options.learning_rate), loss="binary_crossentropy")
    return model


def read(data: Path, options: argparse.Namespace) -> tuple[tf.data.Dataset, tf.data.Dataset, np.ndarray]:
    """Batches to train on, those of the lines behind them, and the clicks of these."""
    lines = tf.data.TextLineDataset(str(data))
    defaults = [0.0] * (1 + DENSE_FEATURES) + [""] * SPARSE_FEATURES

    def parsed(batch: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        click, *columns = tf.io.decode_csv(batch, defaults, field_delim="\t", use_quote_delim=False)
        return dict(zip([*DENSE, *SPARSE], columns, strict=True)), click

    def batches(some: tf.data.Dataset) -> tf.data.Dataset:
        return some.batch(options.batch).map(parsed, tf.data.AUTOTUNE).prefetch(2)

    held_out = batches(lines.skip(options.examples).take(options.held_out))
    clicks = [click.numpy() for _, click in held_out]
    if not clicks:
        raise SystemExit(f"deepfm.py: {data} has no lines behind the first {options.examples:,}; say --examples fewer")
    return batches(lines.take(options.examples)), held_out, np.concatenate(clicks)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a log in Criteo's format (default: a generated one)")
    parser.add_argument("--examples", type=int, default=400_000, help="lines to train on (default: 400000)")
    parser.add_argument("--held-out", type=int, default=50_000, help="lines behind them, to score (default: 50000)")
    parser.add_argument("--batch", type=int, default=2048, help="lines of a step (default: 2048)")
    parser.add_argument("--learning-rate", type=float, default=0.002, help="of Adam (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0, help="of the generated log and the first weights")
    options = parser.parse_args()
    if min(options.examples, options.held_out, options.batch) < 1:
        parser.error("--examples, --held-out and --batch must be positive")
    return options


if __name__ == "__main__":
    main()
