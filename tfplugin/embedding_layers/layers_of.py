"""The embedding layers as subclasses of the Layer of a Keras."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfplugin.embedding_layers.embedding import EmbeddingLayer, PaddingMask


@dataclass(frozen=True)
class Layers:
    """The layers for one Keras."""

    Embedding: Any
    PaddingMask: Any


def layers_of(keras: Any, module: str) -> Layers:
    """The layers for ``keras`` or ``tf_keras``. `module` is where they will be found."""

    def make(name: str, bases: tuple[type, ...], doc: str | None, **attributes: Any) -> Any:
        doc = doc and doc.replace("{module}", keras.__name__)
        made = type(name, bases, {"__doc__": doc, "__module__": module, "_keras": keras, **attributes})
        return keras.utils.register_keras_serializable("tfplugin")(made)

    layer = keras.layers.Layer
    mask = make("PaddingMask", (PaddingMask, keras.Operation), PaddingMask.__doc__) if keras.__name__ == "keras" else None
    return Layers(
        make("Embedding", (EmbeddingLayer, layer), _EMBEDDING, _mask_operation=mask),
        mask,
    )


_EMBEDDING = """Rows of ids, from a table without a vocabulary: any id has a row, which training makes when it comes.

    The table is a `tfplugin.KvVariable`, made with the layer, and in its attribute `table`. ``compile`` with any optimizer
    of Keras trains it. Keys get rows in ``fit`` and ``train_on_batch`` (calls with ``training=True``), and in calls that
    a gradient tape records and that say nothing of training; in all others, and in a frozen layer, a missing key gives
    zeros and stays missing.

    Args:
      dim: width of a row.
      combiner: None gives a row for each id; ``"sum"``, ``"mean"`` or ``"sqrtn"`` make one of the rows along the last
        dimension, in the lookup itself. Samples without ids give zeros.
      mask_zero: whether the id 0 (of strings: ``""``) is padding. Without a combiner the layer computes a mask, as
        Keras's own does, and 0 has a row like any id; a combiner leaves the padding out. Ragged ids have no mask.
      padding_id: the id that is padding, in the place of 0: it gives zeros, never has a row, and a combiner leaves it
        out. It is masked with `mask_zero`.
      initializer: what a row starts from: a name, an initializer of this Keras, a number, or an array [dim] or [m, dim].
        See `tfplugin.get_kv_variable`.
      regularizer: of the rows that a call looks up, each key once; what it gives is added to the loss. Rows that no
        sample of a batch has are left alone.
      constraint: of the rows that a step has changed, each by itself: norms are those of rows (``axis=1``).
      max_capacity, eviction, admission, expiry, expire_every, expire_on_save, max_hbm, capacity_hint: as of
        `tfplugin.get_kv_variable`.
      key_dtype: ``"int64"``, ``"int32"``, ``"uint64"`` or ``"string"``. The key of a string is an int64,
        ``tf.strings.to_hash_bucket_fast(string, 1726 * 5342931457063200)``; so it is where `key_dtype` is int64.
      dtype: of the rows, or a dtype policy: under a mixed one rows are float32, and what the layer gives is float16 or
        bfloat16.
      optimizer: of the table alone: a name, an optimizer of this Keras or one of `tfplugin.optimizers`. Default: the
        model's.
      name: of the layer, and of the table in checkpoints.
      parts: in how many parts the table is; default: one, or one for each parameter server.
      trainable, kwargs: as of any layer.

    Call arguments:
      inputs: ids [...]: a tensor, a RaggedTensor or a SparseTensor.
      weights: with a combiner, numbers that rows are multiplied by: of the kind and shape of `inputs`.
      training: as above.

    Returns:
      [..., dim]; with a combiner [..., dim] without the last dimension of the ids, of which those of shape [batch] count
      as one for each sample. Ragged where ids are, but for the dimension that a combiner takes away. Sparse ids without
      a combiner give a dense tensor with zeros where there is no id.

    Raises:
      TypeError: ids of a dtype that are no keys, such as floats; an input of another Keras; dtypes that tables do not
        have.
      ValueError: an argument out of range; weights without a combiner, or of another shape.

    Example:
      >>> layer = tfplugin.{module}.Embedding(8, name="user")
      >>> layer(tf.constant([[15, 2], [4, -92], [22, 4]])).shape
      TensorShape([3, 2, 8])
      >>> model = {module}.Sequential([
      ...     {module}.Input((None,), dtype="int64"),
      ...     tfplugin.{module}.Embedding(16, combiner="mean", name="basket"),
      ...     {module}.layers.Dense(1),
      ... ])
      >>> model.compile("adam", "mse")
    """
