"""Evicting rows of key-value variables by policies, and what these go by: steps and epochs."""

from __future__ import annotations

import json
from typing import Any

import tensorflow as tf

from tfplugin.ops import raw
from tfplugin.policies import EVICTION_POLICIES, EvictionPolicy, KeepTop

#: 16 bits each: a rank is the two 64-bit words of what rows are ranked by and of the key.
_DIGITS = 8


class RowExpiry:
    """Methods of `KvVariable` and `PartitionedKvVariable`."""

    _kv_parts: tuple[Any, ...]
    _name: str

    def evict(self, policy: EvictionPolicy) -> tf.Tensor:
        """Removes the rows that a policy names, slots and all, and those that have expired.

        The table is read once, by all threads, while training may go on; `KeepTop` reads it some times more, and keeps
        the top rows of all parts together. New rows take the memory.

        Args:
          policy: one of `tfplugin.policies`' `ExpireAfterSteps`, `ExpireAfterSeconds`, `ExpireBelowNorm`,
            `ExpireBelowFrequency` and `KeepTop`.

        Returns:
          How many rows went: scalar int64. In a graph they go when it is run.

        Raises:
          TypeError: `policy` is none of these.
          tf.errors.FailedPreconditionError: `ExpireAfterSteps` on a table that does not count steps (see the argument
            `expiry` of `get_kv_variable`), or `ExpireAfterSeconds` on one that does.

        Example:
          >>> v = tfplugin.get_kv_variable("ad", embedding_dim=1)
          >>> _ = v.upsert([1, 2, 3], [[0.5], [3.0], [2.0]])
          >>> int(v.evict(tfplugin.policies.ExpireBelowNorm(1.0)))
          1
          >>> int(v.evict(tfplugin.policies.KeepTop(1, by="norm")))
          1
        """
        if not isinstance(policy, EVICTION_POLICIES):
            kinds = ", ".join(kind.__name__ for kind in EVICTION_POLICIES)
            raise TypeError(
                f"evict of key-value variable '{self._name}': the policy must be one of tfplugin.policies' {kinds}; "
                f"got {policy!r}."
            )
        search = tf.zeros([0], tf.int64)
        if isinstance(policy, KeepTop) and len(self._kv_parts) > 1:
            search = self._lowest_of_top(policy)
        said = json.dumps(policy.fields())
        return tf.add_n([raw.kv_table_evict(part.handle, search, policy=said) for part in self._kv_parts])

    def _lowest_of_top(self, policy: KeepTop) -> tf.Tensor:
        """The rank of the lowest row that all parts together keep; see KvTableCountRanks."""
        search = tf.constant([0, 0, 0, policy.rows], tf.int64)
        for _ in range(_DIGITS):
            counts = [raw.kv_table_count_ranks(part.handle, search, by=policy.by) for part in self._kv_parts]
            with tf.device("CPU:0"):
                search = raw.kv_table_search_ranks(search, tf.add_n(counts), by=policy.by)
        return search

    def step(self) -> tf.Tensor:
        """The step by which rows age: scalar int64.

        Raises:
          tf.errors.FailedPreconditionError: the variable has no policy `ExpireAfterSteps`.
        """
        steps = [raw.kv_table_step(part.handle, tf.constant(-1, tf.int64)) for part in self._kv_parts]
        return tf.reduce_max(tf.stack(steps))

    def set_step(self, step: Any) -> tf.Tensor:
        """Sets the step by which rows age. Updates of the variable go on counting from there.

        Args:
          step: scalar, not before the step that it is.

        Returns:
          The step: scalar int64. In a graph it is set when that is run.

        Raises:
          tf.errors.InvalidArgumentError: a step before the one that it is: steps do not go back.
          tf.errors.FailedPreconditionError: the variable has no policy `ExpireAfterSteps`.
        """
        step = tf.cast(step, tf.int64)
        with tf.control_dependencies([tf.debugging.assert_non_negative(step, message="set_step: a step is 0 or more")]):
            step = tf.identity(step)
        return tf.reduce_max(tf.stack([raw.kv_table_step(part.handle, step) for part in self._kv_parts]))

    def set_epoch(self, epoch: Any) -> tf.Operation | None:
        """Sets the epoch of the touches to come, of a variable that evicts by ``"epoch_lru"`` or ``"epoch_lfu"``.

        Args:
          epoch: scalar, 0 or more, which should only rise: rows last touched in a lower one are evicted first.

        Returns:
          The op (graph mode).

        Raises:
          tf.errors.FailedPreconditionError: the variable has no epochs.
        """
        epoch = tf.cast(epoch, tf.int64)
        return tf.group(*[raw.kv_table_set_epoch(part.handle, epoch) for part in self._kv_parts])
