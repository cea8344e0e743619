"""Predict clicks from 64-bit ids: train, inspect, export and serve, in about a minute and a half on two cores.

    make demo
    .venv/bin/python examples/ctr_demo.py --help

A wide-and-deep model over four sparse features whose ids are hashes from an open vocabulary. Its embeddings are
key-value variables: no vocabulary file, no table size, no collisions; a key gets its row when training first meets it.
Beside it, on the same batches, learns the same network without embeddings. Afterwards the demo calls the three
commands of kvtools as you would, and checks that what they serve is what was trained, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import numpy as np
    import quiet_tensorflow  # noqa: F401  (before TensorFlow)
    import rich.progress
    import tensorflow.compat.v1 as tf
    from rich.console import Console

    import tfplugin
    from kvtools.client import Client
except ImportError as error:
    sys.exit(
        f"ctr_demo.py: this Python ({sys.executable}) cannot import what the demo needs: {error}\n"
        "Run `make demo`, which makes .venv first; after that `.venv/bin/python examples/ctr_demo.py` works too."
    )

from click_log import DENSE_FEATURES, FEATURES, Examples, auc, click_log

BATCH = 4096
HELD_OUT_BATCHES = 25
WIDTH = 8  # of the deep embeddings
PARTS = 2
CLIP = "1e-6"  # `kvtools export` leaves out rows with no value this large: those that Ftrl's l1 holds at zero

Rows = dict[str, tuple[np.ndarray, np.ndarray]]  # table -> keys [n], vectors [n, dim]

console = Console(highlight=False)


# ---- The model -------------------------------------------------------------------------------------------------------


def embed(name: str, ids: tf.Tensor, width: int, initializer: object = None) -> tf.Tensor:
    """Rows of ids, [batch, width], from a key-value variable in two parts."""
    table = tf.get_kv_variable(
        name,
        embedding_dim=width,
        key_dtype=tf.int64,
        initializer=initializer,
        partitioner=tf.fixed_size_partitioner(PARTS),
    )
    return tf.nn.embedding_lookup(table, ids)


def perceptron(x: tf.Tensor, widths: tuple[int, ...] = (64, 32, 1)) -> tf.Tensor:
    """A plain multi-layer perceptron of dense variables; gives [batch]."""
    for i, width in enumerate(widths):
        kernel = tf.get_variable(f"kernel_{i}", [x.shape[1], width], initializer=tf.glorot_uniform_initializer())
        bias = tf.get_variable(f"bias_{i}", [width], initializer=tf.zeros_initializer())
        x = tf.matmul(x, kernel) + bias
        x = tf.nn.relu(x) if i + 1 < len(widths) else x
    return x[:, 0]


def wide_and_deep(ids: dict[str, tf.Tensor], dense: tf.Tensor) -> tf.Tensor:
    """Logits of a click: a weight per id, plus a network over embeddings. [batch]."""
    with tf.variable_scope("wide", reuse=tf.AUTO_REUSE):
        # One table for all features: ids are hashes, and no two features share one.
        weights = [embed("weight", ids[feature], 1, tf.zeros_initializer()) for feature in FEATURES]
    with tf.variable_scope("deep", reuse=tf.AUTO_REUSE):
        rows = {feature: embed(feature, ids[feature], WIDTH) for feature in FEATURES}
        crosses = [rows["user"] * rows["item"], rows["user"] * rows["category"]]
        return tf.add_n(weights)[:, 0] + perceptron(tf.concat([*rows.values(), *crosses, dense], axis=1))


def dense_only(dense: tf.Tensor) -> tf.Tensor:
    """Logits of the baseline, which sees no ids. [batch]."""
    with tf.variable_scope("baseline", reuse=tf.AUTO_REUSE):
        return perceptron(dense)


class Model:
    """Both models in one graph, for training and for scoring."""

    def __init__(self, seed: int) -> None:
        tf.set_random_seed(seed)
        self.ids = {feature: tf.placeholder(tf.int64, [None], f"{feature}_ids") for feature in FEATURES}
        self.dense = tf.placeholder(tf.float32, [None, DENSE_FEATURES], "dense")
        self.clicks = tf.placeholder(tf.float32, [None], "clicks")

        logits, baseline_logits = wide_and_deep(self.ids, self.dense), dense_only(self.dense)
        self.loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(logits=logits, labels=self.clicks))
        baseline_loss = tf.reduce_mean(
            tf.nn.sigmoid_cross_entropy_with_logits(logits=baseline_logits, labels=self.clicks)
        )
        # Ftrl for the wide part, where l1 holds weights of no use at exactly zero; Adam for the rest.
        ftrl = tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.0003, l2_regularization_strength=0.00001)
        self.train = tf.group(
            ftrl.minimize(self.loss, var_list=tf.trainable_variables("wide/")),
            tf.train.AdamOptimizer(0.005).minimize(self.loss, var_list=tf.trainable_variables("deep/")),
            tf.train.AdamOptimizer(0.002).minimize(baseline_loss, var_list=tf.trainable_variables("baseline/")),
        )

        # The same variables, for scoring: an id that training never met counts as zeros and gets no row.
        with tfplugin.inference_mode():
            self.scores = wide_and_deep(self.ids, self.dense), dense_only(self.dense)

        self.tables = {}
        for name in ("wide/weight", *(f"deep/{feature}" for feature in FEATURES)):
            scope, _, short = name.partition("/")
            with tf.variable_scope(scope, reuse=True):
                self.tables[name] = tf.get_kv_variable(short)
        self.rows = tf.add_n([table.size() for table in self.tables.values()])
        self.contents = {name: table.export() for name, table in self.tables.items()}
        self.initializer = tf.global_variables_initializer()
        self.saver = tf.train.Saver()

    def feed(self, examples: Examples) -> dict[tf.Tensor, np.ndarray]:
        """A batch for `Session.run`."""
        ids = {self.ids[feature]: examples.ids[feature] for feature in FEATURES}
        return {**ids, self.dense: examples.dense, self.clicks: examples.clicks}


# ---- Training --------------------------------------------------------------------------------------------------------


def train(model: Model, session: tf.Session, seed: int, steps: int | None, minutes: float) -> int:
    """Trains for `steps`, or for `minutes`, showing progress. Returns the steps done."""
    columns = (
        rich.progress.TextColumn("training"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeRemainingColumn(),
    )
    total, started = steps or 60 * minutes, time.monotonic()
    with rich.progress.Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)
        for step, examples in enumerate(click_log(seed, BATCH), 1):
            loss, _ = session.run([model.loss, model.train], model.feed(examples))
            done = step if steps else time.monotonic() - started
            if step % 10 == 1 or done >= total:
                text = f"step {step:,}  loss {loss:.3f}  {session.run(model.rows):,} rows"
                progress.update(task, completed=min(done, total), description=text)
            if done >= total:
                return step
    raise AssertionError("a click log has no end")


def evaluate(model: Model, session: tf.Session, seed: int) -> dict[str, float]:
    """AUC on held-out impressions: of both models, and of the probabilities that the log was drawn from."""
    held_out, scores = [], []
    for examples, _ in zip(click_log(seed, BATCH), range(HELD_OUT_BATCHES), strict=False):
        held_out.append(examples)
        scores.append(session.run(model.scores, model.feed(examples)))
    clicks = np.concatenate([examples.clicks for examples in held_out])
    with_embeddings, dense = (np.concatenate(column) for column in zip(*scores, strict=True))
    return {
        "dense features only": auc(clicks, dense),
        "with key-value embeddings": auc(clicks, with_embeddings),
        "best possible (the planted truth)": auc(clicks, np.concatenate([e.probability for e in held_out])),
    }


# ---- The three commands ----------------------------------------------------------------------------------------------


def kvtools(*arguments: str | Path) -> list[str]:
    """The command line of a kvtools command, as short as it can be typed here. Prints it."""
    program = Path(sysconfig.get_path("scripts")) / "kvtools"
    if not program.exists():
        sys.exit(f"ctr_demo.py: no command {program}: run `make setup`.")
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    command = [str(program), *map(str, arguments)]
    console.print(f"\n[bold]$ {shlex.join(command)}[/bold]", soft_wrap=True)
    return command


def call(command: list[str]) -> None:
    """Runs a command to its end; leaves the demo if it fails."""
    sys.stdout.flush()
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(f"ctr_demo.py: the command ended with status {status}.")


@contextlib.contextmanager
def server(model: Path) -> Iterator[str]:
    """`kvtools serve` on a free port; gives its address. The server goes when the block is left, however it is."""
    with subprocess.Popen(kvtools("serve", model, "--port", "0"), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            address = re.search(r"http://\S+", line)
            if address is None:
                sys.exit(f"ctr_demo.py: the server did not start: {line}")
            console.print(line, soft_wrap=True, markup=False)
            yield address.group()
        finally:
            process.terminate()


def look_up(address: str, table: str, keys: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Asks the server, as a program of yours would: vectors [n, dim] and which keys were found [n]."""
    with Client(address) as client:
        return client.lookup(table, keys)


