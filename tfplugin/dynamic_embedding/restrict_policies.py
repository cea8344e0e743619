"""What `Variable.restrict` goes by: policies that note which keys are trained, and remove those that matter least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kvtools.status_names import status_table
from tfplugin.dynamic_embedding.sharded_table import ShardedTable


class RestrictPolicy:
    """The base of policies. A subclass overrides `apply_update`, `apply_restriction` and `status`.

    Args:
      var: the `Variable` to restrict.

    Attributes:
      var: as it was given.
      params_in_slots: the slots of the optimizers that have trained it, each a `SlotVariable`. They lie in the rows
        of `var` and go with them.
    """

    def __init__(self, var: ShardedTable) -> None:
        self.var = var
        self.params_in_slots: list[Any] = []

    def apply_update(self, ids: tf.Tensor) -> Any:
        """Notes that an optimizer has updated `ids` [n], each once. Returns the op (graph mode)."""
        raise NotImplementedError(f"{type(self).__name__} has no apply_update.")

    def apply_restriction(self, num_reserved: int, **kwargs: Any) -> Any:
        """Removes rows of `var` until `num_reserved` are left. Returns the op (graph mode)."""
        raise NotImplementedError(f"{type(self).__name__} has no apply_restriction.")

    @property
    def status(self) -> Any:
        """A `Variable` with what the policy knows of each key, saved with `var`; or None."""
        return None

    def track_slots(self, slots: Sequence[Any]) -> None:
        """Adds to `params_in_slots` those that are not in it."""
        names = {slot.name for slot in self.params_in_slots}
        self.params_in_slots += [slot for slot in slots if slot.name not in names]


class _StatusPolicy(RestrictPolicy):
    """Keeps an int32 for each key, and removes the keys whose number is lowest."""

    _kind = ""

    def __init__(self, var: ShardedTable) -> None:
        super().__init__(var)
        self._status = var.like(status_table(var.name, self._kind), tf.int32, 1)
        self._status.status_of = var

    @property
    def status(self) -> ShardedTable:
        """The number of each key: int32, dim 1."""
        return self._status

    def apply_restriction(self, num_reserved: int, **kwargs: Any) -> Any:
        """Removes the keys of the lowest status from the variable, its slots and the status.

        Args:
          num_reserved: how many rows to keep: at least as many as there are tables, of which each keeps its share,
            rounded down; or 0, which removes all.
          kwargs: ``trigger``: nothing is done unless there are more rows than that. Default: `num_reserved`.

        Returns:
          The op (graph mode).

        Raises:
          TypeError: a number that is no int.
          ValueError: a negative number; one below the number of tables, whose shares would be 0.
        """
        trigger = kwargs.get("trigger", num_reserved)
        for what, number in (("num_reserved", num_reserved), ("trigger", trigger)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"restrict of {self.var!r}: {what} must be an int, got {number!r}.")
        if num_reserved < 0:
            raise ValueError(f"restrict of {self.var!r}: num_reserved must be 0 or more, got {num_reserved}.")
        tables = self.var.shard_num
        if 0 < num_reserved < tables:
            raise ValueError(
                f"restrict of {self.var!r}: num_reserved={num_reserved} is less than its {tables} tables, of which "
                f"each keeps its share, rounded down: all rows would go. Keep {tables} or more; 0 removes all."
            )
        kept = num_reserved // tables
        return tf.cond(
            tf.greater(self.var.size(), trigger), lambda: tf.group(self._restrict_tables(kept)), lambda: tf.no_op()
        )

    def _restrict_tables(self, kept: int) -> list[Any]:
        removed = []
        for table, status in zip(self.var.tables, self._status.tables, strict=True):
            keys, rows = status.export()
            # A key that nobody trained has no status, and goes first.
            unknown, _ = table.export()
            unknown = tf.boolean_mask(unknown, ~status.contains(unknown))
            there = table.contains(keys)
            keys, rows = tf.boolean_mask(keys, there), tf.boolean_mask(rows, there)
            excess = tf.maximum(tf.size(keys) + tf.size(unknown) - kept, 0)
            order = tf.argsort(rows[:, 0], stable=True)
            lowest = tf.gather(tf.concat([unknown, tf.gather(keys, order)], 0), tf.range(excess))
            removed += [table.remove(lowest), status.remove(lowest)]
        return [op for op in removed if op is not None]


class TimestampRestrictPolicy(_StatusPolicy):
    """Removes the rows that were updated longest ago. The status of a key is the Unix time of its latest update."""

    _kind = "timestamp"

    @property
    def tstp_var(self) -> ShardedTable:
        """`status`, as TFRA calls it."""
        return self._status

    def apply_update(self, ids: tf.Tensor) -> Any:
        """Sets the time of `ids` to now."""
        ids = tf.reshape(ids, [-1])
        now = tf.cast(tf.timestamp(), tf.int32)
        return self._status.upsert(ids, tf.fill([tf.size(ids), 1], now))


class FrequencyRestrictPolicy(_StatusPolicy):
    """Removes the rows that were updated least often. The status of a key is the number of its updates."""

    _kind = "frequency"

    @property
    def freq_var(self) -> ShardedTable:
        """`status`, as TFRA calls it."""
        return self._status

    def apply_update(self, ids: tf.Tensor) -> Any:
        """Adds 1 to the count of each of `ids`, however often it is in them."""
        unique, _ = tf.unique(tf.reshape(ids, [-1]))
        ones = tf.ones([tf.size(unique), 1], tf.int32)
        added = []
        tables = self._status.tables
        parts = [[unique, ones]] if len(tables) == 1 else self._status.split(unique, ones)
        for table, (keys, counts, *_) in zip(tables, parts, strict=True):
            added.append(table.add(keys, counts))
        return tf.group(*[op for op in added if op is not None])
