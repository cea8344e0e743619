"""Rows that are chosen while they are read to be written, so that a table is read once.

That can be done where nothing but the rows of zeros is to be left out, and no key is there twice. The latter is seen
only in the end, as a rule while rows are written: then what was written is of no use, and is written anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from kvtools.clip import Choice, Criteria, account_of, hidden_rows, passes
from kvtools.dialects.chunk import Array, Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.row_mask import RowMask
from kvtools.table_view import TableView

LEAST_ROWS = 1 << 18
"""Tables of fewer are read twice in no time."""


class RepeatedKeys(Exception):
    """A key is there twice: which rows are kept has to be known before any is written."""


@dataclass(frozen=True)
class ToChoose:
    """A choice that is not made yet: `kept` and `bytes` are what they are at most."""

    reader: TableReader = field(repr=False)
    zeros: bool
    row_bytes: int
    memory: int

    @property
    def table(self) -> str:
        """The table's name."""
        return self.reader.schema.name

    @property
    def kept(self) -> int:
        """How many rows there are to keep."""
        return self.reader.rows

    @property
    def bytes(self) -> int:
        """What they take where they go."""
        return self.kept * self.row_bytes

    def reading(self) -> ChosenAsRead:
        """Return the table to be read, once, in a `with` block."""
        return ChosenAsRead(self)


class ChosenAsRead(TableView):
    """A table without its rows of zeros, which are found as they are read; then there is a `choice`."""

    def __init__(self, of: ToChoose) -> None:
        super().__init__(of.reader, of.reader.schema)
        self._of = of
        self._criteria = Criteria(zeros=of.zeros)
        self._mask = RowMask(of.reader.schema.part_rows, memory=of.memory)
        self._zeros = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvtools-keys")
        self._hidden: Future[Array] | None = None

    def __enter__(self) -> ChosenAsRead:
        self._hidden = self._pool.submit(hidden_rows, self._of.reader, self._of.memory)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows kept of one part; see `TableReader.read_part`."""
        at = 0
        for chunk in self.source.read_part(part, columns, rows, verify):
            kept = passes(chunk, self._criteria, None).get("zeros", np.ones(len(chunk), np.bool_))
            self._mask.put(part, at, kept)
            at += len(chunk)
            lost = len(chunk) - int(np.count_nonzero(kept))
            self._zeros += lost
            if not lost:
                yield chunk
            elif lost < len(chunk):
                yield chunk.take(np.flatnonzero(kept))

    def choice(self) -> Choice:
        """Return which rows were kept, when all have been read; raises `RepeatedKeys`."""
        assert self._hidden is not None
        hidden = self._hidden.result()
        if len(hidden):
            raise RepeatedKeys
        choice = account_of(self.source, self._mask, hidden, self._of.row_bytes)
        return dataclasses.replace(choice, failed={"zeros": self._zeros} if self._of.zeros else {})
