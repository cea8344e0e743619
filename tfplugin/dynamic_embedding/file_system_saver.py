"""`FileSystemSaver`: tables in files of their own beside a checkpoint, as TFRA has them.

The folder is ``TFRADynamicEmbedding-<step>`` for a checkpoint of that step, else ``TFRADynamicEmbedding``, or the
saver's `save_path`. It has the files of docs/dialects/tfra.md for a variable and for each of its slots, and one more,
``<variable>.tables.json``, that says which they are and of which dtypes. TFRA does not read that one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import io_ops
from tensorflow.python.saved_model import save_context
from tensorflow.python.training.saving import saveable_object

from tfplugin.checkpoint import BesideSaveable, is_saved_elsewhere
from tfplugin.dynamic_embedding import table_files
from tfplugin.dynamic_embedding.sharded_table import ShardedTable
from tfplugin.dynamic_embedding.slot_variable import SlotVariable

_log = logging.getLogger("tfplugin")
FOLDER = "TFRADynamicEmbedding"
#: What names in a checkpoint end in where tables are beside it.
MARKERS = ("-shard_upsert_restore", "-prev_global_shard_num")
#: What TensorFlow adds to the prefix of a checkpoint for our way of saving objects.
_OURS = "-DECustomSaver.Variable"


class DynamicEmbeddingSaver:
    """The base of what saves tables beside a checkpoint: the `saver` of a `KVCreator`."""


class FileSystemSaverConfig:
    """The arguments of a `FileSystemSaver`.

    Raises:
      TypeError: one of `proc_size` and `proc_rank` without the other.
      ValueError: a rank that is none.
    """

    def __init__(
        self,
        proc_size: int | None = None,
        proc_rank: int | None = None,
        save_path: str | None = None,
        buffer_size: int = 4096,
    ) -> None:
        if (proc_size is None) != (proc_rank is None):
            raise TypeError(
                "FileSystemSaver takes proc_size and proc_rank together, got "
                f"proc_size={proc_size!r}, proc_rank={proc_rank!r}."
            )
        #: Whether somebody said which process this is.
        self.has_rank = proc_size is not None
        self.proc_size = 1 if proc_size is None else int(proc_size)
        self.proc_rank = 0 if proc_rank is None else int(proc_rank)
        table_files.shard_names("of a FileSystemSaver", 1, self.proc_size, self.proc_rank)
        self.save_path = save_path
        self.buffer_size = buffer_size


class FileSystemSaver(DynamicEmbeddingSaver):
    """Saves tables as files in a folder beside the checkpoint, each process its own.

    The folder of a checkpoint that `max_to_keep` has removed goes when the next one is saved.

    Args:
      proc_size, proc_rank: how many processes train, and which of them this is; default: one.
      save_path: the folder; default: beside the checkpoint.
      buffer_size: rows to write and to read at once.

    Raises:
      TypeError: one of `proc_size` and `proc_rank` without the other.

    Example:
      >>> v = de.get_variable("user", dim=4, kv_creator=de.CuckooHashTableCreator(saver=de.FileSystemSaver()))
    """

    def __init__(
        self,
        proc_size: int | None = None,
        proc_rank: int | None = None,
        save_path: str | None = None,
        buffer_size: int = 4096,
    ) -> None:
        self.config = FileSystemSaverConfig(proc_size, proc_rank, save_path, buffer_size)


def saver_of(variable: ShardedTable) -> FileSystemSaver | None:
    """The saver of a variable that has one."""
    saver = getattr(variable.kv_creator, "saver", None)
    return saver if isinstance(saver, FileSystemSaver) else None


# ---- Saving ----


def folder_of(config: FileSystemSaverConfig, prefix: Any) -> Any:
    """The folder beside the checkpoint that has this prefix: a string tensor."""
    if config.save_path is not None:
        return tf.constant(config.save_path)
    prefix = tf.strings.regex_replace(prefix, f"{re.escape(_OURS)}$", "")
    return tf.strings.regex_replace(prefix, r"^((?:.*/)?)[^/]*?(-\d+)?$", rf"\1{FOLDER}\2")


def save(variable: ShardedTable, folder: Any) -> Any:
    """Writes a variable and its slots. Returns the op (graph mode)."""
    saver = saver_of(variable)
    assert saver is not None
    config = saver.config
    slots = [
        SlotVariable(variable, optimizer, spec)
        for optimizer in list(variable.parts[0]._row_slots.of)
        for spec in variable.parts[0].slots_of(optimizer) or ()
    ]
    bases = {"": variable.name} | {f"{s.optimizer_name}.{s.slot_name}": s.name for s in slots}
    names = [
        shard
        for name in bases.values()
        for shard in table_files.shard_names(name, variable.shard_num, config.proc_size, config.proc_rank)
    ]
    record = {
        "devices": variable.shard_num,
        "processes": config.proc_size,
        "key_dtype": variable.key_dtype.name,
        "value_dtype": variable.value_dtype.name,
        "columns": [
            {"column": column, "name": name, "dim": dim}
            for (column, name), dim in zip(bases.items(), [variable.dim, *[s.dim for s in slots]], strict=True)
        ],
    }

    def finish(folder: str) -> None:
        for name in bases.values():
            table_files.remove_others(folder, name, variable.shard_num, config.proc_size)
        table_files.replace(_record(folder, variable.name), json.dumps(record, indent=1).encode(), config.proc_rank)
        if config.save_path is None:
            _remove_outdated_of(variable.name, folder)

    tables = [*variable.tables, *[table for slot in slots for table in slot.tables]]
    return table_files.save(tables, names, variable.name, folder, None, False, config.buffer_size, finish)


def _record(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name.replace('/', '_')}.tables.json"


def outdated(parent: str) -> list[str]:
    """The folders of tables in `parent` whose own checkpoints are not there (any more)."""
    files = [file.rstrip("/") for file in tf.io.gfile.listdir(parent)] if tf.io.gfile.isdir(parent) else []
    steps = {int(index[1]) for file in files if (index := re.search(r"-(\d+)\.index$", file))}
    folders = [(file, int(step[1])) for file in files if (step := re.fullmatch(rf"{FOLDER}-(\d+)", file))]
    return [f"{parent}/{file}" for file, step in folders if step not in steps]


def _remove_outdated_of(name: str, saved: str) -> None:
    """Removes what was saved of a variable, beside `saved`, for checkpoints that a `max_to_keep` has removed since.

    TFRA's own folders, which it also writes without a checkpoint, stay.
    """
    parent = saved.rstrip("/").rpartition("/")[0] or "."
    for folder in outdated(parent):
        if folder.rpartition("/")[2] == saved.rstrip("/").rpartition("/")[2]:
            continue  # Its checkpoint is yet to come.
        try:
            if tf.io.gfile.exists(_record(folder, name)):
                remove_folder(folder)
        except tf.errors.OpError as error:
            _log.warning("'%s', whose checkpoint is gone, cannot be removed: %s", folder, error.message)


def remove_folder(folder: str) -> None:
    """Removes a folder of tables, which other processes may remove as well."""
    for file in sorted(tf.io.gfile.listdir(folder), key=lambda file: str(file).endswith(".tables.json")):
        with contextlib.suppress(tf.errors.NotFoundError):
            tf.io.gfile.remove(f"{folder}/{file}")
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.io.gfile.rmtree(folder)


def save_objects(trackables: Mapping[str, ShardedTable], file_prefix: tf.Tensor) -> list[tf.Tensor]:
    """Saves those variables of an object-based checkpoint that have a saver; markers for them go into the checkpoint.

    A SavedModel holds the tables itself.

    Raises:
      ValueError: it would lack the rows of other processes.
    """
    beside = {path: variable for path, variable in trackables.items() if variable.checkpoint and saver_of(variable)}
    prefix = tf.convert_to_tensor(file_prefix)
    model = tf.executing_eagerly() and re.search(rf"/variables/variables({re.escape(_OURS)})?$", _str(prefix))
    if save_context.in_save_context() or model:
        for variable in beside.values():
            _check_model_is_whole(variable)
        return []
    if not beside:
        return []
    written = []
    markers: list[str] = []
    for path, variable in beside.items():
        saver = saver_of(variable)
        assert saver is not None
        written.append(save(variable, folder_of(saver.config, prefix)))
        escaped = variable.name.replace(".", "..").replace("/", ".S")
        markers += [
            f"{path}/tables_of_{escaped}/{i}/.ATTRIBUTES/table-shard_upsert_restore" for i in range(variable.shard_num)
        ]
    with tf.control_dependencies([op for op in written if op is not None]):
        shard = tf.strings.join([prefix, "_files"])
        saved = io_ops.save_v2(shard, markers, [""] * len(markers), [tf.constant(True) for _ in markers])
    with tf.control_dependencies([] if saved is None else [saved]):
        return [tf.identity(shard)]


def _check_model_is_whole(variable: ShardedTable) -> None:
    saver = saver_of(variable)
    assert saver is not None
    processes = saver.config.proc_size
    if processes > 1 and not all(is_saved_elsewhere(part) for part in variable.parts):
        raise ValueError(
            f"Saving a SavedModel: dynamic embedding variable '{variable.name}' is spread over {processes} processes, "
            "as its FileSystemSaver says, and a SavedModel would have the rows of this one alone. Save checkpoints, "
            "beside which each process puts its rows (de.train.DECheckpoint); to serve, restore one in a process of "
            "its own, by a FileSystemSaver without proc_size, and save the model there. The rows of a "
            "HvdAllToAllEmbedding can be saved as a model by de.keras.models.de_save_model on all ranks."
        )


def _str(text: tf.Tensor) -> str:
    return str(tf.compat.as_str(text.numpy()))


class FilesSaveable(BesideSaveable):
    """A variable in a Saver's list whose tables are written beside the checkpoint, which gets markers."""

    def __init__(
        self,
        variable: ShardedTable,
        name: str,
        restore: Callable[[tf.Tensor], Any],
        is_in: Callable[[str, Collection[str]], bool],
    ) -> None:
        self._variable = variable
        self._restore = restore
        self._is_in = is_in
        saver = saver_of(variable)
        assert saver is not None
        self._config = saver.config
        base, n = variable.name.replace("/", "_"), variable.shard_num

        def marker(tensor_name: str, value: Any) -> Any:
            return saveable_object.SaveSpec(tf.constant(value), "", tensor_name, device="/cpu:0")

        specs = [marker(f"{name}-prev_global_shard_num", n * self._config.proc_size)]
        specs += [marker(f"{name}/{base}_mht_{i + 1}of{n}-shard_upsert_restore", True) for i in range(n)]
        super().__init__(variable.parts[0].handle, specs, name)

    def save_beside(self, filename: tf.Tensor) -> Any:
        """Writes the files."""
        return save(self._variable, folder_of(self._config, tf.convert_to_tensor(filename)))

    def restore_op(self, filename: tf.Tensor) -> Any:
        """Restores from files, or from a checkpoint that holds the rows itself."""
        return self._restore(filename)

    def is_in(self, path: str, names: Collection[str]) -> bool:
        """Whether there are files, or a checkpoint that holds the rows itself."""
        return super().is_in(path, names) or self._is_in(path, names)


