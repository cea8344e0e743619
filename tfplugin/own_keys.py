"""Writes to one part of a variable: only of keys that are its own, since no lookup asks it for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin.ops import raw

#: Keys of others that an error names.
_NAMED = 3


def own_keys(part: Any, keys: tf.Tensor, method: str) -> tf.Tensor:
    """The `keys` of a write to a `KvVariable`, all of which are its own where it is a part of a variable.

    Raises:
      tf.errors.InvalidArgumentError: a key of another part; in a graph when that runs.
    """
    if part.partitioned_name is None or part.parts == 1:
        return keys
    of = raw.kv_table_partition(keys, parts=part.parts)
    what = f"{method} of part {part.part} of key-value variable '{part.partitioned_name}' ({part.parts} parts): "
    then = (
        f" A part has the keys of which key floor-mod {part.parts} is its number, and no lookup of the variable would "
        "find others in it. Write to the variable as a whole, which hands each key to its part."
    )
    if tf.executing_eagerly():
        owner = of.numpy().reshape(-1)
        if (owner == part.part).all():
            return keys
        others = np.flatnonzero(owner != part.part)
        flat = keys.numpy().reshape(-1)
        named = ", ".join(f"key {flat[i]} belongs to part {owner[i]}" for i in others[:_NAMED])
        more = f" (and {len(others) - _NAMED:,} more)" if len(others) > _NAMED else ""
        raise tf.errors.InvalidArgumentError(None, None, f"{what}{named}{more}.{then}")
    flat, owner = tf.reshape(keys, [-1]), tf.reshape(of, [-1])
    own = tf.equal(owner, part.part)  # "==" compares objects where a program switched TensorFlow 2's behaviour off
    others = tf.where(~own)[:_NAMED, 0]
    told = [f"{what}keys", tf.gather(flat, others), "belong to parts", tf.gather(owner, others), f".{then}"]
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(own), told)]):
        return tf.identity(keys)
