"""Train on clicks as they come, and serve what was learned within a second: an hour of it, in under a minute.

    python examples/online_training.py                                 # an hour of generated clicks in 45 seconds
    python examples/online_training.py --minutes 60                    # in an hour
    python examples/online_training.py --minutes 60 --data clicks.csv  # lines of user,item,click (ids, 0 or 1)

Items come and go, so yesterday's model is worth little. Training saves an increment twice a second, the rows that
changed and the keys that went; `kvtools serve --follow` takes each up; a client scores clicks that nobody trained on
yet with the rows that are served. Ids that come once get no row (admission), rows of items that are gone go
(expiry). In the end what is served is compared with what was trained, row by row.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import quiet_tensorflow  # noqa: F401  (before TensorFlow)
import tensorflow as tf
from click_log import auc, mix, planted
from lookup_server import serve

import tfplugin
from kvtools.client import Client
from tfplugin.policies import ExpireAfterSeconds

WIDTH = 8  # of an embedding; a row has a weight before it
TIMES = 3  # a user or an item gets its row when it comes for the third time
STEPS_PER_SECOND = 20
INCREMENTS_PER_SECOND = 2
LIFE = 0.2  # of the hour: how long an item is shown
ONCE = 0.1  # of the impressions have an item that comes once


class Clicks(NamedTuple):
    """n impressions."""

    user: np.ndarray  # int64 [n]
    item: np.ndarray  # int64 [n]
    clicked: np.ndarray  # float32 [n], 0 or 1


class Model(tf.Module):
    """Weights and vectors of users and items; all of it is rows, so whoever has the rows has the model."""

    def __init__(self, forget_after: int) -> None:
        super().__init__()
        start = tf.random_normal_initializer(stddev=0.05, seed=1)
        policies = {"enter_threshold": TIMES, "expiry": ExpireAfterSeconds(forget_after), "expire_on_save": True}
        self.user = tf.get_kv_variable("user", embedding_dim=1 + WIDTH, initializer=start, enter_threshold=TIMES)
        self.item = tf.get_kv_variable("item", embedding_dim=1 + WIDTH, initializer=start, **policies)
        self.clock = tf.get_kv_variable("clock", embedding_dim=1, value_dtype=tf.float64)  # row 0: seconds trained
        self.optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.02))

    @tf.function(reduce_retracing=True)
    def step(self, user: tf.Tensor, item: tf.Tensor, clicked: tf.Tensor) -> tf.Tensor:
        """One step of training; gives the loss."""
        with tf.GradientTape() as tape:
            of_user, of_item = tfplugin.lookup_many([self.user, self.item], [user, item])
            logits = of_user[:, 0] + of_item[:, 0] + tf.reduce_sum(of_user[:, 1:] * of_item[:, 1:], axis=1)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(clicked, logits))
        variables = [self.user, self.item]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss


def score(user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """The model's logits, [n], from rows."""
    return user[:, 0] + item[:, 0] + (user[:, 1:] * item[:, 1:]).sum(axis=1)


class Watch(threading.Thread):
    """A client that keeps asking how old what is served is: the clock's row, against the time."""

    def __init__(self, url: str, started: float) -> None:
        super().__init__(daemon=True)
        self.ages: list[float] = []  # seconds
        self._url, self._began = url, started
        self._over = threading.Event()

    def run(self) -> None:
        """Asks twenty times a second."""
        with Client(self._url) as client:
            while not self._over.wait(0.05):
                rows, found = client.lookup("clock", [0])
                if found[0]:
                    self.ages.append(time.monotonic() - self._began - float(rows[0, 0]))

    def stop(self) -> None:
        """Ends it."""
        self._over.set()
        self.join()


