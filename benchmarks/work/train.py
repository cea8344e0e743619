"""A whole training step in graph mode: look up, gradient of the sum of squares, apply. One `Session.run`.

case: optimizer (of OPTIMIZERS), rows, dim, batch, ids (how they are drawn), batches, parts, and dtype where it is not
float32 but one of 16 bits: rows are then looked up as float32, and updates are rounded stochastically. The ids are
fed, 8 bytes each, which is the same on all sides and part of the time; the loss is not fetched.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import ids as id_batches
import numpy as np
import tensorflow as tf
from work.fill import Filler
from work.prepared import Prepared

v1 = tf.compat.v1

OPTIMIZERS = {
    "SGD": lambda: v1.train.GradientDescentOptimizer(0.01),
    "Adagrad": lambda: v1.train.AdagradOptimizer(0.01),
    "Adam": lambda: v1.train.AdamOptimizer(0.001),
}


@contextlib.contextmanager
def prepare(library: Any, case: dict[str, Any]) -> Iterator[Prepared]:
    """Fills a table with 0.5, takes one step per batch, and yields the step."""
    batches = id_batches.batches(case["ids"], case["rows"], case["batch"], case["batches"])
    with tf.Graph().as_default() as graph:
        if "dtype" in case:
            table = library.half_table("table", case["dim"], 0.5, case["dtype"])
        else:
            table = library.table("table", case["rows"], case["dim"], 0.5, case["parts"])
        ids = v1.placeholder(tf.int64, [None])
        if "dtype" in case:
            rows = library.float32_lookup(table, ids)
        else:
            rows = library.trainable_lookup(table, ids, unique=case["ids"] == "unique")
        optimizer = library.optimizer(OPTIMIZERS[case["optimizer"]]())
        if "dtype" in case:
            optimizer = library.stochastic(optimizer)
        train = optimizer.minimize(2 * tf.nn.l2_loss(rows))  # the sum of squares; its gradient is one op
        after = library.lookup(table, ids, training=True)
        initializer = v1.global_variables_initializer()
        filler = Filler(library, [table])
    with library.session(graph) as session:
        session.run(initializer)
        filler.run(session, case["rows"])
        step = session.make_callable(train, [ids])
        step(batches[0])
        check = np.mean(session.run(after, {ids: batches[0]}).astype(np.float64))
        for batch in batches[1:]:
            step(batch)
        turn = itertools.cycle(batches)
        yield Prepared(lambda: step(next(turn)), check=float(check))
