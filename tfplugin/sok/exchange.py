"""Lookups over all ranks: keys go to the ranks that own them, and rows come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfplugin.composed_pool import PooledIds, bags_of, pool
from tfplugin.fused_lookup import gather_many
from tfplugin.lookup import parts_of
from tfplugin.ops import raw
from tfplugin.sok import ranks
from tfplugin.sok.exchange_table import ExchangeTable


class Lookup(NamedTuple):
    """What is looked up in one table.

    Attributes:
      table: where.
      ids: [n] and how they make rows; a plain lookup has no segments.
      combiner: ``"sum"``, ``"mean"`` or ``"sqrtn"``; None for a plain lookup.
      hotness: the most ids that a row may have; None for any number.
      admission: the share of new keys that are admitted; 1 for all.
    """

    table: ExchangeTable
    ids: PooledIds
    combiner: str | None
    hotness: int | None = None
    admission: float = 1.0


def look_up(lookups: Sequence[Lookup], train: bool) -> list[tf.Tensor]:
    """Rows of each lookup: [rows of its ids, dim] combined, or [n, dim]. One exchange of keys, and one of rows."""
    world = ranks.current()
    size = world.size
    tables = [one.table for one in lookups]
    keys, counts, places = [], [], []
    for table, ids, *_ in lookups:
        unique, which = tf.unique(ids.keys)
        if table.owner < 0:
            owners = raw.kv_table_partition(unique, parts=size)
        else:
            owners = tf.fill(tf.shape(unique), table.owner)
        order = tf.argsort(owners, stable=True)
        keys.append(_to_int64(tf.gather(unique, order)))
        counts.append(tf.math.bincount(owners, minlength=size, maxlength=size))
        places.append(tf.gather(tf.math.invert_permutation(order), which))
    counts_by_rank = tf.cast(tf.stack(counts, axis=1), tf.int64)  # [size, tables]
    shares = [tf.split(one, count, num=size) for one, count in zip(keys, counts, strict=True)]
    message = tf.concat([part for r in range(size) for part in (counts_by_rank[r], *(share[r] for share in shares))], 0)
    splits = len(tables) + tf.reduce_sum(counts_by_rank, 1)
    received, received_splits = world.alltoall(message, tf.cast(splits, tf.int32), ranks.unique_name("keys"))

    asked: list[list[tf.Tensor]] = [[] for _ in tables]  # by table and rank
    asked_counts = []
    for part in tf.split(received, received_splits, num=size):
        asked_counts.append(part[: len(tables)])
        for share, one in zip(asked, tf.split(part[len(tables) :], asked_counts[-1], num=len(tables)), strict=True):
            share.append(one)
    rows = _local_rows(tables, [tf.concat(share, 0) for share in asked], train)

    wide = _widest([table.dtype for table in tables])
    row_shares = [
        tf.split(tf.cast(one, wide), [count[t] for count in asked_counts], num=size) for t, one in enumerate(rows)
    ]
    reply = tf.concat([tf.reshape(share[r], [-1]) for r in range(size) for share in row_shares], 0)
    dims = tf.constant([table.dim for table in tables], tf.int64)
    reply_splits = tf.stack([tf.reduce_sum(count * dims) for count in asked_counts])
    vectors, vector_splits = world.alltoall(reply, tf.cast(reply_splits, tf.int32), ranks.unique_name("rows"))

    found: list[list[tf.Tensor]] = [[] for _ in tables]
    for r, part in enumerate(tf.split(vectors, vector_splits, num=size)):
        sizes = counts_by_rank[r] * dims
        for share, one, table in zip(found, tf.split(part, sizes, num=len(tables)), tables, strict=True):
            share.append(tf.reshape(one, [-1, table.dim]))
    return [
        tf.cast(_combined(tf.concat(share, 0), place, one), one.table.dtype)
        for share, place, one in zip(found, places, lookups, strict=True)
    ]


def _combined(rows: tf.Tensor, places: tf.Tensor, lookup: Lookup) -> tf.Tensor:
    if lookup.combiner is None:
        return tf.gather(rows, places)
    return pool(rows, places, bags_of(lookup.ids._replace(keys=places)), lookup.combiner)


def _local_rows(tables: Sequence[ExchangeTable], keys: Sequence[tf.Tensor], train: bool) -> list[tf.Tensor]:
    """Rows of keys that this rank owns. Key-value tables that have their dtypes in common share an op."""
    rows: list[tf.Tensor | None] = [None] * len(tables)
    groups: dict[tuple[tf.DType, tf.DType, str], list[int]] = {}
    for t, (table, wanted) in enumerate(zip(tables, keys, strict=True)):
        if table.is_dynamic:
            parts = parts_of(table.variable)
            groups.setdefault((table.key_dtype, table.dtype, "" if parts[0]._eager else parts[0].device), []).append(t)
        else:
            local = wanted // ranks.size() if table.owner < 0 else wanted
            rows[t] = table.variable.sparse_read(local)
    for (key_dtype, *_), members in groups.items():
        found = gather_many(
            [parts_of(tables[t].variable) for t in members], [_from_int64(keys[t], key_dtype) for t in members], train
        )
        for t, one in zip(members, found, strict=True):
            rows[t] = one
    return rows


def _to_int64(keys: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(keys, tf.int64) if keys.dtype == tf.uint64 else tf.cast(keys, tf.int64)


def _from_int64(keys: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.bitcast(keys, dtype) if dtype == tf.uint64 else tf.cast(keys, dtype)


def _widest(dtypes: Sequence[tf.DType]) -> tf.DType:
    """The dtype that rows of all tables travel in."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return tf.float64 if tf.float64 in dtypes else tf.float32
