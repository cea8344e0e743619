"""`sok.all2all_dense_embedding`: a plain lookup over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin import ranks, training_mode
from tfplugin.composed_pool import PooledIds
from tfplugin.sok.exchange import Lookup, fail_on_all, look_up, of_shape
from tfplugin.sok.exchange_ids import keys_of
from tfplugin.sok.exchange_table import exchange_table
from tfplugin.sok.exchange_types import checked_wire_dtype

_CALLER = "sok.all2all_dense_embedding"


@tf.autograph.experimental.do_not_convert
def all2all_dense_embedding(
    param: Any, indices: Any, *, training: bool | None = None, wire_dtype: Any = None, name: str | None = None
) -> Any:
    """Rows of ids, on whichever rank they are. Every rank calls it with ids of its own.

    Args:
      param: a `sok.Variable` or a `sok.DynamicVariable`; on a single rank any variable.
      indices: integers of any shape, dense or ragged.
      training, wire_dtype: as for `lookup_sparse`.
      name: of the exchange: the same on all ranks.

    Returns:
      [*indices.shape, dim], ragged where indices are. Its gradient is summed over the ranks.

    Raises:
      TypeError: a param or ids that do not fit.
      ValueError: another wire_dtype.
      tf.errors.InvalidArgumentError: on every rank, where ids of any rank are not rows of a `Variable`, or the ranks do
        not look up the same in the same way.

    Example:
      >>> v = sok.DynamicVariable(dimension=2, initializer="ones")
      >>> sok.all2all_dense_embedding(v, tf.constant([[7], [-1]], tf.int64)).shape
      TensorShape([2, 1, 2])
    """
    ragged = isinstance(indices, tf.RaggedTensor)
    train = training_mode.is_training(training)
    try:
        wire = checked_wire_dtype(wire_dtype, _CALLER)
        table = exchange_table(param, _CALLER)
        ids = keys_of(indices.flat_values if ragged else indices, table, _CALLER)
    except (TypeError, ValueError) as error:
        return _failing(fail_on_all(error, [param], train, _CALLER, name)[0], indices)
    if ranks.size() == 1 and table.is_plain(ids.dtype) and not ranks.is_elastic():
        rows = param.sparse_read(ids, training=train)
    else:
        flat = tf.reshape(ids, [-1])
        each_alone = tf.range(tf.size(flat, out_type=tf.int64) + 1)
        lookup = Lookup(table, PooledIds(flat, each_alone, None, 1, None, False, None), "sum")
        found = look_up([lookup], train, name, wire_dtype=wire)[0]
        rows = tf.reshape(found, tf.concat([tf.shape(ids), [table.dim]], 0))
        rows.set_shape(ids.shape.concatenate([table.dim]))
    return indices.with_flat_values(rows) if ragged else rows


def _failing(rows: tf.Tensor, indices: Any) -> Any:
    """Rows of a lookup that fails when it is run, as ids of an unknown shape would have given them."""
    if isinstance(indices, tf.RaggedTensor):
        return indices.with_flat_values(rows)
    return of_shape(rows, tf.TensorShape(getattr(indices, "shape", None)).concatenate(rows.shape[-1:]))
