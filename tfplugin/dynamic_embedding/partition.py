"""Which of a variable's tables owns a key."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin.ops import raw


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
