"""The arguments of bounded tables: how many rows they keep, and which go first."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

#: What a bounded table goes by when it evicts.
EVICTIONS = ("lru", "lfu", "custom", "epoch_lru", "epoch_lfu")


def checked_capacity(max_capacity: Any, eviction: Any, name: str) -> int:
    """`max_capacity` as an int.

    Raises:
      ValueError: it is not a number of 0 or more, or `eviction` is none of `EVICTIONS`.
    """
    rows = checked_rows(max_capacity, "max_capacity", name)
    if eviction not in EVICTIONS:
        raise ValueError(f"Key-value variable '{name}': eviction must be one of {EVICTIONS}, got {eviction!r}.")
    return rows


def checked_rows(rows: Any, argument: str, name: str) -> int:
    """A number of rows as an int.

    Raises:
      ValueError: it is not a number of 0 or more.
    """
    if isinstance(rows, (bool, str)) or int(rows) != rows or rows < 0:
        raise ValueError(
            f"Key-value variable '{name}': {argument} must be a number of rows, or 0 for any number; got {rows!r}."
        )
    return int(rows)


def scores_tensor(scores: Any) -> tf.Tensor:
    """Scores as a Tensor of int64 or uint64."""
    scores = scores if tf.is_tensor(scores) else tf.convert_to_tensor(np.asarray(scores))
    if scores.dtype in (tf.int64, tf.uint64):
        return scores
    if not scores.dtype.is_integer and scores.shape.num_elements() != 0:
        raise TypeError(f"set_scores: scores must be integers, got {scores.dtype.name}.")
    return tf.cast(scores, tf.int64)


def microseconds(unix_time: Any, name: str) -> tf.Tensor:
    """A time since which rows were touched, as the table has it: scalar int64.

    Args:
      unix_time: seconds since 1970, a number or a scalar tensor.
      name: of the variable.

    Raises:
      ValueError: not a number, or not a finite one.
    """
    if tf.is_tensor(unix_time):
        return tf.cast(tf.floor(tf.cast(unix_time, tf.float64) * 1e6), tf.int64)
    if isinstance(unix_time, bool) or not math.isfinite(unix_time):
        raise ValueError(
            f"export_since of key-value variable '{name}': the time must be seconds since 1970, got {unix_time!r}."
        )
    return tf.constant(min(max(0, math.floor(unix_time * 1e6)), 2**63 - 1), tf.int64)
