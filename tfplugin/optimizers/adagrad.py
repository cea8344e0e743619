"""The Adagrad family."""

from __future__ import annotations

from typing import Any

from tfplugin.optimizers.base import NON_NEGATIVE, UNIT, FusedOptimizer
from tfplugin.optimizers.hyperparameters import Number


class Adagrad(FusedOptimizer):
    """a += g^2; w -= learning_rate * g / sqrt(a + epsilon).

    Duchi et al., http://jmlr.org/papers/v12/duchi11a.html. Slot: ``accumulator``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      initial_accumulator_value: what a starts from, 0 or more.
      epsilon: 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.Adagrad(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: Any = 1e-7,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "Adagrad",
    ) -> None:
        super().__init__(learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("epsilon_inside", epsilon, NON_NEGATIVE)
        self._set("epsilon", 0.0, NON_NEGATIVE)
        if isinstance(initial_accumulator_value, (int, float)):
            self._check("initial_accumulator_value", initial_accumulator_value, NON_NEGATIVE)
        self._start = float(initial_accumulator_value)

    def rule(self) -> str:
        """The engine's name for it."""
        return "adagrad"

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names, in the order of the rule, and what they start from."""
        return (("accumulator", self._start),)


class AdagradDA(FusedOptimizer):
    """Adagrad by dual averaging, for sparse linear models: w follows from the sums of gradients and of their squares.

    s += g; a += g^2; w = -learning_rate * shrink(s, l1 * t) / (sqrt(a) + learning_rate * l2 * t), shrink(x, y)
    being x moved towards 0 by y. Duchi et al., http://jmlr.org/papers/v12/duchi11a.html. Slots:
    ``gradient_accumulator``, ``gradient_squared_accumulator``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      initial_gradient_squared_accumulator_value: what a starts from, 0 or more.
      l1_regularization_strength, l2_regularization_strength: of the single elements, 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.AdagradDA(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_gradient_squared_accumulator_value: float = 0.1,
        l1_regularization_strength: Any = 0.0,
        l2_regularization_strength: Any = 0.0,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "AdagradDA",
    ) -> None:
        super().__init__(learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("l1", l1_regularization_strength, NON_NEGATIVE)
        self._set("l2", l2_regularization_strength, NON_NEGATIVE)
        if isinstance(initial_gradient_squared_accumulator_value, (int, float)):
            self._check(
                "initial_gradient_squared_accumulator_value", initial_gradient_squared_accumulator_value, NON_NEGATIVE
            )
        self._start = float(initial_gradient_squared_accumulator_value)

    def rule(self) -> str:
        """The engine's name for it."""
        return "adagrad_da"

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names, in the order of the rule, and what they start from."""
        return (("gradient_accumulator", 0.0), ("gradient_squared_accumulator", self._start))

    def _derived(self, values: dict[str, Number], step: Number) -> dict[str, Number]:
        return {"step": step}


class ProximalAdagrad(FusedOptimizer):
    """Adagrad with a proximal step: a += g^2; w = shrink(w - eta * g, eta * l1) / (1 + eta * l2).

    eta is learning_rate / sqrt(a), shrink(x, y) is x moved towards 0 by y. Duchi and Singer,
    http://papers.nips.cc/paper/3793-efficient-learning-using-forward-backward-splitting. Slot: ``accumulator``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      initial_accumulator_value: what a starts from, 0 or more.
      l1_regularization_strength, l2_regularization_strength: of the single elements, 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.ProximalAdagrad(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: Any = 0.0,
        l2_regularization_strength: Any = 0.0,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "ProximalAdagrad",
    ) -> None:
        super().__init__(learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("l1", l1_regularization_strength, NON_NEGATIVE)
        self._set("l2", l2_regularization_strength, NON_NEGATIVE)
        if isinstance(initial_accumulator_value, (int, float)):
            self._check("initial_accumulator_value", initial_accumulator_value, NON_NEGATIVE)
        self._start = float(initial_accumulator_value)

    def rule(self) -> str:
        """The engine's name for it."""
        return "proximal_adagrad"

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names, in the order of the rule, and what they start from."""
        return (("accumulator", self._start),)


class Adadelta(FusedOptimizer):
    """Steps as large as the recent ones: a = rho a + (1 - rho) g^2, d = sqrt(u + epsilon) / sqrt(a + epsilon) * g.

    Then u = rho u + (1 - rho) d^2; w -= learning_rate * d. Zeiler, arXiv 1212.5701. Slots: ``accum``,
    ``accum_update``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      rho: decay rate, 0 to 1.
      epsilon: 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.Adadelta(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: Any = 0.95,
        epsilon: Any = 1e-7,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "Adadelta",
    ) -> None:
        super().__init__(learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("rho", rho, UNIT)
        self._set("epsilon", epsilon, NON_NEGATIVE)

    def rule(self) -> str:
        """The engine's name for it."""
        return "adadelta"

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names, in the order of the rule, and what they start from."""
        return (("accum", 0.0), ("accum_update", 0.0))
