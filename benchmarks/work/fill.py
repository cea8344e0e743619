"""Makes all rows of a table before time is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

CHUNK = 1 << 18


def fill_eagerly(library: Any, table: Any, rows: int) -> None:
    """Rows for the keys [0, rows)."""
    for start in range(0, rows, CHUNK):
        library.fill(table, tf.range(start, min(rows, start + CHUNK), dtype=tf.int64))


class Filler:
    """Rows for the keys [0, rows), in graph mode: made with the graph, run when its variables are initialized."""

    def __init__(self, library: Any, table: Any) -> None:
        self._ids = tf.compat.v1.placeholder(tf.int64, [None])
        self._fill = library.fill(table, self._ids)

    def run(self, session: tf.compat.v1.Session, rows: int) -> None:
        """Does nothing where making the table made the rows."""
        if self._fill is not None:
            for start in range(0, rows, CHUNK):
                session.run(self._fill, {self._ids: np.arange(start, min(rows, start + CHUNK))})
