"""Pooling in TensorFlow's own ops: where the one op does not reach (clipped rows, second derivatives)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf


class PooledIds(NamedTuple):
    """Ids of a pooled lookup, as the op ``KvTablePool`` takes them.

    Attributes:
      keys: [n], of the variable's key dtype.
      segments: row splits [rows + 1] of ragged ids, or indices [n, rank] of sparse ones; int64.
      shape: int64 [rank] of sparse ids; None for ragged ones.
      outer: how many leading columns of the indices make the row; 0 for all but the last.
      weights: [n] or None.
      positive: whether ids whose weight is not positive are left out.
      fill: scalar: the one id of rows that have none; or None.
    """

    keys: tf.Tensor
    segments: tf.Tensor
    shape: tf.Tensor | None
    outer: int
    weights: tf.Tensor | None
    positive: bool
    fill: tf.Tensor | None


class Bags(NamedTuple):
    """Ids one by one: keys [n], the row of each [n] int64, weights [n] or None, and the number of rows, int64."""

    keys: tf.Tensor
    rows: tf.Tensor
    weights: tf.Tensor | None
    count: tf.Tensor


def bags_of(ids: PooledIds) -> Bags:
    """What the op does to ids before it looks them up.

    Raises:
      tf.errors.InvalidArgumentError: more or fewer weights than ids; in a graph when it is run.
    """
    keys, weights = ids.keys, ids.weights
    if weights is not None:
        # One weight would be that of all ids, and the ids after the last weight would be left out.
        weights = _one_each(keys, weights)
    if ids.shape is None:
        count = tf.size(ids.segments, out_type=tf.int64) - 1
        rows = tf.repeat(tf.range(count), ids.segments[1:] - ids.segments[:-1])
    else:
        columns = ids.segments[:, : ids.outer or -1]
        extents = ids.shape[: ids.outer or -1]
        count = tf.reduce_prod(extents)
        strides = tf.math.cumprod(extents, exclusive=True, reverse=True)
        rows = tf.reduce_sum(columns * strides, axis=1)
    if weights is not None and ids.positive:
        keep = tf.where(weights > 0)[:, 0]
        keys, rows, weights = tf.gather(keys, keep), tf.gather(rows, keep), tf.gather(weights, keep)
    if ids.fill is not None:
        present = tf.math.unsorted_segment_sum(tf.ones_like(rows), rows, count)
        empty = tf.where(tf.equal(present, 0))[:, 0]
        keys = tf.concat([keys, tf.fill(tf.shape(empty), ids.fill)], 0)
        rows = tf.concat([rows, empty], 0)
        if weights is not None:
            weights = tf.concat([weights, tf.ones(tf.shape(empty), weights.dtype)], 0)
    return Bags(keys, rows, weights, count)


def _one_each(keys: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    legal = tf.debugging.assert_equal(tf.size(weights), tf.size(keys), "There must be as many weights as ids.")
    with tf.control_dependencies([] if legal is None else [legal]):
        return tf.identity(weights)


def pool(table_rows: tf.Tensor, which: tf.Tensor | None, bags: Bags, combiner: str) -> tf.Tensor:
    """Row ``which[i]`` of `table_rows`, or row i, for id i, combined into [count, dim]. Rows without ids are zeros."""
    low_precision = table_rows.dtype in (tf.float16, tf.bfloat16)
    wide = tf.cast(table_rows, tf.float32) if low_precision else table_rows
    gathered = wide if which is None else tf.gather(wide, which)
    weights = tf.ones_like(bags.rows, wide.dtype) if bags.weights is None else tf.cast(bags.weights, wide.dtype)
    if bags.weights is not None:
        gathered *= weights[:, tf.newaxis]
    total = tf.math.unsorted_segment_sum(gathered, bags.rows, bags.count)
    if combiner != "sum":
        power = weights if combiner == "mean" else weights * weights
        divisor = tf.math.unsorted_segment_sum(power, bags.rows, bags.count)
        if combiner == "sqrtn":
            # The second derivative of the root of 0, of rows without ids or of weight 0, is no number.
            some = divisor > 0
            divisor = tf.where(some, tf.sqrt(tf.where(some, divisor, 1)), 0)
        total = tf.math.divide_no_nan(total, divisor[:, tf.newaxis])
    return tf.cast(total, table_rows.dtype) if low_precision else total


def weights_gradient_gradient(
    rows_of: Callable[[Bags], tf.Tensor], ids: PooledIds, combiner: str, gradient: tf.Tensor, upstream: tf.Tensor
) -> tuple[Bags, tf.Tensor | None, tf.Tensor, tf.Tensor | None]:
    """Derivatives of the gradient by the weights: that is of the ids' rows, of the weights, and of a gradient.

    Args:
      rows_of: the rows of the ids one by one, [n, dim].
      ids: weighted.
      combiner: see `pool`.
      gradient: that of the pooled rows.
      upstream: that of the gradient by the weights.

    Returns:
      The ids one by one; and the derivatives by their rows, by `gradient`, and by the weights (None: it has none).
    """
    bags = bags_of(ids)
    rows, weights = rows_of(bags), ids.weights
    with tf.GradientTape() as outer:
        outer.watch([rows, gradient, weights])
        with tf.GradientTape() as inner:
            inner.watch(weights)
            pooled = pool(rows, None, bags_of(ids), combiner)
        # Of weights of which some are left out it is slices.
        by_weights = tf.convert_to_tensor(inner.gradient(pooled, weights, gradient))
    by_rows, by_gradient, twice = outer.gradient(by_weights, [rows, gradient, weights], upstream)
    # Where rows are gathered, slices, of which `tf.autodiff.ForwardAccumulator` would make nothing.
    by_gradient = tf.convert_to_tensor(by_gradient)
    return bags, by_rows, by_gradient, None if twice is None else tf.convert_to_tensor(twice)
