"""Gradients of tables that an optimizer gathers over steps, and has not applied yet, in a checkpoint of all ranks.

Each rank has those of the rows that it holds. A checkpoint has all of them, as an optimizer on a single rank would; who
restores it keeps those of its own keys.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin import ranks
from tfplugin.optimizers.accumulated_rows import AccumulatedRows


class PendingRows:
    """Those of all optimizers of a checkpoint.

    Args:
      saver: TensorFlow's, of the checkpoint.
      tensors: what it would save of each object, by name.
    """

    def __init__(self, saver: Any, tensors: MutableMapping[Any, Any]) -> None:
        objects = tf.train.TrackableView(saver._graph_view.root).descendants()
        self._tensors = tensors
        self._found: dict[str, AccumulatedRows] = {
            next(iter(tensors[one.keys])): one
            for one in objects
            if isinstance(one, AccumulatedRows) and one.variable.ranks > 1
        }

    def described(self) -> list[str]:
        """What must be the same on all ranks."""
        return [f"{name}: pending gradients of {one.variable.describe()}" for name, one in self._found.items()]

    def write_own(self, scratch: Path) -> None:
        """Writes those of this rank."""
        for number, one in enumerate(self._found.values()):
            for column, values in zip(("keys", "rows"), one.held(), strict=True):
                (_file(scratch, column, number, ranks.rank())).write_bytes(np.ascontiguousarray(values).tobytes())

    def take_all(self, scratch: Path) -> None:
        """Has rank 0 save those of all ranks, which have been written."""
        for number, one in enumerate(self._found.values()):
            for column, variable in (("keys", one.keys), ("rows", one.rows)):
                parts = [_file(scratch, column, number, rank).read_bytes() for rank in range(ranks.size())]
                whole = np.frombuffer(b"".join(parts), variable.dtype.as_numpy_dtype)
                name = next(iter(self._tensors[variable]))
                self._tensors[variable] = {name: tf.constant(whole.reshape(-1, *variable.shape[1:]), variable.dtype)}


def _file(scratch: Path, column: str, number: int, rank: int) -> Path:
    return scratch / f"pending-{column}-{number}-{rank}"
