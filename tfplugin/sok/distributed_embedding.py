"""`sok.DistributedEmbedding`: pooled lookups over all ranks as a layer of Keras 3 or tf_keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin.lookup import COMBINERS
from tfplugin.sok.exchange import Lookup, look_up
from tfplugin.sok.exchange_ids import pooled_keys
from tfplugin.sok.exchange_table import exchange_table
from tfplugin.sok.rank_embedding import RankEmbedding, layer_of


class _DistributedEmbedding(RankEmbedding):
    """What the layer of every Keras does."""

    max_nnz: int

    def __init__(
        self,
        combiner: str,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        max_nnz: int,
        max_feature_num: int = 1,
        use_hashtable: bool = True,
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        if str(combiner).lower() not in COMBINERS:
            raise ValueError(f"sok.DistributedEmbedding: combiner must be one of {COMBINERS}, got {combiner!r}.")
        sizes = {
            "max_vocabulary_size_per_gpu": max_vocabulary_size_per_gpu,
            "embedding_vec_size": embedding_vec_size,
            "slot_num": slot_num,
            "max_nnz": max_nnz,
            "max_feature_num": max_feature_num,
        }
        super().__init__(sizes, use_hashtable, key_dtype, embedding_initializer, **kwargs)
        self.combiner = str(combiner).lower()

    def call(self, inputs: Any, training: bool | None = None) -> tf.Tensor:
        """Rows of keys, combined for each slot of each sample.

        Args:
          inputs: a SparseTensor or RaggedTensor of keys [batch * slot_num, at most max_nnz]: the slots of a sample
            follow each other.
          training: False gives zeros for keys that have no row, and inserts none.

        Returns:
          [batch, slot_num, embedding_vec_size].
        """
        what = f"sok.DistributedEmbedding '{self.name}'"  # type: ignore[attr-defined]
        self._refuse_keras_input(inputs)
        try:
            refused = self._checked_inputs(inputs, what)
            table = exchange_table(self.embedding_variable, what)
            keys, segments = pooled_keys(inputs, None, table, what)
        except (TypeError, ValueError) as error:
            return self._fail_on_all(error, training, [None, self.slot_num])
        lookup = Lookup(table, keys, self.combiner, self.max_nnz, weight_segments=segments)
        rows = look_up([lookup], self._trains(training), refused=refused)[0]
        return self._in_compute_dtype(tf.reshape(rows, [-1, self.slot_num, self.embedding_vec_size]))

    def _checked_inputs(self, inputs: Any, what: str) -> tuple[tf.Tensor, str] | None:
        """Raises TypeError or ValueError for wrong inputs; gives what only a run can tell, as `look_up` takes it."""
        if not isinstance(inputs, (tf.SparseTensor, tf.RaggedTensor)):
            raise TypeError(f"{what} wants a SparseTensor or RaggedTensor of keys, got {type(inputs).__name__}.")
        self._checked_keys(inputs.values)
        wrong = f"{what}: inputs must have {self.slot_num} rows for each sample (slot_num), got "
        rows = inputs.shape[0] if inputs.shape.rank else None
        if rows is None:
            count = inputs.dense_shape[0] if isinstance(inputs, tf.SparseTensor) else inputs.nrows(tf.int64)
            return count % self.slot_num > 0, f"{wrong}a number that is no multiple of it."
        if rows % self.slot_num:
            raise ValueError(f"{wrong}{rows}.")
        return None

    def compute_output_shape(self, input_shape: Any) -> Any:
        """[batch, slot_num, embedding_vec_size]."""
        rows, _ = input_shape
        return (None if rows is None else rows // self.slot_num, self.slot_num, self.embedding_vec_size)

    def get_config(self) -> dict[str, Any]:
        """What it takes to make the layer again."""
        return {**super().get_config(), "combiner": self.combiner}


_DOC = """A pooled embedding whose keys are spread over the ranks: ``key floor-mod size`` owns a key.

    A layer of ``tf.keras``; for models of ``tf_keras`` import it from `tfplugin.sok.tf_keras`.

    Args:
      combiner: ``"mean"``, ``"sum"`` or ``"sqrtn"``, in upper case or lower.
      max_vocabulary_size_per_gpu: the most rows of a rank.
      embedding_vec_size: width of a row.
      slot_num: feature fields that are looked up together; they share one table.
      max_nnz: the most keys of a field; more are an error.
      max_feature_num: accepted; it sizes buffers that there are none of here.
      use_hashtable, key_dtype, embedding_initializer, **kwargs: as for `All2AllDenseEmbedding`.

    Attributes:
      embedding_variable: the rows of this rank; see `All2AllDenseEmbedding`.

    Raises:
      ValueError: a size that is not 1 or more, or an unknown combiner.
      TypeError: inputs that are not sparse or ragged, or keys of another dtype.
      tf.errors.InvalidArgumentError: on every rank, where a field has too many keys, the rows are no multiple of
        `slot_num`, or as for `All2AllDenseEmbedding`.

    Example:
      >>> layer = sok.DistributedEmbedding("mean", 1024, 8, slot_num=2, max_nnz=3)
      >>> layer(tf.ragged.constant([[1, 2], [3], [], [4, 5, 6]], dtype=tf.int64)).shape
      TensorShape([2, 2, 8])
    """


def distributed_embedding_of(keras: Any) -> Any:
    """The layer of a Keras."""
    return layer_of(keras, _DistributedEmbedding, "DistributedEmbedding", _DOC)


DistributedEmbedding = distributed_embedding_of(tf.keras)
