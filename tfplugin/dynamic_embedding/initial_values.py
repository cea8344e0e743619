"""What a missing key gives: the ``initializer`` of a dynamic embedding variable.

As in `tfplugin.initializers` it is a function of the key, the variable's name and the seed. Here rows that have to be
sampled are sampled when the variable is made, because no initializer op is run for these tables.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tfplugin.initializers import KvInitializer, resolve

#: Beyond this a float64 does not hold every integer.
_EXACT = 2**53


@dataclasses.dataclass(frozen=True)
class InitialValues:
    """What tables are made with: the ``default_value`` that a creator is given.

    Attributes:
      dim: width of a row.
      initializer: for the table engine.
    """

    dim: int
    initializer: KvInitializer


def initial_values(given: Any, name: str, dim: int, dtype: tf.DType) -> InitialValues:
    """Turns what a user may pass as ``initializer`` into `InitialValues`.

    Args:
      given: None (zeros), a number, an array or Tensor, or an initializer of TensorFlow or Keras (an object, class or
        name). An array of `dim` elements is the row of every missing key; of another its first element is repeated.
        Among integers, fractions are dropped.
      name: the variable's, which seeds what is random.
      dim: width of a row.
      dtype: of the values.

    Raises:
      TypeError: something else.
      ValueError: a Tensor whose value is known only when the graph runs.
    """
    if isinstance(given, InitialValues):
        return given
    if given is None:
        return InitialValues(dim, KvInitializer("constant", 0.0))
    if isinstance(given, (bool, np.bool_)):
        given = int(given)
    if isinstance(given, (int, float, np.number)) and (not isinstance(given, (int, np.integer)) or abs(given) < _EXACT):
        return InitialValues(dim, KvInitializer("constant", _cast(float(given), dtype)))
    if isinstance(given, (int, np.integer, np.ndarray, list, tuple)) or tf.is_tensor(given):
        flat = _known(given, name).reshape(-1)
        if flat.size == 0:
            return InitialValues(dim, KvInitializer("constant", 0.0))
        return InitialValues(dim, _rows(flat if flat.size == dim else np.repeat(flat[:1], dim), dim, dtype, 0))
    # Integers are drawn as floats, as TFRA does.
    floating = dtype if dtype.is_floating else tf.float32
    native = resolve(given, name, dim, floating)
    if native.kind != "constant" and (not dtype.is_floating or native.rows is not None):
        return InitialValues(dim, _rows(_sampled(given, native, dim, floating), dim, dtype, native.seed))
    if native.kind == "constant":
        native = dataclasses.replace(native, a=_cast(native.a, dtype))
    return InitialValues(dim, native)


def _cast(constant: float, dtype: tf.DType) -> float:
    """A constant as `tf.cast` makes one of the values' dtype: 0.1 is 0 among integers and 1 among bools."""
    if dtype.is_floating or not np.isfinite(constant):
        return constant
    return float(constant != 0) if dtype == tf.bool else float(np.trunc(constant))


def _sampled(given: Any, native: KvInitializer, dim: int, dtype: tf.DType) -> np.ndarray:
    with context.eager_mode():
        if native.rows is not None:
            return np.asarray(native.rows())
        initializer = tf.keras.initializers.get(given) if isinstance(given, str) else given
        initializer = initializer() if isinstance(initializer, type) else initializer
        return np.asarray(initializer([1024, dim], dtype=dtype))


def _known(given: Any, name: str) -> np.ndarray:
    if not tf.is_tensor(given):
        return np.asarray(given)
    value = given.numpy() if hasattr(given, "numpy") else tf.get_static_value(given)
    if value is None:
        try:
            with tf.compat.v1.Session(graph=given.graph) as session:
                value = session.run(given)
        except (tf.errors.OpError, RuntimeError) as error:
            raise ValueError(
                f"Dynamic embedding variable '{name}': its initializer is a Tensor whose value is known only when the "
                f"graph runs ({error}): pass an array or an initializer object."
            ) from error
    return np.asarray(value)


def _rows(values: np.ndarray, dim: int, dtype: tf.DType, seed: int) -> KvInitializer:
    rows = np.ascontiguousarray(values.reshape(-1, dim).astype(dtype.as_numpy_dtype))
    return KvInitializer("rows", seed=seed, rows=lambda: tf.constant(rows, dtype), known_rows=rows.tobytes())
