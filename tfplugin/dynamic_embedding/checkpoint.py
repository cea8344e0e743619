"""Saving and restoring dynamic embedding variables, and reading the checkpoints of TFRA.

Variables are saved as key-value variables are, in the layout of docs/checkpoint-layout.md: their tables are such
variables. Restored is that layout, and any other that `kvtools` reads: the tables that TFRA wrote by name, by object or
as files beside the checkpoint, with the slots of optimizers and the status of restrict policies. Those are first
rewritten in our layout, chunk by chunk, into a temporary folder beside them, from which the tables restore themselves.
"""

from __future__ import annotations

import functools
import re
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context
from tensorflow.python.saved_model import registration
from tensorflow.python.trackable import base as trackable
from tensorflow.python.training.saving import saveable_object_util

from tfplugin import graph_restore, restore_scope, slot_binding
from tfplugin.checkpoint import object_prefix
from tfplugin.dynamic_embedding import file_system_saver
from tfplugin.dynamic_embedding.python_ops import local, python_op
from tfplugin.dynamic_embedding.sharded_table import ShardedTable
from tfplugin.saveable import KvSaveable, restore_op, save_ops

# ---- Name-based: tf.compat.v1.train.Saver ----


class TableSaveable(KvSaveable):
    """One table of a variable in a Saver's list."""

    def __init__(self, variable: ShardedTable, index: int, name: str) -> None:
        self._params = variable
        self._index = index
        self._whole = name
        super().__init__(variable.parts[index], name if variable.shard_num == 1 else f"{name}/part_{index}")

    def is_in(self, path: str, names: Collection[str]) -> bool:
        """Whether a checkpoint, in this layout or TFRA's, has the variable."""
        return _source_by_name(self._params, self._whole).is_in(path, names)

    def restore_op(self, filename: tf.Tensor) -> Any:
        """Restores the table from a checkpoint in this layout or TFRA's."""
        source = _source_by_name(self._params, self._whole)
        if tf.executing_eagerly():
            return source.restore(self._index, source.prefix(filename.numpy()))
        if self._params.names is not None and self._params._by_modulo:  # no other layout has strings that can be read
            return source.restore(self._index, filename)

        def ask() -> tf.Tensor:
            return tf.ensure_shape(python_op(source.prefix, [filename], tf.string), [])

        with local():
            # A graph that is imported by another process has no Python in it: it goes without where it can.
            foreign = _is_foreign(filename) if self._params._by_modulo else None
            prefix = ask() if foreign is None else tf.cond(foreign, ask, lambda: tf.identity(filename))
        restored = source.restore(self._index, prefix)

        def release() -> tf.Tensor:
            with tf.control_dependencies([python_op(source.release, [filename, prefix], [])]):
                return tf.constant(True)

        with local(), tf.control_dependencies([restored]):
            return (release() if foreign is None else tf.cond(foreign, release, lambda: tf.constant(False))).op

    def restore_members(self, members: tf.Tensor) -> Any:
        """Restores the table from members of a chain, which are in this layout."""
        if not self._params._by_modulo:
            raise ValueError(
                f"tfplugin.CheckpointManager: dynamic embedding variable '{self._params.name}' shares its keys out by "
                "another rule, which is no part of a chain: make it with the default partitioner, or leave it out of "
                "the Saver's var_list and save it with a Saver of its own."
            )
        return restore_op(members, self.variable, self._whole, "/part_")


def _files_saveable(variable: ShardedTable, name: str | None = None) -> file_system_saver.FilesSaveable:
    """What a Saver saves and restores of a variable whose tables go to files."""
    whole = name or variable.name
    source = _source_by_name(variable, whole)
    tables = range(variable.shard_num)

    def restore(filename: tf.Tensor) -> Any:
        if tf.executing_eagerly():
            prefix = source.prefix(filename.numpy())
            for i in tables:
                source.restore(i, prefix)
                source.release(filename, prefix)
            return None
        prefix = tf.ensure_shape(python_op(source.prefix, [filename], tf.string), [])
        with tf.control_dependencies([source.restore(i, prefix) for i in tables]):
            return tf.group(*[python_op(source.release, [filename, prefix], []) for _ in tables])

    return file_system_saver.FilesSaveable(variable, whole, restore, source.is_in)


