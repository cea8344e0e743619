"""The rows of all ranks in what rank 0 saves.

Each rank writes its tables into files of a folder that all of them share. While rank 0 saves the model, its tables
stand for the whole: what is saved of them are those files, under the names that the checkpoint has for the tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfplugin import checkpoint, ranks
from tfplugin.kv_variable import KvVariable


class RankRows:
    """The tables of a model that ranks share.

    Args:
      model: or anything that TensorFlow saves.
    """

    def __init__(self, model: Any) -> None:
        objects = tf.train.TrackableView(model).descendants()
        found = {id(v): v for v in objects if isinstance(v, KvVariable) and v.ranks > 1}
        self._tables: list[KvVariable] = sorted(found.values(), key=lambda v: v.name)

    def write_own(self, scratch: Path) -> None:
        """Writes the rows of this rank."""
        for number, table in enumerate(self._tables):
            written = checkpoint.save_ops(
                tf.constant(str(scratch / f"rows-{number}-{ranks.rank()}")), [("rows", table)]
            )
            assert len(written) == 1, "one table is on one device"

    @contextlib.contextmanager
    def of_all_ranks(self, scratch: Path) -> Iterator[None]:
        """While the tables stand for the whole. For rank 0, when all have written."""
        was = [(table.ranks, table.part, table.parts) for table in self._tables]
        of_tables = {
            id(table): [str(scratch / f"rows-{number}-{rank}-0") for rank in range(ranks.size())]
            for number, table in enumerate(self._tables)
        }
        for table in self._tables:
            table.ranks, table.part, table.parts = 1, 0, 1
        try:
            with checkpoint.saved_elsewhere(of_tables):
                yield
        finally:
            for table, (table_ranks, part, parts) in zip(self._tables, was, strict=True):
                table.ranks, table.part, table.parts = table_ranks, part, parts
