"""Tables as files of plain rows: each rank reads its rows from them, or writes its rows at its place in them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from kvtools.dialects.raw_output import create_column
from tfplugin import ranks
from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw
from tfplugin.ranks import step
from tfplugin.sok.distributed_variable import ShardedVariable
from tfplugin.sok.dynamic_variable import DynamicVariable
from tfplugin.sok.shared_folder import put_in_place, shared_scratch

#: About how much of a column is in memory at a time.
CHUNK_BYTES = 16 << 20

Rows = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ColumnFile:
    """One file of a table.

    Attributes:
      name: of the file.
      header: what stands before the rows.
      dtype: of the numbers in the file.
      row_shape: () for keys.
      read: this rank's rows [start, stop).
    """

    name: str
    header: bytes
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    read: Callable[[int, int], Rows]

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return int(self.dtype.itemsize * int(np.prod(self.row_shape, dtype=np.int64)))


@dataclass(frozen=True)
class TableFiles:
    """The files of one table, and how many rows of it this rank writes.

    Attributes:
      table: what messages call it.
      rows: of this rank, in all files.
      columns: the files.
      outdated: tells of a file in the folder that an earlier dump left and that this one makes wrong.
    """

    table: str
    rows: int
    columns: tuple[ColumnFile, ...]
    outdated: Callable[[Path], bool] = lambda path: False

    def layout(self) -> str:
        """What must be the same on all ranks."""
        columns = [f"{one.name} ({one.dtype.name} {list(one.row_shape)})" for one in self.columns]
        return f"'{self.table}' in {', '.join(columns)}"


def write_tables(folder: Path, tables: Sequence[TableFiles], doing: str) -> None:
    """Writes the rows of all ranks, those of rank 0 first, into one set of files. All ranks call it.

    What is in the folder stays as it was unless everything has been written by everyone.

    Raises:
      ValueError: the ranks have different tables, or two tables the same files.
      RankError: another rank failed.
    """
    ranks.check_same([one.layout() for one in tables], doing, "files")
    of_ranks = ranks.current().allgather([one.rows for one in tables])
    with step(doing):
        taken: dict[str, str] = {}
        for one in tables:
            for column in one.columns:
                if column.name in taken:
                    raise ValueError(
                        f"{doing}: '{taken[column.name]}' and '{one.table}' would both be written to '{column.name}': "
                        "give the variables names that differ in more than punctuation."
                    )
                taken[column.name] = one.table
    rank = ranks.rank()
    before = [sum(rows[number] for rows in of_ranks[:rank]) for number in range(len(tables))]
    total = [sum(rows[number] for rows in of_ranks) for number in range(len(tables))]
    with shared_scratch(folder, doing) as scratch:
        with step(doing):
            if rank == 0:
                for one, rows in zip(tables, total, strict=True):
                    for column in one.columns:
                        _make_room(scratch / column.name, column, rows)
        with step(doing):
            for one, first in zip(tables, before, strict=True):
                for column in one.columns:
                    _write_rows(scratch / column.name, column, first, one.rows)
        with step(doing):
            if rank == 0:
                names = [column.name for one in tables for column in one.columns]
                outdated = [
                    path
                    for path in folder.iterdir()
                    if path.name not in taken and path.is_file() and any(one.outdated(path) for one in tables)
                ]
                put_in_place(scratch, [(scratch / name, folder / name) for name in names], outdated)


def _make_room(path: Path, column: ColumnFile, rows: int) -> None:
    region = create_column(path, column.header, column.dtype, (rows, *column.row_shape))
    size = region.offset + rows * column.row_bytes
    # A disk that is too full says so now.
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


def _write_rows(path: Path, column: ColumnFile, first: int, rows: int) -> None:
    if rows == 0:
        return
    at_once = max(1, CHUNK_BYTES // column.row_bytes)
    with path.open("r+b", buffering=0) as file:
        for start in range(0, rows, at_once):
            stop = min(start + at_once, rows)
            chunk = np.ascontiguousarray(column.read(start, stop), column.dtype)
            if chunk.shape != (stop - start, *column.row_shape):
                raise RuntimeError(
                    f"writing '{column.name}': got rows of shape {chunk.shape}, expected "
                    f"{(stop - start, *column.row_shape)}"
                )
            place = len(column.header) + (first + start) * column.row_bytes
            left = memoryview(chunk).cast("B")
            while left:
                written = os.pwrite(file.fileno(), left, place)
                place, left = place + written, left[written:]
        os.fsync(file.fileno())


# ---- This rank's rows of variables -----------------------------------------------------------------------------------


def held_keys(variables: Sequence[DynamicVariable]) -> list[Rows]:
    """The keys that this rank writes of each variable, sorted. All ranks call it together.

    Those that it holds, once in all ranks: lookups on one rank may have made rows of keys that another one owns, whose
    row is the one that counts.
    """
    keys = [np.sort(raw.kv_table_keys(v.handle, Tkeys=v.key_dtype).numpy()) for v in variables]
    group = ranks.current()
    if group.size == 1:
        return keys
    owners = [_owners(v, held, group.size) for v, held in zip(variables, keys, strict=True)]
    stray = [held[owner != group.rank] for held, owner in zip(keys, owners, strict=True)]
    if not any(group.allgather(any(len(one) for one in stray))):
        return keys
    strays = group.allgather(stray)
    taken = group.allgather(
        [
            np.intersect1d(np.concatenate([one[number] for one in strays]), held)
            for number, held in enumerate(_own(keys, owners, group.rank))
        ]
    )
    kept = []
    for number, (held, owner) in enumerate(zip(keys, owners, strict=True)):
        elsewhere = np.concatenate(
            [one[number] for one in taken] + [one[number] for one in strays[: group.rank]]  # a lower rank writes it
        )
        kept.append(held[(owner == group.rank) | ~np.isin(held, elsewhere)])
    return kept


def _own(keys: Sequence[Rows], owners: Sequence[Rows], rank: int) -> list[Rows]:
    return [held[owner == rank] for held, owner in zip(keys, owners, strict=True)]


def _owners(variable: DynamicVariable, keys: Rows, size: int) -> Rows:
    """The rank that owns each key."""
    if variable.owner is not None:
        return np.full(len(keys), variable.owner, np.int32)
    owners: Rows = raw.kv_table_partition(tf.constant(keys, variable.key_dtype), parts=size).numpy()
    return owners


def owned(variable: Any, keys: Rows) -> Rows:
    """Which of these keys, or of these row numbers, this rank keeps: bool [n]."""
    rank, size = ranks.rank(), ranks.size()
    if variable.owner is not None:
        return np.full(len(keys), variable.owner == rank)
    if isinstance(variable, ShardedVariable):
        mine: Rows = keys % size == rank
        return mine
    return _owners(variable, keys, size) == rank


def table_rows(variable: KvVariable, keys: Rows, column: Any, dtype: np.dtype[Any]) -> Callable[[int, int], Rows]:
    """Reads rows [start, stop) of `keys`: values, or those of the slot `column`."""

    def read(start: int, stop: int) -> Rows:
        wanted = tf.constant(keys[start:stop], variable.key_dtype)
        if column is not None:
            rows = column.read(wanted)
        else:
            rows = raw.kv_table_read_column(variable.handle, wanted, dtype=variable.dtype, width=variable.dim)
        return np.asarray(rows.numpy()).astype(dtype, copy=False)

    return read


def variable_rows(variable: Any, dtype: np.dtype[Any]) -> Callable[[int, int], Rows]:
    """Reads rows [start, stop) of a dense variable."""

    def read(start: int, stop: int) -> Rows:
        return np.asarray(tf.convert_to_tensor(variable)[start:stop].numpy()).astype(dtype, copy=False)

    return read


def file_dtype(dtype: tf.DType) -> np.dtype[Any]:
    """What rows of `dtype` are in files that have no bfloat16: float32, exactly."""
    return np.dtype(np.float32) if dtype == tf.bfloat16 else np.dtype(dtype.as_numpy_dtype)


def require_eager(what: str) -> None:
    """Raises outside eager mode."""
    if not tf.executing_eagerly():
        raise RuntimeError(f"{what} runs eagerly: call it outside of tf.function and graphs.")
