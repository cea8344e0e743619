"""What regularizers say of the rows of tables: each row once in a forward pass, however often it is looked up.

A layer adds a loss with each call. That of a later call of the same pass is over the keys of all of them, and takes the
place of the one before; a pass has begun where Keras has cleared the losses of the layer. Layers that share a table are
put together where the losses of a model are asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfplugin import step_record
from tfplugin.keras_models import is_trained


@dataclasses.dataclass(frozen=True)
class Penalty:
    """What a loss of a layer was made of.

    Attributes:
      table: that was looked up.
      regularizer: of its rows.
      keys: [n], each once.
      rows: [n, dim].
    """

    table: Any
    regularizer: Any
    keys: tf.Tensor
    rows: tf.Tensor

    def loss(self) -> tf.Tensor:
        """What the regularizer says, which knows what it was made of."""
        loss = tf.identity(self.regularizer(self.rows))
        loss._kv_penalty = self
        return loss

    def joins(self, other: Penalty) -> bool:
        """Whether both are of one table and one regularizer, and can be in one loss."""
        return (
            self.table is other.table
            and _same(self.regularizer, other.regularizer)
            and _graph(self.keys) is _graph(other.keys)
        )

    def joined(self, other: Penalty) -> Penalty:
        """That of the keys of both."""
        every = tf.concat([self.keys, other.keys], 0)
        keys, which = tf.unique(every)
        first = tf.math.unsorted_segment_min(tf.range(tf.shape(every)[0]), which, tf.shape(keys)[0])
        rows = tf.gather(tf.concat([self.rows, other.rows], 0), first)
        return dataclasses.replace(self, keys=keys, rows=rows)


def add_penalty(layer: Any, penalty: Penalty) -> None:
    """Adds it to the losses of a layer that is being called; unlike tf_keras, Keras 3 leaves frozen weights alone."""
    step_record.note_penalty(penalty.table)
    is_tf_keras = hasattr(layer, "_eager_losses")
    if not is_tf_keras and not is_trained(penalty.table._kv_parts[0], layer):
        return
    # Of tf_keras they are those of a thread. Either list is emptied where a forward pass begins.
    own = layer._eager_losses if is_tf_keras else layer._losses
    for i, loss in enumerate(own):
        before = getattr(loss, "_kv_penalty", None)
        if before is not None and before.joins(penalty):
            del own[i]
            penalty = before.joined(penalty)
            break
    layer.add_loss(penalty.loss())


def each_row_once(losses: Sequence[Any]) -> list[Any]:
    """Losses of layers, with one in the place of those of the same table and regularizer: the first of them."""
    found: list[Any] = []
    for loss in losses:
        penalty = getattr(loss, "_kv_penalty", None)
        joins = (i for i, one in enumerate(found) if _joins(getattr(one, "_kv_penalty", None), penalty))
        at = next(joins, None)
        if at is None:
            found.append(loss)
        else:
            found[at] = found[at]._kv_penalty.joined(penalty).loss()
    return found


def _joins(one: Penalty | None, other: Penalty | None) -> bool:
    return one is not None and other is not None and one.joins(other)


def _same(one: Any, other: Any) -> bool:
    """Whether two regularizers are the same: also two that were made of one name."""
    if one is other:
        return True
    return type(one) is type(other) and hasattr(one, "get_config") and one.get_config() == other.get_config()


def _graph(tensor: tf.Tensor) -> Any:
    return None if isinstance(tensor, tf.__internal__.EagerTensor) else tensor.graph
