"""The keys of strings."""

from __future__ import annotations

import tensorflow as tf

#: Hashes are below this number. It is close to 2**63, and a multiple of every number up to 40: so that the hash modulo
#: the number of tables is what `tf.strings.to_hash_bucket_fast` gives for that number.
HASHES = 1726 * 5342931457063200


def hashes(strings: tf.Tensor) -> tf.Tensor:
    """int64, shape of `strings`: ``tf.strings.to_hash_bucket_fast(strings, HASHES)``, which is FarmHash's Fingerprint64
    modulo `HASHES`, the same in every process, version and machine."""
    return tf.strings.to_hash_bucket_fast(strings, HASHES)
