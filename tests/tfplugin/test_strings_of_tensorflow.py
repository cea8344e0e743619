"""The keys of strings: what `kvtools.string_keys` computes in NumPy is what TensorFlow's op gives."""

import numpy as np
import tensorflow as tf

from kvtools import string_keys
from tfplugin.string_hash import HASHES, hashes


def test_every_length_has_the_hash_of_tensorflow():
    random = np.random.default_rng(0)
    strings = [random.bytes(length) for length in [*range(260)] * 3 + [1000, 4096, 4097, 1 << 20]]
    strings += [b"\0" * length for length in range(70)] + [b"\xff" * length for length in range(70)]
    expected = tf.strings.to_hash_bucket_fast(strings, HASHES).numpy()
    np.testing.assert_array_equal(string_keys(strings), expected)
    np.testing.assert_array_equal(hashes(tf.constant(strings)), expected)