# ---- Checks ----------------------------------------------------------------------------------------------------------


def is_cut(vectors: np.ndarray) -> np.ndarray:
    """Which vectors the export leaves out, and a lookup then answers with zeros: bool [n]."""
    return np.abs(vectors).max(axis=1) < float(CLIP)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float32 arrays are equal, bit for bit."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def check_http(address: str, expected: Rows, rng: np.random.Generator) -> list[str]:
    """Compares served vectors with trained ones: 1,000 keys a table, and 10 that never were. Returns complaints."""
    wrong = []
    for table, (keys, vectors) in expected.items():
        some = rng.choice(len(keys), min(1000, len(keys)), replace=False)
        strangers = rng.integers(-(2**63), 2**63 - 1, 10)
        served, found = look_up(address, table, [*keys[some].tolist(), *strangers.tolist()])
        if not same_bits(served[:-10], vectors[some]) or served[-10:].any():
            wrong.append(f"HTTP: vectors of {table} differ from the trained ones")
        if not np.array_equal(found, [*vectors[some].any(axis=1), *[False] * 10]):
            wrong.append(f"HTTP: {table} has other keys than were trained")
    return wrong


def check_saved_model(model: Path, expected: Rows, scratch: Path) -> list[str]:
    """Compares all vectors of the exported model, looked up by plain TensorFlow in a process of its own."""
    signatures = {table: table.replace("/", "_") for table in expected}
    np.savez(scratch / "ids.npz", **{signatures[table]: keys for table, (keys, _) in expected.items()})
    script = Path(__file__).with_name("stock_lookup.py")
    call([sys.executable, str(script), str(model), str(scratch / "ids.npz"), str(scratch / "vectors.npz")])
    with np.load(scratch / "vectors.npz") as vectors:
        return [
            f"SavedModel: vectors of {table} differ from the trained ones"
            for table, (_, rows) in expected.items()
            if not same_bits(vectors[signatures[table]], rows)
        ]


