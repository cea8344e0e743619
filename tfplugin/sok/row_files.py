"""Tables as files of plain rows: each rank reads its rows from them, or writes its rows at its place in them."""

from __future__ import annotations

import contextlib
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
from tfplugin.slots import SlotSpec
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
    """

    name: str
    header: bytes
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return int(self.dtype.itemsize * int(np.prod(self.row_shape, dtype=np.int64)))


@dataclass(frozen=True)
class TableFiles:
    """The files of one table, and how many rows of it this rank writes.

    Attributes:
      table: what messages call it.
      rows: of this rank, in all files; some may go before their turn comes.
      columns: the files.
      read: of this rank's rows [start, stop) those that are there, each whole: one array for each file.
      outdated: tells of a file in the folder that an earlier dump left and that this one makes wrong.
    """

    table: str
    rows: int
    columns: tuple[ColumnFile, ...]
    read: Callable[[int, int], Sequence[Rows]]
    outdated: Callable[[Path], bool] = lambda path: False

    def layout(self) -> str:
        """What must be the same on all ranks."""
        columns = [f"{one.name} ({one.dtype.name} {list(one.row_shape)})" for one in self.columns]
        return f"'{self.table}' in {', '.join(columns)}"


def write_tables(folder: Path, tables: Sequence[TableFiles], doing: str) -> None:
    """Writes the rows of all ranks, those of rank 0 first, into one set of files. All ranks call it.

    Rows that have gone when their turn comes are not in the files. What is in the folder stays as it was unless
    everything has been written by everyone.

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
    with shared_scratch(folder, doing) as scratch:
        _make_files(scratch, tables, of_ranks, doing)
        with step(doing):
            written = [_write_rows(scratch, one, _first(of_ranks, i)) for i, one in enumerate(tables)]
        kept = ranks.current().allgather(written)
        whole = scratch
        if kept != of_ranks:  # rows went: what is left moves up
            whole = scratch / "whole"
            _make_files(whole, tables, kept, doing)
            with step(doing):
                for i, one in enumerate(tables):
                    _copy_rows(scratch, whole, one, _first(of_ranks, i), _first(kept, i), written[i])
        with step(doing):
            if rank == 0:
                names = [column.name for one in tables for column in one.columns]
                outdated = [
                    path
                    for path in folder.iterdir()
                    if path.name not in taken and path.is_file() and any(one.outdated(path) for one in tables)
                ]
                put_in_place(scratch, [(whole / name, folder / name) for name in names], outdated)


def _first(of_ranks: Sequence[Sequence[int]], number: int) -> int:
    """Where this rank's rows of a table begin in its files."""
    return sum(rows[number] for rows in of_ranks[: ranks.rank()])


def _make_files(folder: Path, tables: Sequence[TableFiles], of_ranks: Sequence[Sequence[int]], doing: str) -> None:
    with step(doing):
        if ranks.rank() == 0:
            folder.mkdir(exist_ok=True)
            for number, one in enumerate(tables):
                for column in one.columns:
                    _make_room(folder / column.name, column, sum(rows[number] for rows in of_ranks))


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


def _write_rows(folder: Path, table: TableFiles, first: int) -> int:
    """Writes this rank's rows that are there, from row `first` on. Returns how many they are."""
    at_once = max(1, CHUNK_BYTES // max(column.row_bytes for column in table.columns))
    written = 0
    with contextlib.ExitStack() as stack:
        files = [_open_for_writing(folder / column.name, stack) for column in table.columns]
        for start in range(0, table.rows, at_once):
            stop = min(start + at_once, table.rows)
            chunks = table.read(start, stop)
            rows = len(chunks[0])
            for column, file, read in zip(table.columns, files, chunks, strict=True):
                chunk = np.ascontiguousarray(read, column.dtype)
                if rows > stop - start or chunk.shape != (rows, *column.row_shape):
                    raise RuntimeError(
                        f"writing '{column.name}': got rows of shape {chunk.shape}, expected "
                        f"{(rows, *column.row_shape)}, at most {stop - start}"
                    )
                if rows:
                    _write(file, memoryview(chunk).cast("B"), _place(column, first + written))
            written += rows
        for file in files if table.rows else ():
            os.fsync(file)
    return written


def _copy_rows(source: Path, target: Path, table: TableFiles, start: int, first: int, rows: int) -> None:
    """Copies `rows` rows from row `start` of the files in one folder to row `first` of those in another."""
    for column in table.columns if rows else ():
        with contextlib.ExitStack() as stack:
            from_file, to_file = (_open_for_writing(folder / column.name, stack) for folder in (source, target))
            end = _place(column, start + rows)
            moved = _place(column, first) - _place(column, start)
            place = _place(column, start)
            while place < end:
                data = os.pread(from_file, min(CHUNK_BYTES, end - place), place)
                if not data:
                    raise OSError(errno.EIO, f"'{source / column.name}' has become shorter")
                _write(to_file, memoryview(data), place + moved)
                place += len(data)
            os.fsync(to_file)


def _open_for_writing(path: Path, stack: contextlib.ExitStack) -> int:
    return stack.enter_context(path.open("r+b", buffering=0)).fileno()


def _place(column: ColumnFile, row: int) -> int:
    return len(column.header) + row * column.row_bytes


def _write(file: int, left: memoryview, place: int) -> None:
    while left:
        written = os.pwrite(file, left, place)
        place, left = place + written, left[written:]


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


def table_rows(
    variable: KvVariable, keys: Rows, slots: Sequence[SlotSpec], dtypes: Sequence[np.dtype[Any]]
) -> Callable[[int, int], list[Rows]]:
    """Reads rows [start, stop) of `keys` that are there: keys, values and slots, each row of one moment.

    `dtypes` are those of keys, values and slots to give.
    """

    def read(start: int, stop: int) -> list[Rows]:
        wanted = keys[start:stop]
        columns, found = raw.kv_table_read_columns(
            variable.handle,
            tf.constant(wanted, variable.key_dtype),
            dtype=variable.dtype,
            N=1 + len(slots),
            columns=["", *(slot.name for slot in slots)],
            widths=[variable.dim, *(slot.width for slot in slots)],
        )
        there = found.numpy()
        read = [wanted, *(np.asarray(column.numpy()) for column in columns)]
        if not there.all():
            read = [column[there] for column in read]
        return [column.astype(dtype, copy=False) for column, dtype in zip(read, dtypes, strict=True)]

    return read


def variable_rows(keys: Rows, columns: Sequence[Any], dtypes: Sequence[np.dtype[Any]]) -> Callable[[int, int], Any]:
    """Reads rows [start, stop) of a dense variable and its slots, which are the `columns`, as `table_rows` does."""

    def read(start: int, stop: int) -> list[Rows]:
        read = [keys[start:stop], *(tf.convert_to_tensor(one)[start:stop].numpy() for one in columns)]
        return [np.asarray(column).astype(dtype, copy=False) for column, dtype in zip(read, dtypes, strict=True)]

    return read


def file_dtype(dtype: tf.DType) -> np.dtype[Any]:
    """What rows of `dtype` are in files that have no bfloat16: float32, exactly."""
    return np.dtype(np.float32) if dtype == tf.bfloat16 else np.dtype(dtype.as_numpy_dtype)


def require_eager(what: str) -> None:
    """Raises outside eager mode."""
    if not tf.executing_eagerly():
        raise RuntimeError(f"{what} runs eagerly: call it outside of tf.function and graphs.")
