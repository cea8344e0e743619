"""The lookup op against `tf.gather` on a dense variable: random hits, one process, interleaved.

Both sides run eagerly on the same ids, allocate their output, and share TensorFlow's threads. Ids rotate over many
batches, so that no batch is answered from cache. Prints medians and the ratio of each pair of runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

import tfplugin  # noqa: F401
from tfplugin.ops import raw


def measure(
    sides: dict[str, Callable[[tf.Tensor], tf.Tensor]], batches: list[tf.Tensor], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Rows per second of each side, round by round; sides alternate within a round."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    n = int(tf.size(batches[0]))
    for side in sides.values():
        for ids in batches:
            side(ids)
    position = 0
    for _ in range(rounds):
        start_at = position
        for name, side in sides.items():
            position = start_at
            start = time.perf_counter()
            for _ in range(calls):
                side(batches[position % len(batches)])
                position += 1
            speeds[name].append(n * calls / (time.perf_counter() - start))
    return speeds


def compare(rows: int, dim: int, sizes: list[int], rounds: int) -> Iterator[dict[str, object]]:
    """One result per batch size, for tables of one dim."""
    random = np.random.default_rng(dim)
    table = tf.get_kv_variable(f"table_{dim}", dim, initializer=0.5)
    for start in range(0, rows, 1 << 18):
        table.sparse_read(tf.range(start, min(rows, start + (1 << 18)), dtype=tf.int64), training=True)
    dense = tf.Variable(tf.fill([rows, dim], 0.5))

    def kv(mode: str) -> Callable[[tf.Tensor], tf.Tensor]:
        return lambda ids: raw.kv_table_gather(table.handle, ids, dtype=tf.float32, dim=dim, mode=mode)

    sides: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
        "kv inference": kv("zeros"),
        "kv training": kv("train"),
        "tf.gather": lambda ids: tf.raw_ops.ResourceGather(resource=dense.handle, indices=ids, dtype=tf.float32),
    }
    for size in sizes:
        batches = [tf.constant(random.integers(0, rows, size)) for _ in range(min(64, max(4, (1 << 22) // size)))]
        speeds = measure(sides, batches, rounds, max(4, (1 << 20) // size))
        yield {
            "benchmark": "TF op lookup, random hits",
            "rows": rows,
            "dim": dim,
            "batch": size,
            "rows_per_second": {name: statistics.median(values) for name, values in speeds.items()},
            "ratio_to_tf_gather": {
                name: statistics.median(a / b for a, b in zip(speeds[name], speeds["tf.gather"], strict=True))
                for name in ("kv inference", "kv training")
            },
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 65536])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    for dim in args.dims:
        for result in compare(args.rows, dim, args.batches, args.rounds):
            print(json.dumps(result), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
