"""Rows that come in any order, written to a tensor of a bundle in the order of their places, in bounded memory.

Places are taken in groups of some 64 MB. Rows of one group alone wait in memory. Those of several are staged where the
group will lie in the file, in the order in which they come; in the end each group is read, put in order and written
again. So nothing but rows of a group is ever written out of order, and the disk holds no second copy.
"""

from __future__ import annotations

import math
import os
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.dialects.bundle.writer import BundleWriter, RegionWriter, write_fully
from kvtools.dialects.chunk import Array
from kvtools.errors import OutputError

GROUP_BYTES = 64 << 20
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
    ) -> None:
        self._writer, self._behind, self._places = writer, behind, places
        self._region = writer.reserve(tensor, dtype, (places + len(behind), *row_shape))
        width = self._region.row_bytes
        # Rows are moved as bytes: NumPy copies those of one item fastest.
        self._item = np.dtype((np.void, width)) if width else np.dtype(np.uint8)
        self._group = max(1, min(places, group_bytes // max(1, width)))
        self._groups = -(-places // self._group)
        self._only: Array | None = None
        if self._groups == 1:
            self._only = np.zeros((places, *row_shape), dtype)
            return
        self._fill = np.zeros(self._groups, np.int64)
        self._staged = np.empty(places, np.int32)
        self._file = os.open(self._region.path, os.O_RDWR | os.O_CLOEXEC)

    def __enter__(self) -> SlotOrderWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            if self._only is None:
                os.close(self._file)

    def put(self, places: npt.NDArray[np.int64], rows: Array) -> None:
        """Put rows [n, *row_shape] at places [n]; none is used twice."""
        rows = np.ascontiguousarray(rows)
        if self._only is not None:
            _scatter(self._only, places, rows, self._item)
            return
        group = places // self._group
        order = np.argsort(group.astype(np.uint16 if self._groups <= 1 << 16 else np.int64), kind="stable")
        rows, places = _items(rows, self._item)[order], places[order]
        counts = np.bincount(group, minlength=self._groups)
        ends = np.cumsum(counts)
        for number in np.flatnonzero(counts).tolist():
            count, end = int(counts[number]), int(ends[number])
            start = number * self._group + int(self._fill[number])
            data = rows[end - count : end].view(np.uint8)
            write_fully(self._file, data, self._region.offset + start * self._region.row_bytes)
            self._staged[start : start + count] = places[end - count : end]
            self._fill[number] += count

    def _finish(self) -> None:
        region = self._region
        shard = RegionWriter(region.path)
        step = max(1, _WRITTEN_AT_ONCE // max(1, region.row_bytes))

        def write(start: int, rows: Array) -> None:
            for at in range(0, len(rows), step):
                shard.write(region, start + at, rows[at : at + step])

        try:
            if self._only is not None:
                write(0, self._only)
            else:
                for number in range(self._groups):
                    write(number * self._group, self._ordered(number))
            write(self._places, self._behind)
        finally:
            written = shard.finish()
        self._writer.absorb(written)

    def _ordered(self, number: int) -> Array:
        """The rows of a group, in order."""
        region, start = self._region, number * self._group
        rows = np.zeros((min(self._group, self._places - start), *region.row_shape), region.dtype)
        count = int(self._fill[number])
        staged = np.empty((count, *region.row_shape), region.dtype)
        _read_fully(self._file, staged.reshape(-1).view(np.uint8), region.offset + start * region.row_bytes)
        _scatter(rows, self._staged[start : start + count] - start, staged, self._item)
        return rows


def _items(rows: Array, item: np.dtype[Any]) -> Array:
    return rows.reshape(len(rows), math.prod(rows.shape[1:])).view(item).reshape(len(rows))


def _scatter(to: Array, places: Array, rows: Array, item: np.dtype[Any]) -> None:
    if len(rows):
        _items(to, item)[places] = _items(rows, item)


def _read_fully(file: int, data: npt.NDArray[np.uint8], offset: int) -> None:
    while len(data):
        count = os.preadv(file, [data], offset)  # type: ignore[list-item]
        if count == 0:
            raise OutputError("putting rows in order: the file that is written was made shorter meanwhile")
        data, offset = data[count:], offset + count
