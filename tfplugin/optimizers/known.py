"""Which optimizers the fused kernels know, and as what.

A class is known by its module and name, so that nothing is imported to look. A subclass is known as its base as long as
it overrides none of the methods that make up the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tensorflow.python.training import sync_replicas_optimizer
from tensorflow.python.training.experimental import loss_scale_optimizer

from tfplugin.optimizers.hyperparameters import Number, Step


@dataclasses.dataclass(frozen=True)
class Known:
    """How the table engine does what an optimizer does.

    Attributes:
      rule: the engine's name for it.
      slots: the optimizer's names for its slots, in the rule's order, and what each starts from.
      hyperparameters: the rule's, by name, for one step. Without the weight decay.
    """

    rule: str
    slots: tuple[tuple[str, float], ...]
    hyperparameters: Callable[[Step], Mapping[str, Number]]


#: (module, class) -> the methods that make up its update, and what describes an optimizer of it.
_CLASSES: dict[tuple[str, str], tuple[tuple[str, ...], Callable[[Any], Known]]] = {}

#: These take norms or factors over all rows of a matrix, and no kernel of ours does it per row.
_COUPLES_ROWS = ("Adafactor", "Muon")


def register(module: str, name: str, methods: tuple[str, ...], describe: Callable[[Any], Known]) -> None:
    """Makes a class known."""
    _CLASSES[module, name] = (methods, describe)


def find(optimizer: Any) -> Known | str:
    """What the engine knows an optimizer as, or why it does not."""
    own = getattr(optimizer, "as_known", None)
    if own is not None:
        return own()
    cls = type(optimizer)
    for i, base in enumerate(cls.__mro__):
        entry = _CLASSES.get((base.__module__, base.__name__))
        if entry is None:
            continue
        methods, describe = entry
        for method in methods:
            own_method = vars(optimizer).get(method)
            replaced = own_method is not None and not getattr(own_method, "keeps_update", False)
            if replaced or any(method in vars(subclass) for subclass in cls.__mro__[:i]):
                return f"{cls.__name__} has a {method} of its own"
        return describe(optimizer)
    return f"no fused kernel for {cls.__name__}"


def rmsprop_rule(centered: bool, momentum: bool) -> str:
    """The engine's name for RMSprop of a kind."""
    return ("centered_" if centered else "") + "rmsprop" + ("" if momentum else "_plain")


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


_V1_WRAPPERS = (
    (loss_scale_optimizer.MixedPrecisionLossScaleOptimizer, "_optimizer"),
    (sync_replicas_optimizer.SyncReplicasOptimizer, "_opt"),
)


def couples_rows(optimizer: Any) -> str | None:
    """The name of the class of an optimizer whose update of a row depends on other rows."""
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    return next((name for name in names if name in _COUPLES_ROWS), None)
