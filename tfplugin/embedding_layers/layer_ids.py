"""Ids as layers of Keras are given them: their keys, and what of them is looked up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfplugin.keys import how_to_convert
from tfplugin.same_places import in_same_places
from tfplugin.string_hash import string_keys

COMBINERS = ("sum", "mean", "sqrtn")

#: Integers that every int64 key holds: they are cast.
_SMALLER = (tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32)


@dataclasses.dataclass(frozen=True)
class Reading:
    """How ids of one kind are looked up in a table.

    Attributes:
      what: who looks up, for messages.
      table: a `KvVariable`, or a partitioned one.
      combiner: see the layers.
      strings: whether ids are strings, and nothing else.
      padding: the id that stands for none: a number or a string; None: there is none.
      longest: the most ids of a ragged row that count; None: all.
    """

    what: str
    table: Any
    combiner: str | None
    strings: bool = False
    padding: Any = None
    longest: int | None = None

    @property
    def dim(self) -> int:
        """Width of a row."""
        return int(self.table.dim)


@dataclasses.dataclass(frozen=True)
class Lookup:
    """What `tfplugin.lookup_many` is asked for, and what is made of its answer.

    Attributes:
      reading: how.
      ids: a tensor or a RaggedTensor for a plain lookup, a SparseTensor or RaggedTensor [bags, None] for a pooled one.
      weights: of a pooled lookup, as `ids` are, or None.
      finish: makes the layer's output of the rows.
    """

    reading: Reading
    ids: Any
    weights: Any
    finish: Callable[[Any], Any]


def check_dtype(dtype: Any, reading: Reading, error: type[Exception] = TypeError) -> None:
    """Raises `error` for ids of a dtype that are no keys of the table."""
    dtype, key_dtype = tf.as_dtype(dtype), reading.table.key_dtype
    wanted = tf.string if reading.strings else key_dtype
    if (dtype == tf.string and key_dtype == tf.int64) or (
        not reading.strings and (dtype == key_dtype or (key_dtype == tf.int64 and dtype in _SMALLER))
    ):
        padding_of(dtype, reading, error)
        return
    raise error(
        f"{reading.what} has {wanted.name} keys, got ids of {dtype.name}: "
        + ("strings need int64 keys." if dtype == tf.string else how_to_convert(dtype, wanted))
    )


def _keys(values: tf.Tensor, reading: Reading) -> tf.Tensor:
    check_dtype(values.dtype, reading)
    if values.dtype == tf.string:
        return string_keys(values)
    return values if values.dtype == reading.table.key_dtype else tf.cast(values, tf.int64)


def padding_of(dtype: Any, reading: Reading, error: type[Exception] = TypeError) -> Any:
    """The padding id among ids of that dtype; None: there is none.

    Raises `error` where it is a string, and they are numbers, or the other way round.
    """
    padding = reading.padding
    strings = tf.as_dtype(dtype) == tf.string
    if padding == 0 and strings:  # as `mask_zero` says it of numbers
        return ""
    if padding is not None and isinstance(padding, (str, bytes)) != strings:
        raise error(f"{reading.what} has padding_id={padding!r}, got ids of {tf.as_dtype(dtype).name}.")
    return padding


def _with_values(ids: Any, values: tf.Tensor) -> Any:
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(values)
    if isinstance(ids, tf.SparseTensor):
        return tf.SparseTensor(ids.indices, values, ids.dense_shape)
    return values


def values_of(ids: Any) -> tf.Tensor:
    """The ids themselves, as a tensor."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.flat_values
    return ids.values if isinstance(ids, tf.SparseTensor) else ids


def mask_of(ids: Any, padding: Any) -> Any:
    """Which ids are not padding: bool, of the shape of `ids`. Of sparse ids it is dense; of ragged ones None."""
    if isinstance(ids, tf.RaggedTensor):
        return None
    values = values_of(ids)
    there = tf.not_equal(values, tf.constant(padding, values.dtype))
    if isinstance(ids, tf.SparseTensor):
        mask = tf.scatter_nd(ids.indices, tf.cast(there, tf.int32), ids.dense_shape) > 0
        return tf.ensure_shape(mask, ids.shape)
    return there


