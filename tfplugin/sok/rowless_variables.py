"""Steps of Keras 3 optimizers on a rank that has no rows of a `Variable`.

Keras takes an array of shape [0, n] for a bias where it adds another one to it, and fails. There is nothing to update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfplugin.optimizers.patch_lock import patch_lock
from tfplugin.sok.distributed_variable import ShardedVariable
from tfplugin.wrapped_method import replaced


def has_no_rows(variable: Any) -> bool:
    """Whether it is a `Variable` of which other ranks have all rows."""
    return isinstance(variable, ShardedVariable) and variable.shape[0] == 0


def gradient_without_rows(variable: ShardedVariable) -> tf.Tensor:
    """A dense one: Keras adds what it has gathered to an IndexedSlices in a way of its own."""
    return tf.zeros(variable.shape, variable.dtype)


def passing_over(apply: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """`apply`, by which `optimizer` (without wrappers) applies gradients, leaving alone what has no rows."""
    if not hasattr(optimizer, "_check_variables_are_known"):  # not of Keras 3
        return apply

    def apply_to_rows(*args: Any, **kwargs: Any) -> Any:
        # Taken now: the wrapper has put functions of its own here.
        update_step, move_averages = optimizer.update_step, optimizer._update_model_variables_moving_average

        def update(gradient: Any, variable: Any, *learning_rate: Any) -> Any:
            return None if has_no_rows(variable) else update_step(gradient, variable, *learning_rate)

        def move(variables: Sequence[Any]) -> None:
            averages = optimizer._model_variables_moving_average
            pairs = [(v, average) for v, average in zip(variables, averages, strict=False) if not has_no_rows(v)]
            object.__setattr__(optimizer, "_model_variables_moving_average", [average for _, average in pairs])
            try:
                move_averages([v for v, _ in pairs])
            finally:
                object.__setattr__(optimizer, "_model_variables_moving_average", averages)

        with (
            patch_lock(optimizer),
            replaced(optimizer, "update_step", update),
            replaced(optimizer, "_update_model_variables_moving_average", move),
        ):
            return apply(*args, **kwargs)

    return apply_to_rows
