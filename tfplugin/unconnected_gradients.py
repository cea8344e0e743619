"""``unconnected_gradients="zero"``: where nothing leads from a table to the loss, its gradient is slices of no rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import default_gradient

from tfplugin.kv_variable import KvVariable
from tfplugin.slices_of_rows import differentiable

_ZERO = tf.UnconnectedGradients.ZERO


def of_tape(
    original: Callable[..., Any],
    tape: Any,
    target: Any,
    sources: Sequence[Any],
    output_gradients: Any = None,
    sources_raw: Sequence[Any] | None = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """``imperative_grad``, the gradients of a tape."""
    target, output_gradients = differentiable(target, output_gradients)
    zero = unconnected_gradients in (_ZERO, _ZERO.value)
    if not zero or not any(isinstance(source, KvVariable) for source in sources_raw or ()):
        return original(tape, target, sources, output_gradients, sources_raw, unconnected_gradients)
    gradients = original(tape, target, sources, output_gradients, sources_raw)
    return [
        (_no_rows(source) if isinstance(source, KvVariable) else default_gradient.zeros_like(source))
        if gradient is None
        else gradient
        for source, gradient in zip(sources_raw or (), gradients, strict=True)
    ]


def of_graph(original: Callable[..., Any], ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
    """``_GradientsHelper``, the gradients of a graph: of a table that is not connected TensorFlow makes dense zeros."""
    gradients = original(ys, xs, *args, **kwargs)
    return [
        _no_rows(x) if isinstance(x, KvVariable) and isinstance(gradient, tf.Tensor) else gradient
        for x, gradient in zip(xs if isinstance(xs, (list, tuple)) else [xs], gradients, strict=True)
    ]


def _no_rows(table: KvVariable) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.zeros([0, table.dim], table.dtype), tf.zeros([0], table.key_dtype))