def main() -> None:
    """Trains, and serves; then compares."""
    options = parse_options()
    tf.keras.utils.set_random_seed(options.seed)
    seconds = 60 * options.minutes
    forget_after = max(2, round(seconds / 12))
    model = Model(forget_after)
    stream = read_clicks(options) if options.data else None
    with tempfile.TemporaryDirectory() as name:
        chain = Path(name) / "chain"
        saved = tf.train.Checkpoint(user=model.user, item=model.item, clock=model.clock, optimizer=model.optimizer)
        manager = tfplugin.CheckpointManager(
            saved, chain, max_to_keep=2, full_every=seconds / 3, delta_every=1 / INCREMENTS_PER_SECOND
        )
        first = next(stream, None) if stream else generated(0.0, options, 0)
        if first is None:
            raise SystemExit(f"online_training.py: {options.data} has no lines")
        model.step(*first)  # makes the optimizer's slots, which a chain keeps from its first full on
        model.clock.upsert([0], [[0.0]])
        manager.save()
        with serve("--follow", chain, "--cache", Path(name) / "cache") as url, Client(url) as client:
            told = train(model, manager, stream, client, Watch(url, time.monotonic()), seconds, options)
            gone = told["gone"][~model.item.contains(told["gone"]).numpy()]
            manager.save()
            last = model.clock.sparse_read([0])[0, 0]
            wait_for(lambda: float(client.lookup("clock", [0])[0][0, 0]) == np.float32(last), "the last increment")
            rows = compare(model, client)
            assert not client.lookup("item", gone)[1].any(), "items that expired are served"
        members = [Path(member).name for member in manager.checkpoints]
        manager.close()
    if not told["ages"]:
        raise SystemExit(f"online_training.py: {options.data} ended before a row was served: it takes more lines")
    age = float(np.median(told["ages"]))
    assert age < options.freshness, f"what was served was {age:.2f} s old, in the median"
    if options.data is None:
        assert rows["item"] < 0.5 * told["items"], "most items have a row, admission and expiry notwithstanding"
        assert len(gone), "no item has gone"
        assert told["live"] > told["frozen"] + 0.03, f"AUC {told['live']:.4f} live, {told['frozen']:.4f} frozen"
    print(
        f"{told['items']:,} items were seen, {rows['item']:,} have a row, {len(gone):,} had one; {len(members)} members"
    )
    print(
        f"served rows were {age:.2f} s old in the median; AUC of the last quarter {told['live']:.3f} by them, "
        f"{told['frozen']:.3f} by those of the first quarter; all {sum(rows.values()):,} equal the trained ones"
    )


def train(
    model: Model,
    manager: tfplugin.CheckpointManager,
    stream: Iterator[Clicks] | None,
    client: Client,
    watch: Watch,
    seconds: float,
    options: argparse.Namespace,
) -> dict:
    """Trains for `seconds`, or until the stream ends, and scores what comes next with what is served."""
    started, number = time.monotonic(), 0
    watch.start()
    items: set[int] = set()
    frozen, gone = None, np.empty(0, np.int64)
    scored: list[tuple[np.ndarray, ...]] = []  # clicked, by the served rows, by the frozen ones
    while (now := time.monotonic() - started) < seconds:
        number += 1
        clicks = next(stream, None) if stream else generated(now / seconds, options, number)
        if clicks is None:
            break
        if frozen is None and now > seconds / 4:
            frozen = {name: table.export() for name, table in (("user", model.user), ("item", model.item))}
            gone = frozen["item"][0].numpy()
        if frozen is not None and now > 0.75 * seconds and number % 5 == 0:
            served = client.lookup_many({"user": clicks.user, "item": clicks.item})
            kept = [rows_of(frozen[name], ids) for name, ids in (("user", clicks.user), ("item", clicks.item))]
            scored.append((clicks.clicked, score(served["user"][0], served["item"][0]), score(*kept)))
        items.update(clicks.item.tolist())
        loss = model.step(*clicks)
        model.clock.upsert([0], [[time.monotonic() - started]])
        manager.save_if_due()
        if number % max(1, int(STEPS_PER_SECOND * seconds / 8)) == 0:
            age = np.median(watch.ages[-100:]) if watch.ages else np.nan
            print(
                f"minute {60 * now / seconds:2.0f}: step {number:,}  loss {loss:.3f}  {int(model.item.size()):,} item "
                f"rows  served rows are {age:.2f} s old",
                flush=True,
            )
        time.sleep(max(0.0, started + number / STEPS_PER_SECOND - time.monotonic()))
    watch.stop()
    clicked, live, kept = (
        (np.concatenate(column) for column in zip(*scored, strict=True)) if scored else [np.empty(0)] * 3
    )
    return {
        "ages": watch.ages,
        "items": len(items),
        "gone": gone,
        "live": auc(clicked, live) if scored else np.nan,
        "frozen": auc(clicked, kept) if scored else np.nan,
    }


