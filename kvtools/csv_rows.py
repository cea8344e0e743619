"""Rows as comma-separated values: numbers in as few digits as tell each from all others of its type."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterator, Sequence

import numpy as np

from kvtools._row_text import csv_lines as _lines
from kvtools.dialects.chunk import Array
from kvtools.engine import run_all

_NUMBERS_AT_ONCE = 1 << 16


def csv_header(names: Sequence[str]) -> str:
    """Return the first line, without its end; names are put in quotes where they need it.

    >>> csv_header(["key", "a,b"])
    'key,"a,b"'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(names)  # names with such characters in them are put in quotes
    return text.getvalue().removesuffix("\r\n")


def csv_lines(columns: Sequence[Array], *, workers: int | None = None) -> Iterator[bytes]:
    """Yield rows as lines, some at a time; they are written on several threads.

    Numbers of 16 bits are written as the float32 that they are. NaN, Infinity and -Infinity are written so.

    Args:
        columns: columns side by side, [n] or [n, width] each, of any type that keys, values and counters have.
        workers: how many threads; as many as there are processors if None.

    >>> b"".join(csv_lines([np.array([5, -7]), np.float32([[0.1, 2], [np.nan, -np.inf]])])).decode().splitlines()
    ['5,0.1,2.0', '-7,NaN,-Infinity']
    """
    arrays = [np.ascontiguousarray(_plain(column)) for column in columns]
    rows = len(arrays[0])
    step = max(1, _NUMBERS_AT_ONCE // sum(array.shape[1] if array.ndim == 2 else 1 for array in arrays))
    if rows <= step:
        if rows:
            yield _lines(arrays, 0, rows)
        return
    blocks = [(start, min(start + step, rows)) for start in range(0, rows, step)]
    yield from run_all(functools.partial(_block, arrays), blocks, workers=workers)


def _block(arrays: Sequence[Array], block: tuple[int, int]) -> bytes:
    return _lines(arrays, *block)


def _plain(column: Array) -> Array:
    if column.dtype.kind in "iub" or column.dtype in (np.float32, np.float64):
        return column if column.dtype.isnative else column.astype(column.dtype.newbyteorder("="))
    return column.astype(np.float32)  # bfloat16 and float16
