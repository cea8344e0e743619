"""Stochastic gradient descent, with and without momentum."""

from __future__ import annotations

from typing import Any

from tfplugin.optimizers.base import UNIT, FusedOptimizer


class SGD(FusedOptimizer):
    """w -= learning_rate * g; with momentum a = momentum * a + g and w -= learning_rate * a.

    With `nesterov` it is w -= learning_rate * (g + momentum * a), after Sutskever et al.,
    http://proceedings.mlr.press/v28/sutskever13.html. Slot: ``momentum``, where there is any.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      momentum: 0 to 1.
      nesterov: whether to look ahead.

    Example:
      >>> optimizer = tfplugin.optimizers.SGD(0.1, momentum=0.9)
      >>> optimizer.minimize(lambda: tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2), var_list=[table])
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: Any = 0.0,
        nesterov: bool = False,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "SGD",
    ) -> None:
        has_momentum = not (isinstance(momentum, (int, float)) and momentum == 0)
        rule, slots = ("momentum", (("momentum", 0.0),)) if has_momentum else ("sgd", ())
        super().__init__(rule, slots, learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        if has_momentum:
            self._set("momentum", momentum, UNIT)
            self._set("nesterov", float(bool(nesterov)), UNIT)
