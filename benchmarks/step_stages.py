"""Where the time of a training step goes, stage by stage: our ops, TensorFlow's own, the feed and the session.

The step of `cases/train.py` on a key-value variable. Whole steps are timed as `run.py` times them; then
some are traced (`RunOptions.FULL_TRACE`, which costs a little itself), and each op's median is told. "Between the ops"
is what of a traced step belongs to none of them: the executor, and threads that wake up. "Session" is a run that does
nothing, and "feed" what a run costs more that is fed the ids and does nothing with them. In microseconds.

    python benchmarks/step_stages.py --optimizer Adam --dim 16 --ids zipf
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import floor
import ids as id_batches
import numpy as np
from turns import KEEP_MEMORY

BATCHES = 16
TRACED = 40


def microseconds(call: Callable[[np.ndarray], object], batches: list[np.ndarray], calls: int = 160) -> float:
    """Of a call, the median."""
    times = []
    for i in range(calls):
        start = time.perf_counter()
        call(batches[i % len(batches)])
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def traced(session: Any, step: Any, ids: Any, batches: list[np.ndarray]) -> tuple[dict[str, float], float]:
    """The ops of a step, and how long they all take together, from the first to the last."""
    import tensorflow as tf

    v1 = tf.compat.v1
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
    ops: dict[str, list[int]] = {}
    spans = []
    for i in range(TRACED):
        told = v1.RunMetadata()
        session.run(step, {ids: batches[i % len(batches)]}, options=options, run_metadata=told)
        nodes = [node for device in told.step_stats.dev_stats for node in device.node_stats]
        begin = min(node.all_start_micros for node in nodes)
        spans.append(max(node.all_start_micros + node.all_end_rel_micros for node in nodes) - begin)
        for node in nodes:
            kind = node.timeline_label.split(" = ")[-1].split("(")[0]
            ops.setdefault(f"{kind} {node.node_name}", []).append(node.op_end_rel_micros - node.op_start_rel_micros)
    return {name: statistics.median(times) for name, times in ops.items()}, statistics.median(spans)


def stages(optimizer: str, dim: int, how: str, threads: int, rows: int, batch: int) -> None:
    """Measures and prints."""
    import tensorflow as tf
    from libraries.kv import Library
    from work.fill import Filler
    from work.train import OPTIMIZERS

    v1 = tf.compat.v1
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    library = Library(threads)
    batches = id_batches.batches(how, rows, batch, BATCHES)
    with tf.Graph().as_default() as graph:
        table = library.table("table", rows, dim, 0.5)
        ids = v1.placeholder(tf.int64, [None])
        looked_up = library.trainable_lookup(table, ids, unique=how == "unique")
        train = library.optimizer(OPTIMIZERS[optimizer]()).minimize(2 * tf.nn.l2_loss(looked_up))
        nothing = tf.identity(ids).op
        initializer = v1.global_variables_initializer()
        filler = Filler(library, [table])
    with library.session(graph) as session:
        session.run(initializer)
        filler.run(session, rows)
        step, feed = session.make_callable(train, [ids]), session.make_callable(nothing, [ids])
        for ids_of_step in batches:
            step(ids_of_step)
        whole = microseconds(step, batches)
        empty = microseconds(feed, [batches[0][:1]])
        fed = microseconds(feed, batches)
        ops, span = traced(session, train, ids, batches)
    different = statistics.mean(len(np.unique(ids_of_step)) for ids_of_step in batches) / batch
    least = 1e6 * batch * floor.step_bytes(dim, floor.SLOTS[optimizer], different)
    least /= floor.copy_bandwidth(threads, 256)
    print(f"{optimizer}, dim {dim}, {how} ids: {whole:.0f} a step, {least / whole:.2f} of the floor ({least:.0f})")
    print(f"{empty:8.0f}  session\n{fed - empty:8.0f}  feed\n{span - sum(ops.values()):8.0f}  between the ops")
    for name, time_of in sorted(ops.items(), key=lambda op: -op[1]):
        print(f"{time_of:8.0f}  {name}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=floor.SLOTS, default="Adam")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--ids", choices=("unique", "uniform", "zipf"), default="unique")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=65_536)
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in KEEP_MEMORY.items()):  # malloc reads it when it starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    stages(args.optimizer, args.dim, args.ids, args.threads, args.rows, args.batch)


if __name__ == "__main__":
    main()
