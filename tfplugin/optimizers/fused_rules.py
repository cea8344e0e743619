"""Which rule of the table engine does in one fused op what an optimizer of TensorFlow or Keras does.

Classes are told by module and name, so that nothing is imported to look. A subclass has the rule of its base as long as
it overrides none of the methods that make up the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tfplugin.optimizers.hyperparameters import Number, Step


@dataclasses.dataclass(frozen=True)
class FusedRule:
    """How the table engine does what an optimizer does.

    Attributes:
      name: of the rule.
      slots: the optimizer's names for its slots, in the rule's order, and what each starts from.
      hyperparameters: the rule's, by name, for one step. Without the weight decay.
    """

    name: str
    slots: tuple[tuple[str, float], ...]
    hyperparameters: Callable[[Step], Mapping[str, Number]]


#: (module, class) -> the methods that make up its update, and what describes an optimizer of it.
_CLASSES: dict[tuple[str, str], tuple[tuple[str, ...], Callable[[Any], FusedRule]]] = {}


def register(module: str, name: str, methods: tuple[str, ...], describe: Callable[[Any], FusedRule]) -> None:
    """Says which rule an optimizer of a class has."""
    _CLASSES[module, name] = (methods, describe)


def fused_rule_of(optimizer: Any) -> FusedRule | str:
    """The rule that does what an optimizer does, or why there is none."""
    own = getattr(optimizer, "as_fused_rule", None)
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
