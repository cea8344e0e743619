"""A column that was cut into blocks of rows, and these into blocks of numbers: one tensor, sharded over files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtools.dialects.chunk import CHUNK_BYTES, Array
from kvtools.dialects.column import Column
from kvtools.dialects.rechunk import rechunk


@dataclass(frozen=True)
class Block:
    """A block: its first row and first number of each row, how many of both it has, and its numbers."""

    row: int
    start: int
    rows: int
    width: int
    column: Column


class GridColumn:
    """Rows [rows, *row_shape] that blocks make up, which cover all rows without a gap and without an overlap.

    Args:
        name: what messages call the column.
        dtype: the type of its numbers.
        rows, row_shape: its shape.
        blocks: in any order; only a column of rows of one dimension may be cut within rows.

    Raises:
        ValueError: the blocks leave a gap, or overlap.
    """

    def __init__(
        self, name: str, dtype: np.dtype[Any], rows: int, row_shape: tuple[int, ...], blocks: Sequence[Block]
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.rows = rows
        self.row_shape = row_shape
        self._rows_of_blocks = list(_bands(blocks, rows, row_shape[0] if len(row_shape) == 1 else 1))
        self._starts = np.array([band[0].row for band in self._rows_of_blocks], np.int64)

    @property
    def across(self) -> int:
        """Into how many blocks the first row is cut."""
        return len(self._rows_of_blocks[0]) if self._rows_of_blocks else 1

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield all rows; see `Column.chunks`."""
        step = min(chunk_rows, max(1, CHUNK_BYTES // max(1, self.dtype.itemsize * math.prod(self.row_shape))))
        pieces = (rows for band in self._rows_of_blocks for rows in _joined(band, step, verify))
        yield from rechunk(pieces, chunk_rows)

    def take(self, rows: Array) -> Array:
        """Copy rows; see `Column.take`."""
        taken = np.empty((len(rows), *self.row_shape), self.dtype)
        which = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(which):
            here = np.flatnonzero(which == number)
            band = self._rows_of_blocks[number]
            found = [block.column.take(rows[here] - block.row) for block in band]
            taken[here] = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
        return taken

    def read(self) -> Array:
        """Return all rows."""
        return self.take(np.arange(self.rows))


def _bands(blocks: Sequence[Block], rows: int, width: int) -> Iterator[list[Block]]:
    """Yield the blocks that lie side by side, from the first row on."""
    by_row: dict[int, list[Block]] = {}
    for block in blocks:
        if block.rows and block.width:
            by_row.setdefault(block.row, []).append(block)
    at = 0
    for row, band in sorted(by_row.items()):
        band.sort(key=lambda block: block.start)
        end = 0
        for block in band:
            if block.start != end or block.rows != band[0].rows:
                raise ValueError(f"its shards overlap, or leave a gap, at row {row}")
            end += block.width
        if row != at or end != width:
            raise ValueError(f"its shards overlap, or leave a gap, at row {min(row, at)}")
        at += band[0].rows
        yield band
    if at != rows and width:
        raise ValueError(f"its shards end at row {at}, expected {rows}")


def _joined(band: Sequence[Block], step: int, verify: bool) -> Iterator[Array]:
    streams = [block.column.chunks(step, verify=verify) for block in band]
    if len(streams) == 1:
        return streams[0]
    return (np.concatenate(pieces, axis=1) for pieces in zip(*streams, strict=True))
