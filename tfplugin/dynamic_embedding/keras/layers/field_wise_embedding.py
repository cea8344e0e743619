"""`FieldWiseEmbedding`: one row for each field of each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfplugin.keys import refuse_keras_input

_COMBINERS: dict[str, Callable[..., tf.Tensor]] = {
    "sum": tf.math.unsorted_segment_sum,
    "mean": tf.math.unsorted_segment_mean,
    "sqrt_n": tf.math.unsorted_segment_sqrt_n,
    "sqrtn": tf.math.unsorted_segment_sqrt_n,
}


class FieldWiseLayer:
    """What `FieldWiseEmbedding` is beside an `Embedding`."""

    combiner: Any
    embedding_size: int

    def __init__(
        self,
        embedding_size: int,
        nslots: int,
        slot_map_fn: Callable[[tf.Tensor], tf.Tensor] | None = None,
        key_dtype: Any = tf.int64,
        value_dtype: Any = tf.float32,
        combiner: str = "sum",
        initializer: Any = None,
        devices: Any = None,
        name: str | None = "SlotDynamicEmbeddingLayer",
        with_unique: bool = True,
        **kwargs: Any,
    ) -> None:
        what = f"{type(self).__name__} '{name}'"
        if not callable(slot_map_fn):
            raise ValueError(f"{what}: slot_map_fn must be a function from ids to their fields, got {slot_map_fn!r}.")
        try:
            nslots = int(nslots)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{what}: nslots must be a number, got {nslots!r}.") from error
        if combiner not in _COMBINERS:
            raise ValueError(f"{what}: combiner must be one of {sorted(_COMBINERS)}, got {combiner!r}.")
        super().__init__(  # type: ignore[call-arg]
            embedding_size,
            key_dtype=key_dtype,
            value_dtype=value_dtype,
            combiner=combiner,
            initializer=initializer,
            devices=devices,
            name=name,
            with_unique=with_unique,
            **kwargs,
        )
        self.nslots = nslots
        self.slot_map_fn = slot_map_fn

    def call(self, ids: Any) -> tf.Tensor:
        """The rows of each field of each sample combined; zeros for a field without ids.

        Args:
          ids: [batch, n], dense, ragged or sparse.

        Returns:
          [batch, nslots, embedding_size].

        Raises:
          NotImplementedError: ids of another number of dimensions.
          tf.errors.InvalidArgumentError: `slot_map_fn` gives a field that is not in [0, nslots).
        """
        refuse_keras_input(ids, f"Layer '{self.name}'")  # type: ignore[attr-defined]
        ids = ids if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)) else tf.convert_to_tensor(ids)
        if ids.shape.rank != 2:
            raise NotImplementedError(
                f"{type(self).__name__} '{self.name}': ids must be of shape [batch, n], got {ids.shape}."  # type: ignore[attr-defined]
            )
        if isinstance(ids, tf.RaggedTensor):
            flat, samples, batch = ids.flat_values, ids.value_rowids(), ids.nrows()
        elif isinstance(ids, tf.SparseTensor):
            flat, samples, batch = ids.values, ids.indices[:, 0], ids.dense_shape[0]
        else:
            batch = tf.shape(ids, out_type=tf.int64)[0]
            flat = tf.reshape(ids, [-1])
            samples = tf.repeat(tf.range(batch), tf.shape(ids)[1])
        rows = super().call(flat)  # type: ignore[misc]
        dense = not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
        slots = tf.cast(self.slot_map_fn(ids if dense else flat[tf.newaxis]), tf.int64)
        legal = tf.debugging.assert_equal(
            tf.reduce_all((slots >= 0) & (slots < self.nslots)),
            True,
            f"slot_map_fn of '{self.name}' must give fields in [0, {self.nslots})",  # type: ignore[attr-defined]
        )
        with tf.control_dependencies([] if legal is None else [legal]):
            segments = tf.reshape(slots, [-1]) + self.nslots * samples
        pooled = _COMBINERS[self.combiner](rows, segments, self.nslots * batch)
        return tf.reshape(pooled, [-1, self.nslots, self.embedding_size])

    def compute_output_shape(self, input_shape: Any) -> Any:
        """[batch, nslots, embedding_size]."""
        return (input_shape[0], self.nslots, self.embedding_size)

    def get_config(self) -> dict[str, Any]:
        """What it takes to make the layer again."""
        return {**super().get_config(), "nslots": self.nslots, "slot_map_fn": self.slot_map_fn}  # type: ignore[misc]
