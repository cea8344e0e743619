"""Predict clicks from 64-bit ids: train, inspect, export and serve, in about a minute and a half on two cores.

    make demo
    .venv/bin/python examples/ctr_demo.py --help

A wide-and-deep model over four sparse features whose ids are hashes from an open vocabulary. Its embeddings are
key-value variables: no vocabulary file, no table size, no collisions; a key gets its row when training first meets it.
Beside it, on the same batches, learns the same network without embeddings. Afterwards the demo calls the commands of
kvtools as you would. It exports the whole model, asks the training process, a stock TensorFlow and `kvtools serve` for
the click probabilities of the same impressions, and checks that they are the same, bit for bit; so are the rows of the
tables, which the server looks up, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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

try:
    import grpc
    from tensorflow_serving.apis.predict_pb2 import PredictRequest
    from tensorflow_serving.apis.prediction_service_pb2_grpc import PredictionServiceStub
except ImportError:
    grpc = None  # `make setup` installs them; without them the demo leaves gRPC out, and says so

from click_log import DENSE_FEATURES, FEATURES, Examples, auc, click_log

BATCH = 4096
HELD_OUT_BATCHES = 25
WIDTH = 8  # of the deep embeddings
PARTS = 2
ASKED = 1000  # impressions whose click probabilities are compared
SHOWN = 5
MODEL, TABLES = "ctr", "rows"  # what the server calls the whole model, and the tables

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
            self.probability = tf.sigmoid(self.scores[0], "probability")

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

    def save(self, session: tf.Session, folder: Path) -> None:
        """Saves the model as a server asks it: ids and dense features in, click probabilities out."""
        inputs = {**self.ids, "dense": self.dense}
        tf.saved_model.simple_save(session, str(folder), inputs, {"probability": self.probability})


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


# ---- The commands ----------------------------------------------------------------------------------------------------


def kvtools(*arguments: str | Path) -> list[str]:
    """The command line of a kvtools command, as short as it can be typed here. Prints it."""
    program = Path(sysconfig.get_path("scripts")) / "kvtools"
    if not program.exists():
        sys.exit(f"ctr_demo.py: no command {program}: run `make setup`.")
    command = [short(program), *map(str, arguments)]
    console.print(f"\n[bold]$ {shlex.join(command)}[/bold]", soft_wrap=True)
    return command


def short(path: str | Path) -> str:
    """A path as it can be typed here."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else str(path)


def call(command: list[str]) -> None:
    """Runs a command to its end; leaves the demo if it fails."""
    sys.stdout.flush()
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    print(without_notes(done.stderr), end="", file=sys.stderr, flush=True)
    if done.returncode:
        sys.exit(f"ctr_demo.py: the command ended with status {done.returncode}.")


def without_notes(text: str) -> str:
    """What a process wrote to stderr, but for the notes with which TensorFlow begins, whatever its log level."""
    notes = re.compile(r"WARNING: All log messages before absl|[IW]\d{4} \d\d:|[IW]0000 ")
    return "".join(line for line in text.splitlines(keepends=True) if not notes.match(line))


class Address(NamedTuple):
    """Where a server answers: `http` is a URL, `grpc` host and port, or None if it has no gRPC."""

    http: str
    grpc: str | None


@contextlib.contextmanager
def server(**models: Path) -> Iterator[Address]:
    """`kvtools serve` on free ports; gives its address. The server goes when the block is left, however it is."""
    named = [f"{name}={path}" for name, path in models.items()]
    ports = ["--port", "0", *(["--grpc-port", "0"] if grpc else [])]
    command = kvtools("serve", *named, *ports)
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            found = re.search(r"(http://[^\s,]+)(?:, gRPC at port (\d+))?", line)
            if found is None:
                log.seek(0)
                sys.exit(f"ctr_demo.py: the server did not start: {line}{without_notes(log.read())}")
            console.print(line, soft_wrap=True, markup=False)
            yield Address(found[1], f"127.0.0.1:{found[2]}" if found[2] else None)
        finally:
            process.terminate()


