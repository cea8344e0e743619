"""What the embedding layers of SparseOperationKit 1 have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin import ranks, training_mode
from tfplugin.keys import refuse_keras_input
from tfplugin.sok.distributed_variable import ShardedVariable, Variable
from tfplugin.sok.dynamic_variable import DynamicVariable
from tfplugin.sok.exchange import fail_on_all, of_shape


class RankEmbedding:
    """A layer with one table over all ranks, for any Keras; `layer_of` joins it to a Layer.

    Args:
      sizes: each 1 or more: the arguments by their names, which become attributes.
      use_hashtable, key_dtype, embedding_initializer: as for `All2AllDenseEmbedding`.
    """

    max_vocabulary_size_per_gpu: int
    embedding_vec_size: int
    slot_num: int

    def __init__(
        self, sizes: dict[str, int], use_hashtable: bool, key_dtype: Any, embedding_initializer: Any, **kwargs: Any
    ) -> None:
        self.key_dtype = tf.as_dtype(tf.int64 if key_dtype is None else key_dtype)
        super().__init__(**kwargs)
        for what, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise ValueError(f"sok.{type(self).__name__}: {what} must be a number of 1 or more, got {size!r}.")
            setattr(self, what, int(size))
        self._sizes = tuple(sizes)
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

    def _checked_keys(self, keys: tf.Tensor) -> None:
        """Raises TypeError for keys of another dtype than the layer's."""
        if keys.dtype not in (self.key_dtype, tf.int32):
            raise TypeError(
                f"sok.{type(self).__name__} '{self.name}': keys must be {self.key_dtype.name}, got "  # type: ignore[attr-defined]
                f"{keys.dtype.name}. (A keras.Sequential casts its inputs to floats unless it begins with "
                f"keras.Input(shape, dtype='{self.key_dtype.name}').)"
            )

    def _refuse_keras_input(self, inputs: Any) -> None:
        """Raises TypeError for what stands for keys while a model is put together, where no rank looks up."""
        refuse_keras_input(getattr(inputs, "values", inputs), f"Layer '{self.name}'")  # type: ignore[attr-defined]

    def _fail_on_all(self, error: Exception, training: bool | None, shape: list[int | None]) -> tf.Tensor:
        """What `call` gives where its inputs are wrong: the other ranks, whose inputs may be right, must not wait."""
        caller = f"sok.{type(self).__name__} '{self.name}'"  # type: ignore[attr-defined]
        rows = fail_on_all(error, [self.embedding_variable], self._trains(training), caller)[0]
        return self._in_compute_dtype(of_shape(rows, tf.TensorShape([*shape, self.embedding_vec_size])))

    @staticmethod
    def _trains(training: Any) -> bool:
        """Whether a call of the layer trains: its argument, which may be a number of NumPy, else the context."""
        return training_mode.is_training(None if training is None else bool(training))

    def _in_compute_dtype(self, rows: tf.Tensor) -> tf.Tensor:
        """Rows as the layer's policy wants its outputs: float16 under ``mixed_float16``."""
        return tf.cast(rows, getattr(self, "compute_dtype", None) or rows.dtype)

    def get_config(self) -> dict[str, Any]:
        """What it takes to make the layer again."""
        return {
            **super().get_config(),  # type: ignore[misc]
            **{what: getattr(self, what) for what in self._sizes},
            "use_hashtable": self.use_hashtable,
            "key_dtype": self.key_dtype.name,
            "embedding_initializer": self.embedding_initializer,
        }


def layer_of(keras: Any, embedding: type[RankEmbedding], name: str, doc: str) -> Any:
    """An embedding as a subclass of the Layer of a Keras: ``tf.keras`` (either kind) or ``tf_keras``."""
    return type(name, (embedding, keras.layers.Layer), {"__doc__": doc, "__module__": embedding.__module__})
