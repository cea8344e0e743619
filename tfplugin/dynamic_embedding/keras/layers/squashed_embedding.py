"""`SquashedEmbedding`: one row for each sample."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin.dynamic_embedding.keras.layers.reduce_pooling import reduce_pooling, reduction


class SquashedLayer:
    """What `SquashedEmbedding` is beside an `Embedding`."""

    combiner: Any
    embedding_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reduction(self.combiner)

    def call(self, ids: Any) -> Any:
        """The rows of each sample combined: [batch, embedding_size]; [embedding_size] for ids [n].

        Ids may be ragged, or a SparseTensor [batch, n]. A sample without ids gives zeros.

        Raises:
          ValueError: a SparseTensor of another number of dimensions; ids of another dtype than the keys.
        """
        if isinstance(ids, tf.SparseTensor):
            if ids.shape.rank != 2:
                raise ValueError(
                    f"{type(self).__name__} '{self.name}': sparse ids must be of shape [batch, n], got {ids.shape}."  # type: ignore[attr-defined]
                )
            ids = tf.RaggedTensor.from_value_rowids(ids.values, ids.indices[:, 0], ids.dense_shape[0], validate=False)
        return reduce_pooling(super().call(ids), self.combiner)  # type: ignore[misc]

    def compute_output_shape(self, input_shape: Any) -> Any:
        """One row for each sample."""
        return (*tuple(input_shape)[:-1][:1], self.embedding_size)
