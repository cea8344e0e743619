"""`to_static` of a `sok.DynamicVariable`: some of its rows as a dense variable for a while."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops


class StaticRows:
    """What a `DynamicVariable` can do in SparseOperationKit's static mode.

    Between `to_static` and `to_dynamic` its methods `value`, `read_value`, `assign`, `assign_add` and `assign_sub` are
    those of a dense variable that holds the chosen rows. Lookups and updates by key go on reading and writing the
    table, which `to_dynamic` brings up to date.
    """

    _static: Any = None
    _static_keys: Any = None
    _is_static = False

    def is_static(self) -> bool:
        """Whether `to_static` was called, and `to_dynamic` not yet."""
        return self._is_static

    def to_static(self, indices: Any) -> Any:
        """Copies the rows of keys on this rank, which get one if they have none, to a dense variable.

        Args:
          indices: keys [n], each once.

        Returns:
          What ``tf.Variable.assign`` gives: in a graph an op to run.

        Raises:
          RuntimeError: it is static already.
        """
        if self._is_static:
            raise RuntimeError(f"to_static() of '{self.name}': it is static already; call to_dynamic() first.")  # type: ignore[attr-defined]
        rows = self.sparse_read(indices, training=True)  # type: ignore[attr-defined]
        if self._static is None:
            with tf_ops.init_scope():
                self._static = tf.compat.v1.Variable(
                    tf.zeros([0, self.dim], self.dtype),  # type: ignore[attr-defined]
                    shape=tf.TensorShape([None, self.dim]),  # type: ignore[attr-defined]
                    validate_shape=False,
                    trainable=False,
                    use_resource=True,
                    collections=[],
                    name="static_rows",
                )
        self._static_keys, self._is_static = self.keys_tensor(indices), True  # type: ignore[attr-defined]
        return self._static.assign(rows)

    def to_dynamic(self) -> Any:
        """Writes the rows of the dense variable to the table, which is dynamic again. In a graph gives the op.

        Raises:
          RuntimeError: it is not static.
        """
        rows = self._of_static("to_dynamic").read_value()
        keys, self._static_keys, self._is_static = self._static_keys, None, False
        return self.upsert(keys, rows)  # type: ignore[attr-defined]

    def value(self) -> tf.Tensor:
        """The rows, in the order of the keys (static mode)."""
        return self._of_static("value").value()

    def read_value(self) -> tf.Tensor:
        """As `value`."""
        return self._of_static("read_value").read_value()

    def assign(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``tf.Variable`` (static mode); `sok.assign` writes rows by key."""
        return self._of_static("assign").assign(*args, **kwargs)

    def assign_add(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``tf.Variable`` (static mode); `scatter_add` adds to rows by key."""
        return self._of_static("assign_add").assign_add(*args, **kwargs)

    def assign_sub(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``tf.Variable`` (static mode); `scatter_sub` takes from rows by key."""
        return self._of_static("assign_sub").assign_sub(*args, **kwargs)

    def _of_static(self, method: str) -> Any:
        if not self._is_static:
            raise RuntimeError(
                f"{method}() of '{self.name}' needs static mode: call to_static(keys) first, or read and write rows by "  # type: ignore[attr-defined]
                "key with sok.export, sok.assign and tf.nn.embedding_lookup."
            )
        return self._static
