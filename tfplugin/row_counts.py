"""Counts and stamps of keys, and rows that go by them: the methods of TFPlus's variables."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin.keys import keys_to_tensor
from tfplugin.ops import raw

DAY = 86400


def row_count(table: Any, name: str | None = None) -> tf.Tensor:
    """How many rows a variable of any API has: scalar int64. The `size` of those of `sok` is something else."""
    return tf.add_n([raw.kv_table_size(part.handle) for part in table._kv_parts], name=name)


class RowCounts:
    """How often keys came, and when: of a variable in one part or in many, in the places of their keys."""

    name: str
    key_dtype: tf.DType
    _kv_parts: Any

    def _by_part(self, keys: Any) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        """Keys as a tensor, then per part: the flat positions of its keys, and the keys."""
        keys = keys_to_tensor(keys, self.key_dtype, self.name)
        flat, count = tf.reshape(keys, [-1]), len(self._kv_parts)
        if count == 1:
            return keys, [tf.range(tf.size(flat))], [flat]
        owner = raw.kv_table_partition(flat, parts=count)
        places = tf.dynamic_partition(tf.range(tf.size(flat)), owner, count)
        return keys, places, tf.dynamic_partition(flat, owner, count)

    def increase_counting(self, indices: Any, counts: Any, name: str | None = None) -> tf.Operation | None:
        """Adds to how often keys came, without reading them or touching their rows.

        That of a key that has a row is its frequency. A key that waits to be admitted gets its row with the next
        training lookup after its count is at the threshold. For other keys without a row there is nothing to add to.

        Args:
          indices: keys, any shape.
          counts: as many integers of 0 or more, or one for all.
          name: of the op.

        Raises:
          tf.errors.InvalidArgumentError: a negative count, or not one for each key.
        """
        keys, places, part_keys = self._by_part(indices)
        by = tf.cast(tf.convert_to_tensor(counts), tf.int64)
        by = tf.reshape(tf.broadcast_to(by, tf.shape(keys)) if by.shape.rank == 0 else by, [-1])
        with tf.name_scope(name or "increase_counting"):
            return tf.group(
                *[
                    raw.kv_table_increase_counts(part.handle, owned, tf.gather(by, where))
                    for part, where, owned in zip(self._kv_parts, places, part_keys, strict=True)
                ]
            )

    def get_counting(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """How often each key came: uint32, shape of keys.

        It is the frequency of the key's row (see `stamps`); of a key that waits to be admitted, how many lookups have
        been counted; else 0.
        """
        keys, places, part_keys = self._by_part(indices)
        counts = [
            raw.kv_table_counts(part.handle, owned, name=name)
            for part, owned in zip(self._kv_parts, part_keys, strict=True)
        ]
        return self._in_places(keys, places, counts)

    def get_timestamp(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """The day in which the row of each key was last written, as days since 1970: uint32, shape of keys; 0: no row.

        `stamps` gives the second.

        Raises:
          ValueError: the variable expires by steps, and so stamps rows with steps.
        """
        if self._kv_parts[0].policies.counts_steps:
            raise ValueError(
                f"get_timestamp of key-value variable '{self.name}': its rows expire by steps and are stamped with "
                "steps, not with days: stamps() gives them."
            )
        keys, places, part_keys = self._by_part(indices)
        versions = [part.stamps(owned, name=name)[1] for part, owned in zip(self._kv_parts, part_keys, strict=True)]
        return self._in_places(keys, places, versions) // tf.constant(DAY, tf.uint32)

    @staticmethod
    def _in_places(keys: tf.Tensor, places: list[tf.Tensor], of_parts: list[tf.Tensor]) -> tf.Tensor:
        answers = of_parts[0] if len(of_parts) == 1 else tf.dynamic_stitch(places, of_parts)
        return tf.reshape(answers, tf.shape(keys))

    def total_count(self, name: str | None = None) -> tf.Tensor:
        """How many keys there are, those included that wait to be admitted (but not in a filter): scalar int64."""
        return self._totals(0, name)

    def total_freq(self, name: str | None = None) -> tf.Tensor:
        """The sum of what `get_counting` gives for these keys: scalar int64. Reads the stamps of all rows."""
        return self._totals(1, name)

    def _totals(self, which: int, name: str | None) -> tf.Tensor:
        return tf.add_n([raw.kv_table_totals(part.handle, name=name)[which] for part in self._kv_parts])

    def delete(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Removes keys, with their slots and counts; as `remove`. Returns how many rows went: scalar int64."""
        _, _, part_keys = self._by_part(indices)
        removed = [
            raw.kv_table_remove(part.handle, owned, name=name)
            for part, owned in zip(self._kv_parts, part_keys, strict=True)
        ]
        return tf.add_n(removed)

    def delete_with_timestamp(self, threshold: Any, name: str | None = None) -> tf.Tensor:
        """Removes the rows that have not been written for more than `threshold` days: by the day, as `get_timestamp`.

        Args:
          threshold: days, 0 or more: a number, or a scalar tensor.
          name: of the op.

        Returns:
          How many rows went: scalar int64.

        Raises:
          ValueError: a negative threshold, or none.
        """
        if not tf.is_tensor(threshold) and (
            isinstance(threshold, bool) or not np.isreal(threshold) or not math.isfinite(threshold) or threshold < 0
        ):
            raise ValueError(
                f"delete_with_timestamp of key-value variable '{self.name}': the threshold must be days, 0 or more; "
                f"got {threshold!r}."
            )
        today = tf.cast(tf.timestamp(), tf.int64) // DAY if not tf.executing_eagerly() else int(time.time()) // DAY
        before = (today - tf.cast(threshold, tf.int64)) * DAY
        removed = [raw.kv_table_remove_older(part.handle, before, name=name) for part in self._kv_parts]
        return tf.add_n(removed)
