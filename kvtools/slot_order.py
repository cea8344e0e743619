"""Rows that come in any order, written to a tensor of a bundle in the order of their places, in bounded memory.

Rows that come again, in a few turns, are taken so many at a time as may wait in memory: each is written once. Where
that would take too many turns, or rows come only once, those of the first places wait in memory. The other places are
taken in groups of some 64 MB: their rows are staged where the group will lie in the file, in the order in which they
come; in the end each group is read, put in order and written again. So nothing but rows of a group is ever written out
of order, and the disk holds no second copy.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools import _perfect_hash
from kvtools.dialects.bundle.writer import BundleWriter, RegionWriter, write_fully
from kvtools.dialects.chunk import Array
from kvtools.errors import OutputError

GROUP_BYTES = 64 << 20
MEMORY = 512 << 20
MOST_TURNS = 4
_WRITTEN_AT_ONCE = 4 << 20


class SlotOrderWriter:
    """Writes a tensor [places, *row_shape] whose rows come with their places; places without a row are zeros.

    Args:
        writer: the bundle.
        tensor: what the tensor is called.
        dtype, row_shape: of its rows.
        places: how many there are.
        behind: rows that lie behind them all.
        group_bytes: how much a group is; twice as much is held in memory.
        memory: how many bytes of rows may wait in memory beside that.
        most_turns: how often all rows may come, each time followed by `end_turn`; `turns` is how often they have to.

    Example:
        >>> import tempfile; from pathlib import Path
        >>> prefix = Path(tempfile.mkdtemp()) / "model.ckpt"
        >>> with BundleWriter(prefix) as bundle:
        ...     with SlotOrderWriter(bundle, "rows", np.dtype(np.int8), (1,), 4, np.int8([[9]])) as rows:
        ...         rows.put(np.array([3, 1]), np.int8([[7], [5]]))
        >>> from kvtools.dialects.bundle.reader import Bundle
        >>> Bundle(prefix).tensor("rows").read().ravel().tolist()
        [0, 5, 0, 7, 9]
    """

    def __init__(
        self,
        writer: BundleWriter,
        tensor: str,
        dtype: np.dtype[Any],
        row_shape: tuple[int, ...],
        places: int,
        behind: Array,
        *,
        group_bytes: int = GROUP_BYTES,
        memory: int = MEMORY,
        most_turns: int = 1,
    ) -> None:
        self._writer, self._behind, self._places = writer, behind, places
        self._region = writer.reserve(tensor, dtype, (places + len(behind), *row_shape))
        self._width = width = self._region.row_bytes
        self._held = np.zeros((min(places, max(1, memory // max(1, width))), width), np.uint8)
        needed = -(-places // max(1, len(self._held)))
        self.turns = needed if needed <= most_turns else 1
        self._turn = 0
        self._shard = RegionWriter(self._region.path)
        self._first = places if self.turns > 1 else len(self._held)  # of the places that are staged
        left = places - self._first
        self._group = max(1, min(left, group_bytes // max(1, width)))
        self._groups = -(-left // self._group)
        self._fill = np.zeros(self._groups, np.int64)
        self._staged = np.empty(left, np.int32)
        self._file = os.open(self._region.path, os.O_RDWR | os.O_CLOEXEC) if left else -1

    def __enter__(self) -> SlotOrderWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            if self._groups:
                os.close(self._file)

    def put(self, places: npt.NDArray[np.int64], rows: Array) -> None:
        """Put rows [n, *row_shape] at places [n]; none is used twice in a turn."""
        if not len(places):
            return
        rows = np.ascontiguousarray(rows).reshape(len(places), -1).view(np.uint8).reshape(len(places), self._width)
        _perfect_hash.scatter(rows, places, self._turn * len(self._held), self._held)
        if not self._groups:
            return
        in_groups, places_in_groups = np.empty_like(rows), np.empty_like(places)
        counts = np.empty(self._groups, np.int64)
        _perfect_hash.partition(rows, places, self._first, self._group, in_groups, places_in_groups, counts)
        start = 0
        for number in np.flatnonzero(counts).tolist():
            end = start + int(counts[number])
            staged = number * self._group + int(self._fill[number])
            data = in_groups[start:end].reshape(-1)
            write_fully(self._file, data, self._region.offset + (self._first + staged) * self._width)
            self._staged[staged : staged + end - start] = places_in_groups[start:end] - self._first
            self._fill[number] += end - start
            start = end

    def end_turn(self) -> None:
        """Write the rows of this turn that wait in memory; the next one, if there is any, may begin."""
        first = self._turn * len(self._held)
        self._write(first, self._held[: self._places - first])
        self._turn += 1
        if self._turn < self.turns:
            self._held[:] = 0

    def _finish(self) -> None:
        try:
            if self._turn == 0:
                self.end_turn()
            self._held = self._held[:0]
            # Of all groups in turn: memory that is new for each would have to be cleared by the system.
            rows, staged = (np.empty((self._group, self._width), np.uint8) for _ in range(2))
            for number in range(self._groups):
                self._write(self._first + number * self._group, self._ordered(number, rows, staged))
            self._shard.write(self._region, self._places, self._behind)
        finally:
            written = self._shard.finish()
        self._writer.absorb(written)

    def _write(self, start: int, rows: npt.NDArray[np.uint8]) -> None:
        region = self._region
        step = max(1, _WRITTEN_AT_ONCE // max(1, self._width))
        for at in range(0, len(rows), step):
            some = rows[at : at + step]
            self._shard.write(region, start + at, some.reshape(-1).view(region.dtype).reshape(-1, *region.row_shape))

    def _ordered(self, number: int, rows: Array, staged: Array) -> Array:
        """The rows of a group, in order: the first of `rows`."""
        start, count = number * self._group, int(self._fill[number])
        rows, staged = rows[: min(self._group, len(self._staged) - start)], staged[:count]
        rows[:] = 0
        _read_fully(self._file, staged.reshape(-1), self._region.offset + (self._first + start) * self._width)
        _perfect_hash.scatter(staged, self._staged[start : start + count].astype(np.int64), start, rows)
        return rows


def _read_fully(file: int, data: npt.NDArray[np.uint8], offset: int) -> None:
    while len(data):
        count = os.preadv(file, [data], offset)  # type: ignore[list-item]
        if count == 0:
            raise OutputError("putting rows in order: the file that is written was made shorter meanwhile")
        data, offset = data[count:], offset + count
