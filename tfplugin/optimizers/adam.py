"""Adam and its kin."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin.optimizers.base import ANY, FRACTION, NON_NEGATIVE, UNIT, FusedOptimizer
from tfplugin.optimizers.hyperparameters import Number, nadam_factors, nadam_momentum_product, number


class AdamFamily(FusedOptimizer):
    """What optimizers with two decay rates and an epsilon share: their corrections are powers of the rates."""

    def __init__(
        self,
        rule: str,
        slots: tuple[tuple[str, float], ...],
        learning_rate: Any,
        beta_1: Any,
        beta_2: Any,
        epsilon: Any,
        *common: Any,
    ) -> None:
        super().__init__(rule, slots, learning_rate, *common)
        self._set("beta_1", beta_1, FRACTION)
        self._set("beta_2", beta_2, FRACTION)
        self._set("epsilon", epsilon, NON_NEGATIVE)

    def _derived(self, values: dict[str, Number], step: Number) -> dict[str, Number]:
        return {f"{beta}_power": number(values[beta]) ** step for beta in ("beta_1", "beta_2")}


class Adam(AdamFamily):
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= alpha * m / (sqrt(v) + epsilon).

    alpha is learning_rate * sqrt(1 - b2^t) / (1 - b1^t). On the rows that a step touches; t counts all steps.
    Kingma and Ba, arXiv 1412.6980. Slots: ``m``, ``v``, and ``vhat`` with `amsgrad`.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.
      amsgrad: divide by the largest v so far; see `AMSGrad`.

    Example:
      >>> optimizer = tfplugin.optimizers.Adam(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-7,
        amsgrad: bool = False,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "Adam",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "amsgrad" if amsgrad else "adam",
            (("m", 0.0), ("v", 0.0), ("vhat", 0.0))[: 3 if amsgrad else 2],
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            *common,
        )


class AdamW(AdamFamily):
    """Adam with decoupled weight decay, of the rows that a step touches.

    Loshchilov and Hutter, arXiv 1711.05101. Slots: ``m``, ``v``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.AdamW(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-7,
        *,
        weight_decay: Any = 0.004,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "AdamW",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__("adam", (("m", 0.0), ("v", 0.0)), learning_rate, beta_1, beta_2, epsilon, *common)


class AMSGrad(AdamFamily):
    """Adam that divides by the largest v so far: vhat = max(vhat, v).

    Reddi et al., arXiv 1904.09237. Slots: ``m``, ``v``, ``vhat``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.AMSGrad(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-7,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "AMSGrad",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "amsgrad", (("m", 0.0), ("v", 0.0), ("vhat", 0.0)), learning_rate, beta_1, beta_2, epsilon, *common
        )


class Adamax(AdamFamily):
    """Adam by the infinity norm: u = max(b2 u, |g|); w -= learning_rate / (1 - b1^t) * m / (u + epsilon).

    Kingma and Ba, arXiv 1412.6980, section 7. Slots: ``m``, ``u``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.Adamax(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-7,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "Adamax",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__("adamax", (("m", 0.0), ("u", 0.0)), learning_rate, beta_1, beta_2, epsilon, *common)

    def _derived(self, values: dict[str, Number], step: Number) -> dict[str, Number]:
        return {"beta_1_power": number(values["beta_1"]) ** step}


class Nadam(AdamFamily):
    """Adam with Nesterov momentum, on the schedule b1 (1 - 0.96^t / 2).

    Dozat, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ. Slots: ``m``, ``v``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.Nadam(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-7,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "Nadam",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__("nadam", (("m", 0.0), ("v", 0.0)), learning_rate, beta_1, beta_2, epsilon, *common)

    def _derived(self, values: dict[str, Number], step: Number) -> dict[str, Number]:
        beta_1, beta_2 = number(values["beta_1"]), number(values["beta_2"])
        return nadam_factors(beta_1, beta_2, step, nadam_momentum_product(beta_1, step))


class AdaBelief(AdamFamily):
    """Adam that divides by how far gradients are from their average: s = b2 s + (1 - b2) (g - m)^2 + epsilon.

    Zhuang et al., arXiv 2010.07468. Slots: ``m``, ``s``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.AdaBelief(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-16,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "AdaBelief",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__("adabelief", (("m", 0.0), ("s", 0.0)), learning_rate, beta_1, beta_2, epsilon, *common)


class RectifiedAdam(AdamFamily):
    """Adam that divides by sqrt(v) only once its variance can be trusted, and is plain momentum before.

    Liu et al., arXiv 1908.03265. Slots: ``m``, ``v``, and ``vhat`` with `amsgrad`.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.
      sma_threshold: the length of the moving average from which on v is trusted.
      amsgrad: divide by the largest v so far.
      use_nesterov: step by beta_1 m + (1 - beta_1) g in place of m.
      total_steps: 0, or how many steps there will be: the learning rate rises from 0 to `learning_rate` in the first
        of them, goes down to `min_lr` in the others, both in a line, and stays there.
      warmup_proportion: how much of `total_steps` are the first ones, 0 to 1.
      min_lr: where the learning rate ends.
      decay: divides the learning rate by 1 + decay t, t being the number of the step, from 1.

    Example:
      >>> optimizer = tfplugin.optimizers.RectifiedAdam(0.001, total_steps=10_000, warmup_proportion=0.1, min_lr=1e-5)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-7,
        sma_threshold: Any = 5.0,
        amsgrad: bool = False,
        *,
        use_nesterov: bool = False,
        total_steps: float = 0,
        warmup_proportion: float = 0.1,
        min_lr: float = 0.0,
        decay: float = 0.0,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "RectifiedAdam",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__(
            "radam_amsgrad" if amsgrad else "radam",
            (("m", 0.0), ("v", 0.0), ("vhat", 0.0))[: 3 if amsgrad else 2],
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            *common,
        )
        self._set("sma_threshold", sma_threshold, ANY)
        self._set("nesterov", float(bool(use_nesterov)), UNIT)
        for what, value, allowed in (
            ("total_steps", total_steps, NON_NEGATIVE),
            ("warmup_proportion", warmup_proportion, UNIT),
            ("min_lr", min_lr, NON_NEGATIVE),
            ("decay", decay, NON_NEGATIVE),
        ):
            self._check(what, value, allowed)
        self._total_steps, self._warmup_steps = float(total_steps), total_steps * float(warmup_proportion)
        self._min_lr, self._decay = float(min_lr), float(decay)

    def _derived(self, values: dict[str, Number], step: Number) -> dict[str, Number]:
        return {"learning_rate": self._rate(values["learning_rate"], step), "step": step} | super()._derived(
            values, step
        )

    def _rate(self, rate: Number, step: Number) -> Number:
        """The learning rate of a step after decay and warm-up."""
        if self._decay:
            rate = number(rate) / (1 + self._decay * step)
        if not self._total_steps:
            return rate
        rate = number(rate)
        rising = rate * (step / max(self._warmup_steps, 1.0))
        falling_steps = max(self._total_steps - self._warmup_steps, 1.0)
        since = step - self._warmup_steps
        if isinstance(step, float) and isinstance(rate, float):
            falling = rate + (self._min_lr - rate) / falling_steps * min(since, falling_steps)
            return rising if step <= self._warmup_steps else falling
        rate, since = tf.cast(rate, tf.float64), tf.cast(since, tf.float64)
        falling = rate + (self._min_lr - rate) / falling_steps * tf.minimum(since, falling_steps)
        return tf.where(tf.cast(step, tf.float64) <= self._warmup_steps, tf.cast(rising, tf.float64), falling)


class Lion(FusedOptimizer):
    """w -= learning_rate * sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g.

    Chen et al., arXiv 2302.06675. Slot: ``m``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: rates of the step and of the average, 0 to 1.

    Example:
      >>> optimizer = tfplugin.optimizers.Lion(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.99,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "Lion",
    ) -> None:
        super().__init__("lion", (("m", 0.0),), learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name)
        self._set("beta_1", beta_1, UNIT)
        self._set("beta_2", beta_2, UNIT)


class Lamb(AdamFamily):
    """Adam with steps as long as the row: w -= learning_rate * |w| / |u| * u, u being the step of Adam.

    Norms are of a row in a key-value variable or a gradient of slices, and of the whole variable where its gradient
    is dense. You et al., arXiv 1904.00962. Slots: ``m``, ``v``.

    Args:
      learning_rate, weight_decay, skip_nonfinite, stochastic_rounding, name: see `FusedOptimizer`.
      beta_1, beta_2: decay rates of the averages, at least 0 and less than 1.
      epsilon: 0 or more.

    Example:
      >>> optimizer = tfplugin.optimizers.Lamb(0.001)
      >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    _whole = True

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-7,
        *,
        weight_decay: Any = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        name: str = "Lamb",
    ) -> None:
        common = weight_decay, skip_nonfinite, stochastic_rounding, name
        super().__init__("lamb", (("m", 0.0), ("v", 0.0)), learning_rate, beta_1, beta_2, epsilon, *common)
