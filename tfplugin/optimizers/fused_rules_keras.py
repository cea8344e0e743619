"""The optimizers of Keras 3 and of tf_keras as the fused kernels know them.

Both compute the same; they differ in names of slots and in which slots they make. Hyperparameters are rounded where the
optimizer casts them to the dtype of the variable.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin.optimizers.fused_rules import FusedRule, register, rmsprop_rule
from tfplugin.optimizers.hyperparameters import (
    Number,
    Step,
    given,
    nadam_factors,
    nadam_momentum_product,
    number,
)

_METHODS = ("build", "update_step", "_update_step", "_apply_weight_decay", "_backend_update_step")


def _is_keras_3(o: Any) -> bool:
    return hasattr(o, "_check_variables_are_known")


def _learning_rate(o: Any, step: Step) -> Number:
    if step.learning_rate is not None:
        return given(step.learning_rate)
    schedule = o._learning_rate
    if (
        step.number is not None
        and callable(schedule)
        and not tf.is_tensor(schedule)
        and not hasattr(schedule, "assign")
    ):
        done = step.number - 1
        return number(schedule(done if isinstance(done, float) else tf.cast(done, tf.int64)))
    return given(o.learning_rate)


def _step_number(o: Any, step: Step) -> Number:
    return number(o.iterations) + 1 if step.number is None else step.number


def _powers(o: Any, step: Step) -> dict[str, Number]:
    count = _step_number(o, step)
    return {"beta_1_power": step.rounded(o.beta_1) ** count, "beta_2_power": step.rounded(o.beta_2) ** count}


def _sgd(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        values = {"learning_rate": _learning_rate(o, step)}
        if slots:
            values |= {"momentum": step.rounded(o.momentum), "nesterov": float(bool(o.nesterov))}
        return values

    slots: tuple[tuple[str, float], ...] = (("m", 0.0),)
    if _is_keras_3(o):
        slots = (("momentum", 0.0),) if o.momentum != 0 else ()
    return FusedRule("keras_momentum" if slots else "sgd", slots, hyperparameters)


def _adam(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        values = {
            "learning_rate": _learning_rate(o, step),
            "beta_1": given(o.beta_1),
            "beta_2": given(o.beta_2),
            "epsilon": given(o.epsilon),
            **_powers(o, step),
        }
        if getattr(o, "adaptive_epsilon", False):
            values["epsilon"] = number(o.epsilon) * (1 - values["beta_2_power"]) ** 0.5
        return values

    names = ("momentum", "velocity", "velocity_hat") if _is_keras_3(o) else ("m", "v", "vhat")
    slots = tuple((name, 0.0) for name in names)
    return FusedRule("amsgrad", slots, hyperparameters) if o.amsgrad else FusedRule("adam", slots[:2], hyperparameters)


def _lamb(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        return {
            "learning_rate": _learning_rate(o, step),
            "beta_1": given(o.beta_1),
            "beta_2": given(o.beta_2),
            "epsilon": given(o.epsilon),
            **_powers(o, step),
        }

    return FusedRule("lamb", (("momentum", 0.0), ("velocity", 0.0)), hyperparameters)


def _adagrad(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        return {"learning_rate": _learning_rate(o, step), "epsilon": 0.0, "epsilon_inside": given(o.epsilon)}

    return FusedRule("adagrad", (("accumulator", float(o.initial_accumulator_value)),), hyperparameters)


def _adadelta(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        return {"learning_rate": _learning_rate(o, step), "rho": given(o.rho), "epsilon": given(o.epsilon)}

    return FusedRule("adadelta", (("accumulated_grad", 0.0), ("accumulated_delta_var", 0.0)), hyperparameters)


def _adamax(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        return {
            "learning_rate": _learning_rate(o, step),
            "beta_1": given(o.beta_1),
            "beta_2": given(o.beta_2),
            "epsilon": given(o.epsilon),
            "beta_1_power": _powers(o, step)["beta_1_power"],
        }

    names = ("momentum", "norm") if _is_keras_3(o) else ("m", "u")
    return FusedRule("adamax", tuple((name, 0.0) for name in names), hyperparameters)


def _nadam_product(o: Any, beta_1: Number, step: Step) -> Number:
    """The product of momenta up to this step. Both keep it in a variable, tf_keras in one that a function, which is
    traced more than once, moves on once too often.
    """
    if step.number is None and _is_keras_3(o):
        return number(o._u_product)
    return nadam_momentum_product(beta_1, _step_number(o, step))


def _nadam(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        beta_1, beta_2 = step.rounded(o.beta_1), step.rounded(o.beta_2)
        factors = nadam_factors(beta_1, beta_2, _step_number(o, step), _nadam_product(o, beta_1, step))
        return {"learning_rate": _learning_rate(o, step), "epsilon": given(o.epsilon), **factors}

    names = ("momentum", "velocity") if _is_keras_3(o) else ("m", "v")
    return FusedRule("nadam", tuple((name, 0.0) for name in names), hyperparameters)


def _rmsprop(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        values = {
            "learning_rate": _learning_rate(o, step),
            "rho": given(o.rho),
            "epsilon": 0.0,
            "epsilon_inside": given(o.epsilon),
        }
        if o.momentum > 0:
            values["momentum"] = given(o.momentum)
        return values

    slots = [("velocity", 0.0)]
    if o.momentum > 0:
        slots.append(("momentum", 0.0))
    if o.centered:
        slots.append(("average_gradient", 0.0))
    rule = rmsprop_rule(o.centered, o.momentum > 0)
    return FusedRule(rule, tuple(slots), hyperparameters)


def _ftrl(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        return {
            "learning_rate": _learning_rate(o, step),
            "learning_rate_power": given(o.learning_rate_power),
            "l1": given(o.l1_regularization_strength),
            "l2": given(o.l2_regularization_strength),
            "l2_shrinkage": given(o.l2_shrinkage_regularization_strength),
            "beta": given(o.beta),
        }

    return FusedRule("ftrl", (("accumulator", float(o.initial_accumulator_value)), ("linear", 0.0)), hyperparameters)


def _lion(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        return {
            "learning_rate": _learning_rate(o, step),
            "beta_1": step.rounded(o.beta_1),
            "beta_2": step.rounded(o.beta_2),
        }

    return FusedRule("lion", (("momentum" if _is_keras_3(o) else "m", 0.0),), hyperparameters)


for _module, _name, _describe in (
    ("sgd", "SGD", _sgd),
    ("adam", "Adam", _adam),
    ("adamw", "AdamW", _adam),
    ("adagrad", "Adagrad", _adagrad),
    ("adadelta", "Adadelta", _adadelta),
    ("adamax", "Adamax", _adamax),
    ("nadam", "Nadam", _nadam),
    ("rmsprop", "RMSprop", _rmsprop),
    ("ftrl", "Ftrl", _ftrl),
    ("lion", "Lion", _lion),
):
    for _package in ("keras", "tf_keras"):
        register(f"{_package}.src.optimizers.{_module}", _name, _METHODS, _describe)
register("keras.src.optimizers.lamb", "Lamb", _METHODS, _lamb)
