"""Saving on several Horovod ranks: `DECheckpoint` and `DEHvdSaver`.

Rank 0 writes the checkpoint. Tables that a `FileSystemSaver` saves, which hold other rows on each rank, every rank
writes to files of its own, beside it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint as tf_checkpoint
from tensorflow.python.eager import context

from tfplugin.dynamic_embedding import file_system_saver
from tfplugin.dynamic_embedding.variable import Variable


def _horovod() -> Any:
    """Horovod, where this program has started it on more than one rank."""
    hvd = sys.modules.get("horovod.tensorflow")
    if hvd is None or not hvd.is_initialized() or hvd.size() == 1:
        return None
    return hvd


def _told(hvd: Any, path: str | None) -> str | None:
    """What rank 0 says."""
    with context.eager_mode():
        told: str | None = hvd.broadcast_object(path, root_rank=0, name="tfplugin.de.path")
        return told


def _agree(hvd: Any, doing: str, error: BaseException | None) -> None:
    """Waits for all ranks, and raises on every one where there is an error on any."""
    with context.eager_mode():
        said = hvd.allgather_object(
            None if error is None else f"{type(error).__name__}: {error}", name="tfplugin.de.agree"
        )
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
    if failed:
        raise RuntimeError(f"{doing} failed on {len(failed)} of {len(said)} ranks: {'; '.join(failed)}")


def _attempt(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except Exception as error:  # All ranks have to know, whatever it is.
        return None, error


def _as_rank(hvd: Any, variables: Iterable[Variable]) -> None:
    """Has the savers that were given no rank save as this one."""
    for variable in variables:
        saver = file_system_saver.saver_of(variable)
        if saver is not None and not saver.config.has_rank:
            saver.config.proc_size, saver.config.proc_rank = hvd.size(), hvd.rank()


# ---- tf.train.Checkpoint ----


class DECheckpoint(tf.train.Checkpoint):
    """A `tf.train.Checkpoint` that all ranks save together, each the tables that it holds.

    All ranks call `save` or `write`, and get the same path. After it, folders of tables whose checkpoint is gone are
    removed. Every rank restores its own rows, whatever number of ranks saved them.

    Args:
      root: as of `tf.train.Checkpoint`.
      kwargs: as of `tf.train.Checkpoint`.

    Raises:
      RuntimeError: saving failed on another rank.

    Example:
      >>> v = de.Variable(dim=4, name="user", kv_creator=de.CuckooHashTableCreator(saver=de.FileSystemSaver()))
      >>> path = de.train.DECheckpoint(v=v).save("checkpoints/model")
    """

    def _tables(self) -> list[Variable]:
        found = tf.train.TrackableView(self).descendants()
        return [obj for obj in found if isinstance(obj, Variable) and obj.checkpoint]

    # What `save`, `write` and a `tf.train.CheckpointManager` all call.
    def _write(self, file_prefix: Any, options: Any = None) -> Any:
        hvd = _horovod()
        if hvd is None:
            path = super()._write(file_prefix, options)
            _remove_outdated(path)
            return path
        doing = f"Saving checkpoint '{file_prefix}'"
        _as_rank(hvd, self._tables())
        path, error = None, None
        if hvd.rank() == 0:
            path, error = _attempt(lambda: super(DECheckpoint, self)._write(file_prefix, options))
        path = _told(hvd, path)
        if path is not None and hvd.rank() != 0:
            _, error = _attempt(lambda: _save_files(self._tables(), path))
        _agree(hvd, doing, error)
        error = None
        if hvd.rank() == 0:
            _, error = _attempt(lambda: _remove_outdated(path))
        else:  # A CheckpointManager notes what there is, and what has gone.
            told = getattr(options, "experimental_write_callbacks", None) or []
            _, error = _attempt(lambda: tf_checkpoint._execute_callbacks(told, path))
        _agree(hvd, doing, error)
        return path

    def save(self, file_prefix: Any, options: Any = None) -> str:
        """Saves on all ranks. Returns the path of the checkpoint, which rank 0 writes down as the latest."""
        hvd = _horovod()
        if hvd is None or hvd.rank() == 0:
            saved: str = super().save(file_prefix, options)
            return saved
        self._maybe_create_save_counter()
        self.save_counter.assign_add(1)
        written: str = self._write(file_prefix)
        return written

    def restore(self, save_path: Any, options: Any = None) -> Any:
        """As of `tf.train.Checkpoint`; each rank restores its own rows."""
        hvd = _horovod()
        if hvd is not None:
            _as_rank(hvd, self._tables())
        return super().restore(save_path, options)

    def read(self, save_path: Any, options: Any = None) -> Any:
        """As of `tf.train.Checkpoint`; each rank restores its own rows."""
        hvd = _horovod()
        if hvd is not None:
            _as_rank(hvd, self._tables())
        return super().read(save_path, options)


def _save_files(variables: Iterable[Variable], path: str) -> None:
    for variable in variables:
        saver = file_system_saver.saver_of(variable)
        if saver is not None:
            folder = file_system_saver.folder_of(saver.config, tf.constant(path))
            file_system_saver.save(variable, folder)


def _remove_outdated(path: str) -> None:
    """Removes folders of tables beside a checkpoint whose own checkpoints are gone."""
    parent = Path(path).parent
    if "://" in path or not parent.is_dir():
        return
    steps = {found[1] for index in parent.glob("*.index") if (found := re.search(r"-(\d+)\.index$", index.name))}
    for folder in parent.glob(f"{file_system_saver.FOLDER}-*"):
        step = folder.name.removeprefix(f"{file_system_saver.FOLDER}-")
        if step.isdigit() and step not in steps and f"{int(step):08d}" not in steps:
            tf.io.gfile.rmtree(str(folder))


Checkpoint = DECheckpoint


# ---- tf.compat.v1.train.Saver ----


class DEHvdSaver(tf.compat.v1.train.Saver):
    """A ``tf.compat.v1.train.Saver`` that all ranks call: rank 0 saves, the others write the tables that they hold.

    Args:
      args, kwargs: as of ``tf.compat.v1.train.Saver``.

    Raises:
      RuntimeError: saving failed on another rank.

    Example:
      >>> saver = de.train.DEHvdSaver()
      >>> saver.save(session, "checkpoints/model", global_step=10)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        hvd = _horovod()
        if hvd is not None:
            # Before the ops are made, which say whose files they write.
            _as_rank(hvd, _tables_of(args[0] if args else kwargs.get("var_list")))
        super().__init__(*args, **kwargs)
        tables = _tables_of(args[0] if args else kwargs.get("var_list"))
        self._de_prefix = self._de_files = None
        if tables and not tf.executing_eagerly():
            self._de_prefix = tf.compat.v1.placeholder(tf.string, [])
            folders = [file_system_saver.folder_of(_config(v), self._de_prefix) for v in tables]
            self._de_files = tf.group(
                *[file_system_saver.save(v, folder) for v, folder in zip(tables, folders, strict=True)]
            )

    def save(self, sess: Any, save_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Saves on all ranks. Returns the path of the checkpoint."""
        hvd = _horovod()
        if hvd is None:
            return super().save(sess, save_path, *args, **kwargs)
        path, error = None, None
        if hvd.rank() == 0:
            path, error = _attempt(lambda: super(DEHvdSaver, self).save(sess, save_path, *args, **kwargs))
        path = _told(hvd, path)
        if path is not None and hvd.rank() != 0 and self._de_files is not None:
            _, error = _attempt(lambda: sess.run(self._de_files, {self._de_prefix: path}))
        _agree(hvd, f"Saving checkpoint '{save_path}'", error)
        return path


def _tables_of(var_list: Any) -> list[Variable]:
    """The variables of a Saver's list whose tables go to files; None: of all that the graph has."""
    if var_list is None:
        var_list = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS)
    given = var_list.values() if isinstance(var_list, dict) else var_list
    found = [v._variable if isinstance(v, file_system_saver.FilesSaveable) else v for v in given]
    return [v for v in found if isinstance(v, Variable) and file_system_saver.saver_of(v) is not None]


def _config(variable: Variable) -> Any:
    saver = file_system_saver.saver_of(variable)
    assert saver is not None
    return saver.config
