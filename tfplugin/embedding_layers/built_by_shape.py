"""Calls by which Keras builds a model of shapes alone: it takes all input for floats, and wants weights, not rows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin.embedding_layers.layer_ids import Reading


class _Within(threading.local):
    #: Whether Keras builds a model in this thread.
    building = False


_within = _Within()


@contextlib.contextmanager
def building(yes: bool = True) -> Iterator[None]:
    """While Keras builds a model of shapes; or, within that, does what tells the dtype of later inputs."""
    before, _within.building = _within.building, yes
    try:
        yield
    finally:
        _within.building = before


def is_building() -> bool:
    """Whether Keras builds a model of shapes, for which floats stand for whatever the inputs are."""
    return _within.building


def as_ids(inputs: Any, reading: Reading) -> Any:
    """`inputs`, an array as a tensor; of floats that stand for ids while a model is built, ids of that shape."""
    if isinstance(inputs, np.ndarray):
        inputs = tf.convert_to_tensor(inputs)
    stands_for_ids = _within.building and isinstance(inputs, tf.Tensor) and inputs.dtype.is_floating
    if not stands_for_ids or not tf.is_symbolic_tensor(inputs):
        return inputs
    if reading.strings or isinstance(reading.padding, (str, bytes)):
        return tf.strings.as_string(inputs)
    return tf.cast(inputs, reading.table.key_dtype)
