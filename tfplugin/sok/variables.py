"""Telling variables that the ranks share out from the rest of a model, and from those of another rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tfplugin.sok.distributed_variable import ShardedVariable
from tfplugin.sok.dynamic_variable import DynamicVariable


def filter_variables(vars: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Splits variables into those of sok, which the ranks share out, and the others, which every rank has.

    Example:
      >>> sok_vars, dense_vars = sok.filter_variables(model.trainable_variables)
    """
    ours: list[Any] = []
    others: list[Any] = []
    for variable in vars:
        (ours if is_model_parallel(variable) else others).append(variable)
    return ours, others


def is_model_parallel(variable: Any) -> bool:
    """Whether a variable is shared out over the ranks."""
    return isinstance(variable, (DynamicVariable, ShardedVariable))
