"""Ids of a lookup over the ranks, as users give them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin.composed_pool import PooledIds
from tfplugin.keys import constant_keys, how_to_convert
from tfplugin.sok.exchange_table import ExchangeTable

#: What ids travel as. Narrower integers become int64.
_WIDE = (tf.int64, tf.int32, tf.uint64)
_NARROW = (tf.int8, tf.int16, tf.uint8, tf.uint16, tf.uint32)


def keys_of(ids: Any, table: ExchangeTable, caller: str) -> tf.Tensor:
    """Ids as a Tensor of int32, int64 or uint64, any shape. Whether each is a key of the table is seen when it is run.

    Raises:
      TypeError: ids that are not integers.
      OverflowError: a list that has one which no key is.
    """
    if isinstance(ids, (tf.SparseTensor, tf.RaggedTensor, tf.compat.v1.SparseTensorValue)):
        raise TypeError(f"{caller}: ids of '{table.name}' must be dense here, got a {type(ids).__name__}.")
    if not tf.is_tensor(ids) and getattr(ids, "dtype", None) is None:
        ids = constant_keys(ids, table.key_dtype)
    keys = tf.convert_to_tensor(ids)
    if keys.dtype in _WIDE:
        return keys
    if keys.dtype in _NARROW:
        return tf.cast(keys, table.key_dtype if keys.dtype.size < table.key_dtype.size else tf.int64)
    raise TypeError(
        f"{caller}: '{table.name}' has {table.key_dtype.name} keys, got ids of {keys.dtype.name}: "
        f"{how_to_convert(keys.dtype, table.key_dtype)}"
    )


def pooled_keys(sp_ids: Any, sp_weights: Any, table: ExchangeTable, caller: str) -> tuple[PooledIds, tf.Tensor | None]:
    """Ids and weights of a SparseTensor or a RaggedTensor [batch, None]; the segments of weights of their own.

    Raises:
      TypeError: neither of these, or weights of another kind than the ids.
      ValueError: of another rank.
    """
    if isinstance(sp_ids, tf.RaggedTensor):
        if sp_ids.ragged_rank != 1 or sp_ids.flat_values.shape.rank not in (1, None):
            raise ValueError(f"{caller}: a RaggedTensor of ids has shape [batch, None], got {sp_ids.shape}.")
        segments, shape = tf.cast(sp_ids.row_splits, tf.int64), None
    elif isinstance(sp_ids, (tf.SparseTensor, tf.compat.v1.SparseTensorValue)):
        segments, shape = (tf.convert_to_tensor(part, tf.int64) for part in (sp_ids.indices, sp_ids.dense_shape))
        if segments.shape[-1] not in (2, None):
            raise ValueError(f"{caller}: a SparseTensor of ids has shape [batch, n], got {sp_ids.shape}.")
    else:
        raise TypeError(
            f"{caller}: ids of '{table.name}' must be a SparseTensor or a RaggedTensor, got {type(sp_ids).__name__}."
        )
    weights = weight_segments = None
    if sp_weights is not None:
        if isinstance(sp_weights, tf.RaggedTensor) != isinstance(sp_ids, tf.RaggedTensor) or not isinstance(
            sp_weights, (tf.RaggedTensor, tf.SparseTensor, tf.compat.v1.SparseTensorValue)
        ):
            raise TypeError(
                f"{caller}: weights of '{table.name}' must be of the type of its ids ({type(sp_ids).__name__}), or "
                f"None, got {type(sp_weights).__name__}."
            )
        weights = tf.convert_to_tensor(sp_weights.values)
        if not weights.dtype.is_floating:
            raise TypeError(f"{caller}: weights of '{table.name}' must be floats, got {weights.dtype.name}.")
        if isinstance(sp_weights, tf.RaggedTensor):
            if sp_weights.ragged_rank != 1 or sp_weights.flat_values.shape.rank not in (1, None):
                raise ValueError(
                    f"{caller}: weights of '{table.name}' have shape [batch, None] as its ids, got {sp_weights.shape}."
                )
            own, theirs = sp_ids.row_splits, sp_weights.row_splits
        else:
            own, theirs = sp_ids.indices, sp_weights.indices
        weight_segments = None if theirs is own else tf.convert_to_tensor(theirs, tf.int64)
    pooled = PooledIds(keys_of(sp_ids.values, table, caller), segments, shape, 1, weights, False, None)
    return pooled, weight_segments
