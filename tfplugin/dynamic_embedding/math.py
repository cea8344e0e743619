"""``tfra.dynamic_embedding.math``: TensorFlow's own functions, by TFRA's names."""

import tensorflow as _tf

sparse_fill_empty_rows = _tf.sparse.fill_empty_rows
sparse_reshape = _tf.sparse.reshape
sparse_segment_sum = _tf.compat.v1.sparse_segment_sum

__all__ = ["sparse_fill_empty_rows", "sparse_reshape", "sparse_segment_sum"]