def lookup_of(ids: Any, weights: Any, reading: Reading) -> Lookup:
    """What is to be looked up for the ids that a layer is given.

    Args:
      ids: a tensor, RaggedTensor or SparseTensor of integers or strings.
      weights: None, or numbers for a combiner, of the same kind and shape.
      reading: how.

    Raises:
      TypeError: ids of a dtype that are no keys; weights of another kind than `ids`.
      ValueError: weights without a combiner, or of another shape.
    """
    if weights is not None and not tf.is_tensor(weights):
        weights = tf.convert_to_tensor(weights)
    if weights is not None and reading.combiner is None:
        raise ValueError(f"{reading.what} has no combiner, which weights are for: give it one, such as 'sum'.")
    if weights is not None:
        weights = _checked_weights(weights, ids, reading)
    if isinstance(ids, tf.RaggedTensor) and reading.longest is not None:
        ids = ids[..., : reading.longest]
        weights = None if weights is None else weights[..., : reading.longest]
    keys = _with_values(ids, _keys(values_of(ids), reading))
    if reading.combiner is None:
        return _plain(keys, reading)
    found = padding_of(values_of(ids).dtype, reading)
    padding = None if found is None else _keys(tf.constant(found, values_of(ids).dtype), reading)
    if isinstance(keys, tf.SparseTensor):
        return _pooled_sparse(keys, weights, padding, reading)
    return _pooled(keys, weights, padding, reading)


def _plain(keys: Any, reading: Reading) -> Lookup:
    if isinstance(keys, tf.SparseTensor):
        return Lookup(reading, keys.values, None, lambda rows: scattered(keys, rows, reading.dim))
    return Lookup(reading, keys, None, lambda rows: rows)


def scattered(ids: tf.SparseTensor, rows: tf.Tensor, dim: int) -> tf.Tensor:
    """The rows [n, dim] of sparse ids as a dense tensor, ids.shape + [dim], with zeros where there is no id."""
    dense = tf.scatter_nd(ids.indices, rows, tf.concat([ids.dense_shape, [dim]], 0))
    return tf.ensure_shape(dense, ids.shape.concatenate([dim]))


def _checked_weights(weights: Any, ids: Any, reading: Reading) -> Any:
    """Weights of which each lies where an id does. What is not known while a function is traced is asserted in it."""
    kinds = (tf.RaggedTensor, tf.SparseTensor)
    if any(isinstance(weights, kind) != isinstance(ids, kind) for kind in kinds):
        raise TypeError(
            f"{reading.what}: weights must be of the type of the ids ({type(ids).__name__}), got "
            f"{type(weights).__name__}."
        )
    if not weights.dtype.is_floating:
        raise TypeError(f"{reading.what}: weights must be floating-point numbers, got {weights.dtype.name}.")
    pairs = _layouts(ids, weights)
    if pairs is None or not values_of(weights).shape.is_compatible_with(values_of(ids).shape):
        raise ValueError(
            f"{reading.what}: weights of shape {weights.shape} for ids of shape {ids.shape}; give one for each id."
        )
    where = {tf.RaggedTensor: "row splits", tf.SparseTensor: "indices"}.get(type(ids), "shape")
    told = f"{reading.what}: weights must lie where the ids do: give them the {where} of the ids."
    try:
        values = in_same_places(values_of(weights), [one for one, _ in pairs], [other for _, other in pairs], told)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(error.message) from None
    return _with_values(ids, values)


def _layouts(ids: Any, weights: Any) -> list[tuple[tf.Tensor, tf.Tensor]] | None:
    """What says of ids, and what of weights, where they lie: integers that have to be the same. None: they are not."""
    if isinstance(ids, tf.SparseTensor):
        known = ids.indices.shape.is_compatible_with(weights.indices.shape)
        return [(ids.indices, weights.indices)] if known else None
    if isinstance(ids, tf.RaggedTensor):
        of_ids, of_weights = ids.nested_row_splits, weights.nested_row_splits
        return list(zip(of_ids, of_weights, strict=True)) if len(of_ids) == len(of_weights) else None
    # As many in rows of one known size are at the same places.
    known = all(one.shape.rank is not None and one.shape[1:].is_fully_defined() for one in (ids, weights))
    return [] if known else [(tf.shape(ids), tf.shape(weights))]