# ---- From the beginning to the end -----------------------------------------------------------------------------------


def main() -> int:
    """Runs the demo; 0 if everything that was served equals what was trained."""
    options = parse_options()
    started = time.monotonic()
    output = new_folder(options.output)
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)

    console.rule("1. Train")
    model = Model(options.seed)
    with tf.Session() as session:
        session.run(model.initializer)
        steps = train(model, session, options.seed, options.steps, options.minutes)
        results = evaluate(model, session, options.seed + 1)
        checkpoint = Path(model.saver.save(session, str(output / "checkpoint" / "model.ckpt"), global_step=steps))
        trained: Rows = session.run(model.contents)
    rows = sum(len(keys) for keys, _ in trained.values())
    cut = sum(int(is_cut(vectors).sum()) for _, vectors in trained.values())
    # What a server has to answer: the trained vectors, and zeros for the rows that the export leaves out.
    expected = {table: (keys, np.where(is_cut(v)[:, None], 0, v)) for table, (keys, v) in trained.items()}

    console.print(f"\nHeld-out AUC, {HELD_OUT_BATCHES * BATCH:,} impressions after {steps * BATCH:,} seen:")
    for name, value in results.items():
        console.print(f"  {name:34} {value:.4f}")

    console.rule("2. Look into the checkpoint")
    call(kvtools("inspect", checkpoint))
    keys, vectors = trained["deep/user"]
    strongest = keys[np.argsort(-np.abs(vectors).max(axis=1))[:3]]
    call(kvtools("inspect", checkpoint, "--table", "deep/user", "--keys", *map(str, strongest)))

    console.rule("3. Export for serving")
    exported = output / "exported"
    call(kvtools("export", checkpoint, "--savedmodel", exported, "--clip-abs", CLIP))

    console.rule("4. Serve")
    with server(exported) as address:
        url = f"{address}/v1/tables/deep/user:lookup"
        console.print(f"[bold]$ curl -d '{{\"keys\": [{strongest[0]}]}}' {url}[/bold]", soft_wrap=True)
        vector, _ = look_up(address, "deep/user", [int(strongest[0])])
        console.print(f"[{' '.join(f'{x:.4f}' for x in vector[0])}]", markup=False)
        wrong = check_http(address, expected, np.random.default_rng(options.seed))
    wrong += check_saved_model(exported, expected, output)
    if results["with key-value embeddings"] < results["dense features only"] + 0.03 and steps >= 500:
        wrong.append("the embeddings learned nothing that the dense features do not say")

    console.rule("Summary")
    console.print(
        f"Trained {steps:,} steps in graph mode. {rows:,} keys got a row; {cut:,} rows stayed below {CLIP}\n"
        "and were left out of the export: they are served as zeros, as keys that never were.\n"
        f"AUC {results['dense features only']:.3f} without embeddings, "
        f"{results['with key-value embeddings']:.3f} with them.\n",
        soft_wrap=True,
    )
    for complaint in wrong:
        console.print(f"[red]WRONG[/red]  {complaint}")
    if not wrong:
        console.print(
            "HTTP answers (1,000 keys a table) and the exported SavedModel (all keys, in a process\n"
            "without tfplugin) equal the trained vectors bit for bit.\n",
            soft_wrap=True,
        )
    console.print(f"checkpoint  {checkpoint}.*\nSavedModel  {exported}/", soft_wrap=True)
    console.print(f"done in {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to train (default: 1)")
    parser.add_argument("--steps", type=int, help=f"train this many steps of {BATCH} examples instead")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder (default: demo-output)")
    parser.add_argument("--seed", type=int, default=0, help="of the click log and the initial values")
    options = parser.parse_args()
    if options.minutes <= 0 or (options.steps is not None and options.steps < 1):
        parser.error("--minutes and --steps must be positive")
    return options


def new_folder(folder: Path) -> Path:
    """An empty folder; what an earlier run of the demo left there is removed, anything else is not."""
    mark = folder / ".ctr_demo"
    if folder.exists() and not (mark.exists() or (folder.is_dir() and not any(folder.iterdir()))):
        sys.exit(f"ctr_demo.py: {folder} was not made by this demo; name another folder with --output.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark.touch()
    return folder


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the blocks that stop the server
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nctr_demo.py: interrupted", file=sys.stderr)
        sys.exit(130)
