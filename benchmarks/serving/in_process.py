"""Lookups without a server, on one thread: the snapshot's compiled table, and the SavedModel in TensorFlow.

python -m serving.in_process SNAPSHOT SAVED_MODEL|- SECONDS VALUES.npy KEYS.npy...     a line of JSON for each figure
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from serving.tables import NAME

NATIVE = "native multi-get"
SAVED_MODEL = "SavedModel in TensorFlow"
Ask = Callable[[np.ndarray], np.ndarray]


def native(snapshot: str) -> Ask:
    """The compiled table, all of it in memory."""
    from kvtools import _snapshot

    opened = _snapshot.open(snapshot)
    opened.populate()
    (table,) = opened.tables
    return lambda keys: table.lookup(keys)[0]


def saved_model(folder: str) -> Ask:
    """The signature of the exported model."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    model = tf.saved_model.load(folder)
    signature = model.signatures[NAME]

    def ask(keys: np.ndarray) -> np.ndarray:
        rows: np.ndarray = signature(ids=tf.constant(keys))["embeddings"].numpy()
        return rows

    ask.model = model  # type: ignore[attr-defined]  # it must live as long
    return ask


def measure(ask: Ask, batches: np.ndarray, seconds: float) -> dict[str, float]:
    """One call after the other."""
    times = []
    for batch in batches[:5]:
        ask(batch)
    begin = time.perf_counter()
    cpu = time.process_time()
    at = 0
    while (start := time.perf_counter()) < begin + seconds:
        ask(batches[at % len(batches)])
        times.append(time.perf_counter() - start)
        at += 1
    took, used = time.perf_counter() - begin, time.process_time() - cpu
    p50, p99 = np.percentile(times, [50, 99])
    return {"per_second": at / took, "cpu": used / at, "p50": float(p50), "p99": float(p99), "requests": at}


def main() -> None:
    """Measure both."""
    snapshot, model, seconds, values_file, *keys = sys.argv[1:]
    values = np.load(values_file, mmap_mode="r")
    sides = [(NATIVE, native, snapshot)] + ([(SAVED_MODEL, saved_model, model)] if model != "-" else [])
    for name, open_it, path in sides:
        ask = open_it(path)
        for file in keys:
            batches = np.load(Path(file))
            assert np.array_equal(ask(batches[0]), values[batches[0]]), f"{name}: other rows"
            figures = measure(ask, batches, float(seconds))
            print(json.dumps({"side": name, "keys": batches.shape[1], "connections": 1, **figures}), flush=True)


if __name__ == "__main__":
    main()
