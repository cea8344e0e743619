"""The keys of strings: what `kvtools.string_keys` computes in NumPy is what TensorFlow's op gives."""

import numpy as np
import tensorflow as tf

import kvtools
import tfplugin
from kvtools.string_hash import HASHES


def test_every_length_has_the_hash_of_tensorflow():
    random = np.random.default_rng(0)
    strings = [random.bytes(length) for length in [*range(260)] * 3 + [1000, 4096, 4097, 1 << 20]]
    strings += [b"\0" * length for length in range(70)] + [b"\xff" * length for length in range(70)]
    expected = tf.strings.to_hash_bucket_fast(strings, HASHES).numpy()
    np.testing.assert_array_equal(kvtools.string_keys(strings), expected)
    np.testing.assert_array_equal(tfplugin.string_keys(strings), expected)


def test_ragged_and_sparse_strings_keep_their_places():
    ragged = tf.ragged.constant([["red", "wine"], [], ["red"]])
    keys = kvtools.string_keys(["red", "wine", "red"]).tolist()
    assert tfplugin.string_keys(ragged).to_list() == [keys[:2], [], keys[2:]]
    sparse = tfplugin.string_keys(ragged.to_sparse())
    assert sparse.values.numpy().tolist() == keys and sparse.indices.numpy().tolist() == [[0, 0], [0, 1], [2, 0]]
