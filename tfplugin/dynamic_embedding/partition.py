"""Which of a variable's tables owns a key."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin.ops import raw


def owners_of(variable: Any, keys: tf.Tensor) -> tf.Tensor:
    """The owner of each of `keys` [n] by the partitioner of a variable: int32 [n].

    Raises:
      TypeError: the partitioner gives no whole numbers.
      tf.errors.InvalidArgumentError: not one for each key, or one of a table that there is not; in a graph when it
        runs.
    """
    tables = variable.shard_num
    given = tf.convert_to_tensor(variable.partition_fn(keys, tables))
    if variable.partition_fn is default_partition_fn:
        return tf.reshape(given, [-1])
    what = f"The partitioner of {variable!r} must give a number from 0 to {tables - 1} for each key, got"
    if not given.dtype.is_integer:
        raise TypeError(f"{what} {given.dtype.name}.")
    owner = tf.reshape(tf.cast(given, tf.int32), [-1])
    flat = tf.reshape(keys, [-1])
    many = tf.equal(tf.size(owner), tf.size(flat))
    inside = tf.reduce_all((given >= 0) & (given < tables))
    numbers = owner.shape.num_elements(), flat.shape.num_elements()
    if None not in numbers and numbers[0] != numbers[1]:
        raise tf.errors.InvalidArgumentError(None, None, f"{what} {numbers[0]} for {numbers[1]} keys.")
    if tf.executing_eagerly():
        if not bool(inside):
            wrong = int(tf.where(~((owner >= 0) & (owner < tables)))[0, 0])
            told = f"{what} {int(owner[wrong])} for key {flat[wrong].numpy()!r}."
            raise tf.errors.InvalidArgumentError(None, None, told)
        return owner
    told = [what, owner, "for keys", flat]
    with tf.control_dependencies([tf.debugging.Assert(many, told), tf.debugging.Assert(inside, told)]):
        return tf.identity(owner)


def default_partition_fn(keys: Any, shard_num: int) -> tf.Tensor:
    """The owner of each key: ``key floor-mod shard_num``; for strings their ``string_to_hash_bucket_fast``.

    Args:
      keys: any shape; integers or strings.
      shard_num: how many tables there are.

    Returns:
      int32, shape of keys.

    Example:
      >>> default_partition_fn(tf.constant([-1, 4], tf.int64), 3).numpy()
      array([2, 1], dtype=int32)
    """
    keys = tf.convert_to_tensor(keys)
    if shard_num <= 1:
        return tf.zeros(tf.shape(keys), tf.int32)
    if keys.dtype == tf.string:
        return tf.cast(tf.strings.to_hash_bucket_fast(keys, shard_num), tf.int32)
    return raw.kv_table_partition(keys, parts=shard_num)
