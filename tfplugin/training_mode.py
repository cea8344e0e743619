"""Training or inference: what a lookup does with a key that is not there.

A lookup in a graph inserts keys or does not: that is an attribute of its op. So a `tf.function` has a trace for
training and another for inference, and each call takes the one of the mode that its thread is in: the mode is part of
what TensorFlow finds the traces of a function by. Threads that train and threads that infer do not get in each other's
way.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.saved_model import save_context

_local = threading.local()


@contextlib.contextmanager
def inference_mode() -> Iterator[None]:
    """Makes every lookup inside read-only: a missing key gives zeros and is not inserted.

    Holds on the calling thread, for eager lookups, for graphs that are built inside and for every `tf.function` that is
    called inside: one that was traced for training is traced once more. A lookup's own ``training=`` argument wins.
    ``evaluate`` and ``predict`` of Keras models run in it.

    What ``get_concrete_function`` gave is one trace, of the mode that it was made in: one that inserts keys raises
    RuntimeError here. Graphs of `tf.compat.v1` keep the mode they were built in.

    Example:
      >>> with tfplugin.inference_mode():
      ...     rows = tf.nn.embedding_lookup(v, ids)
    """
    before = getattr(_local, "inference", False)
    _local.inference = True
    try:
        yield
    finally:
        _local.inference = before


def is_training(explicit: bool | None) -> bool:
    """Whether a lookup trains: its own argument, else the context.

    SavedModel signatures are traced for inference, and a layer of Keras that is called with ``training=False`` infers.
    """
    if explicit is not None:
        return explicit
    train = not (_infers() or save_context.in_save_context())
    if train and not tf.executing_eagerly():
        _note_inserts(tf_ops.get_default_graph())
    return train


def _infers() -> bool:
    """Whether the calling thread is in inference mode."""
    return getattr(_local, "inference", False) or _keras_infers()


def make_function_context(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``make_function_context`` of TensorFlow, which tells the traces of a function apart: by the mode, too."""
    found = original(*args, **kwargs)
    return found._replace(context=(found.context, _INFERENCE)) if _infers() else found


#: What tells traces for inference from those for training.
_INFERENCE = "tfplugin.inference_mode"

_INSERTS = "_kv_inserts_keys"


def _note_inserts(graph: Any) -> None:
    """Notes that a graph has a lookup that trains because it was traced for training; and those around it."""
    while graph is not None and not hasattr(graph, _INSERTS):
        setattr(graph, _INSERTS, True)
        graph = getattr(graph, "outer_graph", None)


def inserts(graph: Any) -> bool:
    """Whether a graph, or a function that it calls, has a lookup that trains because it was traced for training."""
    waiting, seen = [graph], set()
    while waiting:
        graph = waiting.pop()
        if hasattr(graph, _INSERTS):
            return True
        if id(graph) not in seen:
            seen.add(id(graph))
            called = (getattr(function, "_cached_graph", None) for function in graph._functions.values())
            waiting += [of_function for of_function in called if of_function is not None]
    return False


def call_concrete_function(original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """``ConcreteFunction.__call__``: one that was traced for training cannot be called for inference."""
    if getattr(_local, "inference", False) and inserts(function.graph):
        raise RuntimeError(
            f"{function.name} was traced for training, and would insert the keys that its lookups miss: inside "
            "tfplugin.inference_mode(), call the tf.function that it is of, or get the concrete function there."
        )
    return original(function, *args, **kwargs)


def _keras_infers() -> bool:
    """Whether a layer of Keras is being called that was told, or whose caller was told, ``training=False``."""
    state = sys.modules.get("keras.src.backend.common.global_state")
    call = None if state is None else state.get_global_attribute("current_call_ctx")
    if _is_false(getattr(call, "training", None)):
        return True
    utils = sys.modules.get("tf_keras.src.engine.base_layer_utils")
    return utils is not None and _is_false(utils.call_context().training)


def _is_false(training: Any) -> bool:
    return training is not None and not tf.is_tensor(training) and not training
