"""The optimizers of `tf.compat.v1.train` as the fused kernels know them.

`_prepare` has been called: hyperparameters are tensors, of float32 where they were Python numbers.
"""

from __future__ import annotations

from typing import Any

from tfplugin.optimizers.fused_rules import FusedRule, register
from tfplugin.optimizers.hyperparameters import Number, Step, given, number

_METHODS = (
    "_create_slots",
    "_prepare",
    "_resource_apply_dense",
    "_resource_apply_sparse",
    "_resource_apply_sparse_duplicate_indices",
)


def _gradient_descent(o: Any) -> FusedRule:
    return FusedRule("sgd", (), lambda _: {"learning_rate": given(o._learning_rate_tensor)})


def _momentum(o: Any) -> FusedRule:
    def hyperparameters(_: Step) -> dict[str, Number]:
        return {
            "learning_rate": given(o._learning_rate_tensor),
            "momentum": given(o._momentum_tensor),
            "nesterov": float(o._use_nesterov),
        }

    return FusedRule("momentum", (("momentum", 0.0),), hyperparameters)


def _adagrad(o: Any) -> FusedRule:
    def hyperparameters(_: Step) -> dict[str, Number]:
        return {"learning_rate": given(o._learning_rate_tensor), "epsilon": 0.0, "epsilon_inside": 0.0}

    return FusedRule("adagrad", (("accumulator", float(o._initial_accumulator_value)),), hyperparameters)


def _adagrad_da(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        return {
            "learning_rate": given(o._learning_rate_tensor),
            "l1": given(o._l1_regularization_strength),
            "l2": given(o._l2_regularization_strength),
            "step": given(o._global_step_on_worker) if step.number is None else step.number,
        }

    start = float(o._initial_gradient_squared_accumulator_value)
    slots = (("gradient_accumulator", 0.0), ("gradient_squared_accumulator", start))
    return FusedRule("adagrad_da", slots, hyperparameters)


def _proximal(o: Any) -> dict[str, Number]:
    return {
        "learning_rate": given(o._learning_rate_tensor),
        "l1": given(o._l1_regularization_strength_tensor),
        "l2": given(o._l2_regularization_strength_tensor),
    }


def _proximal_adagrad(o: Any) -> FusedRule:
    slots = (("accumulator", float(o._initial_accumulator_value)),)
    return FusedRule("proximal_adagrad", slots, lambda _: _proximal(o))


def _proximal_gradient_descent(o: Any) -> FusedRule:
    return FusedRule("proximal_sgd", (), lambda _: _proximal(o))


def _adam(o: Any) -> FusedRule:
    def hyperparameters(step: Step) -> dict[str, Number]:
        if step.number is None:
            power_1, power_2 = (given(power) for power in o._get_beta_accumulators())
        else:
            power_1, power_2 = (number(beta) ** step.number for beta in (o._beta1_t, o._beta2_t))
        return {
            "learning_rate": given(o._lr_t),
            "beta_1": given(o._beta1_t),
            "beta_2": given(o._beta2_t),
            "epsilon": given(o._epsilon_t),
            "beta_1_power": power_1,
            "beta_2_power": power_2,
        }

    return FusedRule("adam", (("m", 0.0), ("v", 0.0)), hyperparameters)


def _rmsprop(o: Any) -> FusedRule:
    def hyperparameters(_: Step) -> dict[str, Number]:
        return {
            "learning_rate": given(o._learning_rate_tensor),
            "rho": given(o._decay_tensor),
            "momentum": given(o._momentum_tensor),
            "epsilon": 0.0,
            "epsilon_inside": given(o._epsilon_tensor),
        }

    slots = (("rms", 1.0), ("momentum", 0.0))
    if o._centered:
        return FusedRule("centered_rmsprop", (*slots, ("mg", 0.0)), hyperparameters)
    return FusedRule("rmsprop", slots, hyperparameters)


def _adadelta(o: Any) -> FusedRule:
    def hyperparameters(_: Step) -> dict[str, Number]:
        return {"learning_rate": given(o._lr_t), "rho": given(o._rho_t), "epsilon": given(o._epsilon_t)}

    return FusedRule("adadelta", (("accum", 0.0), ("accum_update", 0.0)), hyperparameters)


def _ftrl(o: Any) -> FusedRule:
    def hyperparameters(_: Step) -> dict[str, Number]:
        return {
            "learning_rate": given(o._learning_rate_tensor),
            "learning_rate_power": given(o._learning_rate_power_tensor),
            "l1": given(o._l1_regularization_strength_tensor),
            # beta is part of it.
            "l2": given(o._adjusted_l2_regularization_strength_tensor),
            "l2_shrinkage": given(o._l2_shrinkage_regularization_strength_tensor),
            "beta": 0.0,
        }

    return FusedRule("ftrl", (("accum", float(o._initial_accumulator_value)), ("linear", 0.0)), hyperparameters)


for _module, _name, _describe in (
    ("gradient_descent", "GradientDescentOptimizer", _gradient_descent),
    ("momentum", "MomentumOptimizer", _momentum),
    ("adagrad", "AdagradOptimizer", _adagrad),
    ("adagrad_da", "AdagradDAOptimizer", _adagrad_da),
    ("proximal_adagrad", "ProximalAdagradOptimizer", _proximal_adagrad),
    ("proximal_gradient_descent", "ProximalGradientDescentOptimizer", _proximal_gradient_descent),
    ("adam", "AdamOptimizer", _adam),
    ("rmsprop", "RMSPropOptimizer", _rmsprop),
    ("adadelta", "AdadeltaOptimizer", _adadelta),
    ("ftrl", "FtrlOptimizer", _ftrl),
):
    register(f"tensorflow.python.training.{_module}", _name, _METHODS, _describe)
