"""Follow the regularised leader."""

from __future__ import annotations

from typing import Any

from tfplugin.optimizers.base import NON_NEGATIVE, NON_POSITIVE, FusedOptimizer


class Ftrl(FusedOptimizer):
    """z += g - (n'^p - n^p) / learning_rate * w; w = -shrink(z, l1) / ((n'^p + beta) / learning_rate + 2 l2).

    n' is n + g^2, shrink(x, y) is x moved towards 0 by y, p is minus `learning_rate_power`. McMahan et al.,
    https://dl.acm.org/citation.cfm?id=2488200. Slots: ``accum`` (n), ``linear`` (z).

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      learning_rate_power: 0 or less.
      initial_accumulator_value: what n starts from, 0 or more.
      l1_regularization_strength, l2_regularization_strength: of the single elements, 0 or more.
      l2_shrinkage_regularization_strength: adds twice this times w to the gradient.
      beta: of the paper, 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.Ftrl(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        learning_rate_power: Any = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: Any = 0.0,
        l2_regularization_strength: Any = 0.0,
        l2_shrinkage_regularization_strength: Any = 0.0,
        beta: Any = 0.0,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "Ftrl",
    ) -> None:
        super().__init__(learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("learning_rate_power", learning_rate_power, NON_POSITIVE)
        self._set("l1", l1_regularization_strength, NON_NEGATIVE)
        self._set("l2", l2_regularization_strength, NON_NEGATIVE)
        self._set("l2_shrinkage", l2_shrinkage_regularization_strength, NON_NEGATIVE)
        self._set("beta", beta, NON_NEGATIVE)
        if isinstance(initial_accumulator_value, (int, float)):
            self._check("initial_accumulator_value", initial_accumulator_value, NON_NEGATIVE)
        self._start = float(initial_accumulator_value)

    def rule(self) -> str:
        """The engine's name for it."""
        return "ftrl"

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names, in the order of the rule, and what they start from."""
        return (("accum", self._start), ("linear", 0.0))
