"""The embedding layers as subclasses of the Layer of a Keras."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfplugin.dynamic_embedding.keras.layers.embedding import EmbeddingLayer
from tfplugin.dynamic_embedding.keras.layers.field_wise_embedding import FieldWiseLayer
from tfplugin.dynamic_embedding.keras.layers.hvd_all_to_all_embedding import HvdAllToAllLayer
from tfplugin.dynamic_embedding.keras.layers.squashed_embedding import SquashedLayer
from tfplugin.embedding_layers.layer_class import layer_class
from tfplugin.embedding_layers.old_keras import warn_of_old_keras


@dataclass(frozen=True)
class Layers:
    """The layers for one Keras."""

    Embedding: Any
    SquashedEmbedding: Any
    FieldWiseEmbedding: Any
    HvdAllToAllEmbedding: Any


def _listing(layer: Any) -> dict[str, Any]:
    """What has Keras 3 list the rows among the weights. tf_keras lists every tf.Variable that is an attribute."""

    def listed(name: str) -> property:
        def weights(self: Any) -> list[Any]:
            mine = getattr(self, "shadow", None)
            return [*getattr(layer, name).fget(self), *([] if mine is None else [mine])]

        return property(weights, doc=getattr(layer, name).__doc__)

    return {name: listed(name) for name in ("weights", "variables")}


def layers_of(keras: Any, module: str) -> Layers:
    """The layers for ``tf.keras`` (either kind) or ``tf_keras``. `module` is where they will be found."""
    warn_of_old_keras(keras, module)
    layer = keras.layers.Layer
    keras_3 = not hasattr(layer, "_gather_children_attribute")

    def make(name: str, bases: tuple[type, ...], doc: str, **attributes: Any) -> Any:
        return layer_class(keras, "tfplugin.dynamic_embedding", module, name, bases, doc, **attributes)

    embedding = make("Embedding", (EmbeddingLayer, layer), _EMBEDDING, **(_listing(layer) if keras_3 else {}))
    return Layers(
        embedding,
        make("SquashedEmbedding", (SquashedLayer, embedding), _SQUASHED),
        make("FieldWiseEmbedding", (FieldWiseLayer, embedding), _FIELD_WISE),
        make("HvdAllToAllEmbedding", (HvdAllToAllLayer, embedding), _HVD_ALL_TO_ALL),
    )


_EMBEDDING = """An embedding layer without a vocabulary: any id has a row, which training inserts.

    Layers of one name share their rows, as `get_variable` does, until ``clear_session``. Train it by a
    `DynamicEmbeddingOptimizer`.

    Args:
      embedding_size: width of a row.
      key_dtype, value_dtype: as of `Variable`.
      combiner: of subclasses that combine rows.
      initializer: what a missing key gives; see `Variable`. Default: ``RandomNormal()`` of Keras.
      devices: see `Variable`.
      name: of the layer; its variable is ``<name>-parameter``.
      with_unique: accepted: a lookup finds equal ids once, and an update sums their gradients, either way.
      short_file_name: see `Variable`.
      kwargs: ``trainable``, ``bp_v2``, ``restrict_policy``, ``init_capacity``, ``partitioner``, ``kv_creator``,
        ``checkpoint``: of the variable; ``max_norm``: rows of a larger norm are scaled down to it when they are read;
        ``distribute_strategy``: of the `ShadowVariable`; ``keep_distribution``: whether the config has `devices` and
        any ``kv_creator``; it has an `HkvHashTableCreator`, which bounds the table, and a `RedisTableCreator` in any
        case. Others are of a Keras layer.

    Attributes:
      params: the `Variable`.
      shadow: the `ShadowVariable` that is trained; among the layer's ``trainable_weights``.

    Raises:
      TypeError: a size that is no number; dtypes that tables do not have.

    Example:
      >>> layer = de.keras.layers.Embedding(8, name="user")
      >>> layer(tf.constant([[15, 2], [4, 92], [22, 4]], tf.int64)).shape
      TensorShape([3, 2, 8])
    """

_SQUASHED = """An `Embedding` that combines the rows of each sample into one.

    Args: as of `Embedding`, in which
      combiner: ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"prod"``, ``"std"`` or others of which ``tf.math`` has a
        ``reduce_...``; or a function of (values, axis).

    Raises:
      ValueError: an unknown combiner.

    Example:
      >>> de.keras.layers.SquashedEmbedding(8, name="basket")(tf.constant([[15, 2], [4, 92]], tf.int64)).shape
      TensorShape([2, 8])
    """

_FIELD_WISE = """An `Embedding` that combines the rows of each sample field by field.

    Args: as of `Embedding`, and
      nslots: number of fields.
      slot_map_fn: function from ids [batch, n] to the field of each, in [0, nslots).
      combiner: ``"sum"``, ``"mean"`` or ``"sqrt_n"``.

    Raises:
      ValueError: `slot_map_fn` is no function; an unknown combiner.

    Example:
      >>> layer = de.keras.layers.FieldWiseEmbedding(2, 3, lambda ids: ids % 3, name="fields")
      >>> layer(tf.constant([[23, 12, 0], [9, 13, 10]], tf.int64)).shape
      TensorShape([2, 3, 2])
    """

_HVD_ALL_TO_ALL = """An `Embedding` whose rows are spread over Horovod's ranks: rank ``key floor-mod size`` has a key.

    Every rank calls it as often as the others, with ids of its own. Gradients are summed over the ranks. On one rank,
    also without Horovod, it is an `Embedding`. Save it by `de_hvd_save_model` or `tfplugin.sok.Checkpoint`, on all
    ranks.

    Args:
      with_unique, with_secondary_unique, batch_size: accepted: a key is sent once however often it occurs.
      mpi_size: the number of ranks, which is the default; 1 for a table that each rank has for itself.
      args, kwargs: as of `Embedding`; one device on each rank.

    Raises:
      ValueError: another `mpi_size`; several devices.
      RuntimeError: there are several ranks, and ``hvd.init()`` has not been called.

    Example:
      >>> layer = de.keras.layers.HvdAllToAllEmbedding(embedding_size=8, name="spread")
      >>> layer(tf.constant([[15, 2], [4, 92]], tf.int64)).shape
      TensorShape([2, 2, 8])
    """
