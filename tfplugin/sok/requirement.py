"""What is known only when a lookup runs, and must be so."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf


def required(condition: tf.Tensor, told: tf.Tensor) -> contextlib.AbstractContextManager[Any]:
    """What is computed within it is only where `condition` holds. `told` is a scalar string for those it tells.

    Raises:
      tf.errors.InvalidArgumentError: it does not hold; in a graph when that runs.
    """
    if not tf.executing_eagerly():
        return tf.control_dependencies([tf.debugging.Assert(condition, [told])])
    if not bool(condition):  # an Assert would begin with what the tensor is
        raise tf.errors.InvalidArgumentError(None, None, told.numpy().decode())
    return contextlib.nullcontext()
