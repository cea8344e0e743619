"""Look up a batch of ids whose rows are there.

case: rows, dim, batch, ids (how they are drawn), batches, parts, training, way (``function``: a `tf.function`;
``eager``: the bare call; ``session``: `Session.run` with the ids fed). The output is allocated by each call, as it is
in a model, and not fetched.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import ids as id_batches
import numpy as np
import tensorflow as tf
from work.fill import Filler, fill_eagerly
from work.prepared import Prepared

v1 = tf.compat.v1

# In eager mode a library may take two tables of one name for one table, whatever their dims.
_numbers = itertools.count()


@contextlib.contextmanager
def prepare(library: Any, case: dict[str, Any]) -> Iterator[Prepared]:
    """Fills a table with 0.5 and yields the lookup."""
    batches = id_batches.batches(case["ids"], case["rows"], case["batch"], case["batches"])
    if case["way"] == "session":
        with tf.Graph().as_default() as graph:
            table = library.table("table", case["rows"], case["dim"], 0.5, case["parts"])
            ids = v1.placeholder(tf.int64, [None])
            rows = library.lookup(table, ids, case["training"])
            initializer = v1.global_variables_initializer()
            filler = Filler(library, [table])
        with library.session(graph) as session:
            session.run(initializer)
            filler.run(session, case["rows"])
            check = np.mean(session.run(rows, {ids: batches[0]}))
            yield _rotating(session.make_callable(rows.op, [ids]), batches, check)
    else:
        name = f"table_{next(_numbers)}"
        table = library.table(name, case["rows"], case["dim"], 0.5, case["parts"])
        fill_eagerly(library, table, case["rows"])

        def look_up(ids: tf.Tensor) -> tf.Tensor:
            return library.lookup(table, ids, case["training"])

        run = look_up if case["way"] == "eager" else tf.function(look_up)
        tensors = [tf.constant(batch) for batch in batches]
        first = run(tensors[0])
        if first.shape != (case["batch"], case["dim"]):
            raise AssertionError(f"a lookup gave {first.shape}, expected {(case['batch'], case['dim'])}")
        yield _rotating(run, tensors, np.mean(first))


def _rotating(run: Any, batches: list[Any], check: float) -> Prepared:
    for batch in batches:
        run(batch)
    turn = itertools.cycle(batches)
    return Prepared(lambda: run(next(turn)), check=float(check))
