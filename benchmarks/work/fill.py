"""Makes all rows of a table before time is taken."""

from __future__ import annotations

from collections.abc import Sequence
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

    def __init__(self, library: Any, tables: Sequence[Any]) -> None:
        self._ids = tf.compat.v1.placeholder(tf.int64, [None])
        fills = [library.fill(table, self._ids) for table in tables]
        self._fills = [fill for fill in fills if fill is not None]

    def run(self, session: tf.compat.v1.Session, rows: int) -> None:
        """Does nothing where making the table made the rows."""
        if self._fills:
            for start in range(0, rows, CHUNK):
                session.run(self._fills, {self._ids: np.arange(start, min(rows, start + CHUNK))})