def saveables(variable: ShardedTable, name: str | None = None) -> list[Any]:
    """What a Saver saves and restores, one for each table, or one for all where they go to files."""
    if file_system_saver.saver_of(variable) is not None:
        return [_files_saveable(variable, name)]
    return [TableSaveable(variable, i, name or variable.name) for i in range(len(variable.parts))]


def saveables_by_name(variable: ShardedTable) -> dict[str, Callable[..., KvSaveable]]:
    """The same as a Saver asks for them: functions of the name that its dictionary gives."""

    def make(i: int) -> Callable[..., KvSaveable]:
        def saveable(name: str | None = None, **kwargs: Any) -> KvSaveable:
            whole = name.removesuffix(f"_part_{i}") if name and variable.shard_num > 1 else name
            return TableSaveable(variable, i, whole or variable.name)

        return saveable

    if file_system_saver.saver_of(variable) is not None:
        return {trackable.VARIABLE_VALUE_KEY: lambda name=None, **kwargs: _files_saveable(variable, name)}
    found: dict[str, Any] = {f"part_{i}": make(i) for i in range(len(variable.parts))}
    if not variable.parts:
        for i, table in enumerate(variable.tables):
            found |= _of_mutable_table(f"part_{i}", table.table)
    elif variable.shard_num == 1:
        found = {trackable.VARIABLE_VALUE_KEY: make(0)}
    if variable.names is not None:
        found |= _of_mutable_table("names", variable.names.table)
    return found


def _of_mutable_table(attribute: str, table: Any) -> dict[str, Any]:
    """The same of one of TensorFlow's own tables, under the table's name where the Saver's dictionary gives none."""

    def named(factory: Any) -> Any:
        return lambda name=None, **kwargs: factory(name=name or table._name)

    factories = saveable_object_util.saveable_objects_from_trackable(table, tf1_saver=True)
    return {f"{attribute}_{key}": named(factory) for key, factory in factories.items()}


# ---- Object-based: tf.train.Checkpoint ----


def _save_objects(trackables: Mapping[str, ShardedTable], file_prefix: tf.Tensor) -> list[tf.Tensor]:
    """Saves the tables of variables whose keys go to tables by another rule; the rest save themselves, as children."""
    parts = [
        (object_prefix(f"{path}/rows_{i}"), part)
        for path, variable in trackables.items()
        if variable.checkpoint and not variable._by_modulo and file_system_saver.saver_of(variable) is None
        for i, part in enumerate(variable.parts)
    ]
    return (save_ops(file_prefix, parts) if parts else []) + file_system_saver.save_objects(trackables, file_prefix)


def _restore_objects(trackables: Mapping[str, ShardedTable], merged_prefix: tf.Tensor) -> None:
    for path, variable in trackables.items():
        if variable.checkpoint and variable.parts:
            _restore_object(path.split("/.ATTRIBUTES/")[0], variable, merged_prefix)
            for part in variable.parts:
                slot_binding.restored(part, variable._update_uid)


def _restore_object(path: str, variable: ShardedTable, filename: tf.Tensor) -> None:
    """Restores a variable, unless its child has: that is how a checkpoint in this layout is restored.

    A variable whose tables go to files has no such child.
    """
    own = object_prefix(f"{path}/table")
    source = _Source(
        variable, "rows", (f"{own}-kvmeta", f"{own}_part_0-kvmeta"), functools.partial(_by_path, path, variable.name)
    )

    def restore_native() -> list[Any]:
        if file_system_saver.saver_of(variable) is None:
            return []
        return [restore_op(filename, part, own, "_part_") for part in variable.parts]

    def restore(name: Any) -> None:
        if source.is_native(_text(name)):
            restore_native()
        else:
            prefix = source.prefix(name)
            for i in range(variable.shard_num):
                source.restore(i, prefix)
                source.release(name, prefix)

    if tf.executing_eagerly():
        restore(filename.numpy())
        return

    def from_rewritten() -> tf.Tensor:
        prefix = python_op(source.prefix, [filename], tf.string)
        prefix.set_shape([])
        restored = [source.restore(i, prefix) for i in range(variable.shard_num)]
        with tf.control_dependencies(restored):
            releases = [python_op(source.release, [filename, prefix], []) for _ in range(variable.shard_num)]
        with tf.control_dependencies(releases):
            return tf.constant(False)

    is_native = python_op(lambda name: source.is_native(_text(name)), [filename], tf.bool)

    def from_own() -> tf.Tensor:
        with tf.control_dependencies(restore_native()):
            return tf.constant(True)

    graph_restore.note(tf.cond(tf.ensure_shape(is_native, []), from_own, from_rewritten))


