"""What variables and tables have beside their own methods: `save_to_file_system` and `load_from_file_system`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfplugin.dynamic_embedding import table_files
from tfplugin.dynamic_embedding.table_files import BUFFER_SIZE, FOLDER_VARIABLE


class VariableFiles:
    """The methods of variables."""

    name: str
    key_dtype: tf.DType
    value_dtype: tf.DType
    dim: int
    devices: list[str]
    tables: Any
    partition_fn: Any
    upsert: Any

    @tf.autograph.experimental.do_not_convert
    def save_to_file_system(
        self,
        dirpath: Any,
        proc_size: int = 1,
        proc_rank: int = 0,
        file_name_list: Sequence[str] | None = None,
        dirpath_env: str | None = FOLDER_VARIABLE,
        append_to_file: bool = False,
        buffer_size: int = BUFFER_SIZE,
        name: str | None = None,
    ) -> Any:
        """Writes keys and rows to two files for each table, in the format of TFRA, which loads them.

        Slots and the status of a restrict policy are variables with files of their own. New files replace old ones when
        all of them are on disk.

        Args:
          dirpath: the folder; made where there is none.
          proc_size, proc_rank: how many processes there are, and which of them this is, from 0.
          file_name_list: what the files of each table begin with, instead of ``<variable>_mht_<i>of<devices>...``.
          dirpath_env: an environment variable that wins over `dirpath`, where it is set.
          append_to_file: whether rows come behind those that are in the files.
          buffer_size: rows to write at once.
          name: of the op.

        Returns:
          The op (graph mode).

        Raises:
          TypeError: keys or values are strings.
          ValueError: names that are not one for each table; a rank that is none.

        Example:
          >>> v.save_to_file_system("tables")
          >>> sorted(os.listdir("tables"))
          ['user_mht_1of1_rank0_size1-keys', 'user_mht_1of1_rank0_size1-values']
        """
        names = file_name_list or table_files.shard_names(self.name, len(self.tables), proc_size, proc_rank)
        with tf.name_scope(name or "save_to_file_system"):
            return table_files.save(
                self.tables, list(names), self.name, dirpath, dirpath_env, append_to_file, buffer_size
            )

    @tf.autograph.experimental.do_not_convert
    def load_from_file_system(
        self,
        dirpath: Any,
        proc_size: int = 1,
        proc_rank: int = 0,
        file_name_list: Sequence[str] | None = None,
        dirpath_env: str | None = FOLDER_VARIABLE,
        load_entire_dir: bool = False,
        buffer_size: int = BUFFER_SIZE,
        name: str | None = None,
    ) -> Any:
        """Upserts the rows of files that `save_to_file_system` wrote, TFRA's or this one.

        Each row goes to the table that the partitioner says, whichever file it is in. Load a variable before its slots.
        Where there are no files of the variable's own name, those are taken that TFRA calls otherwise: status in
        variable scopes, and slots under optimizers of Keras.

        Args:
          dirpath: the folder.
          proc_size, proc_rank, file_name_list, dirpath_env: as they were given to `save_to_file_system`.
          load_entire_dir: whether to load all files of the variable, of any number of devices and processes.
          buffer_size: rows to read at once.
          name: of the op.

        Returns:
          The op (graph mode).

        Raises:
          FileNotFoundError: a file is not there. (In a graph, `tf.errors.OpError`, as for the next.)
          ValueError: a file's size is not what dtypes, width and the other file ask for.
          TypeError: keys or values are strings.
        """
        tables = len(self.tables)
        if load_entire_dir:
            find = table_files.all_of(self.name, self._tfra_files())
        elif file_name_list:
            find = table_files.named(list(file_name_list), self.name, tables)
        else:
            find = table_files.of(self.name, tables, proc_size, proc_rank, self._tfra_files())
        with tf.name_scope(name or "load_from_file_system"):
            return self._load_files(find, dirpath, dirpath_env, buffer_size)

    @tf.autograph.experimental.do_not_convert
    def load_from_file_system_with_restore_function(
        self, dirpath: Any, proc_size: int = 1, proc_rank: int = 0, buffer_size: int = BUFFER_SIZE
    ) -> Any:
        """Upserts the rows of files that any number of devices and processes wrote.

        Args:
          dirpath: the folder.
          proc_size, proc_rank: of how many processes this is which. Where others wrote the files, it takes the rows
            that ``partitioner(keys, proc_size * devices) // devices`` gives to it.
          buffer_size: rows to read at once.

        Returns:
          The op (graph mode).

        Raises:
          FileNotFoundError, ValueError, TypeError: as of `load_from_file_system`; files of several saves.
        """
        tables = len(self.tables)
        find = table_files.of_any_number(self.name, tables, proc_size, proc_rank, self._tfra_files())

        def upsert_own(keys: tf.Tensor, rows: tf.Tensor) -> Any:
            owner = tf.reshape(tf.cast(self.partition_fn(keys, proc_size * tables), tf.int32), [-1])
            own = tf.equal(owner // tables, proc_rank)
            return self.upsert(tf.boolean_mask(keys, own), tf.boolean_mask(rows, own))

        return self._load_files(find, dirpath, FOLDER_VARIABLE, buffer_size, upsert_own if proc_size > 1 else None)

    def _tfra_files(self) -> str:
        """What files begin with where TFRA has another name for the variable: a regular expression, or nothing."""
        return ""

    def _load_files(
        self, find: Any, dirpath: Any, dirpath_env: str | None, buffer_size: int, upsert: Any = None
    ) -> Any:
        return table_files.load(
            upsert or self.upsert,
            find,
            self.name,
            self.key_dtype,
            self.value_dtype,
            self.dim,
            dirpath,
            dirpath_env,
            buffer_size,
        )


class TableFiles:
    """The methods of a table, whose files carry no rank."""

    file_name: str | None = None

    @tf.autograph.experimental.do_not_convert
    def save_to_file_system(
        self,
        dirpath: Any,
        file_name: str | None = None,
        dirpath_env: str | None = FOLDER_VARIABLE,
        append_to_file: bool = False,
        buffer_size: int = BUFFER_SIZE,
        name: str | None = None,
    ) -> Any:
        """Writes keys and rows to ``<file_name>-keys`` and ``<file_name>-values``; see `Variable`."""
        table: Any = self
        with tf.name_scope(name or "save_to_file_system"):
            return table_files.save(
                [self], [file_name or _own_name(self)], table.name, dirpath, dirpath_env, append_to_file, buffer_size
            )

    @tf.autograph.experimental.do_not_convert
    def load_from_file_system(
        self,
        dirpath: Any,
        file_name: str | None = None,
        dirpath_env: str | None = FOLDER_VARIABLE,
        load_entire_dir: bool = False,
        buffer_size: int = BUFFER_SIZE,
        name: str | None = None,
    ) -> Any:
        """Upserts the rows of two files into this table; with `load_entire_dir`, of all files of its variable.

        Raises:
          tf.errors.InvalidArgumentError: rows of other tables of the variable; its own method hands each to its table.
        """
        table: Any = self
        own = file_name or _own_name(self)
        whole = own.rpartition("_mht_")[0] or own
        find = table_files.all_of(whole) if load_entire_dir else table_files.named([own], table.name, 1)
        with tf.name_scope(name or "load_from_file_system"):
            return table_files.load(
                table.insert,
                find,
                table.name,
                table.key_dtype,
                table.value_dtype,
                table._dim,
                dirpath,
                dirpath_env,
                buffer_size,
            )


def _own_name(table: Any) -> str:
    return str(table.file_name or table.name.replace("/", "_"))
