"""What a row holds before its first update: TensorFlow initializers as a pure function of the key.

Constant, uniform, normal and truncated normal are computed by the table itself, and so are the initializers that scale
one of these by the size of a layer (Glorot, He, LeCun: ``VarianceScaling``). A function, and a Tensor, becomes a small
table of rows: a key takes row ``hash(key) mod M``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops as tf_ops

#: Rows sampled from a function, which the table has no native form of.
SAMPLED_ROWS = 1024

#: The standard deviation of a normal distribution cut off at two of its own.
_CUT_OFF = 0.87962566103423978

#: What draws a matrix as a whole, by how its name begins, and why that cannot be done a row at a time.
_OF_A_MATRIX = {
    "orthogonal": "makes the rows of a matrix orthogonal to each other",
    "convolutionorthogonal": "makes the rows of a matrix orthogonal to each other",
    "convolutiondeltaorthogonal": "makes the rows of a matrix orthogonal to each other",
    "identity": "makes a square matrix, row number i of which is 1 at i",
    "stft": "makes the matrix of a Fourier transform",
}


@dataclasses.dataclass(frozen=True)
class KvInitializer:
    """How missing keys start.

    Attributes:
      kind: ``constant``, ``uniform``, ``normal``, ``truncated_normal`` or ``rows``.
      a: the constant; the lower bound; or the mean.
      b: the upper bound (excluded); or the standard deviation.
      seed: below 2**64.
      rows: for kind ``rows``, a function that gives the Tensor ``[M, dim]`` when the variable is initialized.
      known_rows: the same rows where they are known beforehand, as bytes.
    """

    kind: str
    a: float = 0.0
    b: float = 0.0
    seed: int = 0
    rows: Callable[[], tf.Tensor] | None = None
    known_rows: bytes = b""

    def to_json(self) -> str:
        """The form that ops and checkpoints carry."""
        return json.dumps({"kind": self.kind, "a": self.a, "b": self.b, "seed": self.seed})


def default(dtype: tf.DType, seed: int = 0) -> KvInitializer:
    """How keys start where nobody says so: uniform in [-0.05, 0.05); integers and bools from zero, as in TensorFlow."""
    return KvInitializer("uniform", -0.05, 0.05, seed) if dtype.is_floating else KvInitializer("constant")


def _seed(name: str, op_seed: Any) -> int:
    """A seed from the variable's name, its initializer's seed and ``tf.random.set_seed``: the same in every process."""
    global_seed = context.global_seed() if context.executing_eagerly() else tf_ops.get_default_graph().seed
    text = f"{name}/{global_seed}/{op_seed if isinstance(op_seed, int) else None}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _scalar(value: Any) -> float | None:
    if isinstance(value, (int, float, np.number)):
        return float(value)
    return None


def resolve(initializer: Any, name: str, dim: int, dtype: tf.DType) -> KvInitializer:
    """Turns what a user may pass as ``initializer`` into a `KvInitializer`.

    Args:
      initializer: None (see `default`), a number, a name such as ``"uniform"``, an initializer object or
        class of ``tf.compat.v1``, ``tf.initializers`` or Keras, a function of (shape, dtype), or a Tensor or array of
        shape [dim] or [M, dim].
      name: the variable's name, which seeds it.
      dim: width of a row.
      dtype: of the values.

    Raises:
      ValueError: a Tensor whose shape is not defined or does not end in ``dim``; an initializer of whole matrices, such
        as ``Orthogonal``; a ``Constant`` of a matrix.
      TypeError: something else.

    `VarianceScaling` and its kin (Glorot, He, LeCun) take the number of inputs and outputs of a layer from the shape. A
    table has no number of rows, so they get the shape of a row, ``[dim]``, for which TensorFlow and Keras say that both
    numbers are ``dim``: variance ``scale / dim``, whatever the mode.
    """
    if isinstance(initializer, KvInitializer):
        return initializer
    if initializer is None:
        return default(dtype, _seed(name, None))
    if _scalar(initializer) is not None and not isinstance(initializer, bool):
        return KvInitializer("constant", float(initializer))
    if isinstance(initializer, str):
        initializer = tf.keras.initializers.get(initializer)
    if isinstance(initializer, (np.ndarray, list, tuple)) or tf.is_tensor(initializer):
        return _from_tensor(initializer, name, dim, dtype)
    if inspect.isclass(initializer):
        initializer = initializer()

    kind = type(initializer).__name__.lower().replace("_", "")
    # Keras 3 draws a seed where none is given, another one in each process.
    seed = _seed(name, getattr(initializer, "_init_seed", getattr(initializer, "seed", None)))
    attribute = {key: _scalar(getattr(initializer, key, None)) for key in ("minval", "maxval", "mean", "stddev")}
    if kind.startswith("zeros"):
        return KvInitializer("constant", 0.0)
    if kind.startswith("ones"):
        return KvInitializer("constant", 1.0)
    if kind.startswith("constant"):
        value = getattr(initializer, "value", 0.0)
        if np.ndim(value) > 1 and np.shape(value)[0] > 1:
            raise ValueError(
                f"get_kv_variable('{name}'): {type(initializer).__name__} of shape {np.shape(value)} has row number i "
                "for id i, and a table has no numbers of rows. Write trained rows with table.upsert(keys, rows), of a "
                "layer with layer.table.upsert(keys, rows), or give the rows that keys are to share as an array "
                "[M, dim]."
            )
        return resolve(value, name, dim, dtype)
    if kind.startswith("randomuniform") and None not in (attribute["minval"], attribute["maxval"]):
        return KvInitializer("uniform", attribute["minval"], attribute["maxval"], seed)
    for prefix, native in (("randomnormal", "normal"), ("truncatednormal", "truncated_normal")):
        if kind.startswith(prefix) and None not in (attribute["mean"], attribute["stddev"]):
            return KvInitializer(native, attribute["mean"], attribute["stddev"], seed)
    scaled = _variance_scaling(initializer, dim, seed)
    if scaled is not None:
        return scaled
    of_a_matrix = next((reason for prefix, reason in _OF_A_MATRIX.items() if kind.startswith(prefix)), None)
    if of_a_matrix is not None:
        raise ValueError(
            f"get_kv_variable('{name}'): {type(initializer).__name__} {of_a_matrix}, and a table draws each row by "
            "itself, when its key comes. Take a random initializer, such as tf.keras.initializers.GlorotNormal(), or "
            "give the rows that keys are to share as an array [M, dim]."
        )
    if not callable(initializer):
        raise TypeError(
            f"get_kv_variable('{name}'): initializer must be None, a number, a name, an initializer, a function of "
            f"(shape, dtype) or a Tensor; got {type(initializer).__name__}."
        )
    return KvInitializer("rows", seed=seed, rows=lambda: _sample(initializer, name, dim, dtype))


def _variance_scaling(initializer: Any, dim: int, seed: int) -> KvInitializer | None:
    """An initializer of the family ``VarianceScaling``; None for others, and for classes that draw in their own way."""
    draws = next((cls for cls in type(initializer).__mro__ if "__call__" in vars(cls)), None)
    if draws is None or draws.__name__ != "VarianceScaling":
        return None
    scale, distribution = _scalar(getattr(initializer, "scale", None)), getattr(initializer, "distribution", None)
    if scale is None:
        return None
    deviation = math.sqrt(scale / max(1, dim))
    if distribution == "uniform":
        return KvInitializer("uniform", -math.sqrt(3.0) * deviation, math.sqrt(3.0) * deviation, seed)
    if distribution == "untruncated_normal":
        return KvInitializer("normal", 0.0, deviation, seed)
    if distribution in ("truncated_normal", "normal"):
        return KvInitializer("truncated_normal", 0.0, deviation / _CUT_OFF, seed)
    return None


def _sample(initializer: Callable[..., Any], name: str, dim: int, dtype: tf.DType) -> tf.Tensor:
    rows = tf.cast(tf.convert_to_tensor(initializer([SAMPLED_ROWS, dim], dtype=dtype)), dtype)
    if rows.shape.rank != 2 or rows.shape[1] != dim:
        raise ValueError(
            f"get_kv_variable('{name}'): the initializer gave shape {rows.shape} for shape ({SAMPLED_ROWS}, {dim})."
        )
    return rows


def _from_tensor(value: Any, name: str, dim: int, dtype: tf.DType) -> KvInitializer:
    shape = tf.TensorShape(getattr(value, "shape", np.shape(value)))
    if not shape.is_fully_defined():
        raise ValueError(
            f"get_kv_variable('{name}'): an initializer that is a Tensor needs a defined shape, got {shape}."
        )
    if shape.rank == 0:
        shape_rows = [1, 1]
    elif shape.rank == 1:
        shape_rows = [1, shape[0]]
    else:
        shape_rows = shape.as_list()
    if len(shape_rows) != 2 or shape_rows[0] < 1 or shape_rows[1] not in (dim, 1 if shape.rank == 0 else dim):
        raise ValueError(
            f"get_kv_variable('{name}'): an initializer that is a Tensor has shape [M, {dim}] or [{dim}], got {shape}."
        )

    def rows() -> tf.Tensor:
        tensor = tf.reshape(tf.cast(tf.convert_to_tensor(value), dtype), shape_rows)
        return tf.broadcast_to(tensor, [shape_rows[0], dim])

    return KvInitializer("rows", seed=_seed(name, None), rows=rows)