@functools.cache
def register() -> None:
    """Tells TensorFlow how variables are saved. Done once per process, which may reload."""
    # The name by which TFRA's checkpoints ask for what restores a variable.
    registration.register_checkpoint_saver(
        package="DECustomSaver",
        name="Variable",
        predicate=lambda obj: isinstance(obj, ShardedTable),
        save_fn=_save_objects,
        restore_fn=_restore_objects,
        strict_predicate_restore=False,
    )


# ---- From any checkpoint ----

#: In the names of tensors of TFRA's tables, and of the marks of those in files.
_FOREIGN = re.compile(r"ht_\d+of\d|shard_upsert_restore|prev_global_shard_num")


class _Source:
    """Where the tables of a variable are restored from: the checkpoint itself, or a rewritten copy of what is in it.

    Args:
      variable: to restore.
      name: what the tensors of the variable begin with, in the checkpoint and in the copy.
      marks: the checkpoint has one of these tensors where the tables can restore themselves from it.
      find: gets the tables with the variable's rows out of an opened checkpoint.
    """

    def __init__(
        self, variable: ShardedTable, name: str, marks: Sequence[str], find: Callable[[Any], Sequence[Any]]
    ) -> None:
        self._variable = variable
        self._name = name
        self._marks = marks if variable._by_modulo else ()
        self._find = find
        self._lock = threading.Lock()
        # Copies by checkpoint, and how many tables have still to restore from each.
        self._copies: dict[str, tuple[tempfile.TemporaryDirectory[str], int]] = {}

    def is_native(self, path: str) -> bool:
        """Whether tables restore themselves from the checkpoint."""
        return bool(self._marks) and not _tensor_names(path).isdisjoint(self._marks)

    def is_in(self, path: str, names: Collection[str]) -> bool:
        """Whether a checkpoint, whose tensors have these names, has the variable in any layout."""
        if any(mark in names for mark in self._marks):
            return True
        foreign = any(_FOREIGN.search(name) or name.endswith("-kvmeta") for name in names)
        return foreign and bool(self._find(_opened(self._variable, path)))

    def prefix(self, path: Any) -> bytes:
        """What tables restore from: the checkpoint, or its copy, which is written when the first table asks."""
        path = _text(path)
        if self.is_native(path):
            return path.encode()
        with self._lock:
            if path not in self._copies:
                folder = _copy_folder(path)
                _rewrite(self._variable, self._name, path, self._find, Path(folder.name) / "rows")
                self._copies[path] = (folder, self._variable.shard_num)
            return str(Path(self._copies[path][0].name) / "rows").encode()

    def restore(self, index: int, prefix: Any) -> Any:
        """Restores a table from a `prefix`. Returns the op (graph mode)."""
        part = self._variable.parts[index]
        by_modulo = self._variable._by_modulo
        return restore_op(prefix, part, self._name if by_modulo else f"{self._name}/{index}", "/part_")

    def release(self, path: Any, prefix: Any) -> None:
        """Says that a table has been restored. After the last of them the copy goes."""
        del prefix
        path = _text(path)
        with self._lock:
            if path in self._copies:
                folder, left = self._copies.pop(path)
                if left > 1:
                    self._copies[path] = (folder, left - 1)
                else:
                    folder.cleanup()


def _source_by_name(variable: ShardedTable, name: str) -> _Source:
    """Where a variable is restored from that was saved under a name."""
    marks = (f"{name}-kvmeta", f"{name}/part_0-kvmeta")
    return _Source(variable, name, marks, functools.partial(_by_name, name))


def _copy_folder(path: str) -> tempfile.TemporaryDirectory[str]:
    """A folder for a copy: beside the checkpoint, where all tasks of a cluster can read, if it can be written there."""
    try:
        return tempfile.TemporaryDirectory(prefix=".tfplugin-restore-", dir=Path(path).parent)
    except OSError:
        return tempfile.TemporaryDirectory(prefix="tfplugin-restore-")


