"""Follow the regularised leader."""

from __future__ import annotations

from typing import Any

from tfplugin.optimizers.base import NON_NEGATIVE, NON_POSITIVE, POSITIVE, FusedOptimizer


class FtrlFamily(FusedOptimizer):
    """What Ftrl and its group form share."""

    _rates = POSITIVE  # they divide by it

    def __init__(
        self,
        rule: str,
        learning_rate: Any,
        learning_rate_power: Any,
        initial_accumulator_value: Any,
        l1: Any,
        l2: Any,
        l2_shrinkage: Any,
        beta: Any,
        *common: Any,
    ) -> None:
        start = self._start("initial_accumulator_value", initial_accumulator_value)
        super().__init__(rule, (("accum", start), ("linear", 0.0)), learning_rate, *common)
        self._set("learning_rate_power", learning_rate_power, NON_POSITIVE)
        self._set("l1", l1, NON_NEGATIVE)
        self._set("l2", l2, NON_NEGATIVE)
        self._set("l2_shrinkage", l2_shrinkage, NON_NEGATIVE)
        self._set("beta", beta, NON_NEGATIVE)


class Ftrl(FtrlFamily):
    """z += g - (n'^p - n^p) / learning_rate * w; w = -shrink(z, l1) / ((n'^p + beta) / learning_rate + 2 l2).

    n' is n + g^2, shrink(x, y) is x moved towards 0 by y, p is minus `learning_rate_power`. McMahan et al.,
    https://dl.acm.org/citation.cfm?id=2488200. Slots: ``accum`` (n), ``linear`` (z).

    Args:
      learning_rate: more than 0, a schedule's first ones as well: the rule divides by it.
      weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
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
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "ftrl",
            learning_rate,
            learning_rate_power,
            initial_accumulator_value,
            l1_regularization_strength,
            l2_regularization_strength,
            l2_shrinkage_regularization_strength,
            beta,
            *common,
        )
