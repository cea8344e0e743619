"""Rows of a checkpoint that a table does not take: beyond its `max_capacity`, past their age, of its `padding_key`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin.ops import raw

_log = logging.getLogger("tfplugin")


class RowsLeftOut:
    """What a table may leave out of the rows that it is given, and what is told of it.

    Args:
      doing: what the message begins with: who gives which rows.
      name: of the table.
      table: a key-value variable, in one part or many.
    """

    def __init__(self, doing: str, name: str, table: Any) -> None:
        part = table._kv_parts[0]
        self._doing, self._name = doing, name
        self._padding_key = part.policies.padding_key
        self._capacity = sum(part.max_capacity for part in table._kv_parts if part.holds_rows)
        self._expires = bool(part.policies.expiry)

    @property
    def any(self) -> bool:
        """Whether the table may leave out any."""
        return self._capacity > 0 or self._expires or self._padding_key is not None

    def padding(self, keys: np.ndarray) -> int:
        """How many of the keys are the one that never has a row."""
        return 0 if self._padding_key is None else int(np.count_nonzero(keys == keys.dtype.type(self._padding_key)))

    def told(self, given: int, there: int, padding: int) -> int:
        """How many of the rows that were given are there; the log says where the others are, of which `padding` have
        the padding_key."""
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

    def counted(self, parts: Iterable[Any], keys: Iterable[np.ndarray]) -> int:
        """`told`, of keys that have been given to the parts of a table: in eager mode."""
        parts = list(parts)
        given = there = padding = 0
        for chunk in keys:
            given += len(chunk)
            padding += self.padding(chunk)
            for part in parts:
                there += int(tf.math.count_nonzero(contains(part, chunk[own_rows(part, chunk)])))
        return self.told(given, there, padding)


def own_rows(part: Any, keys: np.ndarray) -> np.ndarray | slice:
    """Which keys a part of a variable has."""
    from kvtools.partition import owners

    return slice(None) if part.parts == 1 else np.flatnonzero(owners(keys, part.parts, "floor_mod") == part.part)


def contains(part: Any, keys: Any) -> Any:
    """Whether a part has rows of keys."""
    with tf.device(part.device or None):
        return raw.kv_table_contains(part.handle, keys)
