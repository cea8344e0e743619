"""`sok.lookup_sparse`: pooled lookups of many tables over all ranks at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin import training_mode
from tfplugin.lookup import COMBINERS
from tfplugin.sok.exchange import Lookup, fail_on_all, look_up
from tfplugin.sok.exchange_ids import pooled_keys
from tfplugin.sok.exchange_table import exchange_table
from tfplugin.sok.exchange_types import checked_wire_dtype

_CALLER = "sok.lookup_sparse"


@tf.autograph.experimental.do_not_convert
def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: Any = None,
    use_low_frequency_filter: bool = False,
    *,
    hotness: Any = None,
    training: bool | None = None,
    wire_dtype: Any = None,
    name: str | None = None,
) -> Any:
    """Looks ids up in one or more tables and combines the rows of each sample: on whichever rank they are.

    Every rank calls it with ids of its own and gets rows for these. All tables of a call share one exchange of keys and
    one of rows, and one more for the gradient. A key is sent once however often it occurs. The gradient of a variable
    is the sum over all ranks, as `tf.IndexedSlices` of the rows that this rank holds: keys of a `DynamicVariable`,
    local row numbers of a `Variable`; a key that several ranks asked for comes once for each of them.

    The older form ``lookup_sparse(params, sp_ids, hotness, combiners)`` works, too.

    Args:
      params: `sok.Variable` and `sok.DynamicVariable`, one or a list; on a single rank any variable.
      sp_ids: for each a SparseTensor or RaggedTensor [batch, None] of integers. Of a `sok.Variable` they are row
        numbers of the whole.
      sp_weights: for each None or what its ids are, of floats. Default: all weights are 1.
      combiners: for each ``"sum"``, ``"mean"`` (weighted: over the sum of the weights) or ``"sqrtn"`` (over the root of
        the sum of their squares). Default: mean.
      use_low_frequency_filter: admits new keys of a `DynamicVariable` with the probability of its ``filter_ratio``
        only; the row of a key that is not admitted is zeros.
      hotness: for each the most ids that a row has; more are an error. Default: any number.
      training: True inserts missing keys of a `DynamicVariable`; False does not and gives zeros. Default: True unless
        inside `tfplugin.inference_mode` or a SavedModel signature.
      wire_dtype: tf.float16 or tf.bfloat16: what float32 rows, and their gradients, travel in between ranks: half the
        bytes. Each is rounded once, before it travels; sums are of float32. Rows of 16 bits and of float64 travel as
        they are, as do all on a single rank. The same on all ranks. Default: rows travel as they are.
      name: of the exchange: the same on all ranks.

    Returns:
      A tensor [batch, dim] for each table: a list where `sp_ids` is one. A row without ids is zeros.

    Raises:
      ValueError: lists of different lengths, an unknown combiner, or another wire_dtype.
      TypeError: params, ids or weights of a kind or dtype that does not fit.
      tf.errors.InvalidArgumentError: on every rank, where ids of any rank are not rows of a `Variable` or are more than
        the hotness of their table; where the ranks do not look up the same tables in the same way, or weights are of
        another shape than their ids; also where another rank raised one of the above, and in place of these when a
        `tf.function` of several ranks runs.
      tf.errors.OpError: on every rank, as of `KvVariable.sparse_read`, where any cannot take the keys that it owns:
        more than a `max_capacity`, or no memory. The tables of that rank are as they were.

    Example:
      >>> v = sok.Variable(np.arange(15).reshape(5, 3), dtype=tf.float32)
      >>> ids = tf.SparseTensor([[0, 0], [0, 1], [1, 0]], [1, 1, 3], [2, 2])
      >>> sok.lookup_sparse(v, ids, combiners="sum").numpy()
      array([[ 6.,  8., 10.],
             [ 9., 10., 11.]], dtype=float32)
    """
    several = isinstance(sp_ids, (list, tuple)) and not isinstance(sp_ids, tf.compat.v1.SparseTensorValue)
    variables = list(params) if isinstance(params, (list, tuple)) else [params]
    train = training_mode.is_training(training)
    try:
        wire = checked_wire_dtype(wire_dtype, _CALLER)
        lookups = _lookups(variables, sp_ids, sp_weights, combiners, use_low_frequency_filter, hotness)
    except (TypeError, ValueError) as error:
        rows = fail_on_all(error, variables, train, _CALLER, name)
    else:
        rows = look_up(lookups, train, name, wire_dtype=wire) if lookups else []
    return rows if several else rows[0]


def _lookups(
    variables: list[Any], sp_ids: Any, sp_weights: Any, combiners: Any, use_low_frequency_filter: bool, hotness: Any
) -> list[Lookup]:
    if _is_hotness(sp_weights):
        if hotness is not None:
            raise ValueError(f"{_CALLER}: hotness is given twice: {sp_weights!r} and {hotness!r}.")
        sp_weights, hotness = None, sp_weights
    count = len(variables)
    all_ids = _one_each(sp_ids, count, "sp_ids")
    all_weights = [None] * count if sp_weights is None else _one_each(sp_weights, count, "sp_weights")
    all_hotness = [None] * count if hotness is None else _one_each(hotness, count, "hotness")
    all_combiners = [None] * count if combiners is None else _one_each(combiners, count, "combiners")
    lookups = []
    for variable, ids, weights, most, combiner in zip(
        variables, all_ids, all_weights, all_hotness, all_combiners, strict=True
    ):
        table = exchange_table(variable, _CALLER)
        if combiner not in (None, *COMBINERS):
            raise ValueError(
                f"{_CALLER}: combiner of '{table.name}' must be one of {COMBINERS} or None, got {combiner!r}."
            )
        if most is not None and (not _is_integer(most) or most < 0):
            raise ValueError(f"{_CALLER}: hotness of '{table.name}' must be 0 or more, got {most!r}.")
        pooled, weight_segments = pooled_keys(ids, weights, table, _CALLER)
        lookups.append(
            Lookup(
                table,
                pooled,
                combiner or "mean",
                None if most is None else int(most),
                getattr(variable, "filter_ratio", 1.0) if use_low_frequency_filter else 1.0,
                weight_segments,
            )
        )
    return lookups


def _one_each(values: Any, count: int, what: str) -> list[Any]:
    is_list = isinstance(values, (list, tuple)) and not isinstance(values, tf.compat.v1.SparseTensorValue)
    listed = list(values) if is_list else [values]
    if len(listed) != count:
        raise ValueError(f"{_CALLER}: got {count} params and {len(listed)} {what}; give one for each.")
    return listed


def _is_hotness(values: Any) -> bool:
    """Whether what stands in the place of weights are numbers: the older form of the call."""
    if _is_integer(values):
        return True
    return isinstance(values, (list, tuple)) and len(values) > 0 and all(_is_integer(value) for value in values)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
