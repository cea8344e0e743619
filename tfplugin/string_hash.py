"""The keys of strings."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kvtools.string_hash import HASHES


def string_keys(strings: Any) -> tf.Tensor:
    """The keys that strings have in tables, those of layers with ``key_dtype="string"`` among them.

    ``tf.strings.to_hash_bucket_fast(strings, 1726 * 5342931457063200)``: FarmHash's Fingerprint64 modulo that number,
    the same in every process, version and machine. `kvtools.string_keys` and ``kvtools hash`` compute it without
    TensorFlow. Two of ten million strings share a key with a probability of about 1 in 180,000.

    Args:
      strings: a Tensor of strings or what becomes one, any shape; or a ragged or sparse one.

    Returns:
      int64, as `strings`.

    Raises:
      TypeError, ValueError: `strings` are no strings.

    Example:
      >>> tf.nn.embedding_lookup(table, tfplugin.string_keys(["ann", "bob"]))
    """
    if isinstance(strings, tf.SparseTensor):
        return strings.with_values(string_keys(strings.values))
    return tf.strings.to_hash_bucket_fast(strings, HASHES)
