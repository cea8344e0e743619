"""A table whose rows lie in the slots of a perfect hash: some slots have none, and all of these hold the same key."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from kvtools.dialects.chunk import KEYS, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import DEFAULT_MEMORY
from kvtools.dialects.schema import TableSchema
from kvtools.errors import CorruptFileError
from kvtools.row_mask import RowMask

_KEY_ROWS = 1 << 18


class SlotTable(TableReader):
    """The rows of `slots`, a table of one part, but those of its free slots.

    Args:
        schema: what is left.
        slots: all slots as rows.
        free_key: the key, as the table has keys, that free slots hold.
        owner: the slot that has this key; -1 if none has.
    """

    def __init__(self, schema: TableSchema, slots: TableReader, free_key: Array, owner: int) -> None:
        self.schema, self._slots, self._free_key, self._owner = schema, slots, free_key, owner
        self._mask: RowMask | None = None
        self._masking = threading.Lock()

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        at = found = 0
        for chunk in self._slots.read_part(part, columns, rows, verify):
            kept = self._kept(chunk.keys, at)
            at += len(kept)
            found += int(np.count_nonzero(kept))
            if found <= self.schema.rows and kept.any():
                yield chunk if kept.all() else chunk.take(np.flatnonzero(kept))
        if found != self.schema.rows:
            raise CorruptFileError(
                f"reading table '{self.schema.name}': got {found} keys in its slots, expected {self.schema.rows};"
                " export the model again"
            )

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        rows = self.row_numbers(rows)
        with self._masking:
            if self._mask is None:
                mask, at = RowMask([self._slots.rows], memory=DEFAULT_MEMORY), 0
                for chunk in self._slots.chunks(KEYS, rows=_KEY_ROWS, verify=False):
                    mask.put(0, at, self._kept(chunk.keys, at))
                    at += len(chunk.keys)
                self._mask = mask
        return self._slots.take(self._mask.rows_of(rows), columns)

    def _kept(self, keys: Array, at: int) -> Array:
        """Whether each key, the first that of slot `at`, is that of its slot."""
        kept: Array = keys != self._free_key
        if at <= self._owner < at + len(keys):
            kept[self._owner - at] = True
        return kept
