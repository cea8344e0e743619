"""Lookups over all ranks: keys go to the ranks that own them, and rows come back.

For any number of tables there is one exchange of keys, one of rows, and one more for the gradient of these. A rank that
finds something wrong with its own ids, or with how it is called, sends the error in place of keys, so that all ranks
fail, and none waits. What is looked up goes with the keys, as a hash: ranks that look up different tables fail, too. A
rank that cannot look up what it is asked for sends the error in place of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfplugin import ranks
from tfplugin.composed_pool import PooledIds
from tfplugin.fused_lookup import gather_for_ranks, gather_many, gather_or_error
from tfplugin.lookup import parts_of
from tfplugin.lookup_many import lookup_many
from tfplugin.ops import raw
from tfplugin.sok import exchange_gradients  # noqa: F401 - the gradients register themselves
from tfplugin.sok.exchange_error import error_to_all
from tfplugin.sok.exchange_table import ExchangeTable, exchange_table
from tfplugin.sok.exchange_types import travel_type
from tfplugin.sok.requirement import required
from tfplugin.sok.row_limit import within_limits


class Lookup(NamedTuple):
    """What is looked up in one table.

    Attributes:
      table: where.
      ids: [n], of int32, int64 or uint64, and how they make rows.
      combiner: ``"sum"``, ``"mean"`` or ``"sqrtn"``.
      hotness: the most ids that a row may have; None for any number.
      admission: the probability that training inserts a missing key; see `KvVariable.sparse_read`.
      weight_segments: of the weights, which must be those of the ids; None where they are the same tensor.
    """

    table: ExchangeTable
    ids: PooledIds
    combiner: str
    hotness: int | None = None
    admission: float = 1.0
    weight_segments: tf.Tensor | None = None


def look_up(
    lookups: Sequence[Lookup],
    train: bool,
    name: str | None = None,
    error: str | None = None,
    wire_dtype: tf.DType | None = None,
    refused: tuple[tf.Tensor, str] | None = None,
) -> list[tf.Tensor]:
    """Rows of the ids of each lookup, combined: [rows of its ids, dim]. With an `error` it fails on all ranks.

    `wire_dtype` is what float32 rows, and their gradients, travel in. `refused` is an error that only the run of a
    graph can tell: whether this rank has it, and what it says.
    """
    world = ranks.current()
    refusals = [one for one in (refused, world.refusal()) if one is not None]
    if world.size == 1 and all(_is_local(one) for one in lookups):
        with tf.control_dependencies([tf.debugging.Assert(~is_so, [text]) for is_so, text in refusals]):
            return _look_up_here(lookups, train, name)
    tables = [one.table for one in lookups]
    wide = _widest([table.dtype for table in tables])
    travel = travel_type(wide, wire_dtype, world.size)
    how = _How(lookups, tf.float64 if wide == tf.float64 else tf.float32)
    names = [name] if name else []
    with tf.device("CPU:0"):
        message, splits, places = raw.kv_exchange_request(
            [one.ids.keys for one in lookups],
            *how.inputs,
            how.weight_segments,
            rank=world.rank,
            ranks=world.size,
            names=[table.name for table in tables],
            owners=[table.owner for table in tables],
            rows=[table.rows for table in tables],
            key_dtypes=[table.key_dtype for table in tables],
            hotness=[-1 if one.hotness is None else one.hotness for one in lookups],
            lookup=_told(lookups, train, travel),
            **how.attributes,
        )
        if error is not None:
            of_error, splits = error_to_all(error)
            # The first word is 0. Of constants alone TensorFlow would run the exchange while it builds the graph.
            message = of_error + message[0]
        for is_so, text in refusals:
            of_ids, told = (message, splits), f"rank {world.rank}: {text}"
            message, splits = tf.cond(is_so, functools.partial(error_to_all, told), functools.partial(tuple, of_ids))
        received, received_splits = world.alltoall(message, splits, ranks.exchange_name("keys", names))
        keys, counts = raw.kv_exchange_serve(
            received,
            received_splits,
            Tout=[table.key_dtype for table in tables],
            ranks=world.size,
            local=[not table.is_dynamic and table.owner < 0 for table in tables],
        )
        if train:
            keys = within_limits(tables, keys, names)
    reply, reply_splits = _reply(lookups, keys, counts, train, wide, travel)
    with tf.device("CPU:0"):
        flat, came = world.alltoall_in_place(reply, reply_splits, ranks.exchange_name("rows", names))
        if world.size > 1:
            flat = _checked(flat, raw.kv_exchange_check(message, splits, flat, came, T=len(tables), dims=how.dims))
        pooled = raw.kv_exchange_pool(
            flat,
            places,
            *how.inputs,
            dtype=wide,
            Twire=reply.dtype,
            combiners=[one.combiner for one in lookups],
            **how.attributes,
        )
        return [_cast(one, table.dtype) for one, table in zip(pooled, tables, strict=True)]


class _How:
    """How ids make rows: what several of the ops take."""

    def __init__(self, lookups: Sequence[Lookup], weights_dtype: tf.DType) -> None:
        ids = [one.ids for one in lookups]
        weighted = [one for one in lookups if one.ids.weights is not None]
        self.weight_segments = []
        if any(one.weight_segments is not None for one in weighted):
            self.weight_segments = [
                one.ids.segments if one.weight_segments is None else one.weight_segments for one in weighted
            ]
        self.inputs = (
            [one.segments for one in ids],
            [one.shape for one in ids if one.shape is not None],
            [_cast(one.weights, weights_dtype) for one in ids if one.weights is not None],
        )
        self.dims = [one.table.dim for one in lookups]
        self.attributes: dict[str, Any] = {
            "dims": self.dims,
            "outer": [-1 if one.shape is None else one.outer for one in ids],
            "weighted": [one.weights is not None for one in ids],
        }


def _told(lookups: Sequence[Lookup], train: bool, travel: tf.DType) -> str:
    """What is looked up, which must be the same on all ranks: a line for the whole, and one for each table."""
    lines = [f"{'a training' if train else 'an inference'} lookup whose rows travel as {travel.name}"]
    for one in lookups:
        table = one.table
        rows = f"{table.key_dtype.name} keys" if table.is_dynamic else f"{table.rows} rows"
        if table.row_limit >= 0:
            rows += f", at most {table.row_limit} on a rank"
        where = "on all ranks" if table.owner < 0 else f"on rank {table.owner}"
        admitted = "" if one.admission == 1.0 else f", {one.admission} of new keys admitted"
        lines.append(f"'{table.name}' ({rows}, dim {table.dim}, {table.dtype.name}, {where}, {one.combiner}{admitted})")
    return "\n".join(lines)


def _is_local(lookup: Lookup) -> bool:
    """Whether the ops for tables of one process do it."""
    return lookup.table.is_plain(lookup.ids.keys.dtype) and lookup.hotness is None and lookup.admission == 1.0


def _look_up_here(lookups: Sequence[Lookup], train: bool, name: str | None) -> list[tf.Tensor]:
    def with_values(ids: PooledIds, values: tf.Tensor) -> Any:
        if ids.shape is None:
            return tf.RaggedTensor.from_row_splits(values, ids.segments, validate=False)
        return tf.SparseTensor(ids.segments, values, ids.shape)

    rows: list[tf.Tensor] = lookup_many(
        [one.table.variable for one in lookups],
        [with_values(one.ids, one.ids.keys) for one in lookups],
        weights=[None if one.ids.weights is None else with_values(one.ids, _weights_of_shape(one)) for one in lookups],
        combiners=[one.combiner for one in lookups],
        training=train,
        name=name,
    )
    return rows


def _weights_of_shape(lookup: Lookup) -> tf.Tensor:
    """The weights, once they have been seen to lie where the ids do."""
    theirs, mine = lookup.weight_segments, lookup.ids.segments
    if theirs is None:
        return lookup.ids.weights
    # Shapes by themselves: Equal broadcasts, and of shapes that do not is False.
    same = tf.reduce_all(tf.equal(tf.shape(theirs), tf.shape(mine)))
    same &= tf.reduce_all(tf.raw_ops.Equal(x=theirs, y=mine, incompatible_shape_error=False))
    kind = "row splits" if lookup.ids.shape is None else "indices"
    told = tf.strings.format(
        f"'{lookup.table.name}': weights are of another shape than the ids: their {kind} are {{}}, and {{}}",
        (theirs, mine),
    )
    with required(same, told):
        return tf.identity(lookup.ids.weights)


def _reply(
    lookups: Sequence[Lookup],
    keys: Sequence[tf.Tensor],
    counts: tf.Tensor,
    train: bool,
    wide: tf.DType,
    travel: tf.DType,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows of the keys, put together for each rank in the type in which they travel, and how much each gets."""
    if ranks.size() > 1 and _share_an_op(lookups, train):
        parts = [parts_of(one.table.variable) for one in lookups]
        return gather_for_ranks(parts, keys, counts, train, Tflat=travel)
    errors: list[tf.Tensor] = []
    try:
        rows = _rows_of_this_rank(lookups, keys, train, errors)
    except Exception as error:  # eager: the others wait for the rows
        if ranks.size() == 1:
            raise
        rows = [tf.zeros([tf.size(k), one.table.dim], wide) for one, k in zip(lookups, keys, strict=True)]
        errors = [_code_and_message(error)]
    with tf.device("CPU:0"):
        dims = [one.table.dim for one in lookups]
        flat, splits = raw.kv_exchange_reply([_cast(one, wide) for one in rows], counts, dims=dims, Tflat=travel)
        if errors:
            flat, splits = raw.kv_exchange_tell(flat, splits, counts, errors, T=len(dims), dims=dims)
    return flat, splits


