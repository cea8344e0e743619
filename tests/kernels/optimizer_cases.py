"""Each update rule with hyperparameters that take every path through it."""

import numpy as np

from kvtools._kvtable import optimizers

_NESTEROV = {"momentum": 0.8, "nesterov": 1.0}
_LASSO = {"l1": 0.02, "l2": 0.1, "l21": 0.01}

# rule, what differs from the fallbacks
CASES = [
    ("sgd", {}),
    ("sgd", {"weight_decay": 0.1}),
    ("momentum", {}),
    ("momentum", _NESTEROV),
    ("keras_momentum", {}),
    ("keras_momentum", _NESTEROV),
    ("proximal_sgd", {}),
    ("proximal_sgd", {"l1": 0.5, "l2": 0.3}),
    ("adagrad", {}),
    ("adagrad", {"epsilon": 0.01, "epsilon_inside": 0.02, "weight_decay": 0.1}),
    ("adagrad_da", {}),
    ("adagrad_da", {"l1": 0.1, "l2": 0.3}),
    ("proximal_adagrad", {}),
    ("proximal_adagrad", {"l1": 0.5, "l2": 0.3}),
    ("adam", {}),
    ("adam", {"beta_1": 0.0, "beta_2": 0.9, "epsilon": 0.01, "weight_decay": 0.1}),
    ("amsgrad", {"beta_2": 0.5}),
    ("rmsprop", {"momentum": 0.7}),
    ("rmsprop_plain", {"epsilon": 0.01, "epsilon_inside": 0.0}),
    ("centered_rmsprop", {"momentum": 0.7, "epsilon_inside": 0.01}),
    ("centered_rmsprop_plain", {"epsilon": 0.01, "epsilon_inside": 0.01}),
    ("adadelta", {"epsilon": 1e-3}),
    ("adamax", {"beta_2": 0.5}),
    ("nadam", {}),
    ("ftrl", {}),
    ("ftrl", {"l1": 0.3, "l2": 0.1, "l2_shrinkage": 0.2, "beta": 0.5}),
    ("ftrl", {"learning_rate_power": -0.3, "l1": 0.1}),
    ("ftrl", {"learning_rate_power": 0.0, "weight_decay": 0.1}),
    ("lion", {}),
    ("lamb", {"weight_decay": 0.1}),
    ("lamb", {"lamb_weight_decay": 0.1, "epsilon": 0.01}),
    ("adabelief", {"epsilon": 1e-4}),
    ("radam", {"beta_2": 0.9}),
    ("radam", {"beta_2": 0.9, "sma_threshold": 4.0}),
    ("radam", {"beta_2": 0.9, "sma_threshold": 4.0, "nesterov": 1.0}),
    ("radam_amsgrad", {"beta_2": 0.9}),
    ("radam_amsgrad", {"beta_2": 0.9, "sma_threshold": 4.0, "nesterov": 1.0}),
    *[(name, {}) for name in optimizers() if name.startswith("group_")],
    *[(name, _LASSO) for name in optimizers() if name.startswith("group_")],
    ("group_adam", {"weight_decay": 0.1, "epsilon": 0.01}),
    ("group_adagrad", {"weight_decay": 0.1, "epsilon": 0.01, "epsilon_inside": 0.02, **_LASSO}),
    ("group_momentum", {**_NESTEROV, "l1": 0.1}),
    ("group_ftrl", {"learning_rate_power": -0.3, "l2_shrinkage": 0.1, "beta": 0.5, **_LASSO}),
    ("group_lamb", {"weight_decay": 0.1, **_LASSO}),
]
NAMES = [name + "".join(f"-{key}={value}" for key, value in changes.items()) for name, changes in CASES]


def hyperparameters(name, changes, step, learning_rate=0.1):
    """What has to be given to a rule at a step (from 1), with the changes."""
    known = optimizers()[name]["hyperparameters"]
    fallback = {key: changes.get(key, value[0]) for key, value in known.items()}
    given = {"learning_rate": learning_rate, "step": float(step)}
    for beta in ("beta_1", "beta_2"):
        if beta in known:
            given[beta + "_power"] = fallback[beta] ** step
    if name == "nadam":
        momenta = [fallback["beta_1"] * (1 - 0.5 * 0.96**t) for t in range(1, step + 2)]
        given["m_factor"] = momenta[-1] / (1 - np.prod(momenta))
        given["g_factor"] = (1 - momenta[-2]) / (1 - np.prod(momenta[:-1]))
        given["v_factor"] = 1 / (1 - fallback["beta_2"] ** step)
    return {key: value for key, value in given.items() if key in known} | changes


def new_columns(name, rng, shape, dtype):
    """A random value and the slots that an optimizer starts with."""
    slots = optimizers()[name]["slots"].values()
    return [rng.normal(size=shape).astype(dtype), *(np.full(shape, initial, dtype) for initial in slots)]
