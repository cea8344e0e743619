"""Tables that may have so many rows and no more: a lookup that would add others fails on all ranks, and adds none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfplugin import ranks
from tfplugin.sok.exchange_table import ExchangeTable
from tfplugin.sok.requirement import required


def within_limits(
    tables: Sequence[ExchangeTable], keys: Sequence[tf.Tensor], names: Sequence[str] = ()
) -> list[tf.Tensor]:
    """The keys of each table, once every rank has said that it has room for those that are new.

    That is one more exchange, of a number for each table with a limit; without such tables there is none.

    Raises:
      tf.errors.InvalidArgumentError: when it is run, on every rank, where any has no room.
    """
    limited = [t for t, table in enumerate(tables) if table.row_limit >= 0]
    if not limited:
        return list(keys)
    mine = tf.stack([_too_many(tables[t], keys[t]) for t in limited])
    of_ranks = ranks.numbers_of_all(mine, ranks.exchange_name("room", names))
    told = tf.strings.join([_told(tables[t], of_ranks[:, column]) for column, t in enumerate(limited)])
    with required(tf.reduce_all(of_ranks == 0), told):
        return [tf.identity(one) for one in keys]


def _too_many(table: ExchangeTable, keys: tf.Tensor) -> tf.Tensor:
    """How many rows too many the table of this rank would have with these keys, [n]: int64."""
    variable: Any = table.variable
    room = table.row_limit - variable.size[0]

    def new() -> tf.Tensor:
        absent = tf.boolean_mask(keys, ~variable.contains(keys))
        return tf.maximum(tf.size(tf.unique(absent).y, out_type=tf.int64) - room, 0)

    # Far from the limit nothing is looked up for it.
    return tf.cond(tf.size(keys, out_type=tf.int64) > room, new, lambda: tf.constant(0, tf.int64))


def _told(table: ExchangeTable, too_many: tf.Tensor) -> tf.Tensor:
    """What is said of a table, empty where all ranks have room. `too_many` are [ranks]."""

    def text() -> tf.Tensor:
        rank = tf.argmax(too_many)
        return tf.strings.join(
            [
                f"'{table.name}' may have {table.row_limit:,} rows on a rank. With the new keys of this batch rank ",
                tf.strings.as_string(rank),
                " would have ",
                tf.strings.as_string(too_many[rank]),
                " more: no key was added on any rank. Make max_vocabulary_size_per_gpu larger. ",
            ]
        )

    return tf.cond(tf.reduce_any(too_many > 0), text, lambda: tf.constant(""))
