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
      [batch, dim]; [dim] for a single sample.

    Raises:
      ValueError: `x` is a vector; an unknown combiner.
    """
    combine = reduction(combiner)
    rank = x.shape.rank
    if rank is None or rank < 2:
        raise ValueError(f"reduce_pooling wants values of 2 dimensions or more, got shape {x.shape}.")
    if rank == 2:
        return combine(x, 0)
    for _ in range(rank - 2):
        x = combine(x, 1)
    return x
