"""Updates that read rows, change them by TensorFlow's ops and write them back come one after the other in a table.

In between, such an update of another thread would read what this one is about to overwrite. Fused updates need no such
lock: the table makes them row by row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw


@contextlib.contextmanager
def locked_updates(variable: KvVariable, after: tf.Tensor) -> Iterator[Callable[[Any], Any]]:
    """Makes the ops within the only update of its kind of `variable`, from when `after` is there.

    Gives a function that ends it: of the op that writes the rows, it returns the op to wait for (graph mode). An update
    that fails before ends by itself.
    """
    eager = tf.executing_eagerly()
    # A tape would keep the lock.
    with record.stop_recording(), tf.control_dependencies([] if eager else [after]):
        lock = raw.kv_table_acquire_update_lock(variable.handle)
    if eager:
        try:
            yield lambda written: written
        finally:
            raw.kv_table_release_update_lock(lock)
        return

    def release(written: Any) -> Any:
        with tf.control_dependencies([written]):
            return raw.kv_table_release_update_lock(lock)

    with tf.control_dependencies([lock]):
        yield release