def look_up(address: Address, table: str, keys: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Asks the server for rows, as a program of yours would: vectors [n, dim] and which keys were found [n]."""
    with Client(address.http) as client:
        return client.lookup(table, keys)


def over_grpc(address: Address, model: str, signature: str, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Asks the server as a client of TensorFlow Serving does, by its own stubs over gRPC: rows, or the one output."""
    request = PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, signature
    for name, array in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
    with grpc.insecure_channel(address.grpc) as channel:
        outputs = PredictionServiceStub(channel).Predict(request, timeout=60).outputs
    return tf.make_ndarray(outputs["embeddings"] if "embeddings" in outputs else next(iter(outputs.values())))


def over_rest(address: Address, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Asks the server for click probabilities by TensorFlow Serving's REST: float32 [n]."""
    with urllib.request.urlopen(predict_url(address), json_of(inputs).encode(), timeout=60) as answer:
        return np.float32(json.load(answer)["outputs"])


def predict_url(address: Address) -> str:
    """Where the whole model answers."""
    return f"{address.http}/v1/models/{MODEL}:predict"


def json_of(inputs: dict[str, np.ndarray]) -> str:
    """The body of a request over REST. Floats in as few digits as tell them from other float32."""
    dense = [[float(str(number)) for number in row] for row in inputs["dense"]]
    return json.dumps({"inputs": {name: array.tolist() for name, array in inputs.items()} | {"dense": dense}})


def in_stock_tensorflow(model: Path, inputs: dict[str, np.ndarray], scratch: Path) -> np.ndarray:
    """Asks the exported model in a process that has TensorFlow and nothing of this package: float32 [n]."""
    np.savez(scratch / "inputs.npz", **inputs)
    script = Path(__file__).with_name("stock_predict.py")
    command = [sys.executable, script, model, scratch / "inputs.npz", scratch / "outputs.npz"]
    console.print(f"\n[bold]$ {shlex.join(map(short, command))}[/bold]", soft_wrap=True)
    call(list(map(str, command)))
    with np.load(scratch / "outputs.npz") as outputs:
        return outputs["probability"]


# ---- Checks ----------------------------------------------------------------------------------------------------------


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float32 arrays are equal, bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def compare(answers: dict[str, np.ndarray]) -> list[str]:
    """Holds who was asked for probabilities, [n] each, against the first of them. Returns complaints."""
    (trained, expected), *others = answers.items()
    return [
        f"{who} gives other click probabilities than {trained}: by up to {np.abs(got - expected).max():.3g}"
        for who, got in others
        if not same_bits(got, expected)
    ]


def check_rows(address: Address, expected: Rows, rng: np.random.Generator) -> list[str]:
    """Compares served vectors with trained ones: 1,000 keys a table, and 10 that never were; over HTTP, and over gRPC
    where the server has it. Returns complaints."""
    wrong = []
    for table, (keys, vectors) in expected.items():
        some = rng.choice(len(keys), min(1000, len(keys)), replace=False)
        strangers = rng.integers(-(2**63), 2**63 - 1, 10)
        asked = np.concatenate([keys[some], strangers])
        # A row of zeros, some of which may be -0.0, is left out, and served as any key that is not there.
        wanted = np.where(vectors[some].any(axis=1)[:, None], vectors[some], np.float32(0))
        served, found = look_up(address, table, asked.tolist())
        if not same_bits(served[:-10], wanted) or served[-10:].any():
            wrong.append(f"HTTP: vectors of {table} differ from the trained ones")
        if not np.array_equal(found, [*wanted.any(axis=1), *[False] * 10]):
            wrong.append(f"HTTP: {table} has other keys than were trained")
        if address.grpc and not same_bits(over_grpc(address, TABLES, table, {"ids": asked}), served):
            wrong.append(f"gRPC: vectors of {table} differ from those over HTTP")
    return wrong


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
        model.save(session, output / "trained")
        trained: Rows = session.run(model.contents)
        examples = next(click_log(options.seed + 2, ASKED))
        answers = {"training": session.run(model.probability, model.feed(examples))}
    rows = sum(len(keys) for keys, _ in trained.values())
    zeros = sum(int((~vectors.any(axis=1)).sum()) for _, vectors in trained.values())
    inputs = {**examples.ids, "dense": examples.dense}

    console.print(f"\nHeld-out AUC, {HELD_OUT_BATCHES * BATCH:,} impressions after {steps * BATCH:,} seen:")
    for name, value in results.items():
        console.print(f"  {name:34} {value:.4f}")

    console.rule("2. Look into the checkpoint")
    call(kvtools("inspect", checkpoint))
    keys, vectors = trained["deep/user"]
    strongest = keys[np.argsort(-np.abs(vectors).max(axis=1))[:3]]
    call(kvtools("inspect", checkpoint, "--table", "deep/user", "--keys", *map(str, strongest)))

    console.rule("3. Export: the whole model, and its tables alone")
    exported, snapshot = output / "models" / "1", output / "tables.kvsnap"
    exported.parent.mkdir()
    call(kvtools("export", output / "trained", "--savedmodel", exported, "--check", "100"))
    call(kvtools("export", checkpoint, "--snapshot", snapshot))

    console.rule("4. Serve")
    answers["stock TensorFlow"] = in_stock_tensorflow(exported, inputs, output)
    with server(**{MODEL: exported.parent, TABLES: snapshot}) as address:
        one = {name: array[:1] for name, array in inputs.items()}
        console.print(f"[bold]$ curl -d '{json_of(one)}' {predict_url(address)}[/bold]", soft_wrap=True)
        console.print(f'{{"outputs":[{over_rest(address, one)[0]}]}}', markup=False)
        answers["kvtools serve"] = over_rest(address, inputs)
        url = f"{address.http}/v1/tables/deep/user:lookup"
        console.print(f"[bold]$ curl -d '{{\"keys\": [{strongest[0]}]}}' {url}[/bold]", soft_wrap=True)
        vector, _ = look_up(address, "deep/user", [int(strongest[0])])
        console.print(f"[{' '.join(f'{x:.4f}' for x in vector[0])}]", markup=False)
        if address.grpc:
            answers["its gRPC"] = over_grpc(address, MODEL, "serving_default", inputs)
        else:
            console.print("(gRPC is left out: there is no package tensorflow-serving-api here)", markup=False)
        wrong = check_rows(address, trained, np.random.default_rng(options.seed))
    wrong += compare(answers)
    if results["with key-value embeddings"] < results["dense features only"] + 0.03 and steps >= 500:
        wrong.append("the embeddings learned nothing that the dense features do not say")

    console.print("\nClick probabilities of the same impressions:")
    console.print("  " + "".join(f"{who:>18}" for who in answers))
    for number in range(SHOWN):
        console.print("  " + "".join(f"{float(got[number]):18.6f}" for got in answers.values()))

    console.rule("Summary")
    console.print(
        f"Trained {steps:,} steps in graph mode. {rows:,} keys got a row. Ftrl's l1 holds {zeros:,} of these at\n"
        "zero: the exports leave them out, since a key that is not there is answered with zeros, too.\n"
        f"AUC {results['dense features only']:.3f} without embeddings, "
        f"{results['with key-value embeddings']:.3f} with them.\n",
        soft_wrap=True,
    )
    for complaint in wrong:
        console.print(f"[red]WRONG[/red]  {complaint}")
    if not wrong:
        protocols = "HTTP and gRPC" if address.grpc else "HTTP"
        console.print(
            f"The click probabilities of {ASKED:,} impressions are the same bit for bit, whoever is asked; so are\n"
            f"the vectors of 1,000 keys a table, over {protocols}, and those that were trained.\n",
            soft_wrap=True,
        )
    console.print(f"checkpoint   {checkpoint}.*\nwhole model  {exported}/\ntables       {snapshot}", soft_wrap=True)
    console.print(
        f"done in {time.monotonic() - started:.0f} s: AUC {results['with key-value embeddings']:.3f}, "
        f"{results['dense features only']:.3f} without ids; {'NOT ' if wrong else ''}the same answers everywhere",
        soft_wrap=True,
    )
    return 1 if wrong else 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.75, help="how long to train (default: 0.75)")
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
