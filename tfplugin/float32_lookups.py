"""Which tables of 16 bits have been looked up as float32, so that all gradients of one come in one dtype.

TensorFlow joins the gradients of several lookups of a variable, which it cannot where one is of 16 bits and another of
float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

from tfplugin import table_handle

_ATTRIBUTE = "_kv_read_as_float32"
_LOOKUPS = ("KvTableGather", "KvTableGatherMany")


def note(tables: Iterable[Any], looked_up_as: tf.DType) -> None:
    """Notes a lookup of tables, each with a `handle` and a `dtype`, where it gives another dtype than theirs."""
    for table in tables:
        if table.dtype != looked_up_as:
            setattr(table.handle, _ATTRIBUTE, True)


def joinable(handle: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """The gradient `rows` of a lookup of `handle` in the dtype that those of its other lookups have."""
    if rows.dtype not in (tf.float16, tf.bfloat16):
        return rows
    widened = getattr(table_handle.origin(handle), _ATTRIBUTE, False)
    if not widened and not isinstance(handle, tf_ops.EagerTensor):  # in a function it is an argument
        lookups = [op for op in handle.consumers() if op.type in _LOOKUPS]
        widened = any(op.get_attr("dtype") == tf.float32 for op in lookups)
    return tf.cast(rows, tf.float32) if widened else rows
