"""String keys: the tables hold their hashes, and beside them is a map from each hash back to its string."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from tfplugin.string_hash import string_keys


class KeyNames(trackable.Trackable):
    """The strings of the hashes that a variable holds.

    Args:
      name: of the variable, for messages and checkpoints.
      checkpoint: whether it is saved.
    """

    def __init__(self, name: str, checkpoint: bool) -> None:
        self._name = name
        self.table = tf.lookup.experimental.MutableHashTable(
            tf.int64, tf.string, "", name=f"{name}_names".replace("/", "_"), checkpoint=checkpoint
        )
        if checkpoint:
            self._track_trackable(self.table, "table")

    def note(self, ids: tf.Tensor, keys: tf.Tensor) -> Any:
        """Notes the strings `keys` of the hashes `ids`. Returns the op (graph mode).

        Raises:
          tf.errors.InvalidArgumentError: another key has the same hash.
        """
        ids, keys = tf.reshape(ids, [-1]), tf.reshape(keys, [-1])
        known = tf.reshape(self.table.lookup(ids), [-1])
        other = tf.not_equal(known, "") & tf.not_equal(known, keys)
        check = tf.debugging.Assert(
            tf.logical_not(tf.reduce_any(other)),
            [
                f"Dynamic embedding variable '{self._name}': keys that share a hash:",
                tf.boolean_mask(keys, other),
            ],
        )
        with tf.control_dependencies([] if check is None else [check]):
            return self.table.insert(ids, keys)

    def of(self, ids: tf.Tensor) -> tf.Tensor:
        """The strings of hashes.

        Raises:
          tf.errors.InvalidArgumentError: a hash whose string is not known, as of rows that were restored without it.
        """
        keys = tf.reshape(self.table.lookup(ids), tf.shape(ids))
        unknown = tf.equal(keys, "") & tf.not_equal(ids, string_keys(tf.constant("")))
        check = tf.debugging.Assert(
            tf.logical_not(tf.reduce_any(unknown)),
            [
                f"Dynamic embedding variable '{self._name}': rows whose strings are not known, as the checkpoint that "
                "they were restored from lacks them: `kvtools split` writes none. The rows are found by their strings "
                "all the same. Hashes:",
                tf.boolean_mask(ids, unknown),
            ],
        )
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(keys)

    def forget(self, ids: tf.Tensor) -> Any:
        """Drops hashes. Returns the op (graph mode)."""
        return self.table.remove(tf.reshape(ids, [-1]))
