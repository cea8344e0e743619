"""Training or inference: what a lookup does with a key that is not there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tensorflow.python.saved_model import save_context

_local = threading.local()


@contextlib.contextmanager
def inference_mode() -> Iterator[None]:
    """Makes every lookup inside read-only: a missing key gives zeros and is not inserted.

    Holds for eager lookups and for graphs and functions traced inside, on the calling thread. A lookup's own
    ``training=`` argument wins.

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


def training(explicit: bool | None) -> bool:
    """Whether a lookup trains: its own argument, else the context. SavedModel signatures are traced for inference."""
    if explicit is not None:
        return explicit
    return not (getattr(_local, "inference", False) or save_context.in_save_context())