def _code_and_message(error: Exception) -> tf.Tensor:
    """An error as KvExchangeTell wants it; see kernels/tensorflow/reply_error.h."""
    if isinstance(error, tf.errors.OpError):
        return tf.constant(bytes([error.error_code]) + str(error.message).encode())
    return tf.constant(bytes([tf.errors.UNKNOWN]) + f"{type(error).__name__}: {error}".encode())


def _checked(rows: tf.Tensor, check: tf.Operation | None) -> tf.Tensor:
    """The rows, once `check` has run; in eager mode it has."""
    if check is None:
        return rows
    with tf.control_dependencies([check]):
        return tf.identity(rows)


def _share_an_op(lookups: Sequence[Lookup], train: bool) -> bool:
    """Whether one op can look all up: key-value tables in host memory that have their dtypes in common."""
    if not all(one.table.is_dynamic and one.table.read is None for one in lookups):
        return False
    if train and any(one.admission < 1.0 for one in lookups):
        return False
    parts = [parts_of(one.table.variable)[0] for one in lookups]
    if any("GPU" in (part.device or "") for part in parts):
        return False
    places = {"" if part._eager else part.device for part in parts}
    return len(places) == len({(one.table.key_dtype, one.table.dtype) for one in lookups}) == 1


def _rows_of_this_rank(
    lookups: Sequence[Lookup], keys: Sequence[tf.Tensor], train: bool, errors: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Rows [n, dim] of the keys, or numbers of local rows, of each table; on several ranks also `errors`, if any.

    Key-value tables share an op where they have their dtypes in common, unless they admit only some keys.
    """
    tables = [one.table for one in lookups]
    rows: list[Any] = [None] * len(tables)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for t, (table, wanted) in enumerate(zip(tables, keys, strict=True)):
        if table.read is not None:
            rows[t] = table.read(wanted)
        elif table.is_dynamic and train and lookups[t].admission < 1.0:
            rows[t] = table.variable.sparse_read(wanted, training=True, admission=lookups[t].admission)
        elif table.is_dynamic:
            part = parts_of(table.variable)[0]
            groups.setdefault((table.key_dtype, table.dtype, "" if part._eager else part.device), []).append(t)
        else:
            rows[t] = table.variable.sparse_read(wanted)
    for members in groups.values():
        parts, wanted = [parts_of(tables[t].variable) for t in members], [keys[t] for t in members]
        if ranks.size() == 1:
            found = gather_many(parts, wanted, train)
        else:
            found, error = gather_or_error(parts, wanted, train)
            errors.append(error)
        for t, one in zip(members, found, strict=True):
            rows[t] = one
    return rows


def fail_on_all(
    error: Exception, variables: Sequence[Any], train: bool, caller: str, name: str | None = None
) -> list[tf.Tensor]:
    """What a lookup does that cannot be made on this rank: the others, who can make it, must not wait for it.

    On a single rank, and in eager mode once the others know, `error` is raised. In a graph it cannot be told before the
    graph runs, as only then do the others listen: the lookup gets built, with no ids, and fails on all ranks when run.

    Args:
      error: what is wrong.
      variables: what is looked up: there is a result for each.
      train, name: as for `look_up`.
      caller: for messages.
    """
    world = ranks.current()
    if world.size == 1:
        raise error
    text = f"rank {world.rank}: {type(error).__name__}: {error}"
    if tf.executing_eagerly():
        with tf.device("CPU:0"):
            world.alltoall(*error_to_all(text), ranks.exchange_name("keys", [name] if name else []))
        raise error
    try:
        tables = [exchange_table(variable, caller) for variable in variables]
    except (TypeError, ValueError):
        raise error from None  # the results would have no shape
    return look_up([Lookup(table, _no_ids(table), "sum") for table in tables], train, name, text)


def of_shape(rows: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Rows that `fail_on_all` gave to a graph, of the shape that what is computed from them expects."""
    shaped = tf.reshape(rows, tf.compat.v1.placeholder_with_default(tf.shape(rows), [None]))
    shaped.set_shape(shape)
    return shaped


def _no_ids(table: ExchangeTable) -> PooledIds:
    """A batch of no samples, of which a graph knows no size: what is computed from the rows must fit any."""
    row_splits = tf.compat.v1.placeholder_with_default(tf.constant([0], tf.int64), [None])
    return PooledIds(tf.zeros([0], table.key_dtype), row_splits, None, 1, None, False, None)


def _cast(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)


def _widest(dtypes: Sequence[tf.DType]) -> tf.DType:
    """The dtype that rows of all tables travel in."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return tf.float64 if tf.float64 in dtypes else tf.float32
