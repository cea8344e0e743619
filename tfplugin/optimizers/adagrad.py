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
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "adagrad",
            (("accumulator", self._start("initial_accumulator_value", initial_accumulator_value)),),
            learning_rate,
            *common,
        )
        self._set("epsilon_inside", epsilon, NON_NEGATIVE)
        self._set("epsilon", 0.0, NON_NEGATIVE)


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
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "adagrad_da",
            (
                ("gradient_accumulator", 0.0),
                (
                    "gradient_squared_accumulator",
                    self._start(
                        "initial_gradient_squared_accumulator_value", initial_gradient_squared_accumulator_value
                    ),
                ),
            ),
            learning_rate,
            *common,
        )
        self._set("l1", l1_regularization_strength, NON_NEGATIVE)
        self._set("l2", l2_regularization_strength, NON_NEGATIVE)

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
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "proximal_adagrad",
            (("accumulator", self._start("initial_accumulator_value", initial_accumulator_value)),),
            learning_rate,
            *common,
        )
        self._set("l1", l1_regularization_strength, NON_NEGATIVE)
        self._set("l2", l2_regularization_strength, NON_NEGATIVE)


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
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__("adadelta", (("accum", 0.0), ("accum_update", 0.0)), learning_rate, *common)
        self._set("rho", rho, UNIT)
        self._set("epsilon", epsilon, NON_NEGATIVE)