def _splits_of(lengths_of_one: Any, bags: Any) -> tf.Tensor:
    return tf.range(bags + 1) * lengths_of_one


def _pooled(keys: Any, weights: Any, padding: tf.Tensor | None, reading: Reading) -> Lookup:
    """Of dense and ragged ids, whose last dimension is pooled."""
    flat = values_of(keys)
    flat_weights = None if weights is None else values_of(weights)
    dim = reading.dim
    if isinstance(keys, tf.RaggedTensor) and flat.shape.rank == 1:
        outer = keys.nested_row_splits[:-1]
        splits = tf.cast(keys.nested_row_splits[-1], tf.int64)

        def finish(rows: tf.Tensor) -> Any:
            return tf.RaggedTensor.from_nested_row_splits(rows, outer, validate=False) if outer else rows
    else:
        if flat.shape.rank is None:
            raise ValueError(f"{reading.what}: how many dimensions the ids have must be known, got shape {flat.shape}.")
        shape = tf.shape(flat, tf.int64)
        # Ids of shape [batch] are one for each sample.
        counted = shape[-1] if flat.shape.rank > 1 else tf.constant(1, tf.int64)
        kept = flat.shape[:-1] if flat.shape.rank > 1 else flat.shape
        outer_shape = shape[:-1] if flat.shape.rank > 1 else shape
        splits = _splits_of(counted, tf.reduce_prod(outer_shape))

        def finish(rows: tf.Tensor) -> Any:
            if kept.rank != 1:
                rows = tf.reshape(rows, tf.concat([outer_shape, [dim]], 0))
            rows = tf.ensure_shape(rows, kept.concatenate([dim]))
            return keys.with_flat_values(rows) if isinstance(keys, tf.RaggedTensor) else rows

        flat = tf.reshape(flat, [-1])
        flat_weights = None if flat_weights is None else tf.reshape(flat_weights, [-1])
    if padding is not None:
        there = tf.not_equal(flat, padding)
        before = tf.concat([[0], tf.cumsum(tf.cast(there, tf.int64))], 0)
        splits = tf.gather(before, splits)
        flat = tf.boolean_mask(flat, there)
        flat_weights = None if flat_weights is None else tf.boolean_mask(flat_weights, there)

    def ragged(values: tf.Tensor | None) -> Any:
        return None if values is None else tf.RaggedTensor.from_row_splits(values, splits, validate=False)

    return Lookup(reading, ragged(flat), ragged(flat_weights), finish)


def _pooled_sparse(keys: tf.SparseTensor, weights: Any, padding: tf.Tensor | None, reading: Reading) -> Lookup:
    rank = keys.shape.rank
    if rank is None:
        raise ValueError(f"{reading.what}: how many dimensions sparse ids have must be known.")
    kept = keys.shape[:-1] if rank > 1 else keys.shape
    outer_shape = keys.dense_shape[:-1] if rank > 1 else keys.dense_shape

    def in_bags(one: tf.SparseTensor) -> tf.SparseTensor:
        if rank == 1:
            one = tf.sparse.expand_dims(one, -1)
        elif rank > 2:
            one = tf.sparse.reshape(one, tf.stack([tf.reduce_prod(outer_shape), keys.dense_shape[-1]]))
        return one if padding is None else tf.sparse.retain(one, there)

    there = None if padding is None else tf.not_equal(keys.values, padding)

    def finish(rows: tf.Tensor) -> tf.Tensor:
        if kept.rank != 1:
            rows = tf.reshape(rows, tf.concat([outer_shape, [reading.dim]], 0))
        return tf.ensure_shape(rows, kept.concatenate([reading.dim]))

    bags = in_bags(keys)
    # In the very places of the ids, which are known to be the same.
    return Lookup(reading, bags, None if weights is None else _with_values(bags, in_bags(weights).values), finish)


def output_shape(input_shape: Any, reading: Reading) -> tuple[int | None, ...]:
    """The shape of what is looked up for ids of that shape."""
    shape = tuple(tf.TensorShape(input_shape).as_list())
    if reading.combiner is not None and len(shape) > 1:
        shape = shape[:-1]
    return (*shape, reading.dim)
