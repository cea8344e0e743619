"""The shape of the rows that a write is given."""

from __future__ import annotations

import tensorflow as tf


def rows_of_values(keys: tf.Tensor, values: tf.Tensor, dim: int, what: str) -> tf.Tensor:
    """The rows of a write one below the other: [n, dim] for n keys.

    Args:
      keys: any shape.
      values: keys.shape + [dim], or [n, dim].
      dim: width of a row.
      what: is written to, for messages.

    Raises:
      tf.errors.InvalidArgumentError: another shape; at once where it is known, else when the op runs.
    """
    wanted = keys.shape.concatenate([dim])
    flat = tf.TensorShape([keys.shape.num_elements(), dim])
    if not (values.shape.is_compatible_with(wanted) or values.shape.is_compatible_with(flat)):
        raise tf.errors.InvalidArgumentError(
            None, None, f"{what}: keys of shape {keys.shape} take rows of shape {wanted}, got {values.shape}."
        )
    rows = tf.reshape(values, [-1, dim])
    if keys.shape.is_fully_defined() and values.shape.is_fully_defined():
        return rows
    got, of_keys = tf.shape(values), tf.shape(keys)
    number = tf.reduce_prod(of_keys, keepdims=True)
    nested = tf.reduce_all(tf.equal(tf.size(got), tf.size(of_keys) + 1))
    expected = tf.cond(nested, lambda: tf.concat([of_keys, [dim]], 0), lambda: tf.concat([number, [dim]], 0))
    same = tf.cond(
        tf.equal(tf.size(got), tf.size(expected)), lambda: tf.reduce_all(tf.equal(got, expected)), lambda: False
    )
    check = tf.debugging.Assert(same, [f"{what}: keys of shape", of_keys, "take rows of", dim, "got values of", got])
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(rows)
