"""In what type rows travel between the ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_HALVES = (tf.float16, tf.bfloat16)


def travel_type(rows: tf.DType, wire: tf.DType | None, ranks: int) -> tf.DType:
    """For rows of that type: `wire` is asked for where they are of float32. On a single rank they stay as they are."""
    return wire if wire is not None and rows == tf.float32 and ranks > 1 else rows


def checked_wire_dtype(dtype: Any, caller: str) -> tf.DType | None:
    """The argument `wire_dtype` of a lookup; None where rows travel as they are.

    Raises:
      ValueError: another type than float16, bfloat16 and float32.
    """
    if dtype is None:
        return None
    try:
        found = tf.as_dtype(dtype)
    except TypeError:
        found = None
    if found == tf.float32:
        return None
    if found not in _HALVES:
        raise ValueError(f"{caller}: wire_dtype must be float16, bfloat16, float32 or None, got {dtype!r}.")
    return found
