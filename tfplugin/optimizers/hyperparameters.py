"""Hyperparameters on their way from an optimizer to the op: numbers where they are known, scalars where not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

#: A float where the value is known while Python runs (always in eager mode), else a scalar Tensor of float64. Both
#: know + - * / and **.
Number = Any

_AS_THEY_ARE = (tf.float32, tf.float64, tf.int32, tf.int64)


def given(value: Any) -> Number:
    """A hyperparameter that goes to the op as it is: a float, or a scalar Tensor of any dtype the op takes."""
    if isinstance(value, (int, float, np.generic)):
        return float(value)
    if callable(value) and not tf.is_tensor(value):
        return given(value())
    tensor = tf.convert_to_tensor(value)
    if isinstance(tensor, tf_ops.EagerTensor):
        return float(tensor.numpy())
    static = tf.get_static_value(tensor)
    if static is not None:
        return float(static)
    return tensor if tensor.dtype in _AS_THEY_ARE else tf.cast(tensor, tf.float32)


def number(value: Any) -> Number:
    """A hyperparameter to calculate with."""
    value = given(value)
    return value if isinstance(value, float) or value.dtype == tf.float64 else tf.cast(value, tf.float64)


@dataclasses.dataclass(frozen=True)
class Step:
    """What the hyperparameters of one step depend on, beside their optimizer.

    Attributes:
      dtype: what the optimizer computes in: tf.float64 for float64 variables, otherwise tf.float32, for 16-bit
        variables, too.
      number: which step this is, from 1, where the optimizer's own count does not say.
      learning_rate: what the optimizer was given for this step, where it is given one.
      coefficients: of a ``tf_keras.optimizers.legacy`` optimizer.
    """

    dtype: tf.DType
    number: Number = None
    learning_rate: Any = None
    coefficients: Mapping[str, tf.Tensor] = dataclasses.field(default_factory=dict)

    def rounded(self, value: Any) -> Number:
        """As an optimizer has it after ``tf.cast``: that makes Python numbers float32 first, whatever comes then."""
        value = number(value)
        if isinstance(value, float):
            return float(np.float32(value))
        return value if self.dtype == tf.float64 else tf.cast(tf.cast(value, tf.float32), tf.float64)


def pack(values: Mapping[str, Number]) -> tuple[list[str], list[tf.Tensor]]:
    """Names, and the tensors whose elements, one after the other, have them."""
    known = {name: value for name, value in values.items() if isinstance(value, float)}
    others = {name: value for name, value in values.items() if name not in known}
    tensors = [tf.constant(list(known.values()), tf.float64)] if known else []
    return [*known, *others], [*tensors, *others.values()]


def nadam_momentum_product(beta_1: Number, step: Number) -> Number:
    """prod over i = 1..step of beta_1 (1 - 0.96^i / 2), the momentum schedule of Nadam."""
    # Beyond this many factors the product is no more than rounding beside 1, what it is subtracted from.
    most = 50_000.0
    if isinstance(beta_1, float):
        most = min(most, math.ceil(-46 / math.log(max(beta_1, 1e-9))) if beta_1 < 1 else most)
    if isinstance(beta_1, float) and isinstance(step, float):
        i = np.arange(1, min(step, most) + 1)
        return float(np.prod(beta_1 * (1 - 0.5 * 0.96**i)))
    i = tf.range(1, tf.minimum(tf.cast(step, tf.float64), most) + 1, dtype=tf.float64)
    return tf.reduce_prod(beta_1 * (1 - 0.5 * 0.96**i))


def nadam_factors(beta_1: Number, beta_2: Number, step: Number, product: Number) -> dict[str, Number]:
    """The factors of Nadam's step: `product` is that of `nadam_momentum_product`."""
    momentum = beta_1 * (1 - 0.5 * 0.96**step)
    next_momentum = beta_1 * (1 - 0.5 * 0.96 ** (step + 1))
    return {
        "beta_1": beta_1,
        "beta_2": beta_2,
        "m_factor": next_momentum / (1 - product * next_momentum),
        "g_factor": (1 - momentum) / (1 - product),
        "v_factor": 1 / (1 - beta_2**step),
    }
