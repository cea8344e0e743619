"""Look up a batch of ids whose rows are there, in a `sok.DynamicVariable` with a capacity or without.

case: rows, dim, batch, ids (how they are drawn), batches, training, bounded (whether `rows` is also the most that it
keeps, those used last). In a `tf.function`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import ids as id_batches
import numpy as np
import tensorflow as tf
from work.prepared import Prepared

_numbers = itertools.count()


@contextlib.contextmanager
def prepare(library: Any, case: dict[str, Any]) -> Iterator[Prepared]:
    """Fills a table with 0.5 and yields the lookup."""
    from tfplugin import sok

    bounds = {"var_type": "hybrid", "max_capacity": case["rows"]} if case["bounded"] else {}
    table = sok.DynamicVariable(case["dim"], "0.5", name=f"bounded_{next(_numbers)}", **bounds)
    for first in range(0, case["rows"], 1 << 16):
        keys = np.arange(first, min(case["rows"], first + (1 << 16)))
        sok.assign(table, keys, np.full([len(keys), case["dim"]], 0.5, np.float32))

    @tf.function
    def look_up(ids: tf.Tensor) -> tf.Tensor:
        return library.lookup(table, ids, case["training"])

    batches = id_batches.batches(case["ids"], case["rows"], case["batch"], case["batches"])
    tensors = [tf.constant(batch) for batch in batches]
    check = np.mean([np.mean(look_up(batch)) for batch in tensors])
    if table.size.numpy()[0] != case["rows"]:
        raise AssertionError(f"the table has {table.size.numpy()[0]} rows, expected {case['rows']}")
    turn = itertools.cycle(tensors)
    yield Prepared(lambda: look_up(next(turn)), check=float(check))
