"""Bounded tables under the names of HierarchicalKV: `HkvHashTableCreator` and what it makes.

The engine evicts by the time of the last touch itself. Frequencies and scores of a user's own are set after each write,
before the next one evicts by them.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin.dynamic_embedding.creators import EngineTableCreator
from tfplugin.dynamic_embedding.python_ops import python_op
from tfplugin.dynamic_embedding.sharded_table import ShardedTable
from tfplugin.dynamic_embedding.table import CuckooHashTable
from tfplugin.ops import raw
from tfplugin.placement import on_device_of

_log = logging.getLogger("tfplugin")

INIT_CAPACITY = MAX_CAPACITY = 1 << 20
MAX_HBM_FOR_VALUES = 1 << 30


@enum.unique
class HkvEvictStrategy(enum.IntEnum):
    """Which rows go first when a table is full.

    LRU: those that were written or trained longest ago. LFU: those that were written or trained least often.
    EPOCHLRU, EPOCHLFU: those of earlier epochs, then as LRU and LFU. CUSTOMIZED: those of the lowest score.
    """

    LRU = 0
    LFU = 1
    EPOCHLRU = 2
    EPOCHLFU = 3
    CUSTOMIZED = 4


class HkvHashTableConfig:
    """What an `HkvHashTableCreator` makes.

    Args:
      init_capacity: rows that each table makes room for.
      max_capacity: the most rows that a batch leaves behind in each table.
      max_hbm_for_values: not used: tables are in host memory.
      evict_strategy: an `HkvEvictStrategy`.
      step_per_epoch: writes in an epoch, of a table; 0: there is one epoch.
      gen_scores_fn: function of keys [n] that gives their scores, integers of 0 or more [n]: for ``CUSTOMIZED``.
      reserved_key_start_bit: not used: any key can be stored.

    Raises:
      ValueError: a capacity that is none, a strategy that is none, or no `gen_scores_fn` for ``CUSTOMIZED``.
    """

    def __init__(
        self,
        init_capacity: int = INIT_CAPACITY,
        max_capacity: int = MAX_CAPACITY,
        max_hbm_for_values: int = MAX_HBM_FOR_VALUES,
        evict_strategy: HkvEvictStrategy = HkvEvictStrategy.LRU,
        step_per_epoch: int = 0,
        gen_scores_fn: Callable[[tf.Tensor], Any] | None = None,
        reserved_key_start_bit: int = 0,
    ) -> None:
        for what, number, least in (
            ("init_capacity", init_capacity, 0),
            ("max_capacity", max_capacity, 1),
            ("step_per_epoch", step_per_epoch, 0),
        ):
            if isinstance(number, bool) or int(number) != number or number < least:
                raise ValueError(f"HkvHashTableConfig: {what} must be a number of {least} or more, got {number!r}.")
        if evict_strategy not in list(HkvEvictStrategy):
            raise ValueError(f"HkvHashTableConfig: evict_strategy must be an HkvEvictStrategy, got {evict_strategy!r}.")
        if evict_strategy == HkvEvictStrategy.CUSTOMIZED and gen_scores_fn is None:
            raise ValueError("HkvHashTableConfig: evict_strategy CUSTOMIZED goes by gen_scores_fn: give one.")
        if max_hbm_for_values not in (0, MAX_HBM_FOR_VALUES):
            _log.warning(
                "HkvHashTableConfig: max_hbm_for_values=%r is not used: max_capacity=%r alone bounds a table.",
                max_hbm_for_values,
                max_capacity,
            )
        self.init_capacity = int(init_capacity)
        self.max_capacity = int(max_capacity)
        self.max_hbm_for_values = max_hbm_for_values
        self.evict_strategy = HkvEvictStrategy(evict_strategy)
        self.step_per_epoch = int(step_per_epoch)
        self.gen_scores_fn = gen_scores_fn
        self.reserved_key_start_bit = reserved_key_start_bit


class HkvHashTable(CuckooHashTable):
    """A table that evicts rows when it is full, with their slots.

    Args:
      key_dtype, value_dtype, default_value, name, checkpoint, device: as of `CuckooHashTable`; no strings.
      config: an `HkvHashTableConfig`.
      part: as of `CuckooHashTable`.

    Raises:
      TypeError: strings.
    """

    def __init__(
        self,
        key_dtype: Any,
        value_dtype: Any,
        default_value: Any,
        name: str = "HkvHashTable",
        checkpoint: bool = True,
        init_size: int = 0,
        config: HkvHashTableConfig | None = None,
        device: str = "",
        shard_saveable_object_fn: Any = None,
        **part: Any,
    ) -> None:
        self.config = config = config or HkvHashTableConfig()
        for dtype in (key_dtype, value_dtype):
            if tf.as_dtype(dtype) == tf.string:
                raise TypeError(f"Dynamic embedding variable '{name}': bounded tables hold numbers, got strings.")
        by_time = config.evict_strategy in (HkvEvictStrategy.LRU, HkvEvictStrategy.EPOCHLRU)
        self._writes = 0
        self._lock = threading.Lock()
        super().__init__(
            key_dtype,
            value_dtype,
            default_value,
            name,
            checkpoint,
            min(init_size or config.init_capacity, config.max_capacity),
            None,
            device,
            shard_saveable_object_fn,
            max_capacity=config.max_capacity,
            # The engine's "lfu" counts lookups of training that insert; these here do not.
            eviction="lru" if by_time else "custom",
            **part,
        )

    def _epoch(self) -> np.ndarray:
        """Counts a write, and says which epoch it is in."""
        with self._lock:
            self._writes += 1
            return np.int64((self._writes - 1) // self.config.step_per_epoch)

    def _scores(self, ids: tf.Tensor) -> tf.Tensor:
        if self.config.gen_scores_fn is not None and self.config.evict_strategy == HkvEvictStrategy.CUSTOMIZED:
            return tf.reshape(self.config.gen_scores_fn(ids), [-1])
        times = tf.cast(self.kv.stamps(ids)[0], tf.int64)
        if self.config.evict_strategy == HkvEvictStrategy.LFU or not self.config.step_per_epoch:
            return times
        epoch = python_op(self._epoch, [], tf.int64)
        # Below 2**63, as scores are compared without a sign.
        return tf.bitwise.left_shift(tf.reshape(epoch, []), tf.constant(32, tf.int64)) + times

    def note_update(self, keys: Any) -> Any:
        """Sets the scores of keys that were written. Returns the op, if there is one (graph mode)."""
        if self.kv.eviction != "custom":
            return None
        ids = tf.reshape(self.ids(keys), [-1])
        count = self.kv.set_scores(ids, self._scores(ids))
        return None if tf.executing_eagerly() else count.op

    def _then_note(self, written: Any, keys: Any) -> Any:
        with tf.control_dependencies([] if written is None or tf.executing_eagerly() else [written]):
            noted = self.note_update(keys)
        return written if noted is None else noted

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Writes rows, inserting keys that are not there, and evicts others where the table is full."""
        return self._then_note(super().insert(keys, values, name), keys)

    upsert = insert

    def add(self, keys: Any, deltas: Any) -> Any:
        """As of `CuckooHashTable`."""
        return self._then_note(super().add(keys, deltas), keys)

    def accum(self, keys: Any, values_or_deltas: Any, exists: Any, name: str | None = None) -> Any:
        """As of `CuckooHashTable`."""
        return self._then_note(super().accum(keys, values_or_deltas, exists, name), keys)

    # ---- Scores ------------------------------------------------------------------------------------------------------

    def export_keys_and_scores(self, split_size: int, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and what eviction goes by, int64 [N]: the row of the lowest score goes first.

        LRU: microseconds since 1970. LFU: writes and updates. With epochs, LFU: the epoch in the upper 32 bits.
        CUSTOMIZED: what `gen_scores_fn` gave at the last write.

        Args:
          split_size: accepted: the table is read in pieces of its own.
          name: of the op.

        Raises:
          ValueError: `split_size` is no number of 1 or more.
        """
        keys, _, scores = self._with_scores(split_size, name)
        return keys, scores

    def export_with_scores(self, split_size: int, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """All keys [N], rows [N, dim] and scores: as `export_keys_and_scores`."""
        return self._with_scores(split_size, name)

    def _with_scores(self, split_size: int, name: str | None) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        if isinstance(split_size, bool) or not isinstance(split_size, int) or split_size < 1:
            raise ValueError(f"Scores of '{self._name}': split_size must be a number of 1 or more, got {split_size!r}.")
        with tf.name_scope(name or "export_with_scores"):
            keys, rows = self.export()
            with on_device_of(self.kv):
                scores = raw.kv_table_scores(self.kv.handle, keys)
        return keys, rows, tf.cast(scores, tf.int64)


class HkvHashTableCreator(EngineTableCreator):
    """Makes tables of bounded size, in host memory.

    Args:
      config: an `HkvHashTableConfig`; default: 2^20 rows, of which the oldest go.
      saver: as of `KVCreator`.

    Raises:
      TypeError: the config is another.

    Example:
      >>> config = de.HkvHashTableConfig(max_capacity=1000, evict_strategy=de.HkvEvictStrategy.LFU)
      >>> v = de.get_variable("user", dim=4, kv_creator=de.HkvHashTableCreator(config))
    """

    def __init__(self, config: HkvHashTableConfig | None = None, saver: Any = None) -> None:
        if config is not None and not isinstance(config, HkvHashTableConfig):
            raise TypeError(f"HkvHashTableCreator: config must be an HkvHashTableConfig, got {config!r}.")
        super().__init__(config or HkvHashTableConfig(), saver)

    def create(
        self,
        key_dtype: Any = None,
        value_dtype: Any = None,
        default_value: Any = None,
        name: str | None = None,
        checkpoint: bool | None = None,
        init_size: int | None = 0,
        config: Any = None,
        device: str | None = None,
        shard_saveable_object_fn: Any = None,
        **part: Any,
    ) -> HkvHashTable:
        """A table; see `HkvHashTable` for the arguments."""
        config = config or self.config
        self._made = {
            "key_dtype": key_dtype,
            "value_dtype": value_dtype,
            "name": name,
            "checkpoint": checkpoint,
            "init_capacity": config.init_capacity,
            "max_capacity": config.max_capacity,
            "config": config,
            "device": device,
        }
        return HkvHashTable(
            key_dtype,
            value_dtype,
            default_value,
            name or "HkvHashTable",
            bool(checkpoint),
            init_size or 0,
            config,
            device or "",
            shard_saveable_object_fn,
            **part,
        )


def note_updates(params: ShardedTable, keys: tf.Tensor) -> list[Any]:
    """Has tables that evict by scores set those of keys that an optimizer has updated. Returns ops (graph mode)."""
    if not isinstance(params.tables[0], HkvHashTable) or params.parts[0].eviction != "custom":
        return []
    if params.shard_num == 1:
        return [params.tables[0].note_update(keys)]
    return [table.note_update(own) for table, (own, *_) in zip(params.tables, params.split(keys), strict=True)]
