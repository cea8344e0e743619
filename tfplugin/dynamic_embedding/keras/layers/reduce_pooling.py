"""`reduce_pooling`: the rows of a sample made one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def reduction(combiner: Any) -> Callable[..., tf.Tensor]:
    """``tf.math.reduce_<combiner>``, or the function that `combiner` is.

    Raises:
      ValueError: there is none of that name.
    """
    found = combiner if callable(combiner) else getattr(tf.math, f"reduce_{combiner}", None)
    if found is None:
        raise ValueError(
            f"combiner must be a function of (values, axis), or one of 'sum', 'mean', 'min', 'max', 'prod', 'std' and "
            f"others of which tf.math has a reduce_..., got {combiner!r}."
        )
    return found


def reduce_pooling(x: Any, combiner: Any = "sum") -> Any:
    """Combines the rows of each sample.

    Args:
      x: [batch, s1, ..., sn, dim], ragged, too; or [n, dim], the rows of a single sample.
      combiner: ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"prod"``, ``"std"``, ...; or a function of values and an
        axis. With several dimensions it is taken of one after the other.

    Returns:
      [batch, dim]; [dim] for a single sample. Zeros where there are no rows, unless `combiner` is a function.

    Raises:
      ValueError: `x` is a vector; an unknown combiner.
    """
    combine = reduction(combiner)
    rank = x.shape.rank
    if rank is None or rank < 2:
        raise ValueError(f"reduce_pooling wants values of 2 dimensions or more, got shape {x.shape}.")
    fill = not callable(combiner)
    if rank == 2:
        return _filled(combine(x, 0), tf.shape(x)[:1]) if fill else combine(x, 0)
    for _ in range(rank - 2):
        count = x.row_lengths() if isinstance(x, tf.RaggedTensor) else tf.shape(x)[1:2]
        x = _filled(combine(x, 1), count) if fill else combine(x, 1)
    return x


def _filled(combined: Any, count: tf.Tensor) -> Any:
    """Zeros for samples whose rows were none: of which the mean is no number, and the maximum no row."""
    if isinstance(combined, tf.RaggedTensor):  # no rows in it either
        return combined
    there = tf.reshape(count > 0, tf.concat([tf.shape(count), tf.ones([tf.rank(combined) - 1], tf.int32)], 0))
    return tf.where(there, combined, tf.zeros([], combined.dtype))
