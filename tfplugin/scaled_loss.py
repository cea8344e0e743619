"""Losses that an optimizer has scaled, and whether a backward pass is that of one.

Gradients of a scaled loss are scaled back by whoever applies them. An update in the backward pass comes before that,
and would take them as they are. So a scaled loss is marked, and the backward pass asks what it is the gradient of.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import backprop
from tensorflow.python.ops import gradients_util
from tensorflow.python.training.experimental import loss_scale_optimizer

_ATTRIBUTE = "_kv_scaled_by"

#: What takes gradients, and its name for what it takes them of.
_TARGETS = {
    backprop.GradientTape.gradient.__code__: "target",
    gradients_util._GradientsHelper.__code__: "ys",
}
#: This one scales the loss itself, and takes the gradients.
_SCALES = loss_scale_optimizer.MixedPrecisionLossScaleOptimizer.compute_gradients.__code__


def mark(loss: Any, optimizer: Any) -> Any:
    """Notes that `optimizer` has scaled a loss: a tensor, or a function that computes one. Returns the marked loss."""
    if callable(loss) and not tf.is_tensor(loss):
        return functools.wraps(loss)(lambda: mark(loss(), optimizer))
    if tf.is_tensor(loss):  # else a number, of which nobody takes gradients
        setattr(loss, _ATTRIBUTE, type(optimizer).__name__)
    return loss


def scaler_of_this_pass() -> str | None:
    """The class of the optimizer that has scaled the loss whose gradients are being computed; None if none has.

    Known where the gradient is taken of the scaled loss itself, and not of something computed from it.
    """
    return next(_scalers(sys._getframe(1)), None)


def _scalers(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        if frame.f_code is _SCALES:
            yield type(frame.f_locals["self"]).__name__
        name = _TARGETS.get(frame.f_code)
        if name is not None:
            for target in tf.nest.flatten(frame.f_locals.get(name)):
                scaler = getattr(target, _ATTRIBUTE, None)
                if scaler is not None:
                    yield scaler
        frame = frame.f_back
