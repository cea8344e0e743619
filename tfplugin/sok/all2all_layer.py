"""`sok.All2AllDenseEmbedding`: an embedding over all ranks as a layer of Keras 3 or tf_keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin.sok.all2all_dense_embedding import all2all_dense_embedding
from tfplugin.sok.rank_embedding import RankEmbedding, layer_of


class _All2AllDenseEmbedding(RankEmbedding):
    """What the layer of every Keras does."""

    nnz_per_slot: int

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        nnz_per_slot: int,
        dynamic_input: bool = False,
        use_hashtable: bool = True,
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        sizes = {
            "max_vocabulary_size_per_gpu": max_vocabulary_size_per_gpu,
            "embedding_vec_size": embedding_vec_size,
            "slot_num": slot_num,
            "nnz_per_slot": nnz_per_slot,
        }
        super().__init__(sizes, use_hashtable, key_dtype, embedding_initializer, **kwargs)
        self.dynamic_input = bool(dynamic_input)

    def call(self, inputs: Any, training: bool | None = None) -> tf.Tensor:
        """Rows of keys, on whichever rank they are.

        Args:
          inputs: keys: [batch, slot_num, nnz_per_slot]; with dynamic_input [None].
          training: False gives zeros for keys that have no row, and inserts none.

        Returns:
          [batch, slot_num, nnz_per_slot, embedding_vec_size]; with dynamic_input [None, embedding_vec_size].
        """
        self._refuse_keras_input(inputs)
        wanted = [None] if self.dynamic_input else [None, self.slot_num, self.nnz_per_slot]
        try:
            self._checked_keys(inputs)
            self._checked_shape(tf.TensorShape(inputs.shape), tf.TensorShape(wanted))
        except (TypeError, ValueError) as error:
            return self._fail_on_all(error, training, wanted)
        rows = all2all_dense_embedding(self.embedding_variable, inputs, training=self._trains(training))
        return self._in_compute_dtype(rows)

    def _checked_shape(self, shape: tf.TensorShape, wanted: tf.TensorShape) -> None:
        if not shape.is_compatible_with(wanted):
            raise ValueError(
                f"sok.All2AllDenseEmbedding '{self.name}': inputs must be of shape {wanted} "  # type: ignore[attr-defined]
                f"(dynamic_input={self.dynamic_input}), got {shape}."
            )

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Adds the width of a row."""
        return (*tuple(input_shape), self.embedding_vec_size)

    def get_config(self) -> dict[str, Any]:
        """What it takes to make the layer again."""
        return {**super().get_config(), "dynamic_input": self.dynamic_input}


_DOC = """An embedding whose keys are spread over the ranks: ``key floor-mod size`` owns a key.

    A layer of ``tf.keras``; for models of ``tf_keras`` import it from `tfplugin.sok.tf_keras`.

    Args:
      max_vocabulary_size_per_gpu: the most rows of a rank.
      embedding_vec_size: width of a row.
      slot_num: feature fields that are looked up together; they share one table.
      nnz_per_slot: keys in each field.
      dynamic_input: inputs are [None] instead, for lookups between ``tf.unique`` and ``tf.gather``.
      use_hashtable: any key is legal and gets a row when it is first seen (`DynamicVariable`). False: keys are row
        numbers in [0, max_vocabulary_size_per_gpu * size) of a dense table (`Variable`).
      key_dtype: tf.int64 (default), tf.int32 or tf.uint64.
      embedding_initializer: as for `DynamicVariable`. Default: uniform in [-0.05, 0.05).
      **kwargs: of a Keras layer: name, dtype, trainable.

    Attributes:
      embedding_variable: the rows of this rank. Keras 3 lists it in ``variables`` and ``trainable_variables``, but not
        in ``weights``, which must have a shape; train it by `sok.OptimizerWrapper`.

    Raises:
      ValueError: a size that is not 1 or more; inputs of another shape.
      tf.errors.InvalidArgumentError: on every rank, where a key is out of range (use_hashtable=False), or where new
        keys would give any rank more than max_vocabulary_size_per_gpu rows (True): then none of them is added.

    Example:
      >>> layer = sok.All2AllDenseEmbedding(1024, 8, slot_num=2, nnz_per_slot=3)
      >>> layer(tf.constant([[[1, 2, 3], [4, 5, 6]]], tf.int64)).shape
      TensorShape([1, 2, 3, 8])
    """


def all2all_layer_of(keras: Any) -> Any:
    """The layer of a Keras."""
    return layer_of(keras, _All2AllDenseEmbedding, "All2AllDenseEmbedding", _DOC)


All2AllDenseEmbedding = all2all_layer_of(tf.keras)
