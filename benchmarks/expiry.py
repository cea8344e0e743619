"""What expiry beside training costs: two tables take turns in one process, one of which expires.

    python benchmarks/expiry.py [ROWS]

Each turn trains one table for some steps: a lookup and an update by Adam, a compiled function of TensorFlow. The table
that expires looks at its rows for age and norm, all of them about once in 200 steps. Prints one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
import tensorflow as tf
from adam_step import adam_step

import tfplugin
from tfplugin.policies import ExpireAfterSteps, ExpireBelowNorm

DIM, BATCH, STEPS, TURNS = 32, 8192, 40, 15


def trained(name: str, rows: int, **told: object) -> tuple[tfplugin.KvVariable, tf.types.experimental.GenericFunction]:
    """A table with rows, and one step of its training on ids."""
    table = tfplugin.get_kv_variable(name, DIM, initializer=1.0, capacity_hint=rows, **told)
    step = adam_step(table)
    step(tf.range(BATCH, dtype=tf.int64))
    for begin in range(0, rows, 1 << 17):
        table.sparse_read(tf.range(begin, min(rows, begin + (1 << 17)), dtype=tf.int64), training=True)
    return table, step


def main(rows: int) -> None:
    """Measures and prints."""
    policies = [ExpireAfterSteps(2000), ExpireBelowNorm(1e-3)]
    made = {"plain": trained("plain", rows), "expires": trained("expires", rows, expiry=policies, expire_every=200)}
    rng = np.random.default_rng(1)
    ratios, seconds = [], {name: [] for name in made}
    for turn in range(TURNS):
        ids = [tf.constant(rng.integers(0, 2 * rows, BATCH)) for _ in range(STEPS)]
        took = {}
        for name in sorted(made, reverse=bool(turn % 2)):
            _, step = made[name]
            begin = time.perf_counter()
            for batch in ids:
                step(batch)
            took[name] = (time.perf_counter() - begin) / STEPS
            seconds[name].append(took[name])
        if turn > 0:  # the first turns compile and grow
            ratios.append(took["expires"] / took["plain"])
    table = made["expires"][0]
    print(
        json.dumps(
            {
                "rows": rows,
                "step_ms": {name: round(1e3 * statistics.median(times), 3) for name, times in seconds.items()},
                "expires_to_plain": round(statistics.median(ratios), 4),
                "expired_rows": int(table.evicted_rows()),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000)