def _text(path: Any) -> str:
    return str(tf.compat.as_str(path.numpy() if hasattr(path, "numpy") else path))


def _is_foreign(path: tf.Tensor) -> tf.Tensor:
    """Whether a checkpoint looks like one of TFRA's, by TensorFlow's ops alone: bool, true rather too often."""
    index = tf.io.read_file(tf.strings.join([path, ".index"]))
    return tf.strings.regex_full_match(index, rf"(?s)\C*({_FOREIGN.pattern})\C*")


def _tensor_names(path: str) -> frozenset[str]:
    return restore_scope.once(
        ("names", path), lambda: frozenset(tf.train.load_checkpoint(path).get_variable_to_shape_map())
    )


# ---- Rows of other layouts ----


def _place(table: Any) -> str:
    """Where TFRA saved a table."""
    return str(table.schema.metadata.get("tfra", {}).get("places", {}).get("", ""))


def _by_name(name: str, checkpoint: Any) -> list[Any]:
    """The tables that were saved under a variable's name."""
    if name in checkpoint.tables:
        return [checkpoint.tables[name]]
    parts = [table for found, table in checkpoint.tables.items() if found.startswith(f"{name}/part_")]
    base = name.replace("/", "_")
    return parts or [table for table in checkpoint.tables.values() if _place(table).split("/")[-1] == base][:1]


def _by_path(path: str, name: str, checkpoint: Any) -> list[Any]:
    """The tables that were saved under an object's path."""
    found = [table for table in checkpoint.tables.values() if _place(table).startswith(f"{path}/tables_of_")]
    return found or _by_name(name, checkpoint)


def _rewrite(variable: ShardedTable, name: str, path: str, find: Callable[[Any], Sequence[Any]], output: Path) -> None:
    """Writes the rows of a variable in our layout: one table where the tables share it out themselves, else several."""
    import kvtools
    from kvtools.rename import RenamedTable
    from kvtools.status_names import KINDS, status_of

    beside = file_system_saver.read(variable, path)
    checkpoint = None if beside else _opened(variable, path)
    tables = [from_arrays(name, beside)] if checkpoint is None else list(find(checkpoint))
    status = status_of(variable.name)
    if not tables and status is not None:
        tables = [_StatusArrays(table, KINDS[status[1]]).table() for table in _by_name(status[0], checkpoint)]
    if not tables:
        raise ValueError(
            f"Restoring dynamic embedding variable '{variable.name}': '{path}' has no table of it; it has "
            f"{', '.join(sorted(checkpoint.tables)) or 'none'}. Leave it out of the Saver's var_list, or say which "
            "table it is by a dictionary."
        )
    if variable.names is not None:
        raise ValueError(
            f"Restoring dynamic embedding variable '{variable.name}': '{path}' has no string keys that can be read: "
            "only a checkpoint of this project does, restored with the default partitioner."
        )
    starts = {spec.name: spec.constant for specs in variable.parts[0]._row_slots.of.values() for spec in specs}
    for table in tables:
        _check_fits(variable, table.schema, path)
    # TFRA's slots are tables of their own, which may lack rows.
    tables = [table.filled(starts) if hasattr(table, "filled") else table for table in tables]
    if variable._by_modulo and len(tables) == 1:
        rewritten = [RenamedTable(tables[0], name, {})]
    else:
        columns = [_arrays(table) for table in tables]
        joined = {column: np.concatenate([each[column] for each in columns]) for column in columns[0]}
        if variable._by_modulo:
            rewritten = [from_arrays(name, joined)]
        else:
            owner = np.asarray(variable.partition_fn(tf.constant(joined["keys"]), variable.shard_num))
            rewritten = [
                from_arrays(f"{name}/{i}", {column: array[owner == i] for column, array in joined.items()})
                for i in range(variable.shard_num)
            ]
    kvtools.write_tables(rewritten, output, "tfplugin", parts=1)


def _opened(variable: ShardedTable, path: str) -> Any:
    """A checkpoint, or the files of TFRA's saver beside it, which do not say of which dtypes they are."""
    from kvtools.dialects.detect import open_checkpoint
    from kvtools.dialects.options import OpenOptions

    saver = file_system_saver.saver_of(variable)
    folder = None if saver is None else saver.config.save_path
    if folder is None and not any(name.endswith(file_system_saver.MARKERS) for name in _tensor_names(path)):
        return restore_scope.once((path, None), lambda: open_checkpoint(path))
    whole = variable.status_of or variable
    # Lenient: of other dtypes, other tables cannot be opened.
    options = OpenOptions(key_dtype=whole.key_dtype.name, value_dtype=whole.value_dtype.name, lenient=True)
    return restore_scope.once((folder or path, options), lambda: open_checkpoint(folder or path, options))


