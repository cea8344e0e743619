"""Optimizers with the sparse group lasso: rows that do not earn their keep become zero as a whole."""

from __future__ import annotations

from typing import Any

from tfplugin.optimizers.adam import powers
from tfplugin.optimizers.base import FRACTION, NON_NEGATIVE, NON_POSITIVE, UNIT, FusedOptimizer
from tfplugin.optimizers.hyperparameters import Number


class GroupAdam(FusedOptimizer):
    """Adam with the sparse group lasso, which zeroes whole rows.

    z gathers the steps; s is z moved towards 0 by l1. w is 0 where |s| <= l21 sqrt(dim), else s shortened by that
    and divided as in Adam. A zeroed row reads as zeros, is left out of clipped exports, and comes back when its
    gradients ask for it. Without lambdas it is Adam. Yue et al., arXiv 2107.14432. Slots: ``m``, ``v``, ``z``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: the lambdas, 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.GroupAdam(0.001, l21_regularization_strength=1e-4)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-7,
        l1_regularization_strength: Any = 0.0,
        l2_regularization_strength: Any = 0.0,
        l21_regularization_strength: Any = 0.0,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupAdam",
    ) -> None:
        super().__init__(learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("beta_1", beta_1, FRACTION)
        self._set("beta_2", beta_2, FRACTION)
        self._set("epsilon", epsilon, NON_NEGATIVE)
        self._set("l1", l1_regularization_strength, NON_NEGATIVE)
        self._set("l2", l2_regularization_strength, NON_NEGATIVE)
        self._set("l21", l21_regularization_strength, NON_NEGATIVE)

    def rule(self) -> str:
        """The engine's name for it."""
        return "group_adam"

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names, in the order of the rule, and what they start from."""
        return (("m", 0.0), ("v", 0.0), ("z", 0.0))

    def _derived(self, values: dict[str, Number], step: Number) -> dict[str, Number]:
        return powers(values, step)


class GroupAdagrad(FusedOptimizer):
    """Adagrad with the sparse group lasso, which zeroes whole rows.

    z gathers the steps; s is z moved towards 0 by l1. w is 0 where |s| <= l21 sqrt(dim), else s shortened by that
    and divided as in Adagrad. A zeroed row reads as zeros, is left out of clipped exports, and comes back when its
    gradients ask for it. Without lambdas it is Adagrad. Yue et al., arXiv 2107.14432. Slots: ``accumulator``,
    ``z``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      initial_accumulator_value: 0 or more.
      epsilon: 0 or more.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: the lambdas, 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.GroupAdagrad(0.001, l21_regularization_strength=1e-4)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: Any = 1e-7,
        l1_regularization_strength: Any = 0.0,
        l2_regularization_strength: Any = 0.0,
        l21_regularization_strength: Any = 0.0,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupAdagrad",
    ) -> None:
        super().__init__(learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("epsilon_inside", epsilon, NON_NEGATIVE)
        self._set("l1", l1_regularization_strength, NON_NEGATIVE)
        self._set("l2", l2_regularization_strength, NON_NEGATIVE)
        self._set("l21", l21_regularization_strength, NON_NEGATIVE)
        self._set("epsilon", 0.0, NON_NEGATIVE)
        if isinstance(initial_accumulator_value, (int, float)):
            self._check("initial_accumulator_value", initial_accumulator_value, NON_NEGATIVE)
        self._start = float(initial_accumulator_value)

    def rule(self) -> str:
        """The engine's name for it."""
        return "group_adagrad"

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names, in the order of the rule, and what they start from."""
        return (("accumulator", self._start), ("z", 0.0))


class GroupMomentum(FusedOptimizer):
    """SGD with the sparse group lasso, which zeroes whole rows.

    z gathers the steps; s is z moved towards 0 by l1. w is 0 where |s| <= l21 sqrt(dim), else s shortened by that
    and divided as in SGD. A zeroed row reads as zeros, is left out of clipped exports, and comes back when its
    gradients ask for it. Without lambdas it is SGD. Yue et al., arXiv 2107.14432. Slots: ``momentum``, ``z``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      momentum: 0 to 1.
      nesterov: whether to look ahead.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: the lambdas, 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.GroupMomentum(0.01, l21_regularization_strength=1e-4)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: Any = 0.9,
        nesterov: bool = False,
        l1_regularization_strength: Any = 0.0,
        l2_regularization_strength: Any = 0.0,
        l21_regularization_strength: Any = 0.0,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupMomentum",
    ) -> None:
        super().__init__(learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("momentum", momentum, UNIT)
        self._set("l1", l1_regularization_strength, NON_NEGATIVE)
        self._set("l2", l2_regularization_strength, NON_NEGATIVE)
        self._set("l21", l21_regularization_strength, NON_NEGATIVE)
        self._set("nesterov", float(bool(nesterov)), UNIT)

    def rule(self) -> str:
        """The engine's name for it."""
        return "group_momentum"

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names, in the order of the rule, and what they start from."""
        return (("momentum", 0.0), ("z", 0.0))


class GroupAMSGrad(FusedOptimizer):
    """AMSGrad with the sparse group lasso, which zeroes whole rows.

    z gathers the steps; s is z moved towards 0 by l1. w is 0 where |s| <= l21 sqrt(dim), else s shortened by that
    and divided as in AMSGrad. A zeroed row reads as zeros, is left out of clipped exports, and comes back when its
    gradients ask for it. Without lambdas it is AMSGrad. Yue et al., arXiv 2107.14432. Slots: ``m``, ``v``,
    ``vhat``, ``z``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: the lambdas, 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.GroupAMSGrad(0.001, l21_regularization_strength=1e-4)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-7,
        l1_regularization_strength: Any = 0.0,
        l2_regularization_strength: Any = 0.0,
        l21_regularization_strength: Any = 0.0,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupAMSGrad",
    ) -> None:
        super().__init__(learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("beta_1", beta_1, FRACTION)
        self._set("beta_2", beta_2, FRACTION)
        self._set("epsilon", epsilon, NON_NEGATIVE)
        self._set("l1", l1_regularization_strength, NON_NEGATIVE)
        self._set("l2", l2_regularization_strength, NON_NEGATIVE)
        self._set("l21", l21_regularization_strength, NON_NEGATIVE)

    def rule(self) -> str:
        """The engine's name for it."""
        return "group_amsgrad"

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names, in the order of the rule, and what they start from."""
        return (("m", 0.0), ("v", 0.0), ("vhat", 0.0), ("z", 0.0))

    def _derived(self, values: dict[str, Number], step: Number) -> dict[str, Number]:
        return powers(values, step)


class GroupAdaBelief(FusedOptimizer):
    """AdaBelief with the sparse group lasso, which zeroes whole rows.

    z gathers the steps; s is z moved towards 0 by l1. w is 0 where |s| <= l21 sqrt(dim), else s shortened by that
    and divided as in AdaBelief. A zeroed row reads as zeros, is left out of clipped exports, and comes back when
    its gradients ask for it. Without lambdas it is AdaBelief. Yue et al., arXiv 2107.14432. Slots: ``m``, ``s``,
    ``z``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: the lambdas, 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.GroupAdaBelief(0.001, l21_regularization_strength=1e-4)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-16,
        l1_regularization_strength: Any = 0.0,
        l2_regularization_strength: Any = 0.0,
        l21_regularization_strength: Any = 0.0,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupAdaBelief",
    ) -> None:
        super().__init__(learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("beta_1", beta_1, FRACTION)
        self._set("beta_2", beta_2, FRACTION)
        self._set("epsilon", epsilon, NON_NEGATIVE)
        self._set("l1", l1_regularization_strength, NON_NEGATIVE)
        self._set("l2", l2_regularization_strength, NON_NEGATIVE)
        self._set("l21", l21_regularization_strength, NON_NEGATIVE)

    def rule(self) -> str:
        """The engine's name for it."""
        return "group_adabelief"

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names, in the order of the rule, and what they start from."""
        return (("m", 0.0), ("s", 0.0), ("z", 0.0))

    def _derived(self, values: dict[str, Number], step: Number) -> dict[str, Number]:
        return powers(values, step)


class GroupLamb(FusedOptimizer):
    """Lamb with the sparse group lasso, which zeroes whole rows.

    z gathers the steps; s is z moved towards 0 by l1. w is 0 where |s| <= l21 sqrt(dim), else s shortened by that
    and divided as in Lamb. A zeroed row reads as zeros, is left out of clipped exports, and comes back when its
    gradients ask for it. Without lambdas it is Lamb. Yue et al., arXiv 2107.14432. Slots: ``m``, ``v``, ``z``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: the lambdas, 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.GroupLamb(0.001, l21_regularization_strength=1e-4)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-7,
        l1_regularization_strength: Any = 0.0,
        l2_regularization_strength: Any = 0.0,
        l21_regularization_strength: Any = 0.0,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupLamb",
    ) -> None:
        super().__init__(learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("beta_1", beta_1, FRACTION)
        self._set("beta_2", beta_2, FRACTION)
        self._set("epsilon", epsilon, NON_NEGATIVE)
        self._set("l1", l1_regularization_strength, NON_NEGATIVE)
        self._set("l2", l2_regularization_strength, NON_NEGATIVE)
        self._set("l21", l21_regularization_strength, NON_NEGATIVE)

    def rule(self) -> str:
        """The engine's name for it."""
        return "group_lamb"

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names, in the order of the rule, and what they start from."""
        return (("m", 0.0), ("v", 0.0), ("z", 0.0))

    def _derived(self, values: dict[str, Number], step: Number) -> dict[str, Number]:
        return powers(values, step)


class GroupFtrl(FusedOptimizer):
    """Ftrl with the sparse group lasso, which zeroes whole rows; the lambdas are not scaled by the learning rate.

    As in `tfplugin.optimizers.Ftrl`, and w = 0 where |s| <= l21 sqrt(dim), s = shrink(z, l1). A zeroed row reads as
    zeros, is left out of clipped exports, and comes back when its gradients ask for it. Yue et al., arXiv
    2107.14432. Slots: ``accum``, ``linear``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      learning_rate_power: 0 or less.
      initial_accumulator_value: what n starts from, 0 or more.
      l1_regularization_strength, l2_regularization_strength: of the single elements, 0 or more.
      l2_shrinkage_regularization_strength: adds twice this times w to the gradient.
      beta: of the paper, 0 or more.
      l21_regularization_strength: of the row, 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.GroupFtrl(0.1, l21_regularization_strength=0.01)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        learning_rate_power: Any = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: Any = 0.0,
        l2_regularization_strength: Any = 0.0,
        l21_regularization_strength: Any = 0.0,
        l2_shrinkage_regularization_strength: Any = 0.0,
        beta: Any = 0.0,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupFtrl",
    ) -> None:
        super().__init__(learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("learning_rate_power", learning_rate_power, NON_POSITIVE)
        self._set("l1", l1_regularization_strength, NON_NEGATIVE)
        self._set("l2", l2_regularization_strength, NON_NEGATIVE)
        self._set("l21", l21_regularization_strength, NON_NEGATIVE)
        self._set("l2_shrinkage", l2_shrinkage_regularization_strength, NON_NEGATIVE)
        self._set("beta", beta, NON_NEGATIVE)
        if isinstance(initial_accumulator_value, (int, float)):
            self._check("initial_accumulator_value", initial_accumulator_value, NON_NEGATIVE)
        self._start = float(initial_accumulator_value)

    def rule(self) -> str:
        """The engine's name for it."""
        return "group_ftrl"

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names, in the order of the rule, and what they start from."""
        return (("accum", self._start), ("linear", 0.0))


SparseGroupFtrl = GroupFtrl
