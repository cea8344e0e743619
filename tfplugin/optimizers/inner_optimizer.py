"""The optimizer that updates variables, inside of one that scales the loss or gathers replicas."""

from __future__ import annotations

from typing import Any

from tensorflow.python.training import sync_replicas_optimizer
from tensorflow.python.training.experimental import loss_scale_optimizer

_V1_WRAPPERS = (
    (loss_scale_optimizer.MixedPrecisionLossScaleOptimizer, "_optimizer"),
    (sync_replicas_optimizer.SyncReplicasOptimizer, "_opt"),
)


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates variables: what one that scales the loss or gathers replicas has inside, or itself."""
    while True:
        inner = getattr(optimizer, "inner_optimizer", None)
        for wrapper, attribute in _V1_WRAPPERS:
            if isinstance(optimizer, wrapper):
                inner = getattr(optimizer, attribute)
        if inner is None:
            return optimizer
        optimizer = inner
