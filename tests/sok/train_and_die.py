"""One rank of `test_dying_rank.py`: trains with a checkpoint after every step, and may die in the middle of one.

    train_and_die.py FOLDER STEPS [kill|raise]

With the last argument rank 1 dies in its fourth step, once the others wait for it. It goes on from the last checkpoint
in FOLDER if there is one. Each rank writes how it ended, and the rows that it then has, to FOLDER.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import tfplugin.sok as sok

DIES_IN = 3  # the fourth step
KEYS = np.concatenate([np.arange(-10, 30), [2**63 - 1, -(2**63)]])


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, to the rank that is left: it has yet to write
    hvd.init()
    sok.init()
    folder, steps, death = Path(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:])
    dynamic = sok.DynamicVariable(3, "random", name="dynamic")
    static = sok.Variable(np.arange(60.0).reshape(20, 3), dtype=tf.float32, name="static")
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05))
    done = tf.Variable(0, dtype=tf.int64)
    checkpoint = sok.Checkpoint(dynamic=dynamic, static=static, optimizer=optimizer, done=done)
    manager = sok.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=2)

    def die(at: np.ndarray) -> np.int64:
        if death and int(at) == DIES_IN and sok.rank() == 1:
            time.sleep(0.5)  # the others are in the exchange
            if death == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no more data on this rank")
        return np.int64(0)

    @tf.function(autograph=False)
    def train(keys: tf.RaggedTensor, rows: tf.RaggedTensor, step: tf.Tensor) -> None:
        keys = keys.with_flat_values(keys.flat_values + tf.numpy_function(die, [step], tf.int64))
        with tf.GradientTape() as tape:
            pooled = sok.lookup_sparse([dynamic, static], [keys, rows], combiners=["sum", "mean"])
            loss = tf.nn.l2_loss(pooled[0] - pooled[1])
        variables = [dynamic, static]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    checkpoint.restore(manager.latest_checkpoint)
    began = int(done)
    ended: dict[str, Any] = {"began": began, "error": None}
    try:
        for step in range(began, steps):
            rng = np.random.default_rng(100 * step + sok.rank())
            keys = tf.RaggedTensor.from_row_lengths(rng.choice(KEYS, 12), [4, 0, 8])
            rows = tf.RaggedTensor.from_row_lengths(rng.integers(20, size=12), [6, 5, 1])
            train(keys, rows, tf.constant(step, tf.int64))
            done.assign(step + 1)
            manager.save()
    except BaseException as error:
        ended["error"] = f"{type(error).__name__}: {error}"
        print(ended["error"], file=sys.stderr, flush=True)
        raise
    finally:
        held, values = sok.export(dynamic)
        ended["dynamic"] = dict(zip(held.numpy().tolist(), values.numpy().tolist(), strict=True))
        ended["static"] = static.numpy()
        (folder / f"ended-{sok.rank()}.pickle").write_bytes(pickle.dumps(ended))


if __name__ == "__main__":
    main()
