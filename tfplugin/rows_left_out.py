"""Rows of a checkpoint that a table does not take: beyond its `max_capacity`, past their age, of its `padding_key`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin.ops import raw

_log = logging.getLogger("tfplugin")


class RowsLeftOut:
    """Tells how many of the rows that a table was given it has, and of the others in the log.

    Args:
      doing: what the log says first: who gives which rows.
      name: of the table.
      table: a key-value variable, in one part or many.
      keys: gives the keys of the rows, a chunk of [n] at a time, in the table's type; several times.
    """

    def __init__(self, doing: str, name: str, table: Any, keys: Callable[[], Iterator[np.ndarray]]) -> None:
        self._doing, self._name, self._keys = doing, name, keys
        self._parts = [part for part in table._kv_parts if part.holds_rows]
        self._key_dtype = table._kv_parts[0].key_dtype
        policies = table._kv_parts[0].policies
        self._padding_key = policies.padding_key
        self._capacity = sum(part.max_capacity for part in self._parts)
        self._expires = bool(policies.expiry)

    @property
    def any(self) -> bool:
        """Whether the table may leave out any; else there is nothing to count."""
        return self._capacity > 0 or self._expires or self._padding_key is not None

    def count_now(self) -> int:
        """How many are there: in eager mode."""
        given = there = padding = 0
        for keys in self._keys():
            for part in self._parts:
                own = keys[own_rows(part, keys)]
                given += len(own)
                there += int(tf.math.count_nonzero(_contains(part, own)))
                padding += self._padding(own)
        return self._told(given, there, padding)

    def count_in_graph(self) -> tf.Tensor:
        """The same, in a graph: counts when it is run."""
        if not self._parts:
            return tf.constant(0, tf.int64)
        counts = tf.unstack(tf.add_n([self._count_part(part) for part in self._parts]))
        told = tf.numpy_function(lambda *counted: np.int64(self._told(*map(int, counted))), counts, tf.int64)
        told.set_shape([])
        return told

    def _count_part(self, part: Any) -> tf.Tensor:
        """[3] of int64: how many of the keys belong to a part, how many it has, and how many are its padding_key."""
        stream = _KeyStream(part, self._keys, self._key_dtype)

        def body(_: Any, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            more, keys = tf.numpy_function(stream.next, [], [tf.bool, self._key_dtype])
            more.set_shape([])
            keys.set_shape([None])
            padding = tf.constant(0, tf.int64)
            if self._padding_key is not None:
                padding = tf.math.count_nonzero(tf.equal(keys, tf.constant(self._padding_key, self._key_dtype)))
            counted = tf.stack([tf.size(keys, tf.int64), tf.math.count_nonzero(_contains(part, keys)), padding])
            return more, counts + counted

        begun = tf.numpy_function(stream.begin, [], tf.bool)
        begun.set_shape([])
        none = tf.zeros([3], tf.int64)
        _, counts = tf.while_loop(lambda more, _: more, body, [begun, none], parallel_iterations=1)
        return counts

    def _padding(self, keys: np.ndarray) -> int:
        return 0 if self._padding_key is None else int(np.count_nonzero(keys == keys.dtype.type(self._padding_key)))

    def _told(self, given: int, there: int, padding: int) -> int:
        """The rows that are there; the log says where the others are, of which `padding` have the padding_key."""
        went = given - there - padding
        reasons = [f"{padding} has its padding_key, {self._padding_key}"] if padding else []
        if went:
            limit = [f"max_capacity={self._capacity}"] if self._capacity else []
            limit += ["its expiry"] if self._expires else []
            reasons.append(f"{went} went by {' or '.join(limit) or 'steps of training meanwhile'}")
        if reasons:
            _log.warning(
                "%s: %d of its %d rows are in key-value variable '%s': %s.",
                *(self._doing, there, given, self._name, ", ".join(reasons)),
            )
        return there


class _KeyStream:
    """The keys of one part, a chunk at each call, from the first one on after `begin`."""

    def __init__(self, part: Any, keys: Callable[[], Iterator[np.ndarray]], key_dtype: tf.DType) -> None:
        self._part, self._all, self._key_dtype = part, keys, key_dtype
        self._chunks: Iterator[np.ndarray] = iter(())

    def begin(self) -> np.ndarray:
        self._chunks = self._all()
        return np.bool_(True)  # type: ignore[return-value]

    def next(self) -> list[Any]:
        """Whether there is more, and keys."""
        keys = next(self._chunks, None)
        if keys is None:
            return [np.bool_(False), np.empty(0, self._key_dtype.as_numpy_dtype)]
        return [np.bool_(True), keys[own_rows(self._part, keys)]]


def own_rows(part: Any, keys: np.ndarray) -> np.ndarray | slice:
    """Which keys a part of a variable has."""
    from kvtools.partition import owners

    return slice(None) if part.parts == 1 else np.flatnonzero(owners(keys, part.parts, "floor_mod") == part.part)


def _contains(part: Any, keys: Any) -> Any:
    with tf.device(part.device or None):
        return raw.kv_table_contains(part.handle, keys)
