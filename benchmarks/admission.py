"""What admission of keys costs a lookup and a step, beside a table that admits every key: turn and turn about.

python benchmarks/admission.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import tfplugin
from tfplugin.policies import BloomAdmission, CountAdmission, ProbabilityAdmission

ROWS, DIM, BATCH = 2_000_000, 16, 65_536
TURNS, LOOKUPS = 15, 8
KINDS = {
    "admits all": {},
    "counts": {"admission": CountAdmission(3)},
    "filter": {"admission": BloomAdmission(3, ROWS)},
    "probability": {"admission": ProbabilityAdmission(0.1)},
    "padding key": {"padding_key": -1},
}


def table(kind: str) -> tfplugin.KvVariable:
    """Two million rows under the policies of a kind."""
    made = tfplugin.get_kv_variable(kind.replace(" ", "_"), DIM, capacity_hint=ROWS, **KINDS[kind])
    for first in range(0, ROWS, 100_000):
        made.upsert(np.arange(first, first + 100_000), np.zeros([100_000, DIM], np.float32))
    return made


def step_of(made: tfplugin.KvVariable) -> Callable[[tf.Tensor], None]:
    """A training step by SGD."""
    optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))

    @tf.function
    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(made, ids))
        optimizer.apply_gradients([(tape.gradient(loss, made), made)])

    return step


def main() -> None:
    """Measures and prints the median of all turns."""
    random = np.random.default_rng(0)
    tables = {kind: table(kind) for kind in KINDS}
    lookups = {
        kind: tf.function(lambda ids, made=made: tf.nn.embedding_lookup(made, ids)) for kind, made in tables.items()
    }
    steps = {kind: step_of(made) for kind, made in tables.items()}
    hits = [tf.constant(random.integers(0, ROWS, BATCH)) for _ in range(LOOKUPS)]
    fresh = dict.fromkeys(KINDS, 10 * ROWS)
    times: dict[tuple[str, str], list[float]] = {}

    def measure(what: str, kind: str, call: Callable[[tf.Tensor], object], batches: list[tf.Tensor]) -> None:
        began = time.perf_counter()
        for ids in batches:
            call(ids)
        times.setdefault((what, kind), []).append((time.perf_counter() - began) / len(batches))

    for _ in range(TURNS + 1):
        for kind in KINDS:
            measure("lookup, all keys there", kind, lookups[kind], hits)
            measure("step, all keys there", kind, steps[kind], hits[:2])
            mixed = []
            for _ in range(2):
                ids = random.integers(0, ROWS, BATCH)
                ids[::10] = np.arange(fresh[kind], fresh[kind] + len(ids[::10]))
                fresh[kind] += len(ids)
                mixed.append(tf.constant(ids))
            measure("lookup, a tenth comes for the first time", kind, lookups[kind], mixed)
    for (what, kind), seconds in sorted(times.items(), key=lambda item: item[0][0]):
        median = float(np.median(seconds[1:]))
        print(f"{what:42} {kind:12} {median * 1e3:6.2f} ms, {BATCH / median / 1e6:5.1f} M keys/s")


if __name__ == "__main__":
    main()
