"""Columns made from other columns: turned row by row into other numbers, or put one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.column import Column


class MappedColumn:
    """A column whose numbers are `convert` of another's: the same rows and row shape, type `dtype`."""

    def __init__(self, source: Column, dtype: np.dtype[Any], convert: Callable[[Array], Array]) -> None:
        self._source = source
        self._convert = convert
        self.name = source.name
        self.dtype = dtype
        self.rows = source.rows
        self.row_shape = source.row_shape

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield all rows in order; see `Column.chunks`."""
        return map(self._convert, self._source.chunks(chunk_rows, verify=verify))

    def take(self, rows: Array) -> Array:
        """Copy the rows of these int64 numbers [n]."""
        return self._convert(self._source.take(rows))

    def read(self) -> Array:
        """Return all rows."""
        return self._convert(self._source.read())


class ConcatenatedColumn:
    """Columns of one type and row shape, one after the other; at least one."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = tuple(columns)
        self.name = columns[0].name
        self.dtype = columns[0].dtype
        self.rows = sum(column.rows for column in columns)
        self.row_shape = columns[0].row_shape

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield all rows in order, no chunk spanning two columns; see `Column.chunks`."""
        for column in self._columns:
            yield from column.chunks(chunk_rows, verify=verify)

    def take(self, rows: Array) -> Array:
        """Copy the rows of these int64 numbers [n]."""
        taken = np.empty((len(rows), *self.row_shape), self.dtype)
        start = 0
        for column in self._columns:
            here = np.flatnonzero((rows >= start) & (rows < start + column.rows))
            if len(here):
                taken[here] = column.take(rows[here] - start)
            start += column.rows
        return taken

    def read(self) -> Array:
        """Return all rows; a copy unless only one of the columns has any."""
        filled = [column for column in self._columns if column.rows]
        if len(filled) == 1:
            return filled[0].read()
        return np.concatenate([np.empty((0, *self.row_shape), self.dtype), *(column.read() for column in filled)])
