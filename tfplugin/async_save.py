"""Asynchronous saves: `tf.train.CheckpointOptions(enable_async=True)`.

TensorFlow copies every variable when the save is asked for, and a thread of its writes the copies. A table is not
copied: its one-moment export is begun instead (a *cut*). Who is about to change a row that has not been written yet
lays it aside first, and only that takes memory. On a GPU what the memory for that holds is copied at once, and who
would change rows waits until the others have been written.

A cut that nobody writes would hold up who trains. So whatever fails on the way gives it up, and what failed before is
told before the next one begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfplugin.ops import raw
from tfplugin.saveable import check_whole

_log = logging.getLogger("tfplugin")
_ALL_ROWS = (-1, -1)


class TableAtMoment:
    """Stands for a table in an asynchronous save: what it held when the save was asked for.

    Attributes:
      table: the table.
      cuts: of each part the handle of what is exported, and the export's number, while it is not saved.
    """

    def __init__(self, table: Any) -> None:
        self.table = table
        self.cuts: list[tuple[Any, tf.Tensor]] = []

    def take(self) -> None:
        """Begins the exports of now, in place of those before."""
        self.drop()
        check_whole(self.table)
        try:
            for part in self.table._kv_parts:
                with tf.device(part.device or None):
                    cut = raw.kv_table_cut(part.handle, tf.constant(_ALL_ROWS, tf.int64)).cut
                self.cuts.append((part.handle, cut))
        except BaseException:
            self.drop()
            raise

    def taken(self) -> list[tuple[Any, tf.Tensor]]:
        """The exports, for one who saves them or gives them up."""
        cuts, self.cuts = self.cuts, []
        return cuts

    def drop(self) -> None:
        """Gives up exports that were not saved."""
        for exported, cut in self.taken():
            with tf.device(exported.device or None):
                raw.kv_table_drop_cut(exported, cut)


def take(table: Any, object_map: Any) -> None:
    """What a table's ``_copy_trackable_to_cpu`` does."""
    if table not in object_map:
        object_map[table] = TableAtMoment(table)
    object_map[table].take()


def _moments(object_map: Any) -> list[TableAtMoment]:
    return [one for one in (object_map or {}).values() if isinstance(one, TableAtMoment)]


# ---- Around TensorFlow's functions -----------------------------------------------------------------------------------


def begin(original: Callable[..., Any], helper: Any, *args: Any, **kwargs: Any) -> Any:
    """`AsyncCheckpointHelper.save` and `_write`: what failed before is told before anything is taken anew."""
    if helper._initialized:
        helper._queue.join()
        helper._check_async_thread_error()
    try:
        return original(helper, *args, **kwargs)
    except BaseException:
        for moment in _moments(helper._object_map):
            moment.drop()
        raise


def copy_to_cpu(original: Any, helper: Any) -> None:
    """`AsyncCheckpointHelper._copy_to_cpu`, a traced function there: by call where there are tables."""
    if not _moments(helper._object_map):
        original.__get__(helper, type(helper))()
        return
    for one in helper._saveable_trackables:
        try:
            one._copy_trackable_to_cpu(object_map=helper._object_map)
        except NotImplementedError as error:
            _log.warning("Trackable %s skipped due to: %s", one, error)
    for embedding in helper._tpu_embedding_objects:
        embedding._retrieve_variables()


def sync(original: Callable[..., Any], helper: Any) -> Any:
    """`AsyncCheckpointHelper.sync`: tells what failed, too, where there are tables."""
    done = original(helper)
    if _moments(helper._object_map):
        helper._check_async_thread_error()
    return done


def write(original: Callable[..., Any], saver: Any, *args: Any, **kwargs: Any) -> Any:
    """`TrackableSaver.save`: what it does not come to is given up."""
    try:
        return original(saver, *args, **kwargs)
    finally:
        for moment in _moments(saver._object_map):
            moment.drop()
