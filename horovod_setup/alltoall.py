"""Run by each of several ranks: starts Horovod and exchanges rows with the others, in eager mode and in a tf.function.

    horovodrun -np 2 --gloo -H localhost:2 python -m kvtools.horovod_setup.alltoall

A rank that received other rows than were sent to it ends with an error.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main() -> int:
    """Exchange rows, compare them, and print one line."""
    tf: Any = importlib.import_module("tensorflow")
    hvd: Any = importlib.import_module("horovod.tensorflow")
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    # Rank r sends d + 1 rows to rank d; each says where it comes from and where it goes.
    rows = tf.constant([[float(rank), float(to)] for to in range(size) for _ in range(to + 1)])
    splits = tf.range(1, size + 1)
    expected = [[float(source), float(rank)] for source in range(size) for _ in range(rank + 1)]
    for exchange in (_exchange, tf.function(_exchange)):
        got, counts = exchange(hvd, rows, splits)
        if got.numpy().tolist() != expected or counts.numpy().tolist() != [rank + 1] * size:
            print(f"alltoall: rank {rank} of {size} got {got.numpy().tolist()}, expected {expected}", file=sys.stderr)
            return 1
    print(f"alltoall: rank {rank} of {size} is right", flush=True)
    hvd.shutdown()
    return 0


def _exchange(hvd: Any, rows: Any, splits: Any) -> Any:
    return hvd.alltoall(rows, splits=splits)


if __name__ == "__main__":
    sys.exit(main())
