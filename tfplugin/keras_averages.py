"""``SwapEMAWeights`` of Keras 3 on models with tables: rows and their moving averages change places as weights do."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from tfplugin.keras_hooks import KerasHooks
from tfplugin.keras_training import TrainedTables
from tfplugin.optimizers import row_averages
from tfplugin.optimizers.generic_update import stands_for_table
from tfplugin.optimizers.inner_optimizer import innermost
from tfplugin.optimizers.wrapper import wrapper_of
from tfplugin.wrapped_method import wrap_method


def _swap(original: Callable[..., Any], callback: Any, optimizer: Any) -> None:
    """``_tf_swap_variables``: weights and averages change places."""
    _meet_tables(callback.model, optimizer)
    row_averages.swap(optimizer)
    original(callback, _of_weights(optimizer))


def _settle(original: Callable[..., Any], callback: Any, optimizer: Any) -> None:
    """``_tf_finalize_ema_values``: averages become what the weights are."""
    row_averages.settle(optimizer)
    original(callback, _of_weights(optimizer))


def _meet_tables(model: Any, optimizer: Any) -> None:
    """Has an optimizer, which may have been loaded and have made no step, know the averages of a model's tables."""
    trained = TrainedTables.of_model(model)
    parts = [part for key, part in trained.parts.items() if key not in trained.optimizers]
    if parts and optimizer is innermost(model.optimizer):
        wrapper_of(model.optimizer).know(parts)


def _of_weights(optimizer: Any) -> Any:
    """An optimizer as `SwapEMAWeights` looks at it, without what stands for tables."""
    averages = optimizer._model_variables_moving_average
    pairs = [(v, a) for v, a in zip(optimizer._trainable_variables, averages, strict=False) if not stands_for_table(v)]
    return types.SimpleNamespace(
        _trainable_variables=[variable for variable, _ in pairs],
        _model_variables_moving_average=[average for _, average in pairs],
        _distribution_strategy=getattr(optimizer, "_distribution_strategy", None),
    )


def _changes(keras: Any) -> Iterator[Callable[[], None]]:
    callback = getattr(keras.callbacks, "SwapEMAWeights", None)
    if callback is not None and hasattr(callback, "_tf_swap_variables"):
        yield wrap_method(callback, "_tf_swap_variables", _swap)
        yield wrap_method(callback, "_tf_finalize_ema_values", _settle)


_hooks = KerasHooks(_changes)
install, uninstall = _hooks.install, _hooks.uninstall
