"""In what type rows travel between the ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

_HALVES = (tf.float16, tf.bfloat16)


class TravelType(NamedTuple):
    """What rows are put into.

    Attributes:
      name: of the type.
      flat: of the buffer that travels.
      bfloat16_bits: whether the float16 elements of that are the bits of bfloat16, which Horovod does not know.
    """

    name: str
    flat: tf.DType
    bfloat16_bits: bool

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of the ops that make a buffer."""
        return {"Tflat": self.flat, "bfloat16_bits": self.bfloat16_bits}


def travel_type(rows: tf.DType, wire: tf.DType | None, ranks: int) -> TravelType:
    """For rows of that type: `wire` is asked for where they are of float32. On a single rank they stay as they are."""
    if ranks == 1:
        return TravelType(rows.name, rows, False)
    dtype = rows if wire is None or rows != tf.float32 else wire
    if dtype == tf.bfloat16:
        return TravelType(dtype.name, tf.float16, True)
    return TravelType(dtype.name, dtype, False)


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
