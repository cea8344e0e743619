"""The keys of strings."""

from __future__ import annotations

import tensorflow as tf

from kvtools.string_hash import HASHES


def hashes(strings: tf.Tensor) -> tf.Tensor:
    """int64, shape of `strings`: ``tf.strings.to_hash_bucket_fast(strings, HASHES)``, which is FarmHash's Fingerprint64
    modulo `HASHES`, the same in every process, version and machine."""
    return tf.strings.to_hash_bucket_fast(strings, HASHES)
