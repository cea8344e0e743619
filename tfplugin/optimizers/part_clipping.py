"""Clipping to a norm: ``clipnorm`` of tables in several parts, as a part is no variable of its own, and
``global_clipnorm`` of tables whose rows are of another dtype than weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def clipped_as_wholes(
    gradients: Sequence[Any], tables: Sequence[Any], clip: Callable[[list[Any]], Sequence[Any]]
) -> list[Any]:
    """What `clip` makes of a list of gradients, in which those of the parts of a table, [n, dim] each, are one.

    Args:
      gradients: of tables, and of others.
      tables: of each gradient what the parts of a table have in common; None of one that is no part of a table.
      clip: from a list of gradients makes another one.
    """
    places: dict[Any, list[int]] = {}
    for i, table in enumerate(tables):
        places.setdefault(("part of", id(table)) if table is not None else i, []).append(i)
    whole = [gradients[at[0]] if len(at) == 1 else tf.concat([gradients[i] for i in at], 0) for at in places.values()]
    clipped: list[Any] = [None] * len(gradients)
    for at, one in zip(places.values(), clip(whole), strict=True):
        parts = [one] if len(at) == 1 else tf.split(one, [tf.shape(gradients[i])[0] for i in at])
        for i, part in zip(at, parts, strict=True):
            clipped[i] = part
    return clipped


def clipped_in_one_dtype(gradients: Sequence[Any], clip: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """What `clip`, which adds up the norms of all, makes of a list of gradients that may be of several dtypes."""
    dtypes = {gradient.dtype for gradient in gradients if gradient is not None}
    if len(dtypes) <= 1:
        return list(clip(list(gradients)))
    widest = tf.float64 if tf.float64 in dtypes else tf.float32
    clipped = clip([None if gradient is None else tf.cast(gradient, widest) for gradient in gradients])
    return [
        None if gradient is None else tf.cast(one, gradient.dtype)
        for gradient, one in zip(gradients, clipped, strict=True)
    ]