def compare(model: Model, client: Client) -> dict[str, int]:
    """Holds what is served against what was trained; gives how many rows each table has."""
    counts = {}
    for name, table in (("user", model.user), ("item", model.item)):
        keys, rows = (column.numpy() for column in table.export())
        served, found = client.lookup(name, keys)
        assert found.all() and np.array_equal(served, rows), f"served rows of '{name}' differ from the trained ones"
        counts[name] = len(keys)
    return counts


def rows_of(exported: tuple[tf.Tensor, tf.Tensor], ids: np.ndarray) -> np.ndarray:
    """Rows of ids, [n, 1 + WIDTH], zeros where there is none, of what a table's `export` gave."""
    keys, rows = (column.numpy() for column in exported)
    order = np.argsort(keys)
    at = order[np.minimum(np.searchsorted(keys, ids, sorter=order), len(keys) - 1)]
    return np.where((keys[at] == ids)[:, None], rows[at], np.float32(0))


def wait_for(done: object, what: str) -> None:
    """Asks again until it is there."""
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end, f"{what} was not served within 30 s"
        time.sleep(0.02)


def generated(now: float, options: argparse.Namespace, number: int) -> Clicks:
    """Clicks at `now`, from 0 to 1: of the items that are shown then, the newest ones most often."""
    rng = np.random.default_rng([options.seed, number])
    n = options.batch
    shown = int(LIFE * options.items)
    item = int(now * options.items) + shown - np.minimum(rng.exponential(shown / 4, n), shown).astype(np.int64)
    item = mix(item.astype(np.uint64) + (np.uint64(1) << np.uint64(40))).view(np.int64)
    item = np.where(rng.random(n) < ONCE, rng.integers(-(2**63), 2**63, n), item)
    user = mix(rng.integers(0, options.users, n).astype(np.uint64)).view(np.int64)
    likes = (planted(user, "likes", 2) * planted(item, "kind", 2)).sum(axis=1)
    logit = -1.0 + 1.2 * planted(item, "level", 1)[:, 0] + 0.5 * planted(user, "level", 1)[:, 0] + 0.7 * likes
    return Clicks(user, item, (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(np.float32))


def read_clicks(options: argparse.Namespace) -> Iterator[Clicks]:
    """Batches of the user's own clicks, in the order of the file."""
    with options.data.open() as file:
        for begin in itertools.count(1, options.batch):
            lines = list(itertools.islice(file, options.batch))
            if not lines:
                return
            try:
                yield parse(lines)
            except (ValueError, OverflowError):
                raise SystemExit(f"online_training.py: {wrong_line(options.data, lines, begin)}") from None


def parse(lines: list[str]) -> Clicks:
    """Clicks of lines of user,item,click; what comes after these is left out."""
    user, item, clicked = zip(*(line.rstrip().split(",")[:3] for line in lines), strict=True)
    clicks = Clicks(np.array(user, np.int64), np.array(item, np.int64), np.array(clicked, np.float32))
    if not np.isin(clicks.clicked, (0, 1)).all():
        raise ValueError("a click is 0 or 1")
    return clicks


def wrong_line(path: Path, lines: list[str], begin: int) -> str:
    """Says which of these lines is none of user,item,click, and what it should be."""
    for number, line in enumerate(lines, begin):
        try:
            parse([line])
        except (ValueError, OverflowError):
            return f"{path}:{number}: {line.rstrip()!r} is not user,item,click: two integers of 64 bits, and 0 or 1"
    raise AssertionError("every line by itself is right")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.75, help="how long the hour takes (default: 0.75)")
    parser.add_argument("--data", type=Path, help="a file with lines of user,item,click (default: generated clicks)")
    parser.add_argument("--batch", type=int, default=1024, help="impressions of a step (default: 1024)")
    parser.add_argument("--users", type=int, default=4000, help="to generate (default: 4000)")
    parser.add_argument("--items", type=int, default=2000, help="that appear in the hour (default: 2000)")
    parser.add_argument("--freshness", type=float, default=1.0, help="seconds that served rows may be old (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the generated clicks")
    options = parser.parse_args()
    if options.minutes <= 0 or min(options.batch, options.users, options.items) < 1:
        parser.error("--minutes, --batch, --users and --items must be positive")
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data {options.data} is no file")
    return options


if __name__ == "__main__":
    main()
