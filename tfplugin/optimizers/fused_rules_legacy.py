"""The optimizers of `tf_keras.optimizers.legacy` as the fused kernels know them.

Hyperparameters are the coefficients that such an optimizer prepares for each dtype.
"""

from __future__ import annotations

from typing import Any

from tfplugin.optimizers.fused_rules import FusedRule, register, rmsprop_rule
from tfplugin.optimizers.hyperparameters import Number, Step, given, number

_METHODS = (
    "_create_slots",
    "_prepare",
    "_prepare_local",
    "_resource_apply_dense",
    "_resource_apply_sparse",
    "_resource_apply_sparse_duplicate_indices",
)


def _named(step: Step, **names: str) -> dict[str, Number]:
    return {ours: given(step.coefficients[theirs]) for ours, theirs in names.items()}


def _powers(step: Step, *betas: str) -> dict[str, Number]:
    if step.number is None:
        return {f"{beta}_power": given(step.coefficients[f"{beta}_power"]) for beta in betas}
    return {f"{beta}_power": number(step.coefficients[f"{beta}_t"]) ** step.number for beta in betas}


def _sgd(o: Any) -> FusedRule:
    if not o._momentum:
        return FusedRule("sgd", (), lambda step: _named(step, learning_rate="lr_t"))
    return FusedRule(
        "keras_momentum",
        (("momentum", 0.0),),
        lambda step: _named(step, learning_rate="lr_t", momentum="momentum") | {"nesterov": float(bool(o.nesterov))},
    )


def _adam(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        values = _named(step, learning_rate="lr_t", beta_1="beta_1_t", beta_2="beta_2_t", epsilon="epsilon")
        return values | _powers(step, "beta_1", "beta_2")

    slots = (("m", 0.0), ("v", 0.0))
    return (
        FusedRule("amsgrad", (*slots, ("vhat", 0.0)), hyperparameters)
        if o.amsgrad
        else FusedRule("adam", slots, hyperparameters)
    )


def _adagrad(o: Any) -> FusedRule:
    return FusedRule(
        "adagrad",
        (("accumulator", float(o._initial_accumulator_value)),),
        lambda step: _named(step, learning_rate="lr_t", epsilon="epsilon") | {"epsilon_inside": 0.0},
    )


def _adadelta(_: Any) -> FusedRule:
    return FusedRule(
        "adadelta",
        (("accum_grad", 0.0), ("accum_var", 0.0)),
        lambda step: _named(step, learning_rate="lr_t", rho="rho", epsilon="epsilon"),
    )


def _adamax(_: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        values = _named(step, learning_rate="lr_t", beta_1="beta_1_t", beta_2="beta_2_t", epsilon="epsilon")
        return values | _powers(step, "beta_1")

    return FusedRule("adamax", (("m", 0.0), ("v", 0.0)), hyperparameters)


def _nadam(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        if step.number is not None:
            raise ValueError("Nadam of tf_keras.optimizers.legacy counts its steps itself; use another Nadam.")
        factor = {name: number(step.coefficients[name]) for name in _NADAM}
        return {
            **_named(step, learning_rate="lr_t", epsilon="epsilon", beta_1="beta_1_t", beta_2="beta_2_t"),
            "m_factor": factor["m_t_1"] / factor["one_minus_m_schedule_next"],
            "g_factor": factor["one_minus_m_t"] / factor["one_minus_m_schedule_new"],
            "v_factor": 1 / factor["v_t_prime_denominator"],
        }

    return FusedRule("nadam", (("m", 0.0), ("v", 0.0)), hyperparameters)


_NADAM = (
    "m_t_1",
    "one_minus_m_t",
    "one_minus_m_schedule_new",
    "one_minus_m_schedule_next",
    "v_t_prime_denominator",
)


def _rmsprop(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        values = _named(step, learning_rate="lr_t", rho="rho")
        # TensorFlow's op, which it runs where there is momentum, has epsilon under the root.
        epsilon = given(step.coefficients["epsilon"])
        if o._momentum:
            return values | {"epsilon": 0.0, "epsilon_inside": epsilon} | _named(step, momentum="momentum")
        return values | {"epsilon": epsilon, "epsilon_inside": 0.0}

    slots = [("rms", 0.0)]
    if o._momentum:
        slots.append(("momentum", 0.0))
    if o.centered:
        slots.append(("mg", 0.0))
    rule = rmsprop_rule(o.centered, bool(o._momentum))
    return FusedRule(rule, tuple(slots), hyperparameters)


def _ftrl(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        return _named(
            step,
            learning_rate="lr_t",
            learning_rate_power="learning_rate_power",
            l1="l1_regularization_strength",
            l2="l2_regularization_strength",
            l2_shrinkage="l2_shrinkage_regularization_strength",
            beta="beta",
        )

    return FusedRule("ftrl", (("accumulator", float(o._initial_accumulator_value)), ("linear", 0.0)), hyperparameters)


for _module, _name, _describe in (
    ("gradient_descent", "SGD", _sgd),
    ("adam", "Adam", _adam),
    ("adagrad", "Adagrad", _adagrad),
    ("adadelta", "Adadelta", _adadelta),
    ("adamax", "Adamax", _adamax),
    ("nadam", "Nadam", _nadam),
    ("rmsprop", "RMSprop", _rmsprop),
    ("ftrl", "Ftrl", _ftrl),
):
    register(f"tf_keras.src.optimizers.legacy.{_module}", _name, _METHODS, _describe)
