"""The lookups of a layer's call: all in one, where that can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from tfplugin.composed_pool import bags_of, pool
from tfplugin.embedding_layers.layer_ids import Lookup
from tfplugin.embedding_layers.penalties import Penalty
from tfplugin.lookup import pooled_ids
from tfplugin.lookup_many import lookup_many
from tfplugin.training_mode import is_training


def trains(layer: Any, training: Any) -> bool:
    """Whether a call of a layer inserts the keys that are missing.

    Args:
      layer: that is called. A frozen one never trains.
      training: what Keras, or the caller, says. Where nobody does, the call trains if a gradient tape records it.

    Raises:
      TypeError: `training` is a tensor, of which nothing is known while a function is traced.
    """
    if not layer.trainable:
        return False
    if training is None:
        training = record.could_possibly_record() or not tf.compat.v1.executing_eagerly_outside_functions()
    elif tf.is_tensor(training):
        training = tf.get_static_value(training)
        if training is None:
            raise TypeError(
                f"Layer '{layer.name}': training must be True or False, got a tensor: whether a lookup gives keys "
                "their rows is said when it is traced."
            )
    return bool(training) and is_training(None)


def read(lookups: Sequence[Lookup], train: bool) -> list[Any]:
    """The rows of each lookup, as its `Lookup.finish` gives them: one op for all that can share it."""
    if len(lookups) == 1 and lookups[0].reading.combiner is None:
        ids, table = lookups[0].ids, lookups[0].reading.table
        if isinstance(ids, tf.RaggedTensor):
            rows = [ids.with_flat_values(table.sparse_read(ids.flat_values, training=train))]
        else:
            rows = [table.sparse_read(ids, training=train)]
    else:
        rows = lookup_many(
            [one.reading.table for one in lookups],
            [one.ids for one in lookups],
            weights=[one.weights for one in lookups],
            combiners=[one.reading.combiner for one in lookups],
            training=train,
        )
    return [one.finish(found) for one, found in zip(lookups, rows, strict=True)]


def read_regularized(lookup: Lookup, regularizer: Any, train: bool) -> tuple[Any, Penalty]:
    """The rows of a lookup, and what a regularizer is to look at: the rows of its keys, each key once."""
    table, combiner = lookup.reading.table, lookup.reading.combiner
    if combiner is not None:
        bags = bags_of(pooled_ids(table, lookup.ids, lookup.weights, lookup.reading.what))
        keys, which = tf.unique(bags.keys)
        rows = table.sparse_read(keys, training=train)
        return lookup.finish(pool(rows, which, bags, combiner)), Penalty(table, regularizer, keys, rows)
    for part in table._kv_parts:
        part._clipped_whole = True
    ids = lookup.ids
    flat = ids.flat_values if isinstance(ids, tf.RaggedTensor) else ids
    keys, which = tf.unique(tf.reshape(flat, [-1]))
    rows = table.sparse_read(keys, training=train)
    every = tf.reshape(tf.gather(rows, which), tf.concat([tf.shape(flat), [table.dim]], 0))
    every = tf.ensure_shape(every, flat.shape.concatenate([table.dim]))
    found = ids.with_flat_values(every) if isinstance(ids, tf.RaggedTensor) else every
    return lookup.finish(found), Penalty(table, regularizer, keys, rows)


def cast(rows: Any, dtype: Any) -> Any:
    """Rows, ragged ones too, of that dtype."""
    dtype = tf.as_dtype(dtype)
    if rows.dtype == dtype:
        return rows
    if isinstance(rows, tf.RaggedTensor):
        return rows.with_flat_values(tf.cast(rows.flat_values, dtype))
    return tf.cast(rows, dtype)
