"""Weights of which each lies where an id does: their number alone does not say whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin.ops import raw


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
        # An op costs a small lookup a good part of its time.
        if not all(np.array_equal(one.numpy(), other.numpy()) for one, other in pairs):
            raise tf.errors.InvalidArgumentError(None, None, told)
        return weights
    ids_at, weights_at = ([tf.cast(one, tf.int64) for one in side] for side in zip(*pairs, strict=True))
    return raw.kv_same_places(weights, ids_at, weights_at, message=told)
