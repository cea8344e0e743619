"""The engine's update rules do what the stock optimizers do to a dense variable."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from kvtools._kvtable import apply_to_arrays, optimizers

LR = 0.05
v1 = tf.compat.v1.train
legacy = tf_keras.optimizers.legacy


def powers(t, beta_1=0.9, beta_2=0.999):
    return {"beta_1": beta_1, "beta_2": beta_2, "beta_1_power": beta_1**t, "beta_2_power": beta_2**t}


def nadam(t, beta_1=0.9, beta_2=0.999, decay=1.0):
    momenta = [beta_1 * (1 - 0.5 * 0.96 ** (decay * i)) for i in range(1, t + 2)]
    return {
        "m_factor": momenta[-1] / (1 - np.prod(momenta)),
        "g_factor": (1 - momenta[-2]) / (1 - np.prod(momenta[:-1])),
        "v_factor": 1 / (1 - beta_2**t),
    }


def l1_l2(names=("l1_regularization_strength", "l2_regularization_strength")):
    return {names[0]: 0.3, names[1]: 0.2}


LASSO = {"l1": 0.3, "l2": 0.2}
FTRL = dict(LASSO, l2_shrinkage=0.1)
FTRL_NAMES = dict(l1_l2(), l2_shrinkage_regularization_strength=0.1)

# stock optimizer, rule, its hyperparameters at step t, slots that start from something else
CASES = {
    "v1 gradient descent": (lambda: v1.GradientDescentOptimizer(LR), "sgd", lambda t: {}, {}),
    "v1 momentum": (lambda: v1.MomentumOptimizer(LR, 0.8), "momentum", lambda t: {"momentum": 0.8}, {}),
    "v1 nesterov": (
        lambda: v1.MomentumOptimizer(LR, 0.8, use_nesterov=True),
        "momentum",
        lambda t: {"momentum": 0.8, "nesterov": 1},
        {},
    ),
    "v1 adagrad": (lambda: v1.AdagradOptimizer(LR), "adagrad", lambda t: {}, {}),
    "v1 adam": (lambda: v1.AdamOptimizer(LR, epsilon=1e-3), "adam", lambda t: powers(t) | {"epsilon": 1e-3}, {}),
    "v1 rmsprop": (
        lambda: v1.RMSPropOptimizer(LR, 0.8, 0.7, 1e-3),
        "rmsprop",
        lambda t: {"rho": 0.8, "momentum": 0.7, "epsilon_inside": 1e-3},
        {"rms": 1.0},
    ),
    "v1 centered rmsprop": (
        lambda: v1.RMSPropOptimizer(LR, 0.8, 0.7, 1e-3, centered=True),
        "centered_rmsprop",
        lambda t: {"rho": 0.8, "momentum": 0.7, "epsilon_inside": 1e-3},
        {"rms": 1.0},
    ),
    "v1 adadelta": (
        lambda: v1.AdadeltaOptimizer(LR, 0.9, 1e-3),
        "adadelta",
        lambda t: {"rho": 0.9, "epsilon": 1e-3},
        {},
    ),
    "v1 ftrl": (lambda: v1.FtrlOptimizer(LR, **FTRL_NAMES), "ftrl", lambda t: FTRL, {}),
    "v1 ftrl without penalties": (lambda: v1.FtrlOptimizer(LR), "ftrl", lambda t: {}, {}),
    "v1 ftrl of another power": (
        lambda: v1.FtrlOptimizer(LR, learning_rate_power=-0.3, beta=0.4),
        "ftrl",
        lambda t: {"learning_rate_power": -0.3, "beta": 0.4},
        {},
    ),
    "v1 proximal adagrad": (
        lambda: v1.ProximalAdagradOptimizer(LR, **l1_l2()),
        "proximal_adagrad",
        lambda t: LASSO,
        {},
    ),
    "v1 proximal gradient descent": (
        lambda: v1.ProximalGradientDescentOptimizer(LR, **l1_l2()),
        "proximal_sgd",
        lambda t: LASSO,
        {},
    ),
    "keras lamb": (lambda: keras.optimizers.Lamb(LR, weight_decay=0.1), "lamb", lambda t: powers(t), {}),
    "keras adagrad": (lambda: keras.optimizers.Adagrad(LR), "adagrad", lambda t: {"epsilon_inside": 1e-7}, {}),
    "legacy adagrad": (lambda: legacy.Adagrad(LR, epsilon=0.01), "adagrad", lambda t: {"epsilon": 0.01}, {}),
    "legacy nadam": (lambda: legacy.Nadam(LR), "nadam", lambda t: nadam(t, decay=0.004), {}),
    "legacy adamax": (lambda: legacy.Adamax(LR), "adamax", lambda t: powers(t), {}),
    "legacy sgd": (
        lambda: legacy.SGD(LR, momentum=0.8, nesterov=True),
        "keras_momentum",
        lambda t: {"momentum": 0.8, "nesterov": 1},
        {},
    ),
    "legacy rmsprop": (
        lambda: legacy.RMSprop(LR, epsilon=0.01),
        "rmsprop_plain",
        lambda t: {"epsilon": 0.01, "epsilon_inside": 0},
        {},
    ),
    "legacy centered rmsprop": (
        lambda: legacy.RMSprop(LR, momentum=0.5, centered=True, epsilon=0.01),
        "centered_rmsprop",
        lambda t: {"momentum": 0.5, "epsilon_inside": 0.01},
        {},
    ),
    "legacy amsgrad": (lambda: legacy.Adam(LR, amsgrad=True), "amsgrad", lambda t: powers(t), {}),
}
for _name, _of in (("keras", keras.optimizers), ("tf_keras", tf_keras.optimizers)):
    CASES |= {
        f"{_name} sgd": (
            lambda of=_of: of.SGD(LR, momentum=0.8),
            "keras_momentum",
            lambda t: {"momentum": 0.8},
            {},
        ),
        f"{_name} adamw": (lambda of=_of: of.AdamW(LR, weight_decay=0.1), "adam", lambda t: powers(t), {}),
        f"{_name} amsgrad": (lambda of=_of: of.Adam(LR, amsgrad=True), "amsgrad", lambda t: powers(t), {}),
        f"{_name} adamax": (lambda of=_of: of.Adamax(LR), "adamax", lambda t: powers(t), {}),
        f"{_name} nadam": (lambda of=_of: of.Nadam(LR), "nadam", nadam, {}),
        f"{_name} lion": (lambda of=_of: of.Lion(LR), "lion", lambda t: {}, {}),
        f"{_name} adadelta": (lambda of=_of: of.Adadelta(LR), "adadelta", lambda t: {}, {}),
        f"{_name} rmsprop": (
            lambda of=_of: of.RMSprop(LR, epsilon=0.01),
            "rmsprop_plain",
            lambda t: {"epsilon_inside": 0.01},
            {},
        ),
        f"{_name} centered rmsprop": (
            lambda of=_of: of.RMSprop(LR, momentum=0.5, centered=True, epsilon=0.01),
            "centered_rmsprop",
            lambda t: {"momentum": 0.5, "epsilon_inside": 0.01},
            {},
        ),
        f"{_name} ftrl": (
            lambda of=_of: of.Ftrl(LR, beta=0.4, **FTRL_NAMES),
            "ftrl",
            lambda t: dict(FTRL, beta=0.4),
            {},
        ),
    }


def apply_stock(optimizer, variable, gradients):
    for gradient in gradients:
        optimizer.apply_gradients([(tf.constant(gradient), variable)])
    return variable.numpy()


@pytest.mark.parametrize("case", CASES)
def test_the_rule_is_the_stock_optimizer(case):
    make, rule, hyperparameters, starts = CASES[case]
    rng = np.random.default_rng(1)
    initial = rng.normal(size=(1, 16)).astype(np.float32)  # one row: LAMB's norms are those of the variable
    gradients = rng.normal(size=(6, 1, 16)).astype(np.float32)
    # A Keras optimizer takes a Keras variable or TensorFlow's.
    expected = apply_stock(make(), tf.Variable(initial), gradients)
    slots = optimizers()[rule]["slots"] | starts
    columns = [initial.copy(), *(np.full_like(initial, start) for start in slots.values())]
    known = optimizers()[rule]["hyperparameters"]
    for t, gradient in enumerate(gradients, 1):
        given = {"learning_rate": LR} | hyperparameters(t)
        if "adamw" in case or "lamb" in case:
            given["weight_decay"] = 0.1
        apply_to_arrays(rule, columns, gradient, {key: given[key] for key in given if key in known})
    np.testing.assert_allclose(columns[0], expected, rtol=2e-5, atol=2e-6)


def test_the_rule_is_adagrad_da():
    """Its step comes from a variable, so it runs in a graph."""
    rng = np.random.default_rng(2)
    initial = rng.normal(size=(2, 8)).astype(np.float32)
    gradients = rng.normal(size=(5, 2, 8)).astype(np.float32)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        step = tf.compat.v1.train.get_or_create_global_step()
        variable = tf.Variable(initial)
        gradient = tf.compat.v1.placeholder(tf.float32, (2, 8))
        strengths = {"l1_regularization_strength": 0.1, "l2_regularization_strength": 0.2}
        train = v1.AdagradDAOptimizer(LR, step, **strengths).apply_gradients([(gradient, variable)], step)
        session.run(tf.compat.v1.global_variables_initializer())
        for value in gradients:
            session.run(train, {gradient: value})
        expected = session.run(variable)
    columns = [initial.copy(), np.zeros_like(initial), np.full_like(initial, 0.1)]
    for t, value in enumerate(gradients, 1):
        h = {"learning_rate": LR, "l1": 0.1, "l2": 0.2, "step": t}
        apply_to_arrays("adagrad_da", columns, value, h)
    np.testing.assert_allclose(columns[0], expected, rtol=2e-5, atol=2e-6)
