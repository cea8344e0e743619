"""Weights of which each lies where an id does: their number alone does not say whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def places_of(ids: Any) -> tuple[tf.Tensor, ...]:
    """What says where the values of a SparseTensor or a RaggedTensor lie: its indices, or its row splits."""
    return tuple(ids.nested_row_splits) if isinstance(ids, tf.RaggedTensor) else (ids.indices,)


def in_same_places(
    weights: tf.Tensor, of_ids: Sequence[tf.Tensor], of_weights: Sequence[tf.Tensor], told: str
) -> tf.Tensor:
    """The values of weights, whose places are those of the ids. The same tensors are not compared.

    Raises:
      tf.errors.InvalidArgumentError: they are not; in a graph when it runs. `told` says whose they are.
    """
    pairs = [(one, other) for one, other in zip(of_ids, of_weights, strict=True) if one is not other]
    if not pairs:
        return weights
    if tf.executing_eagerly():
        if not all(bool(_is_same(one, other)) for one, other in pairs):
            raise tf.errors.InvalidArgumentError(None, None, told)
        return weights
    # XLA leaves assertions out.
    with tf.xla.experimental.jit_scope(compile_ops=False):
        same = tf.reduce_all([_is_same(one, other) for one, other in pairs])
        with tf.control_dependencies([tf.debugging.Assert(same, [told])]):
            return tf.identity(weights)


def _is_same(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    equal = tf.raw_ops.Equal(x=tf.cast(one, tf.int64), y=tf.cast(other, tf.int64), incompatible_shape_error=False)
    return tf.reduce_all(equal)