def read_column(variable: ShardedTable, index: int, path: str, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Keys and rows, as arrays, that a checkpoint in any layout has for a table of a variable, or for a slot of it.

    Raises:
      ValueError: it has none that fit.
    """
    name = f"Table {index + 1} of {variable.shard_num} of dynamic embedding variable '{variable.name}'"
    found = [] if variable.names is not None else list(_by_name(variable.name, _opened(variable, path)))
    read = []
    for table in found:
        _check_fits(variable, table.schema, path)
        arrays = _arrays(table)
        wanted = f"slot:{column}" if column else "values"
        if wanted in arrays:
            read.append((arrays["keys"], arrays[wanted]))
    if not read:
        raise ValueError(
            f"{name}: '{path}' has no {f'slot {column} of' if column else 'rows of'} it that can be read: leave it out "
            "of the Saver's var_list."
        )
    keys, rows = (np.concatenate(arrays) for arrays in zip(*read, strict=True))
    with tf_context.eager_mode():
        own = np.asarray(variable.partition_fn(tf.constant(keys), variable.shard_num)).reshape(-1) == index
    return keys[own], rows[own]


def _check_fits(variable: ShardedTable, schema: Any, path: str) -> None:
    wanted = (variable.key_dtype.name, variable.value_dtype.name, variable.dim)
    if (schema.key_dtype, schema.value_dtype, schema.dim) != wanted:
        raise ValueError(
            f"Restoring dynamic embedding variable '{variable.name}' from '{path}': table '{schema.name}' has "
            f"{schema.key_dtype} keys and rows of {schema.value_dtype}[{schema.dim}], the variable {wanted[0]} keys "
            f"and {wanted[1]}[{wanted[2]}]: make it with the dtypes and the width of the table."
        )


def _arrays(table: Any) -> dict[str, np.ndarray]:
    """All columns of a table, slots as ``slot:<name>``."""
    chunks = list(table.chunks())
    schema = table.schema
    if not chunks:
        empty = {"keys": np.zeros(0, schema.key_dtype), "values": np.zeros((0, schema.dim), _numpy(schema.value_dtype))}
        return empty | {f"slot:{s.name}": np.zeros((0, s.width), _numpy(s.dtype)) for s in schema.slots}
    columns = {
        "keys": np.concatenate([chunk.keys for chunk in chunks]),
        "values": np.concatenate([chunk.values for chunk in chunks]),
    }
    for slot in chunks[0].slots:
        columns[f"slot:{slot}"] = np.concatenate([chunk.slots[slot] for chunk in chunks])
    return columns


def _numpy(dtype: str) -> Any:
    return tf.as_dtype(dtype).as_numpy_dtype


def from_arrays(name: str, columns: Mapping[str, np.ndarray]) -> Any:
    """A table of these columns, as `kvtools` writes it: ``keys``, ``values``, and slots as ``slot:<name>``."""
    import kvtools

    slots = {column.removeprefix("slot:"): array for column, array in columns.items() if column.startswith("slot:")}
    return kvtools.table_from_arrays(name, columns["keys"], columns["values"], slots=slots or None)


class _StatusArrays:
    """The counter of a table's rows that TFRA's restrict policies kept, as a table of its own."""

    def __init__(self, table: Any, column: str) -> None:
        self._table = table
        self._column = column

    def table(self) -> Any:
        """int32, dim 1."""
        chunks = [chunk for chunk in self._table.chunks() if getattr(chunk, self._column) is not None]
        keys = [chunk.keys for chunk in chunks] or [np.zeros(0, self._table.schema.key_dtype)]
        numbers = [getattr(chunk, self._column) for chunk in chunks] or [np.zeros(0, np.int32)]
        values = np.concatenate(numbers).astype(np.int32)[:, None]
        known = values[:, 0] != 0  # else the key has no status: the first is 1
        return from_arrays("status", {"keys": np.concatenate(keys)[known], "values": values[known]})
