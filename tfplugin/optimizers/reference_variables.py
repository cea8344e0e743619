"""Updates of reference variables, those of TensorFlow 1 without ``enable_resource_variables``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

from tfplugin.ops import raw


def update_reference_variable(
    columns: Sequence[Any],
    indices: tf.Tensor | None,
    update: Callable[[Sequence[tf.Tensor], tf.Tensor | None], tf.Operation],
) -> tf.Operation:
    """Has `update` change a variable and its slots as resource variables. Graph mode.

    Args:
      columns: the variable and its slots.
      indices: [n], of the rows that the gradient names, duplicates included; None for the whole variable.
      update: of the handles, and of where in their rows each of `indices` is.
    """
    if indices is None:
        rows, places = None, None
        values = [tf.convert_to_tensor(column) for column in columns]
    else:
        rows, places = tf.unique(indices)
        values = [tf.gather(column, rows) for column in columns]
    handles = [raw.kv_table_step_variable(tf.identity(value)) for value in values]
    with tf.control_dependencies([update(handles, places)]):
        updated = [
            gen_resource_variable_ops.read_variable_op(handle, value.dtype)
            for handle, value in zip(handles, values, strict=True)
        ]
    if rows is None:
        written = [tf.compat.v1.assign(column, value).op for column, value in zip(columns, updated, strict=True)]
    else:
        written = [
            tf.compat.v1.scatter_update(column, rows, value).op for column, value in zip(columns, updated, strict=True)
        ]
    return tf.group(*written)
