"""Lookups of several tables, or of several parts of one, in a single op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.eager import context

from tfplugin import float32_lookups, step_record
from tfplugin.composed_pool import PooledIds
from tfplugin.ops import raw
from tfplugin.placement import on_device_of


class Table(Protocol):
    """What a lookup asks of a table: of a `KvVariable`, or of what stands for one."""

    handle: tf.Tensor
    dtype: tf.DType
    dim: int
    device: str
    trainable: bool
    regularizer: Any
    _eager: bool
    _task: str
    _backward_token: str

    def _op_device(self) -> str | None: ...


def can_fuse(parts: Sequence[Table], train: bool) -> bool:
    """Whether one op can look the parts up.

    Not when they are on several devices, nor when a regularizer wants to see each part's rows (training in a graph).
    """
    if train and parts[0].regularizer is not None and not context.executing_eagerly():
        return False
    if len(parts) == 1:
        return True
    # In eager mode an op takes tables of any device of its process.
    return len({part._task if part._eager else part.device for part in parts}) == 1


def _note_lookups(tables: Sequence[Sequence[Table]], train: bool) -> None:
    for parts in tables:
        for part in parts:
            step_record.note_lookup(part, train)


def _tokens(tables: Sequence[Sequence[Table]]) -> list[str]:
    tokens = [part._backward_token for parts in tables for part in parts]
    return tokens if any(tokens) else []


def _attributes(tables: Sequence[Sequence[Table]], train: bool, missing: str = "zeros") -> dict[str, Any]:
    """What every op that gathers rows is told of the tables and of the lookup."""
    return {
        "parts": [len(parts) for parts in tables],
        "dims": [parts[0].dim for parts in tables],
        "mode": "train" if train else missing,
        "remember": train and any(parts[0].trainable for parts in tables),
        "in_backward": _tokens(tables),
    }


def gather_many(
    tables: Sequence[Sequence[Table]],
    keys: Sequence[tf.Tensor],
    train: bool,
    missing: str = "zeros",
    name: str | None = None,
    output_dtype: tf.DType | None = None,
) -> list[tf.Tensor]:
    """Rows of ``keys[t]`` out of table t, each ``[*keys[t].shape, dim]``.

    All parts of all tables share device, key dtype and value dtype. `output_dtype` as of `KvVariable.sparse_read`,
    checked.
    """
    _note_lookups(tables, train)
    first = tables[0][0]
    dtype = output_dtype or first.dtype
    for parts in tables:
        float32_lookups.note(parts, dtype)
    with on_device_of(first):
        rows, _ = raw.kv_table_gather_many(
            [part.handle for parts in tables for part in parts],
            list(keys),
            dtype=dtype,
            **_attributes(tables, train, missing),
            name=name,
        )
    return rows


def gather_or_error(
    tables: Sequence[Sequence[Table]], keys: Sequence[tf.Tensor], train: bool
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """As `gather_many`; what fails does not raise, but is told in a scalar string for KvExchangeTell, else empty."""
    _note_lookups(tables, train)
    first = tables[0][0]
    with on_device_of(first):
        found = raw.kv_exchange_look_up(
            [part.handle for parts in tables for part in parts],
            list(keys),
            dtype=first.dtype,
            **_attributes(tables, train),
        )
    return found.rows, found.error


def gather_for_ranks(
    tables: Sequence[Sequence[Table]],
    keys: Sequence[tf.Tensor],
    counts: tf.Tensor,
    train: bool,
    **flat: Any,
) -> tuple[tf.Tensor, tf.Tensor]:
    """As `gather_many`, into the buffer of an exchange; and how many of its elements are for each rank. Where the
    lookup fails it raises nothing: the buffer tells all ranks of it.

    All tables are in host memory. `counts` [ranks, tables] says how many keys of a table are a rank's; `flat` are the
    attributes that say of what the buffer is.
    """
    _note_lookups(tables, train)
    first = tables[0][0]
    with on_device_of(first):
        found = raw.kv_exchange_gather(
            [part.handle for parts in tables for part in parts],
            list(keys),
            counts,
            dtype=first.dtype,
            **_attributes(tables, train),
            **flat,
        )
    return found.flat, found.splits


def pool_many(
    tables: Sequence[Sequence[Table]],
    ids: Sequence[PooledIds],
    combiners: Sequence[str],
    train: bool,
    name: str | None = None,
    missing: str = "zeros",
) -> list[tf.Tensor]:
    """Rows of ``ids[t]`` out of table t, combined: each [rows of ids[t], dim]. Tables as in `gather_many`."""
    _note_lookups(tables, train)
    first = tables[0][0]
    # What the op computes with.
    weights_dtype = tf.float64 if first.dtype == tf.float64 else tf.float32
    weights = [one.weights for one in ids if one.weights is not None]
    weights = [w if w.dtype == weights_dtype else tf.cast(w, weights_dtype) for w in weights]
    with on_device_of(first):
        return raw.kv_table_pool(
            [part.handle for parts in tables for part in parts],
            [one.keys for one in ids],
            [one.segments for one in ids],
            [one.shape for one in ids if one.shape is not None],
            weights,
            [one.fill for one in ids if one.fill is not None],
            dtype=first.dtype,
            parts=[len(parts) for parts in tables],
            dims=[parts[0].dim for parts in tables],
            combiners=list(combiners),
            outer=[-1 if one.shape is None else one.outer for one in ids],
            weighted=[one.weights is not None for one in ids],
            positive=[one.positive for one in ids],
            filled=[one.fill is not None for one in ids],
            mode="train" if train else missing,
            in_backward=_tokens(tables),
            name=name,
        )
