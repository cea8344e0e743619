"""RMSprop."""

from __future__ import annotations

from typing import Any

from tfplugin.optimizers.base import NON_NEGATIVE, UNIT, FusedOptimizer
from tfplugin.optimizers.fused_rules import rmsprop_rule


class RMSprop(FusedOptimizer):
    """r = rho r + (1 - rho) g^2; w -= learning_rate * g / sqrt(r + epsilon).

    With momentum the step goes through a = momentum * a + step; w -= a. Centered, r counts from the square of the
    average gradient. Tieleman and Hinton, https://www.cs.toronto.edu/~hinton/coursera/lecture6/lec6.pdf; Graves,
    arXiv 1308.0850. Slots: ``rms``, and ``momentum`` and ``mg`` where there are such.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      rho: decay rate of the average, 0 to 1.
      momentum: 0 to 1.
      epsilon: 0 or more.
      centered: whether to subtract the square of the average gradient.

    Example:
      >>> optimizer = tfplugin.optimizers.RMSprop(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: Any = 0.9,
        momentum: Any = 0.0,
        epsilon: Any = 1e-7,
        centered: bool = False,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "RMSprop",
    ) -> None:
        has_momentum = not (isinstance(momentum, (int, float)) and momentum == 0)
        slots = (("rms", 0.0), *((("momentum", 0.0),) if has_momentum else ()), *((("mg", 0.0),) if centered else ()))
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(rmsprop_rule(bool(centered), has_momentum), slots, learning_rate, *common)
        self._set("rho", rho, UNIT)
        self._set("epsilon_inside", epsilon, NON_NEGATIVE)
        self._set("epsilon", 0.0, NON_NEGATIVE)
        if has_momentum:
            self._set("momentum", momentum, UNIT)
