"""Gradients of tables as TensorFlow's functions take them: slices of rows, which have no dense form."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.util import dispatch


def add_n(inputs: Sequence[tf.IndexedSlices], name: str | None = None) -> Any:
    """``tf.add_n`` of gradients of lookups of a table: the slices of all of them, which name a row once for each."""
    if any(slices.dense_shape is not None for slices in inputs):
        return NotImplemented
    with tf.name_scope(name or "AddN"):
        return tf.IndexedSlices(
            tf.concat([slices.values for slices in inputs], 0), tf.concat([slices.indices for slices in inputs], 0)
        )


def refuse_dense_form(value: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
    """What TensorFlow converts slices to a tensor by: raises ValueError where they are of a table."""
    if value.dense_shape is not None:
        return NotImplemented
    raise ValueError(
        f"IndexedSlices without a dense_shape, as the gradients of a key-value variable are, have no dense form: a "
        f"table has no number of rows. Got slices with values of shape {value.values.shape}. Compute with their "
        ".values, and keep their .indices: tf.IndexedSlices(0.5 * slices.values, slices.indices); tf.add_n adds up "
        "those of several lookups."
    )


def register() -> None:
    """Registers `add_n` with TensorFlow's type-based dispatch."""
    dispatch.dispatch_for_api(tf.math.add_n, {"inputs": typing.List[tf.IndexedSlices]})(add_n)  # noqa: UP006


def unregister() -> None:
    """Takes `add_n` out of TensorFlow's dispatch again."""
    dispatch.unregister_dispatch_for(add_n)


# Before TensorFlow's own, whose message names neither a table nor a way out.
tf.register_tensor_conversion_function(tf.IndexedSlices, refuse_dense_form, priority=99)
