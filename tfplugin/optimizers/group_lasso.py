"""Optimizers with the sparse group lasso: rows that do not earn their keep become zero as a whole."""

from __future__ import annotations

from typing import Any

from tfplugin.optimizers.adam import AdamFamily
from tfplugin.optimizers.base import NON_NEGATIVE, UNIT, FusedOptimizer
from tfplugin.optimizers.ftrl import FtrlFamily


class GroupAdam(AdamFamily):
    """Adam with the sparse group lasso, which zeroes whole rows.

    z gathers the steps; s is z moved towards 0 by l1. w is 0 where |s| <= l21 sqrt(dim), else s shortened by that
    and divided as in Adam. A zeroed row reads as zeros, is left out of clipped exports, and comes back when its
    gradients ask for it. Without lambdas it is Adam. Yue et al., arXiv 2107.14432. Slots: ``m``, ``v``, ``z``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: the lambdas, 0 or more. Of
        key-value variables; dense variables get plain Adam.
      regularize_dense: penalize dense variables, too: a row is what lies under one index of the first dimension.
      initial_accumulator_value, version, accum_name, linear_name: as TFPlus has them: its version 4 is what there is,
        which has no accumulator, and slots have one name.

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
        regularize_dense: bool = False,
        initial_accumulator_value: float = 0.0,
        version: int = 4,
        accum_name: None = None,
        linear_name: None = None,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupAdam",
    ) -> None:
        _no_names_of_slots(type(self).__name__, accum_name, linear_name)
        if version != 4:
            raise ValueError(f"GroupAdam: version must be 4, got {version!r}: earlier ones have other formulas.")
        self._start("initial_accumulator_value", initial_accumulator_value)
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "group_adam", (("m", 0.0), ("v", 0.0), ("z", 0.0)), learning_rate, beta_1, beta_2, epsilon, *common
        )
        self._set_lambdas(l1_regularization_strength, l2_regularization_strength, l21_regularization_strength)
        self._plain_when_dense("adam", ("m", "v"), ("l1", "l2", "l21"), regularize_dense)


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
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: the lambdas, 0 or more. Of
        key-value variables; dense variables get plain Adagrad.
      regularize_dense: penalize dense variables, too: a row is what lies under one index of the first dimension.

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
        regularize_dense: bool = False,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupAdagrad",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "group_adagrad",
            (("accumulator", self._start("initial_accumulator_value", initial_accumulator_value)), ("z", 0.0)),
            learning_rate,
            *common,
        )
        self._set("epsilon_inside", epsilon, NON_NEGATIVE)
        self._set_lambdas(l1_regularization_strength, l2_regularization_strength, l21_regularization_strength)
        self._plain_when_dense("adagrad", ("accumulator",), ("l1", "l2", "l21"), regularize_dense)
        self._set("epsilon", 0.0, NON_NEGATIVE)


class GroupMomentum(FusedOptimizer):
    """SGD with the sparse group lasso, which zeroes whole rows.

    z gathers the steps; s is z moved towards 0 by l1. w is 0 where |s| <= l21 sqrt(dim), else s shortened by that
    and divided as in SGD. A zeroed row reads as zeros, is left out of clipped exports, and comes back when its
    gradients ask for it. Without lambdas it is SGD. Yue et al., arXiv 2107.14432. Slots: ``momentum``, ``z``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      momentum: 0 to 1.
      nesterov: whether to look ahead.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: the lambdas, 0 or more. Of
        key-value variables; dense variables get plain SGD.
      regularize_dense: penalize dense variables, too: a row is what lies under one index of the first dimension.

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
        regularize_dense: bool = False,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupMomentum",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__("group_momentum", (("momentum", 0.0), ("z", 0.0)), learning_rate, *common)
        self._set("momentum", momentum, UNIT)
        self._set_lambdas(l1_regularization_strength, l2_regularization_strength, l21_regularization_strength)
        self._plain_when_dense("momentum", ("momentum",), ("l1", "l2", "l21"), regularize_dense)
        self._set("nesterov", float(bool(nesterov)), UNIT)


