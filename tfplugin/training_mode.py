"""Training or inference: what a lookup does with a key that is not there."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model import save_context

_local = threading.local()


@contextlib.contextmanager
def inference_mode() -> Iterator[None]:
    """Makes every lookup inside read-only: a missing key gives zeros and is not inserted.

    Holds for eager lookups and for graphs and functions traced inside, on the calling thread. A lookup's own
    ``training=`` argument wins. ``evaluate`` and ``predict`` of Keras models run in it.

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
    return not (getattr(_local, "inference", False) or save_context.in_save_context() or _keras_infers())


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
