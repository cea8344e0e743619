"""The optimizer that updates variables, inside of one that scales the loss or gathers replicas."""

from __future__ import annotations

from typing import Any

from tensorflow.python.training import sync_replicas_optimizer
from tensorflow.python.training.experimental import loss_scale_optimizer

_V1_WRAPPERS = (
    (loss_scale_optimizer.MixedPrecisionLossScaleOptimizer, "_optimizer"),
    (sync_replicas_optimizer.SyncReplicasOptimizer, "_opt"),
)


def inner_of(optimizer: Any) -> Any:
    """What an optimizer that scales the loss or gathers replicas has inside; None of any other."""
    for wrapper, attribute in _V1_WRAPPERS:
        if isinstance(optimizer, wrapper):
            return getattr(optimizer, attribute)
    return getattr(optimizer, "inner_optimizer", None)


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates variables: what one that scales the loss or gathers replicas has inside, or itself."""
    while (inner := inner_of(optimizer)) is not None:
        optimizer = inner
    return optimizer
