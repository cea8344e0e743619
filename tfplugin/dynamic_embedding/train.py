"""Saving on several Horovod ranks: `DECheckpoint` and `DEHvdSaver`.

Rank 0 writes the checkpoint. Tables that a `FileSystemSaver` saves, which hold other rows on each rank, every rank
writes to files of its own, beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint as tf_checkpoint

from tfplugin import ranks
from tfplugin.dynamic_embedding import file_system_saver
from tfplugin.dynamic_embedding.variable import Variable


def _world() -> ranks.Ranks | None:
    """The ranks, where there are several."""
    world = ranks.found()
    return None if world.size == 1 else world


def _told(world: ranks.Ranks, path: str | None) -> str | None:
    """What rank 0 says."""
    told: str | None = world.allgather(path)[0]
    return told


def _attempt(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except Exception as error:  # All ranks have to know, whatever it is.
        return None, error


def _as_rank(world: ranks.Ranks, variables: Iterable[Variable]) -> None:
    """Has the savers that were given no rank save as this one."""
    for variable in variables:
        saver = file_system_saver.saver_of(variable)
        if saver is not None and not saver.config.has_rank:
            saver.config.proc_size, saver.config.proc_rank = world.size, world.rank


# ---- tf.train.Checkpoint ----


class DECheckpoint(tf.train.Checkpoint):
    """A `tf.train.Checkpoint` that all ranks save together, each the tables that it holds.

    All ranks call `save` or `write`, and get the same path. After it, folders of tables whose checkpoint is gone are
    removed. Every rank restores its own rows, whatever number of ranks saved them.

    Args:
      root: as of `tf.train.Checkpoint`.
      kwargs: as of `tf.train.Checkpoint`.

    Raises:
      RankError: saving failed on another rank.

    Example:
      >>> v = de.Variable(dim=4, name="user", kv_creator=de.CuckooHashTableCreator(saver=de.FileSystemSaver()))
      >>> path = de.train.DECheckpoint(v=v).save("checkpoints/model")
    """

    def _tables(self) -> list[Variable]:
        found = tf.train.TrackableView(self).descendants()
        return [obj for obj in found if isinstance(obj, Variable) and obj.checkpoint]

    # What `save`, `write` and a `tf.train.CheckpointManager` all call.
    def _write(self, file_prefix: Any, options: Any = None) -> Any:
        world = _world()
        if world is None:
            path = super()._write(file_prefix, options)
            _remove_outdated(path)
            return path
        doing = f"Saving checkpoint '{file_prefix}'"
        _as_rank(world, self._tables())
        path, error = None, None
        if world.rank == 0:
            path, error = _attempt(lambda: super(DECheckpoint, self)._write(file_prefix, options))
        path = _told(world, path)
        if path is not None and world.rank != 0:
            _, error = _attempt(lambda: _save_files(self._tables(), path))
        ranks.agree(doing, error)
        error = None
        if world.rank == 0:
            _, error = _attempt(lambda: _remove_outdated(path))
        else:  # A CheckpointManager notes what there is, and what has gone.
            told = getattr(options, "experimental_write_callbacks", None) or []
            _, error = _attempt(lambda: tf_checkpoint._execute_callbacks(told, path))
        ranks.agree(doing, error)
        return path

    def save(self, file_prefix: Any, options: Any = None) -> str:
        """Saves on all ranks. Returns the path of the checkpoint, which rank 0 writes down as the latest."""
        world = _world()
        if world is None or world.rank == 0:
            saved: str = super().save(file_prefix, options)
            return saved
        self._maybe_create_save_counter()
        self.save_counter.assign_add(1)
        written: str = self._write(file_prefix)
        return written

    def restore(self, save_path: Any, options: Any = None) -> Any:
        """As of `tf.train.Checkpoint`; each rank restores its own rows."""
        world = _world()
        if world is not None:
            _as_rank(world, self._tables())
        return super().restore(save_path, options)

    def read(self, save_path: Any, options: Any = None) -> Any:
        """As of `tf.train.Checkpoint`; each rank restores its own rows."""
        world = _world()
        if world is not None:
            _as_rank(world, self._tables())
        return super().read(save_path, options)


def _save_files(variables: Iterable[Variable], path: str) -> None:
    for variable in variables:
        saver = file_system_saver.saver_of(variable)
        if saver is not None:
            folder = file_system_saver.folder_of(saver.config, tf.constant(path))
            file_system_saver.save(variable, folder)


def _remove_outdated(path: str) -> None:
    """Removes folders of tables beside a checkpoint whose own checkpoints are gone."""
    if "://" not in path:
        for folder in file_system_saver.outdated(str(Path(path).parent)):
            file_system_saver.remove_folder(folder)


Checkpoint = DECheckpoint


# ---- tf.compat.v1.train.Saver ----


class DEHvdSaver(tf.compat.v1.train.Saver):
    """A ``tf.compat.v1.train.Saver`` that all ranks call: rank 0 saves, the others write the tables that they hold.

    Args:
      args, kwargs: as of ``tf.compat.v1.train.Saver``.

    Raises:
      RankError: saving failed on another rank.

    Example:
      >>> saver = de.train.DEHvdSaver()
      >>> saver.save(session, "checkpoints/model", global_step=10)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        world = _world()
        if world is not None:
            # Before the ops are made, which say whose files they write.
            _as_rank(world, _tables_of(args[0] if args else kwargs.get("var_list")))
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
        world = _world()
        if world is None:
            return super().save(sess, save_path, *args, **kwargs)
        path, error = None, None
        if world.rank == 0:
            path, error = _attempt(lambda: super(DEHvdSaver, self).save(sess, save_path, *args, **kwargs))
        path = _told(world, path)
        if path is not None and world.rank != 0 and self._de_files is not None:
            _, error = _attempt(lambda: sess.run(self._de_files, {self._de_prefix: path}))
        ranks.agree(f"Saving checkpoint '{save_path}'", error)
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
