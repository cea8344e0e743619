"""Train a Deep Interest Network on what people clicked before, in a training loop of your own.

    python examples/din.py                            # a generated log, in the format of Taobao's UserBehavior.csv
    python examples/din.py --data UserBehavior.csv    # yours

The question is whether somebody will click an item, given the last 20 that they clicked. DIN weighs each of these by
how much it has to do with the item in question (its *attention*); beside it learns the same network that takes their
mean. Items and categories have a row each in a key-value variable: nobody counts them first. Histories are padded with
0, the variables' padding key, which never gets a row.

G. Zhou and others: Deep Interest Network for Click-Through Rate Prediction, 2018, arXiv:1706.06978.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import quiet_tensorflow  # noqa: F401  (before TensorFlow)
import tensorflow as tf
from click_log import auc
from user_behaviour import read_clicks, write_clicks

import tfplugin

HISTORY = 20  # clicks that the model sees
SHORTEST = 8  # people who clicked less often are left out
WIDTH = 16  # of an embedding; an item has two, its own and its category's
PADDING = 0


class Impressions(NamedTuple):
    """n items that somebody did or did not click."""

    item: np.ndarray  # int64 [n]
    category: np.ndarray  # int64 [n]
    items: np.ndarray  # int64 [n, HISTORY]: what they clicked before, the latest last, PADDING in front
    categories: np.ndarray  # int64 [n, HISTORY]
    clicked: np.ndarray  # float32 [n]


class Scorer(tf.Module):
    """The logit of a click, from an item and a history."""

    def __init__(self, name: str, attention: bool) -> None:
        super().__init__(name)
        self.item = tf.get_kv_variable(f"{name}/item", embedding_dim=WIDTH, padding_key=PADDING)
        self.category = tf.get_kv_variable(f"{name}/category", embedding_dim=WIDTH, padding_key=PADDING)
        dense = tf.keras.layers.Dense
        self.attention = tf.keras.Sequential([dense(36, "sigmoid"), dense(1)]) if attention else None
        if attention:
            self.attention.build([None, HISTORY, 8 * WIDTH])
        self.top = tf.keras.Sequential([dense(64, "relu"), dense(32, "relu"), dense(1)])
        self.top.build([None, 6 * WIDTH])

    @property
    def variables(self) -> list:
        """What is trained: the tables, and the dense part."""
        dense = [*self.top.trainable_variables, *(self.attention.trainable_variables if self.attention else [])]
        return [self.item, self.category, *dense]

    def __call__(self, item: tf.Tensor, category: tf.Tensor, items: tf.Tensor, categories: tf.Tensor) -> tf.Tensor:
        """Logits, [n]."""
        # All rows in one op: each variable is asked for the item in question and the history at once.
        rows = tfplugin.lookup_many(
            [self.item, self.category],
            [tf.concat([item[:, None], items], axis=1), tf.concat([category[:, None], categories], axis=1)],
        )
        rows = tf.concat(rows, axis=2)  # [n, 1 + HISTORY, 2 * WIDTH]
        asked, history = rows[:, :1], rows[:, 1:]
        there = tf.cast(items != PADDING, tf.float32)  # [n, HISTORY]
        if self.attention is None:
            weights = there / tf.maximum(tf.reduce_sum(there, axis=1, keepdims=True), 1.0)
        else:
            beside = tf.broadcast_to(asked, tf.shape(history))
            pairs = tf.concat([history, beside, history - beside, history * beside], axis=2)
            weights = (
                self.attention(pairs)[:, :, 0] * there
            )  # as in the paper: no softmax, so strong interest stays strong
        interest = tf.reduce_sum(history * weights[:, :, None], axis=1)
        asked = asked[:, 0]
        return self.top(tf.concat([asked, interest, asked * interest], axis=1))[:, 0]


def main() -> None:
    """Trains both, scores the last click of everybody, saves and restores."""
    options = parse_options()
    tf.keras.utils.set_random_seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder) / "UserBehavior.csv"
        if options.data is None:
            print(f"writing the clicks of {options.users:,} people to {data.name}", flush=True)
            write_clicks(data, options.seed, options.users, clicks=30)
        people = read_clicks(data, options.users, SHORTEST)
        if not people:
            raise SystemExit(f"din.py: {data}: nobody in it has {SHORTEST} clicks (pv) or more")
        train, held_out = impressions(people, np.random.default_rng(options.seed))
        print(f"{len(people):,} people, {len(train.clicked):,} impressions, {len(held_out.clicked):,} held out")

        score = {}
        for name, attention in (("mean", False), ("attention", True)):
            model = Scorer(name, attention)
            optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(options.learning_rate))
            fit(model, optimizer, train, options)
            score[name] = scores(model, held_out)

        path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(f"{folder}/checkpoint/din")
        again = Scorer("attention", attention=True)
        tf.train.Checkpoint(model=again).restore(path).expect_partial()
        assert np.array_equal(scores(again, held_out), score["attention"]), "restored, it scores otherwise"
        rows = int(model.item.size())
        seen = np.unique(np.concatenate([train.item, train.items.reshape(-1)]))
        assert rows == len(seen[seen != PADDING]), "items have a row each, and padding has none"

    mean, attention = (auc(held_out.clicked, score[name]) for name in ("mean", "attention"))
    learned = attention > mean and attention > 0.55
    assert learned or options.data, f"attention {attention:.4f}, mean {mean:.4f}: nothing was learned"
    print(
        f"held-out AUC {attention:.3f} with attention, {mean:.3f} with the mean of the history; {rows:,} items have a "
        "row, padding has none; restored from a checkpoint it scores the same"
    )


def fit(model: Scorer, optimizer: tfplugin.OptimizerWrapper, train: Impressions, options: argparse.Namespace) -> None:
    """Trains for some epochs."""

    @tf.function(reduce_retracing=True)
    def step(*columns: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(*columns[:-1])
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(columns[-1], logits))
        variables = model.variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    batches = tf.data.Dataset.from_tensor_slices(tuple(train))
    batches = batches.shuffle(len(train.clicked), seed=options.seed).batch(options.batch)
    for epoch in range(1, options.epochs + 1):
        started = time.monotonic()
        losses = [step(*batch) for batch in batches]
        pace = len(losses) / (time.monotonic() - started)
        print(f"{model.name}: epoch {epoch}  loss {np.mean(losses):.4f}  {pace:.0f} steps/s", flush=True)


def scores(model: Scorer, asked: Impressions) -> np.ndarray:
    """Logits, [n]. An item that training never met counts as zeros and gets no row."""
    with tfplugin.inference_mode():
        return np.concatenate(
            [model(*(column[at : at + 4096] for column in asked[:-1])) for at in range(0, len(asked.clicked), 4096)]
        )


def impressions(people: list[np.ndarray], rng: np.random.Generator) -> tuple[Impressions, Impressions]:
    """To train on, and to score: the last click of each person is held out. Beside each click stands an item that they
    did not click then, drawn from everything that was clicked."""
    everything = np.concatenate(people)
    rows: tuple[list, list] = [], []
    for clicks in people:
        for at in range(SHORTEST // 2, len(clicks)):
            before = clicks[max(0, at - HISTORY) : at]
            history = np.full((HISTORY, 2), PADDING, np.int64)
            history[HISTORY - len(before) :] = before
            other = everything[rng.integers(len(everything))]
            of = rows[at == len(clicks) - 1]
            of += [(clicks[at], history, 1.0), (other, history, 0.0)]
    return impressions_of(rows[0]), impressions_of(rows[1])


def impressions_of(rows: list[tuple[np.ndarray, np.ndarray, float]]) -> Impressions:
    """The columns of (item and category, history, whether it was clicked)."""
    asked, history = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    clicked = np.array([row[2] for row in rows], np.float32)
    return Impressions(asked[:, 0], asked[:, 1], history[:, :, 0], history[:, :, 1], clicked)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file as UserBehavior.csv (default: a generated one)")
    parser.add_argument("--users", type=int, default=3000, help="how many people to read, or generate (default: 3000)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the impressions (default: 2)")
    parser.add_argument("--batch", type=int, default=1024, help="impressions of a step (default: 1024)")
    parser.add_argument("--learning-rate", type=float, default=0.003, help="of Adam (default: 0.003)")
    parser.add_argument("--seed", type=int, default=0, help="of the generated clicks and the first weights")
    options = parser.parse_args()
    if min(options.users, options.epochs, options.batch) < 1:
        parser.error("--users, --epochs and --batch must be positive")
    return options


if __name__ == "__main__":
    main()
