"""The embedding layers as subclasses of the Layer of a Keras."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfplugin.embedding_layers.collection import EmbeddingCollectionLayer
from tfplugin.embedding_layers.configs import FeatureConfigFields, TableConfigFields
from tfplugin.embedding_layers.embedding import EmbeddingLayer, PaddingMask
from tfplugin.embedding_layers.layer_class import layer_class
from tfplugin.embedding_layers.old_keras import warn_of_old_keras


@dataclass(frozen=True)
class Layers:
    """The layers for one Keras."""

    Embedding: Any
    EmbeddingCollection: Any
    TableConfig: Any
    FeatureConfig: Any
    #: Of Keras 3.
    PaddingMask: Any


def layers_of(keras: Any, module: str) -> Layers:
    """The layers for ``keras`` or ``tf_keras``. `module` is where they will be found."""
    warn_of_old_keras(keras, module)

    def make(name: str, bases: tuple[type, ...], doc: str | None, **attributes: Any) -> Any:
        doc = doc and doc.replace("{module}", keras.__name__)
        return layer_class(keras, "tfplugin", module, name, bases, doc, **attributes)

    layer = keras.layers.Layer
    mask = (
        make("PaddingMask", (PaddingMask, keras.Operation), PaddingMask.__doc__) if keras.__name__ == "keras" else None
    )
    table_config = make("TableConfig", (TableConfigFields,), _TABLE_CONFIG)
    feature_config = make("FeatureConfig", (FeatureConfigFields,), _FEATURE_CONFIG, _table_config=table_config)
    of_collection = {"_table_config": table_config, "_feature_config": feature_config}
    return Layers(
        make("Embedding", (EmbeddingLayer, layer), _EMBEDDING, _mask_operation=mask),
        make("EmbeddingCollection", (EmbeddingCollectionLayer, layer), _COLLECTION, **of_collection),
        table_config,
        feature_config,
        mask,
    )


_EMBEDDING = """Rows of ids, from a table without a vocabulary: any id has a row, which training makes when it comes.

    The table is a `tfplugin.KvVariable`, made with the layer, and in its attribute `table`. ``compile`` with any
    optimizer of Keras trains it. Keys get rows in ``fit`` and ``train_on_batch`` (calls with ``training=True``), and in
    calls that a gradient tape records and that say nothing of training; in all others, and in a frozen layer, a missing
    key gives zeros and stays missing.

    Args:
      dim: width of a row.
      combiner: None gives a row for each id; ``"sum"``, ``"mean"`` or ``"sqrtn"`` make one of the rows along the last
        dimension, in the lookup itself. Samples without ids give zeros.
      mask_zero: whether the id 0 (of strings: ``""``) is padding. Without a combiner the layer computes a mask, as
        Keras's own does, and 0 has a row like any id; a combiner leaves the padding out. Ragged ids have no mask.
      padding_id: the id that is padding, in the place of 0: it gives zeros, never has a row, and a combiner leaves it
        out. It is masked with `mask_zero`.
      initializer: what a row starts from: a name, an initializer of this Keras, a number, or an array of shape
        [dim], or [m, dim], of which a key takes a row by its hash; ``layer.table.upsert(ids, rows)`` writes trained
        rows. See `tfplugin.get_kv_variable`.
      regularizer: of the rows that a forward pass looks up, each key once however many calls look it up; what it
        gives is added to the loss. Rows that no sample of a batch has are left alone.
      constraint: of the rows that a step has changed, each by itself: norms are those of rows (``axis=1``).
      max_capacity, eviction, admission, expiry, expire_every, expire_on_save, max_hbm, max_memory, spill,
        capacity_hint: as of `tfplugin.get_kv_variable`.
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
      [..., dim]; with a combiner [..., dim] without the last dimension of the ids, of which those of shape [batch]
      count as one for each sample. Ragged where ids are, but for the dimension that a combiner takes away. Sparse ids
      without a combiner give a dense tensor with zeros where there is no id.

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

