"""`sok.All2AllDenseEmbedding`: an embedding over all ranks as a layer of Keras 3 or tf_keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin import ranks
from tfplugin.sok.all2all_dense_embedding import all2all_dense_embedding
from tfplugin.sok.distributed_variable import ShardedVariable, Variable
from tfplugin.sok.dynamic_variable import DynamicVariable


class _All2AllDenseEmbedding:
    """What the layer of every Keras does; `all2all_layer_of` joins it to a Layer."""

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
        self.key_dtype = tf.as_dtype(tf.int64 if key_dtype is None else key_dtype)
        super().__init__(**kwargs)
        sizes = {
            "max_vocabulary_size_per_gpu": max_vocabulary_size_per_gpu,
            "embedding_vec_size": embedding_vec_size,
            "slot_num": slot_num,
            "nnz_per_slot": nnz_per_slot,
        }
        for what, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise ValueError(f"sok.All2AllDenseEmbedding: {what} must be a number of 1 or more, got {size!r}.")
        self.max_vocabulary_size_per_gpu = int(max_vocabulary_size_per_gpu)
        self.embedding_vec_size = int(embedding_vec_size)
        self.slot_num = int(slot_num)
        self.nnz_per_slot = int(nnz_per_slot)
        self.dynamic_input = bool(dynamic_input)
        self.use_hashtable = bool(use_hashtable)
        self.embedding_initializer = embedding_initializer
        self.embedding_variable = self._make_variable(f"{self.name}/embedding")  # type: ignore[attr-defined]

    def _make_variable(self, name: str) -> DynamicVariable | ShardedVariable:
        trainable = bool(self.trainable)  # type: ignore[attr-defined]
        dtype = tf.as_dtype(getattr(self, "variable_dtype", None) or tf.float32)
        if not self.use_hashtable:
            return Variable(
                shape=(self.max_vocabulary_size_per_gpu * ranks.size(), self.embedding_vec_size),
                initializer=self.embedding_initializer or "random_uniform",
                dtype=dtype,
                trainable=trainable,
                name=name,
            )
        variable = DynamicVariable(
            self.embedding_vec_size,
            self.embedding_initializer,
            key_type=self.key_dtype,
            dtype=dtype,
            trainable=trainable,
            name=name,
        )
        variable.row_limit = self.max_vocabulary_size_per_gpu
        return variable

    @property
    def variable(self) -> DynamicVariable | ShardedVariable:
        """The embedding: its rows on this rank."""
        return self.embedding_variable

    def call(self, inputs: Any, training: bool | None = True) -> tf.Tensor:
        """Rows of keys, on whichever rank they are.

        Args:
          inputs: keys: [batch, slot_num, nnz_per_slot]; with dynamic_input [None].
          training: False gives zeros for keys that have no row, and inserts none.

        Returns:
          [batch, slot_num, nnz_per_slot, embedding_vec_size]; with dynamic_input [None, embedding_vec_size].
        """
        if inputs.dtype not in (self.key_dtype, tf.int32):
            raise TypeError(
                f"sok.All2AllDenseEmbedding '{self.name}': keys must be {self.key_dtype.name}, got "  # type: ignore[attr-defined]
                f"{inputs.dtype.name}. (A keras.Sequential casts its inputs to floats unless it begins with "
                f"keras.Input(shape, dtype='{self.key_dtype.name}').)"
            )
        shape = tf.TensorShape(inputs.shape)
        wanted = tf.TensorShape([None] if self.dynamic_input else [None, self.slot_num, self.nnz_per_slot])
        if not shape.is_compatible_with(wanted):
            raise ValueError(
                f"sok.All2AllDenseEmbedding '{self.name}': inputs must be of shape {wanted} "  # type: ignore[attr-defined]
                f"(dynamic_input={self.dynamic_input}), got {shape}."
            )
        return all2all_dense_embedding(
            self.embedding_variable, inputs, training=None if training is None else bool(training)
        )

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Adds the width of a row."""
        return (*tuple(input_shape), self.embedding_vec_size)

    def get_config(self) -> dict[str, Any]:
        """What it takes to make the layer again."""
        return {
            **super().get_config(),  # type: ignore[misc]
            "max_vocabulary_size_per_gpu": self.max_vocabulary_size_per_gpu,
            "embedding_vec_size": self.embedding_vec_size,
            "slot_num": self.slot_num,
            "nnz_per_slot": self.nnz_per_slot,
            "dynamic_input": self.dynamic_input,
            "use_hashtable": self.use_hashtable,
            "key_dtype": self.key_dtype.name,
            "embedding_initializer": self.embedding_initializer,
        }


def all2all_layer_of(keras: Any) -> Any:
    """The layer as a subclass of the Layer of a Keras: ``tf.keras`` (either kind) or ``tf_keras``."""
    layer = keras.layers.Layer
    keras_3 = not hasattr(layer, "_gather_children_attribute")

    # Both kinds of Keras list tf.Variables only, and a table is none: each is told in the place that it asks.
    if keras_3:

        def variables(self: Any) -> list[Any]:
            """All variables of the layer, the embedding among them."""
            listed = list(layer.variables.fget(self))
            mine = self.embedding_variable
            return listed if any(v is mine for v in listed) else [*listed, mine]

        listing = {"variables": property(variables)}
    else:

        def trainable_weights(self: Any) -> list[Any]:
            """What is trained, the embedding among it."""
            listed = list(layer.trainable_weights.fget(self))
            mine = self.embedding_variable
            return listed if not self.trainable or any(v is mine for v in listed) else [*listed, mine]

        listing = {"trainable_weights": property(trainable_weights)}

    return type(
        "All2AllDenseEmbedding",
        (_All2AllDenseEmbedding, layer),
        {"__doc__": _DOC, "__module__": __name__, **listing},
    )


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

All2AllDenseEmbedding = all2all_layer_of(tf.keras)
