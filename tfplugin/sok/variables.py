"""Telling variables that the ranks share out from the rest of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfplugin.sok.placement import ModelParallel


def filter_variables(vars: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Splits variables into those of sok, which the ranks share out, and the others, which every rank has.

    Args:
      vars: variables; or a model, a layer or a ``tf.Module``, whose trainable variables they then are, with the tables
        in it that a ``tf.Module`` does not list.

    Example:
      >>> sok_vars, dense_vars = sok.filter_variables(model.trainable_variables)
    """
    listed = _trainable_variables_of(vars) if hasattr(vars, "trainable_variables") else list(vars)
    ours = [variable for variable in listed if is_model_parallel(variable)]
    return ours, [variable for variable in listed if not is_model_parallel(variable)]


def _trainable_variables_of(module: Any) -> list[Any]:
    listed = list(module.trainable_variables)
    if hasattr(module, "_flatten_layers"):  # of Keras
        return listed
    known = {id(variable) for variable in listed}
    for child in tf.train.TrackableView(module).descendants():
        if is_model_parallel(child) and child.trainable and id(child) not in known:
            listed.append(child)
    return listed


def split_embedding_variable_from_others(variables: Any) -> tuple[list[Any], list[Any]]:
    """The name of `filter_variables` in SparseOperationKit 1.

    Raises:
      ValueError: not a list or tuple.
    """
    if not isinstance(variables, (list, tuple)):
        raise ValueError(
            "sok.split_embedding_variable_from_others wants a list or tuple of variables, got "
            f"{type(variables).__name__}."
        )
    return filter_variables(variables)


def is_model_parallel(variable: Any) -> bool:
    """Whether a variable is shared out over the ranks."""
    return isinstance(variable, ModelParallel)
