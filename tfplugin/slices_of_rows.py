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


class NoDenseForm(ValueError):
    """Slices of a table are to be one tensor."""


def refuse_dense_form(value: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
    """What TensorFlow converts slices to a tensor by: raises NoDenseForm where they are of a table."""
    if value.dense_shape is not None:
        return NotImplemented
    raise NoDenseForm(
        f"IndexedSlices without a dense_shape, as the gradients of a key-value variable are, have no dense form: a "
        f"table has no number of rows. Got slices with values of shape {value.values.shape}. Compute with their "
        ".values, and keep their .indices: tf.IndexedSlices(0.5 * slices.values, slices.indices); tf.add_n adds up "
        "those of several lookups."
    )


def differentiable(targets: Sequence[Any], gradients: Sequence[Any] | None) -> tuple[Any, Any]:
    """What a tape is to differentiate, and the gradients of that, less slices of tables that have none.

    TensorFlow's forward mode asks what tangents of tables add to what is looked up, and no table has one.

    Raises:
      TypeError: slices of a table that somebody wants the gradient of.
    """
    of_tables = [i for i, one in enumerate(targets) if isinstance(one, tf.IndexedSlices) and one.dense_shape is None]
    if not of_tables:
        return targets, gradients
    if gradients is None or any(gradients[i] is not None for i in of_tables):
        raise TypeError(
            "The gradient of a key-value variable is tf.IndexedSlices, which no tape differentiates: give its .values."
        )
    others = [i for i in range(len(targets)) if i not in of_tables]
    return [targets[i] for i in others], [gradients[i] for i in others]


def register() -> None:
    """Registers `add_n` with TensorFlow's type-based dispatch."""
    dispatch.dispatch_for_api(tf.math.add_n, {"inputs": typing.List[tf.IndexedSlices]})(add_n)  # noqa: UP006


def unregister() -> None:
    """Takes `add_n` out of TensorFlow's dispatch again."""
    dispatch.unregister_dispatch_for(add_n)


# Before TensorFlow's own, whose message names neither a table nor a way out.
tf.register_tensor_conversion_function(tf.IndexedSlices, refuse_dense_form, priority=99)
