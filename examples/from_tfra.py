"""From TensorFlow Recommenders Addons to stock TensorFlow Serving, and on with training, without TFRA.

    python examples/from_tfra.py
    python examples/from_tfra.py --model saved_model --requests requests.npz --answers answers.npz --checkpoint run

What TFRA trained and saved becomes a SavedModel of stock operations: a TensorFlow without custom ops loads it, in a
process of its own, and answers as TFRA did; so does `kvtools serve` to a client of TensorFlow Serving. Then a
checkpoint becomes one of key-value variables, with the optimizer's slots, and training goes on where TFRA stopped.

Without arguments it takes the models that the tests keep, which TFRA 0.8.1 wrote beside its own answers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import quiet_tensorflow  # noqa: F401  (before TensorFlow)
import tensorflow.compat.v1 as tf
from lookup_server import run, serve

import kvtools
import tfplugin  # noqa: F401  (makes tf.get_kv_variable available)
from kvtools.dialects.interface import Checkpoint

HERE = Path(__file__).resolve().parent
SAMPLES = HERE.parent / "tests" / "data" / "tfra"

Arrays = dict[str, np.ndarray]


def main() -> None:
    """The model, then the checkpoint."""
    options = parse_options()
    model, requests, answers, checkpoint = sources(options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exported = folder / "models" / "1"
        exported.parent.mkdir()
        print(run("export", model, "--savedmodel", exported), end="")
        compare("stock TensorFlow", in_stock_tensorflow(exported, requests, folder), answers)
        with serve(f"tfra={exported.parent}") as url:
            compare("kvtools serve", over_rest(f"{url}/v1/models/tfra:predict", requests), answers)

        moved = folder / "moved.ckpt"
        print(run("migrate", checkpoint, moved, "--to", "tfplugin", "--verify"), end="")
        loss, slots = train_on(str(moved), kvtools.open(str(checkpoint)))
    count = sum(len(rows) for rows in answers.values())
    print(
        f"stock TensorFlow and kvtools serve give TFRA's {count:,} answers bit for bit; training went on from its rows "
        f"with {' and '.join(slots)}, loss {loss[0]:.4f} to {loss[-1]:.4f}"
    )


def in_stock_tensorflow(model: Path, requests: Arrays, folder: Path) -> Arrays:
    """Asks the exported model in a process that has TensorFlow and nothing of kvtools."""
    np.savez(folder / "requests.npz", **requests)
    files = [model, folder / "requests.npz", folder / "answers.npz"]
    subprocess.run([sys.executable, HERE / "stock_predict.py", *files], check=True)
    return dict(np.load(folder / "answers.npz"))


def over_rest(url: str, requests: Arrays) -> Arrays:
    """Asks as a client of TensorFlow Serving does, by its REST interface."""
    body = json.dumps({"inputs": {name: array.tolist() for name, array in requests.items()}})
    with urllib.request.urlopen(url, body.encode(), timeout=60) as answer:
        outputs = json.load(answer)["outputs"]
    return outputs if isinstance(outputs, dict) else {"": outputs}  # of one output REST says no name


def compare(who: str, got: dict, answers: Arrays) -> None:
    """Holds what was answered against what TFRA answered, bit for bit."""
    for name, wanted in answers.items():
        rows = np.asarray(got[name] if name in got else got[""], wanted.dtype)
        assert rows.tobytes() == wanted.tobytes(), f"{who}: '{name}' differs from what TFRA answered"
    print(f"{who} answers as TFRA did")


def train_on(path: str, source: Checkpoint, steps: int = 20) -> tuple[list[float], list[str]]:
    """Restores the first table that has slots of Adam into a graph, and trains it on; gives losses and slots."""
    name = next((name for name, table in source.tables.items() if "Adam.m" in table.slots), None)
    if name is None:
        raise SystemExit("from_tfra.py: no table of the checkpoint has slots of Adam's, to go on with")
    wanted = source.table(name).to_numpy()
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_kv_variable(name, embedding_dim=wanted.values.shape[1])
        rows = tf.nn.embedding_lookup(table, tf.constant(wanted.keys, tf.int64))
        # A task of its own: the sum of each row is to become 1.
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(rows, axis=1) - 1.0))
        train = tf.train.AdamOptimizer(0.01).minimize(loss)
        slots = {slot: table.export(slot) for slot in wanted.slots}
        session.run(tf.global_variables_initializer())
        tf.train.Saver([table]).restore(session, path)
        assert np.array_equal(session.run(rows), wanted.values), "restored rows differ from TFRA's"
        for slot, (keys, values) in session.run(slots).items():
            same = np.array_equal(values[np.argsort(keys)], wanted.slots[slot][np.argsort(wanted.keys)])
            assert same, f"{slot} as restored differs from TFRA's"
        losses = [session.run([loss, train])[0] for _ in range(steps)]
    assert losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    return losses, list(wanted.slots)


def sources(options: argparse.Namespace) -> tuple[Path, Arrays, Arrays, Path]:
    """A SavedModel, requests and TFRA's answers to them; and a checkpoint."""
    checkpoint = options.checkpoint or SAMPLES / "v1_adam"
    if options.model is not None:
        return options.model, dict(np.load(options.requests)), dict(np.load(options.answers)), checkpoint
    told = np.load(SAMPLES / "expected_tf2.npz")
    return SAMPLES / "savedmodel", {"ids": told["serve_keys"]}, {"emb": told["serve_values"]}, checkpoint


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a SavedModel of TFRA's (default: one that the tests keep)")
    parser.add_argument("--requests", type=Path, help="with --model: an .npz of its inputs")
    parser.add_argument("--answers", type=Path, help="with --model: an .npz of the outputs that TFRA gives to these")
    parser.add_argument("--checkpoint", type=Path, help="TFRA's, trained by Adam (default: one that the tests keep)")
    options = parser.parse_args()
    if len({option is None for option in (options.model, options.requests, options.answers)}) > 1:
        parser.error("--model, --requests and --answers go together")
    if options.model is None and not SAMPLES.is_dir():
        parser.error(f"there is no {SAMPLES}: outside of a clone of the repository, name models of your own")
    return options


if __name__ == "__main__":
    main()
