"""`sok.Saver`: tables as the files of SparseOperationKit 1, specified in docs/dialects/sok-legacy.md."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from kvtools.dialects.chunk import KEYS, KEYS_AND_VALUES
from kvtools.dialects.column_table import ColumnTable
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.sok_legacy import KEYS_FILE, VALUES_FILE, open_table
from tfplugin import ranks
from tfplugin.kv_variable import KvVariable
from tfplugin.ranks import step
from tfplugin.sok.distributed_variable import ShardedVariable
from tfplugin.sok.dump import check_row_numbers, own_rows, write_table_rows
from tfplugin.sok.dynamic_variable import DynamicVariable
from tfplugin.sok.row_files import (
    ColumnFile,
    Rows,
    TableFiles,
    held_keys,
    owned,
    require_eager,
    table_rows,
    variable_rows,
    write_tables,
)

_FLOAT32 = np.dtype(np.float32)
_INT64 = np.dtype(np.int64)


class Saver:
    """Writes and reads embeddings as SparseOperationKit 1 does: ``<name>_keys.file`` and ``<name>_values.file``.

    All ranks call its methods. The folder is on a filesystem that they share. Any number of ranks reads what any other
    has written. The files say nothing of their types: keys are int64, values float32.

    Example:
      >>> saver = sok.Saver()
      >>> saver.dump_to_file(layer.embedding_variable, "saved")
      >>> saver.restore_from_file(layer.embedding_variable, "saved")
    """

    def dump_to_file(self, embedding_variable: Any, filepath: str | os.PathLike[str]) -> None:
        """Writes the rows that all ranks hold of a variable to a folder.

        Earlier files of that name stay as they were unless everything has been written.

        Args:
          embedding_variable: a `sok.DynamicVariable`, a `sok.Variable`, or an `All2AllDenseEmbedding` layer.
          filepath: the folder; made if need be.

        Raises:
          TypeError: something else.
          ValueError: float64 values, which the format has not, or uint64 keys beyond int64.
          OSError: the folder cannot be written to.
          RankError: another rank failed.
        """
        doing = f"sok.Saver: dumping to '{os.fspath(filepath)}'"
        with step(doing):
            require_eager("sok.Saver")
            variable = _variable(embedding_variable, doing)
        held = held_keys([variable])[0] if isinstance(variable, DynamicVariable) else variable.global_rows()
        with step(doing):
            files = _files(variable, held, doing)
        write_tables(Path(filepath), [files], doing)

    def restore_from_file(self, embedding_variable: Any, filepath: str | os.PathLike[str]) -> None:
        """Reads rows of a variable from a folder: keys in the files get their values, other rows stay.

        The files are checked on every rank before anything is changed on any.

        Args:
          embedding_variable: as for `dump_to_file`, of the same name.
          filepath: the folder.

        Raises:
          TypeError: something else.
          FileNotFoundError, kvtools.errors.BadInputError: a file is missing.
          ValueError: sizes that do not fit the variable: truncated files, or another dimension.
          RankError: another rank failed.
        """
        doing = f"sok.Saver: restoring from '{os.fspath(filepath)}'"
        with step(doing):
            require_eager("sok.Saver")
            variable = _variable(embedding_variable, doing)
            table = _open(variable, Path(filepath), doing)
            if isinstance(variable, ShardedVariable):
                check_row_numbers(variable, table, f"{doing}: variable '{variable.name}'")
            else:
                _check_keys(variable, table, doing)
        with step(doing):
            _read(variable, table)

    def load_embedding_values(self, embedding_variable: Any, tensors: Any) -> None:
        """Writes the first rows of a variable: row r of the tensors is that of key, or row number, r.

        Args:
          embedding_variable: as for `dump_to_file`.
          tensors: [rows, dimension], the same on all ranks, or a list of such, which follow each other. Each rank keeps
            its own rows. Other rows stay.

        Raises:
          TypeError: something that is no variable of sok.
          ValueError: another dimension than the variable's, or more rows than it has.
          RankError: another rank failed.
        """
        doing = "sok.Saver: loading values"
        with step(doing):
            require_eager("sok.Saver")
            variable = _variable(embedding_variable, doing)
            if isinstance(tensors, (list, tuple)):
                tensors = tf.concat(list(tensors), 0)
            values = tf.convert_to_tensor(tensors)
            if values.shape.rank != 2 or values.shape[1] != _dim(variable):
                raise ValueError(
                    f"{doing}: '{variable.name}' wants tensors [rows, {_dim(variable)}], got {values.shape}."
                )
            if isinstance(variable, ShardedVariable) and len(values) > variable.global_shape[0]:
                raise ValueError(
                    f"{doing}: '{variable.name}' has {variable.global_shape[0]} rows, the tensors {len(values)}."
                )
        numbers = np.arange(len(values))
        mine = numbers[owned(variable, numbers)]
        rows = tf.cast(tf.gather(values, mine), variable.dtype)
        with step(doing):
            if isinstance(variable, KvVariable):
                variable.upsert(tf.constant(mine, variable.key_dtype), rows)
            else:
                variable.scatter_update(tf.IndexedSlices(rows, variable.key_map(mine)))


def _variable(given: Any, doing: str) -> DynamicVariable | ShardedVariable:
    for attribute in ("embedding_variable", "variable"):  # of a layer
        if not isinstance(given, (DynamicVariable, ShardedVariable)) and hasattr(given, attribute):
            given = getattr(given, attribute)
    if not isinstance(given, (DynamicVariable, ShardedVariable)):
        raise TypeError(
            f"{doing}: expected a sok.DynamicVariable, a sok.Variable or an All2AllDenseEmbedding layer, got "
            f"{type(given).__name__}."
        )
    return given


def _file_name(variable: Any) -> str:
    return str(variable.name).removesuffix(":0").replace("/", "_")


def _dim(variable: Any) -> int:
    return variable.dim if isinstance(variable, KvVariable) else variable.global_shape[1]


def _files(variable: Any, held: Rows, doing: str) -> TableFiles:
    if variable.dtype == tf.float64:
        raise ValueError(f"{doing}: '{variable.name}' holds float64, the format float32: use sok.dump.")
    if len(held) and held.dtype == np.uint64 and int(held.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{doing}: '{variable.name}' has key {held.max()}, the format int64 keys: use sok.dump.")
    name = _file_name(variable)
    columns = (
        ColumnFile(f"{name}{KEYS_FILE}", b"", _INT64, ()),
        ColumnFile(f"{name}{VALUES_FILE}", b"", _FLOAT32, (_dim(variable),)),
    )
    dtypes = [column.dtype for column in columns]
    if isinstance(variable, KvVariable):
        read = table_rows(variable, held, (), dtypes)
    else:
        read = variable_rows(held, [variable], dtypes)
    return TableFiles(variable.name, len(held), columns, read)


def _open(variable: Any, folder: Path, doing: str) -> ColumnTable:
    name, dim = _file_name(variable), _dim(variable)
    sizes = []
    for path in (folder / f"{name}{KEYS_FILE}", folder / f"{name}{VALUES_FILE}"):
        if not path.is_file():
            raise FileNotFoundError(f"{doing}: rank {ranks.rank()} finds no '{path}'.")
        sizes.append(path.stat().st_size)
    rows, rest = divmod(sizes[1], dim * _FLOAT32.itemsize)
    # The files do not say which keys they have. The number of rows does.
    key_dtype = {8 * rows: "int64", 4 * rows: "uint32"}.get(sizes[0]) if rows else ("int64" if not sizes[0] else None)
    if rest or key_dtype is None:
        raise ValueError(
            f"{doing}: '{name}{KEYS_FILE}' has {sizes[0]} bytes and '{name}{VALUES_FILE}' {sizes[1]}, which is no "
            f"number of int64 or uint32 keys with as many rows of {dim} float32: they are truncated, or of another "
            f"dimension than '{variable.name}'."
        )
    return open_table(folder, name, OpenOptions(key_dtype=key_dtype, value_dtype="float32", dim=dim))


def _check_keys(variable: DynamicVariable, table: ColumnTable, doing: str) -> None:
    limits = np.iinfo(variable.key_dtype.as_numpy_dtype)
    for chunk in table.chunks(KEYS, rows=1 << 18):
        if len(chunk) and not limits.min <= int(chunk.keys.min()) <= int(chunk.keys.max()) <= limits.max:
            raise ValueError(
                f"{doing}: the files have keys from {chunk.keys.min()} to {chunk.keys.max()}, '{variable.name}' has "
                f"{variable.key_dtype.name} keys."
            )


def _read(variable: Any, table: ColumnTable) -> None:
    if isinstance(variable, KvVariable):
        for chunk in table.chunks(KEYS_AND_VALUES):
            keys = chunk.keys.astype(variable.key_dtype.as_numpy_dtype)
            mine = owned(variable, keys)
            write_table_rows(variable, keys[mine], [chunk.values[mine]], None)
        return
    rows = np.empty((len(variable.global_rows()), _dim(variable)), _FLOAT32)
    for chunk in table.chunks(KEYS_AND_VALUES):
        mine = own_rows(variable, chunk)
        rows[variable.key_map(mine.keys.astype(np.int64)).numpy()] = mine.values
    variable.assign(tf.cast(rows, variable.dtype))
