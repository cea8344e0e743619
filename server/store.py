"""The tables that a server answers from: values in the mapped files, keys in an index built at start."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.dialects.chunk import Columns
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import OpenOptions, Progress
from kvtools.dialects.schema import TableSchema
from kvtools.errors import BadInputError, UnknownTableError
from kvtools.server.key_index import KeyIndex

_VALUES = Columns(values=True)


class StoredTable:
    """One table, ready for lookups from any number of threads."""

    def __init__(self, reader: TableReader) -> None:
        self._reader = reader
        self._index = KeyIndex(reader.all_keys())
        self.key_limits = np.iinfo(reader.schema.key_dtype)

    @property
    def schema(self) -> TableSchema:
        """What the table holds."""
        return self._reader.schema

    @property
    def duplicates(self) -> int:
        """How many rows are hidden by a later row of the same key."""
        return self._index.duplicates

    def verify(self) -> None:
        """Read every row and compare its checksums; raises `BadInputError`."""
        for _ in self._reader.chunks(_VALUES):
            pass

    def lookup(self, keys: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Look up `keys` [n] of the table's key type.

        Returns the values [n, dim] in the table's type, zeros where there is no row, and whether each key
        was found, bool [n].
        """
        rows = self._index.find(keys)
        found = rows >= 0
        if found.all():
            values = self._reader.take(rows, _VALUES).values
            assert values is not None
            return values, found
        embeddings = np.zeros((len(keys), self.schema.dim), self._reader.value_dtype)
        embeddings[found] = self._reader.take(rows[found], _VALUES).values
        return embeddings, found


class TableStore:
    """The tables of a checkpoint, or of a SavedModel that `kvtools export` wrote, by name.

    Reads and checks all keys, and no values.

    Raises:
        BadInputError: the checkpoint has no table, or cannot be read.

    Example:
        ```python
        store = TableStore("exported")
        embeddings, found = store.table("user_emb").lookup(np.array([17, -3]))
        ```
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        options: OpenOptions | None = None,
        tables: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> None:
        checkpoint = open_checkpoint(path, options)
        readers = checkpoint.select(tables)
        if not readers:
            raise BadInputError(
                f"serving '{checkpoint.path}': it has no key-value table; see `kvtools inspect`, or name another path"
            )
        self.path = checkpoint.path
        self.dialect = checkpoint.dialect
        self.tables: dict[str, StoredTable] = {}
        for reader in readers:
            self.tables[reader.schema.name] = StoredTable(reader)
            if progress:
                progress(reader.schema.name, reader.schema.rows, reader.schema.rows)

    @property
    def warm(self) -> bool:
        """Whether the index is in memory; it is from the start, and values are read as they are asked for."""
        return True

    def populate(self, stop: threading.Event | None = None) -> None:
        """Bring what is served into memory; the index is there from the start."""

    def verify(self) -> None:
        """Read every row and compare its checksums; raises `BadInputError`."""
        for table in self.tables.values():
            table.verify()

    def table(self, name: str) -> StoredTable:
        """Return the table `name`; raises `UnknownTableError`."""
        try:
            return self.tables[name]
        except KeyError:
            raise UnknownTableError(f"there is no table '{name}'; GET /v1/tables lists the tables") from None
