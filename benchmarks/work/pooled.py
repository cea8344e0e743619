"""Pooled lookups of many features with several ids each: `embedding_lookup_sparse` per feature, combiner ``mean``.

case: features, examples, most_ids (an example has 1 to this many, each count as likely), rows (of a feature's table),
dim, ids (how they are drawn), batches, gradient (whether `tf.gradients` of the sum of squares is computed, too). The
ids lie in variables of the graph, so nothing is fed; the graph holds the lookups once per batch. Nothing is fetched.
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


def _sparse_ids(case: dict[str, Any], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Indices [ids, 2] and ids of one feature in one batch."""
    counts = rng.integers(1, case["most_ids"] + 1, case["examples"])
    example = np.repeat(np.arange(case["examples"]), counts)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([example, place], axis=1), id_batches.draw(case["ids"], case["rows"], int(counts.sum()), rng)


@contextlib.contextmanager
def prepare(library: Any, case: dict[str, Any]) -> Iterator[Prepared]:
    """Fills a table per feature with 0.5 and yields the lookups of all of them."""
    rng = np.random.default_rng(5)
    shape = [case["examples"], case["most_ids"]]
    with tf.Graph().as_default() as graph:
        tables = [
            library.table(f"table_{feature}", case["rows"], case["dim"], 0.5) for feature in range(case["features"])
        ]
        contents, checks, fetches = {}, [], []
        for batch in range(case["batches"]):
            outputs, sources = [], []
            for feature, table in enumerate(tables):
                indices, ids = _sparse_ids(case, rng)
                holders = []
                for name, array in (("indices", indices), ("ids", ids)):
                    value = v1.placeholder(tf.int64, array.shape)
                    held = v1.Variable(value, trainable=False, name=f"{name}_{batch}_{feature}")
                    contents[value] = array
                    holders.append(held)
                pooled, source = library.pooled(table, tf.SparseTensor(holders[0], holders[1], shape))
                outputs.append(pooled)
                sources.append(source)
            fetch = [output.op for output in outputs]
            if case["gradient"]:
                loss = tf.add_n([tf.reduce_sum(output * output) for output in outputs])
                for gradient in tf.gradients(loss, sources):
                    sliced = isinstance(gradient, tf.IndexedSlices)
                    fetch += [gradient.values.op, gradient.indices.op] if sliced else [gradient.op]
            # Not grouped: TensorFlow would drop what only a group waits for.
            fetches.append(fetch)
            checks.append(tf.reduce_mean(tf.add_n(outputs)))
        initializer = v1.global_variables_initializer()
        filler = Filler(library, tables)
    with library.session(graph) as session:
        session.run(initializer, contents)
        filler.run(session, case["rows"])
        steps = [session.make_callable(fetch) for fetch in fetches]
        for step in steps:
            step()
        turn = itertools.cycle(steps)
        yield Prepared(lambda: next(turn)(), check=float(session.run(checks[0])))
