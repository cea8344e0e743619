"""Match keys with keys where neither side is sorted, in bounded memory.

Both sides are cut into buckets by a hash of the key, so that a bucket of one side can only match the same bucket of
the other. Where everything fits in memory there is one bucket; otherwise the buckets go to a temporary folder first
(the GRACE hash join, https://en.wikipedia.org/wiki/Hash_join).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvtools.scratch_array import scratch_array, scratch_room

Array = npt.NDArray[Any]
T = TypeVar("T")

_BYTES_PER_ROW = 64
"""What a row takes while its bucket is sorted and matched: key, row number, order and their sorted copies."""
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SortedKeys:
    """The keys of one bucket of one side, sorted, with their row numbers; equal keys in row order."""

    keys: Array
    rows: npt.NDArray[np.int64]


def sorted_buckets(
    sides: Sequence[Iterable[Array]], total_rows: int, *, memory: int
) -> Iterator[tuple[SortedKeys, ...]]:
    """Yield, bucket by bucket, the sorted keys of each side; every key is in the same bucket on all sides.

    Args:
        sides: per side a stream of key arrays, all of one integer type; row numbers count along the stream.
        total_rows: about how many keys all sides have.
        memory: bytes to stay within; what does not fit goes to temporary files.

    >>> [(b.keys.tolist(), b.rows.tolist()) for b, in sorted_buckets([[np.array([7, 3]), np.array([7])]], 3, memory=99)]
    [([3, 7, 7], [1, 0, 2])]
    """
    return _each_bucket(sides, total_rows, _sorted, memory=memory)


def match_rows(wanted: Iterable[Array], have: Iterable[Array], rows: tuple[int, int], *, memory: int) -> Array:
    """Return, for each key of `wanted`, the number of its last row in `have`, int64 [rows[0]], -1 where there is none.

    The result is a memory map of a temporary file where it is larger than a quarter of `memory`.

    >>> match_rows([np.array([5, 6])], [np.array([6, 5, 5])], (2, 3), memory=1 << 20).tolist()
    [2, 0]
    """
    result = row_numbers(rows[0], memory=memory)
    result[:] = -1
    for want, there in sorted_buckets([wanted, have], sum(rows), memory=memory):
        if len(want.keys) and len(there.keys):
            at = np.searchsorted(there.keys, want.keys, side="right") - 1
            found = (at >= 0) & (there.keys[at] == want.keys)
            result[want.rows[found]] = there.rows[at[found]]
    return result


def repeated_rows(keys: Iterable[Array], rows: int, *, memory: int) -> Array:
    """Return the numbers of the rows whose key stands again in a later row, sorted, int64.

    >>> repeated_rows([np.array([5, 7, 5]), np.array([5])], 4, memory=1 << 20).tolist()
    [0, 2]
    """
    found = [of for (of,) in _each_bucket([keys], rows, _repeated, memory=memory)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *found]))


def count_repeated(keys: Iterable[Array], rows: int, *, memory: int) -> int:
    """Return how many rows have a key that stands again in a later row; faster than `repeated_rows`, which says which.

    >>> count_repeated([np.array([5, 7, 5]), np.array([5])], 4, memory=1 << 20)
    2
    """
    if rows * 16 > memory:
        return sum(count for (count,) in _each_bucket([keys], rows, _count_same, memory=memory))
    joined = _concatenated(keys)
    joined.sort()
    return int(np.count_nonzero(joined[1:] == joined[:-1]))


def row_numbers(rows: int, *, memory: int) -> Array:
    """Return an uninitialised int64 [rows], in a temporary file that nobody else sees if it is large."""
    if rows * 8 <= memory // 4:
        return np.empty(rows, np.int64)
    return scratch_array(rows, np.int64, prefix="kvtools-rows-")


def _each_bucket(
    sides: Sequence[Iterable[Array]], total_rows: int, work: Callable[[Array, Array | None], T], *, memory: int
) -> Iterator[tuple[T, ...]]:
    """Yield, bucket by bucket, what `work` makes of the keys of each side and their row numbers.

    Row numbers that count from 0 are None.
    """
    buckets = max(1, -(-total_rows * _BYTES_PER_ROW // max(memory, 1)))
    if buckets == 1 or total_rows < 1000:
        yield tuple(work(_concatenated(side), None) for side in sides)
        return
    buckets = min(buckets + 1, 4096)
    with scratch_room():
        scratch = tempfile.TemporaryDirectory(prefix="kvtools-keys-")
    with scratch as folder:
        spilled = [_spill(side, Path(folder) / str(number), buckets) for number, side in enumerate(sides)]
        for bucket in range(buckets):
            yield tuple(work(*_load(files, dtype, bucket)) for files, dtype in spilled)


def _sorted(keys: Array, rows: Array | None) -> SortedKeys:
    if len(keys) < 2 or bool((keys[1:] >= keys[:-1]).all()):
        return SortedKeys(keys, np.arange(len(keys), dtype=np.int64) if rows is None else rows)
    order = np.argsort(keys, kind="stable")
    return SortedKeys(keys[order], order if rows is None else rows[order])


def _repeated(keys: Array, rows: Array | None) -> Array:
    """The numbers of the rows whose key stands again in a later row. Most often there are none, and that sorting the
    keys alone tells four times as fast."""
    ordered = np.sort(keys)
    if not (ordered[1:] == ordered[:-1]).any():
        return np.empty(0, np.int64)
    del ordered
    bucket = _sorted(keys, rows)
    earlier: Array = bucket.rows[:-1][bucket.keys[1:] == bucket.keys[:-1]]
    return earlier


def _count_same(keys: Array, _: Array | None) -> int:
    ordered = np.sort(keys)
    return int(np.count_nonzero(ordered[1:] == ordered[:-1]))


def _concatenated(side: Iterable[Array]) -> Array:
    arrays = list(side)
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _spill(side: Iterable[Array], folder: Path, buckets: int) -> tuple[list[Path], np.dtype[Any]]:
    with scratch_room():
        folder.mkdir()
    paths = [folder / str(bucket) for bucket in range(buckets)]
    dtype: np.dtype[Any] = np.dtype(np.int64)
    row = 0
    for keys in side:
        dtype = keys.dtype
        mixed = (keys.astype(np.uint64) * _MIX) >> np.uint64(40)
        owner = (mixed * np.uint64(buckets)) >> np.uint64(24)
        order = np.argsort(owner, kind="stable")
        ends = np.cumsum(np.bincount(owner.astype(np.int64), minlength=buckets))
        record = np.empty(len(keys), [("key", dtype), ("row", np.int64)])
        record["key"], record["row"] = keys[order], row + order
        for bucket, path in enumerate(paths):
            start = ends[bucket - 1] if bucket else 0
            if ends[bucket] > start:
                with scratch_room(), path.open("ab") as file:
                    file.write(record[start : ends[bucket]].view(np.uint8).data)
        row += len(keys)
    return paths, dtype


def _load(paths: list[Path], dtype: np.dtype[Any], bucket: int) -> tuple[Array, npt.NDArray[np.int64]]:
    if not paths[bucket].exists():
        return np.empty(0, dtype), np.empty(0, np.int64)
    record = np.fromfile(paths[bucket], [("key", dtype), ("row", np.int64)])
    paths[bucket].unlink()
    return record["key"].copy(), record["row"].copy()