class GroupAMSGrad(AdamFamily):
    """AMSGrad with the sparse group lasso, which zeroes whole rows.

    z gathers the steps; s is z moved towards 0 by l1. w is 0 where |s| <= l21 sqrt(dim), else s shortened by that
    and divided as in AMSGrad. A zeroed row reads as zeros, is left out of clipped exports, and comes back when its
    gradients ask for it. Without lambdas it is AMSGrad. Yue et al., arXiv 2107.14432. Slots: ``m``, ``v``,
    ``vhat``, ``z``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: the lambdas, 0 or more. Of
        key-value variables; dense variables get plain AMSGrad.
      regularize_dense: penalize dense variables, too: a row is what lies under one index of the first dimension.

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
        regularize_dense: bool = False,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupAMSGrad",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "group_amsgrad",
            (("m", 0.0), ("v", 0.0), ("vhat", 0.0), ("z", 0.0)),
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            *common,
        )
        self._set_lambdas(l1_regularization_strength, l2_regularization_strength, l21_regularization_strength)
        self._plain_when_dense("amsgrad", ("m", "v", "vhat"), ("l1", "l2", "l21"), regularize_dense)


class GroupAdaBelief(AdamFamily):
    """AdaBelief with the sparse group lasso, which zeroes whole rows.

    z gathers the steps; s is z moved towards 0 by l1. w is 0 where |s| <= l21 sqrt(dim), else s shortened by that
    and divided as in AdaBelief. A zeroed row reads as zeros, is left out of clipped exports, and comes back when
    its gradients ask for it. Without lambdas it is AdaBelief. Yue et al., arXiv 2107.14432. Slots: ``m``, ``s``,
    ``z``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: the lambdas, 0 or more. Of
        key-value variables; dense variables get plain AdaBelief.
      regularize_dense: penalize dense variables, too: a row is what lies under one index of the first dimension.

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
        regularize_dense: bool = False,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupAdaBelief",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "group_adabelief", (("m", 0.0), ("s", 0.0), ("z", 0.0)), learning_rate, beta_1, beta_2, epsilon, *common
        )
        self._set_lambdas(l1_regularization_strength, l2_regularization_strength, l21_regularization_strength)
        self._plain_when_dense("adabelief", ("m", "s"), ("l1", "l2", "l21"), regularize_dense)


class GroupLamb(AdamFamily):
    """Lamb with the sparse group lasso, which zeroes whole rows.

    z gathers the steps; s is z moved towards 0 by l1. w is 0 where |s| <= l21 sqrt(dim), else s shortened by that
    and divided as in Lamb. A zeroed row reads as zeros, is left out of clipped exports, and comes back when its
    gradients ask for it. Without lambdas it is Lamb, but that epsilon is added to the root before it is corrected,
    and so weighs less in the first steps. Yue et al., arXiv 2107.14432. Slots: ``m``, ``v``, ``z``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.
      l1_regularization_strength, l2_regularization_strength, l21_regularization_strength: the lambdas, 0 or more. Of
        key-value variables; dense variables get plain Lamb.
      regularize_dense: penalize dense variables, too: a row is what lies under one index of the first dimension.

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
        regularize_dense: bool = False,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupLamb",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "group_lamb", (("m", 0.0), ("v", 0.0), ("z", 0.0)), learning_rate, beta_1, beta_2, epsilon, *common
        )
        self._set_lambdas(l1_regularization_strength, l2_regularization_strength, l21_regularization_strength)
        self._plain_when_dense("lamb", ("m", "v"), ("l1", "l2", "l21"), regularize_dense)
        self._whole = not regularize_dense


class GroupFtrl(FtrlFamily):
    """Ftrl with the sparse group lasso, which zeroes whole rows; the lambdas are not scaled by the learning rate.

    As in `tfplugin.optimizers.Ftrl`, and w = 0 where |s| <= l21 sqrt(dim), s = shrink(z, l1). A zeroed row reads as
    zeros, is left out of clipped exports, and comes back when its gradients ask for it. Yue et al., arXiv
    2107.14432. Slots: ``accum``, ``linear``.

    Args:
      learning_rate: more than 0, a schedule's first ones as well: the rule divides by it.
      weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      learning_rate_power: 0 or less.
      initial_accumulator_value: what n starts from, 0 or more.
      l1_regularization_strength, l2_regularization_strength: of the single elements, 0 or more.
      l2_shrinkage_regularization_strength: adds twice this times w to the gradient.
      beta: of the paper, 0 or more.
      l21_regularization_strength: of the row, 0 or more. Of key-value variables; dense variables get plain Ftrl.
      regularize_dense: let l21 penalize dense variables, too: a row is what lies under one index of dimension 0.
      accum_name, linear_name: None; slots of key-value variables have one name.

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
        regularize_dense: bool = False,
        accum_name: None = None,
        linear_name: None = None,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "GroupFtrl",
    ) -> None:
        _no_names_of_slots(type(self).__name__, accum_name, linear_name)
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "group_ftrl",
            learning_rate,
            learning_rate_power,
            initial_accumulator_value,
            l1_regularization_strength,
            l2_regularization_strength,
            l2_shrinkage_regularization_strength,
            beta,
            *common,
        )
        self._set("l21", l21_regularization_strength, NON_NEGATIVE)
        self._plain_when_dense("ftrl", ("accum", "linear"), ("l21",), regularize_dense)


def _no_names_of_slots(optimizer: str, *names: str | None) -> None:
    if any(name is not None for name in names):
        raise ValueError(
            f"{optimizer}: accum_name and linear_name must be None: slots are named after the optimizer, whose name= "
            "can be chosen."
        )


SparseGroupFtrl = GroupFtrl
"""The name that TFPlus has for it."""
