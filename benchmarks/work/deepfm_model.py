"""DeepFM in graph mode, whatever its embeddings come from. Stock TensorFlow only.

H. Guo, R. Tang, Y. Ye, Z. Li, X. He: DeepFM: A Factorization-Machine based Neural Network for CTR Prediction, 2017,
arXiv:1703.04247.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

WIDTH = 16  # of an embedding
ROW = 1 + WIDTH  # of a table's row: an id's weight in the linear part, then its embedding
HIDDEN = (128, 64)


def deepfm(rows: tf.Tensor, dense: tf.Tensor, sparse_features: int, seed: int = 0) -> tf.Tensor:
    """Logits of a click, [batch].

    Args:
        rows: The rows of a batch's ids, [batch * sparse_features, ROW], examples one after the other.
        dense: Dense features, float32 [batch, n].
        sparse_features: How many ids an example has.
        seed: Of the initial weights.
    """
    rows = tf.reshape(rows, [-1, sparse_features, ROW])
    weights, embeddings = rows[:, :, 0], rows[:, :, 1:]
    linear = tf.reduce_sum(weights, axis=1) + _layer(dense, 1, "linear", seed)[:, 0]
    # The sum over all pairs of dot products, in linear time.
    pairs = 0.5 * (tf.square(tf.reduce_sum(embeddings, axis=1)) - tf.reduce_sum(tf.square(embeddings), axis=1))
    x = tf.concat([tf.reshape(embeddings, [-1, sparse_features * WIDTH]), dense], axis=1)
    for i, width in enumerate(HIDDEN):
        x = tf.nn.relu(_layer(x, width, f"hidden_{i}", seed + i))
    return linear + tf.reduce_sum(pairs, axis=1) + _layer(x, 1, "output", seed)[:, 0]


def _layer(x: tf.Tensor, width: int, name: str, seed: int) -> tf.Tensor:
    with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
        shape = [x.shape[1], width]
        kernel = tf.get_variable("kernel", shape, initializer=tf.glorot_uniform_initializer(seed), use_resource=True)
        bias = tf.get_variable("bias", [width], initializer=tf.zeros_initializer(), use_resource=True)
        return tf.matmul(x, kernel) + bias
