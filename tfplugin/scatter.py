"""Writes of rows by their keys, under the names that TensorFlow's and TFPlus's variables have."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin.ops import raw
from tfplugin.own_keys import own_keys
from tfplugin.placement import refuse_repeated_write


class Scatter:
    """``scatter_add`` and its kin, of `tf.IndexedSlices`: keys, and a row for each.

    A key without a row starts from its initial value; where a table does not admit every key, it is left out, except
    by `scatter_update`, which writes it. Of equal keys each counts, one after the other in their order; of
    `scatter_update` the last. `use_locking` is accepted: each row is written whole.

    Raises:
      TypeError: what is given is no `tf.IndexedSlices`.
      tf.errors.InvalidArgumentError: rows of another shape or dtype; for one part of a variable, keys of others.

    Example:
      >>> v = tfplugin.get_kv_variable("e", embedding_dim=2, initializer=tf.compat.v1.ones_initializer())
      >>> v.scatter_mul(tf.IndexedSlices([[3.0, 4.0]], [7]))
      >>> v.sparse_read([7]).numpy()
      array([[3., 4.]], dtype=float32)
    """

    name: str
    dtype: tf.DType
    dim: int
    _kv_parts: Any

    def scatter_update(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Writes rows."""
        return self._scatter("scatter_update", sparse_delta, name, lambda part, keys, rows: part._upsert(keys, rows))

    def scatter_add(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Adds to rows."""
        return self._scatter("scatter_add", sparse_delta, name, lambda part, keys, rows: part._accumulate(keys, rows))

    def scatter_sub(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Subtracts from rows."""
        return self._scatter("scatter_sub", sparse_delta, name, lambda part, keys, rows: part._accumulate(keys, -rows))

    def scatter_mul(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Multiplies rows, element by element."""
        return self._combine("mul", sparse_delta, name)

    def scatter_div(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Divides rows, element by element."""
        return self._combine("div", sparse_delta, name)

    def scatter_min(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Keeps the smaller of each two elements."""
        return self._combine("min", sparse_delta, name)

    def scatter_max(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Keeps the larger of each two elements."""
        return self._combine("max", sparse_delta, name)

    def _combine(self, op: str, sparse_delta: Any, name: str | None) -> Any:
        refuse_repeated_write(self.name)
        return self._scatter(
            f"scatter_{op}",
            sparse_delta,
            name,
            lambda part, keys, rows: raw.kv_table_combine(part.handle, keys, rows, op=op),
        )

    def _scatter(self, method: str, slices: Any, name: str | None, write: Any) -> Any:
        if not isinstance(slices, tf.IndexedSlices):
            raise TypeError(
                f"{method} of key-value variable '{self.name}' takes tf.IndexedSlices(rows, keys), got {slices!r:.80}."
            )
        with tf.name_scope(name or method):
            keys, places, part_keys = self._by_part(slices.indices)  # type: ignore[attr-defined]
            rows = tf.convert_to_tensor(slices.values, self.dtype)
            flat = tf.TensorShape([keys.shape.num_elements(), self.dim])
            if not rows.shape.is_compatible_with(keys.shape.concatenate([self.dim])) and not (
                rows.shape.is_compatible_with(flat)
            ):
                raise ValueError(
                    f"{method} of key-value variable '{self.name}' wants rows of shape "
                    f"{keys.shape.concatenate([self.dim])} for keys of shape {keys.shape}, got {rows.shape}."
                )
            rows = tf.reshape(rows, [-1, self.dim])
            if len(part_keys) == 1:
                return write(self._kv_parts[0], own_keys(self._kv_parts[0], part_keys[0], method), rows)
            return tf.group(
                *[
                    write(part, owned, tf.gather(rows, where))
                    for part, where, owned in zip(self._kv_parts, places, part_keys, strict=True)
                ]
            )
