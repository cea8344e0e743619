"""`SquashedEmbedding`: one row for each sample."""

from __future__ import annotations

from typing import Any

from tfplugin.dynamic_embedding.keras.layers.reduce_pooling import reduce_pooling, reduction


class SquashedLayer:
    """What `SquashedEmbedding` is beside an `Embedding`."""

    combiner: Any
    embedding_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reduction(self.combiner)

    def call(self, ids: Any) -> Any:
        """The rows of each sample combined: [batch, embedding_size]; [embedding_size] for ids [n]."""
        return reduce_pooling(super().call(ids), self.combiner)  # type: ignore[misc]

    def compute_output_shape(self, input_shape: Any) -> Any:
        """One row for each sample."""
        return (*tuple(input_shape)[:-1][:1], self.embedding_size)