# ---- Restoring ----


def read(variable: ShardedTable, path: str) -> dict[str, np.ndarray] | None:
    """The columns of a variable that was saved beside the checkpoint `path`, slots as ``slot:<name>``; None where no
    such files are, or they were not written here.

    Raises:
      ValueError: they have other dtypes, another width, or sizes that do not fit.
      FileNotFoundError: a file is missing.
    """
    saver = saver_of(variable)
    config = FileSystemSaverConfig() if saver is None else saver.config
    found = [folder for folder in _folders(config, path) if tf.io.gfile.exists(_record(folder, variable.name))]
    if not found:
        return None
    folder = found[0]
    with tf.io.gfile.GFile(_record(folder, variable.name), "r") as file:
        record = json.loads(file.read())
    got = (record["key_dtype"], record["value_dtype"], record["columns"][0]["dim"])
    wanted = (variable.key_dtype.name, variable.value_dtype.name, variable.dim)
    if got != wanted:
        raise ValueError(
            f"Restoring dynamic embedding variable '{variable.name}' from '{folder}': the files have {got[0]} keys and "
            f"rows of {got[1]}[{got[2]}], the variable {wanted[0]} keys and {wanted[1]}[{wanted[2]}]: make it with "
            "the dtypes and the width of the files."
        )
    same = (record["devices"], record["processes"]) == (variable.shard_num, config.proc_size)
    ranks = [config.proc_rank] if same else range(record["processes"])
    columns: dict[str, np.ndarray] = {}
    for entry in record["columns"]:
        names = [
            shard
            for rank in ranks
            for shard in table_files.shard_names(entry["name"], record["devices"], record["processes"], rank)
        ]
        keys, rows = table_files.read_all(
            entry["name"], folder, names, variable.key_dtype, variable.value_dtype, entry["dim"]
        )
        if not entry["column"]:
            columns = {"keys": keys, "values": rows}
        else:
            columns[f"slot:{entry['column']}"] = _in_order(columns["keys"], keys, rows, entry["name"], folder)
    if not same and config.proc_size > 1:
        owner = variable.partition_fn(tf.constant(columns["keys"]), config.proc_size * variable.shard_num)
        own = np.asarray(owner) // variable.shard_num == config.proc_rank
        columns = {column: array[own] for column, array in columns.items()}
    return columns


def _folders(config: FileSystemSaverConfig, path: str) -> list[str]:
    if config.save_path is not None:
        return [config.save_path]
    parent, _, name = path.rpartition("/")
    step = re.search(r"-(\d+)$", name)
    names = [f"{FOLDER}-{step[1]}", f"{FOLDER}-{int(step[1]):08d}", FOLDER] if step else [FOLDER]
    return [f"{parent or '.'}/{name}" for name in names]


def _in_order(order: np.ndarray, keys: np.ndarray, rows: np.ndarray, name: str, folder: str) -> np.ndarray:
    """Rows in the order of other keys."""
    if np.array_equal(order, keys):
        return rows
    by_key = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys, order, sorter=by_key)
    if len(order) != len(keys) or (at == len(keys)).any() or not np.array_equal(keys[by_key[at]], order):
        raise ValueError(
            f"Restoring slot '{name}' of a dynamic embedding variable: its files in '{folder}' have other keys than "
            "those of the variable: they are of two saves, or it was trained while it was saved. Save it again."
        )
    return rows[by_key[at]]
