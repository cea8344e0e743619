"""Restoring a `tf.train.Checkpoint` in a graph: the ops of key-value variables run with the others.

TensorFlow calls what restores the objects of a registered saver, and drops the ops that come of it: in eager mode they
have run by then, and a `tf.function` runs them for their effects, but a session would not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

_now = threading.local()


def _in_graph() -> bool:
    return not tf.executing_eagerly() and not tf_ops.inside_function()


def note(op: Any) -> None:
    """Has an op or tensor run when a session restores the checkpoint. Does nothing outside of graphs.

    Raises:
      RuntimeError: nobody would run it, as `tfplugin.uninstall` has been called.
    """
    if not _in_graph():
        return
    if getattr(_now, "ops", None) is None:
        raise RuntimeError(
            "Restoring key-value variables from a tf.train.Checkpoint in a graph needs tfplugin's changes to "
            "TensorFlow: call tfplugin.install() before."
        )
    _now.ops.append(getattr(op, "op", op))


def restore(original: Callable[..., Any], saver: Any, *args: Any, **kwargs: Any) -> Any:
    """`MultiDeviceSaver.restore`: in a graph, with the ops that were noted among those that it returns."""
    if not _in_graph():
        return original(saver, *args, **kwargs)
    before, _now.ops = getattr(_now, "ops", None), []
    try:
        restored = dict(original(saver, *args, **kwargs) or {})
        return restored | {op.name: op for op in _now.ops}
    finally:
        _now.ops = before
