"""How fast the memory would allow: the bytes that a piece of work must move over the bandwidth of a plain copy.

Memory comes in lines of 64 bytes, so what is read at random is counted in whole lines, and what is read or written in
order in bytes. Per id:

    look up     its key 8; once per different id: the index line 64, the row's value in lines; writes the output
    gradient    reads the output, writes as much
    apply       reads the key 8 and the gradient; once per different id: reads and writes the line with frequency and
                version, reads and writes the row with its slots, in lines

A repeated id finds its row in cache, so skewed ids count a row once. The position of a row is not looked up again by
the apply: a lookup can remember it. Allocation, feeding and the reading of a line before it is written over count
nothing. What is left is less than any implementation moves: no one reaches 1.0 of it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ids
import numpy as np

LINE = 64
SLOTS = {"SGD": 0, "Adagrad": 1, "Adam": 2}
_FLOAT = 4


def _lines(size: float) -> float:
    return LINE * -(-size // LINE)


def lookup_bytes(dim: int, different: float = 1.0) -> float:
    """Per id of a lookup. `different`: the share of ids that are not repetitions."""
    return 8 + different * (LINE + _lines(dim * _FLOAT)) + dim * _FLOAT


def step_bytes(dim: int, slots: int, different: float = 1.0) -> float:
    """Per id of a training step of an optimizer with so many slots.

    >>> step_bytes(dim=16, slots=2)  # 200 for the lookup, 128 for the gradient, 584 for the apply
    912.0
    """
    gradient = 2 * dim * _FLOAT
    apply = 8 + dim * _FLOAT + different * (2 * LINE + 2 * _lines((1 + slots) * dim * _FLOAT))
    return lookup_bytes(dim, different) + gradient + apply


def bytes_per_item(work: str, parameters: dict[str, Any]) -> float:
    """Of one item of a case."""
    batches = ids.batches(parameters["ids"], parameters["rows"], parameters["batch"], 1)
    different = len(np.unique(batches[0])) / len(batches[0])
    if work == "lookup":
        return lookup_bytes(parameters["dim"], different)
    if work == "train":
        return step_bytes(parameters["dim"], SLOTS[parameters["optimizer"]], different)
    raise ValueError(f"floor: no count of bytes for {work!r}")


def copy_bandwidth(threads: int, mebibytes: int, repetitions: int = 3) -> float:
    """Bytes read and written a second by that many threads copying large arrays: the best of some tries."""
    size = mebibytes * 2**20 // threads
    arrays = [(np.zeros(size, np.uint8), np.ones(size, np.uint8)) for _ in range(threads)]
    best = float("inf")
    for _ in range(repetitions + 1):  # the first one fetches the pages
        copies = [threading.Thread(target=np.copyto, args=pair) for pair in arrays]
        start = time.perf_counter()
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.join()
        best = min(best, time.perf_counter() - start)
    return 2 * size * threads / best