_COLLECTION = """The rows of many features, from tables that they may share: all in one lookup.

    It takes the place of ``keras_rs.layers.DistributedEmbedding``, and its configs have the same fields, but for the
    size of a vocabulary. Features whose tables have the key dtype in common are looked up by one op (pooled ones by
    another), which works on all of them in parallel, and their gradients come out of one. A table with a `regularizer`
    is looked up by itself. Which calls give keys their rows is said at `Embedding`.

    Args:
      feature_configs: `FeatureConfig` s in dictionaries, lists and tuples; or one.
      name: of the layer.
      dtype: of the rows of all tables, or a dtype policy; see `Embedding`.
      trainable, kwargs: as of any layer.

    Call arguments:
      inputs: ids in the structure of `feature_configs`; each as of `Embedding`.
      weights: None, or in that structure None or weights, as of `Embedding`.
      training: as of `Embedding`.

    Attributes:
      tables: the `tfplugin.KvVariable` s by their names.

    Returns:
      The rows in the structure of `feature_configs`; each as of `Embedding`.

    Raises:
      TypeError, ValueError: as `Embedding`; inputs of another structure; two tables or features of one name; shapes
        that are not those of a `FeatureConfig`.

    Example:
      >>> item = tfplugin.{module}.TableConfig("item", embedding_dim=8, combiner="mean")
      >>> user = tfplugin.{module}.TableConfig("user", embedding_dim=4)
      >>> layer = tfplugin.{module}.EmbeddingCollection({
      ...     "user": tfplugin.{module}.FeatureConfig("user", user),
      ...     "seen": tfplugin.{module}.FeatureConfig("seen", item),
      ...     "candidate": tfplugin.{module}.FeatureConfig("candidate", item),
      ... })
      >>> rows = layer({
      ...     "user": tf.constant([7, 8]),
      ...     "seen": tf.ragged.constant([[15, 2], [4]], dtype=tf.int64),
      ...     "candidate": tf.constant([4, 92]),
      ... })
      >>> rows["seen"].shape, rows["user"].shape
      (TensorShape([2, 8]), TensorShape([2, 4]))
    """

_TABLE_CONFIG = """A table of an `EmbeddingCollection`, with the fields of ``keras_rs.layers.TableConfig`` and more.

    All but the name are given by keyword.

    Args:
      name: of the table, in checkpoints, too.
      embedding_dim: width of a row.
      initializer: as of `Embedding`. Default: ``VarianceScaling(mode="fan_out")``, a truncated normal distribution of
        standard deviation ``1 / sqrt(embedding_dim)``.
      optimizer: of this table alone, as of `Embedding`. Default: the model's.
      combiner: ``"mean"``, ``"sum"``, ``"sqrtn"``, or None for a row for each id.
      placement: ``"auto"`` or ``"default_device"``: the CPU, or the device of a ``tf.device`` that the layer is
        made in.
      max_ids_per_partition, max_unique_ids_per_partition: accepted: of these there may be any number.
      vocabulary_size: must be left out: a table has no vocabulary.
      padding_id, regularizer, constraint, max_capacity, eviction, admission, expiry, expire_every, expire_on_save,
        max_hbm, max_memory, spill, capacity_hint, parts, key_dtype: as of `Embedding`.

    Raises:
      ValueError, TypeError: an argument out of range; a `vocabulary_size`.

    Example:
      >>> table = tfplugin.{module}.TableConfig("item", embedding_dim=8, combiner="sum", max_capacity=1_000_000)
    """

_FEATURE_CONFIG = """A feature of an `EmbeddingCollection`. Its fields are those of ``keras_rs.layers.FeatureConfig``.

    Args:
      name: of the feature.
      table: the `TableConfig` of the table it is looked up in; features that share it share the rows.
      input_shape: of its ids, with the batch; None: any. Ragged ids beyond the last number are left out.
      output_shape: of its rows, with the batch; None: as it comes.

    Raises:
      ValueError, TypeError: no name; another kind of table.

    Example:
      >>> table = tfplugin.{module}.TableConfig("item", embedding_dim=8)
      >>> feature = tfplugin.{module}.FeatureConfig("seen", table, (None, 50), (None, 8))
    """
