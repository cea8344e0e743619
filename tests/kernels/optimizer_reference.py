"""Every update rule in plain NumPy, from the papers and TensorFlow's documentation. Rows are independent.

A rule is a function of the value w, the slots s (a dict, which it changes), the gradient g, all (rows, dim), and the
hyperparameters h (a dict with all of them). It returns the new value. Weight decay is in `step`.
"""

import numpy as np

RULES = {}


def rule(function):
    RULES[function.__name__] = function
    return function


def step(name, columns, gradient, hyperparameters, described):
    """The columns after one step, in the gradient's dtype; described is optimizers()[name]."""
    h = {key: fallback for key, (fallback, _) in described["hyperparameters"].items()} | hyperparameters
    slots = dict(zip(described["slots"], (column.copy() for column in columns[1:]), strict=True))
    before = columns[0].copy()
    decay = h["learning_rate"] * h["weight_decay"]
    with np.errstate(all="ignore"):
        if name.startswith("group_") and name != "group_ftrl":
            value = RULES[name](before, slots, gradient, h, decay)
        else:
            value = RULES[name](before - decay * before, slots, gradient, h)
    return [value, *slots.values()]


def soft_threshold(x, by):
    return np.sign(x) * np.maximum(np.abs(x) - by, 0)


def average(old, new, beta):
    return beta * old + (1 - beta) * new


@rule
def sgd(w, s, g, h):
    return w - h["learning_rate"] * g


@rule
def momentum(w, s, g, h):
    s["accumulator"] = h["momentum"] * s["accumulator"] + g
    direction = g + h["momentum"] * s["accumulator"] if h["nesterov"] else s["accumulator"]
    return w - h["learning_rate"] * direction


@rule
def keras_momentum(w, s, g, h):
    s["momentum"] = h["momentum"] * s["momentum"] - h["learning_rate"] * g
    return w + (h["momentum"] * s["momentum"] - h["learning_rate"] * g if h["nesterov"] else s["momentum"])


@rule
def proximal_sgd(w, s, g, h):
    lr = h["learning_rate"]
    return soft_threshold(w - lr * g, lr * h["l1"]) / (1 + lr * h["l2"])


@rule
def adagrad(w, s, g, h):
    s["accumulator"] = s["accumulator"] + g**2
    return w - h["learning_rate"] * g / (np.sqrt(s["accumulator"] + h["epsilon_inside"]) + h["epsilon"])


@rule
def adagrad_da(w, s, g, h):
    s["gradient_accumulator"] = s["gradient_accumulator"] + g
    s["gradient_squared_accumulator"] = s["gradient_squared_accumulator"] + g**2
    shrunk = soft_threshold(s["gradient_accumulator"], h["l1"] * h["step"])
    root = np.sqrt(s["gradient_squared_accumulator"])
    return -h["learning_rate"] * shrunk / (h["l2"] * h["step"] * h["learning_rate"] + root)


@rule
def proximal_adagrad(w, s, g, h):
    s["accumulator"] = s["accumulator"] + g**2
    rate = h["learning_rate"] / np.sqrt(s["accumulator"])
    return soft_threshold(w - rate * g, rate * h["l1"]) / (1 + rate * h["l2"])


def moments(s, g, h, second="v"):
    s["m"] = average(s["m"], g, h["beta_1"])
    s[second] = average(s[second], g**2, h["beta_2"])


def adam_rate(h):
    return h["learning_rate"] * np.sqrt(1 - h["beta_2_power"]) / (1 - h["beta_1_power"])


@rule
def adam(w, s, g, h):
    moments(s, g, h)
    return w - adam_rate(h) * s["m"] / (np.sqrt(s["v"]) + h["epsilon"])


@rule
def amsgrad(w, s, g, h):
    moments(s, g, h)
    s["vhat"] = np.maximum(s["vhat"], s["v"])
    return w - adam_rate(h) * s["m"] / (np.sqrt(s["vhat"]) + h["epsilon"])


def rmsprop_increment(s, g, h, centered):
    s["rms"] = average(s["rms"], g**2, h["rho"])
    square = s["rms"]
    if centered:
        s["mg"] = average(s["mg"], g, h["rho"])
        square = square - s["mg"] ** 2
    return h["learning_rate"] * g / (np.sqrt(square + h["epsilon_inside"]) + h["epsilon"])


def rmsprop_momentum(s, increment, h):
    s["momentum"] = h["momentum"] * s["momentum"] + increment
    return s["momentum"]


@rule
def rmsprop(w, s, g, h):
    return w - rmsprop_momentum(s, rmsprop_increment(s, g, h, False), h)


@rule
def rmsprop_plain(w, s, g, h):
    return w - rmsprop_increment(s, g, h, False)


@rule
def centered_rmsprop(w, s, g, h):
    return w - rmsprop_momentum(s, rmsprop_increment(s, g, h, True), h)


@rule
def centered_rmsprop_plain(w, s, g, h):
    return w - rmsprop_increment(s, g, h, True)


@rule
def adadelta(w, s, g, h):
    s["accum"] = average(s["accum"], g**2, h["rho"])
    update = np.sqrt(s["accum_update"] + h["epsilon"]) / np.sqrt(s["accum"] + h["epsilon"]) * g
    s["accum_update"] = average(s["accum_update"], update**2, h["rho"])
    return w - h["learning_rate"] * update


@rule
def adamax(w, s, g, h):
    s["m"] = average(s["m"], g, h["beta_1"])
    s["u"] = np.maximum(h["beta_2"] * s["u"], np.abs(g))
    return w - h["learning_rate"] / (1 - h["beta_1_power"]) * s["m"] / (s["u"] + h["epsilon"])


@rule
def nadam(w, s, g, h):
    moments(s, g, h)
    m_hat = h["m_factor"] * s["m"] + h["g_factor"] * g
    return w - h["learning_rate"] * m_hat / (np.sqrt(s["v"] * h["v_factor"]) + h["epsilon"])


def ftrl_dual(w, s, g, h):
    power = -h["learning_rate_power"]
    before = s["accumulator"] ** power
    s["accumulator"] = s["accumulator"] + g**2
    after = s["accumulator"] ** power
    shrunk_gradient = g + 2 * h["l2_shrinkage"] * w
    s["linear"] = s["linear"] + shrunk_gradient - (after - before) / h["learning_rate"] * w
    return np.clip(s["linear"], -h["l1"], h["l1"]) - s["linear"], (after + h["beta"]) / h["learning_rate"] + 2 * h["l2"]


@rule
def ftrl(w, s, g, h):
    dual, quadratic = ftrl_dual(w, s, g, h)
    return dual / quadratic


@rule
def lion(w, s, g, h):
    w = w - h["learning_rate"] * np.sign(average(s["m"], g, h["beta_1"]))
    s["m"] = average(s["m"], g, h["beta_2"])
    return w


def trust_ratio(w, update):
    w_norm = np.linalg.norm(w, axis=1, keepdims=True)
    norm = np.linalg.norm(update, axis=1, keepdims=True)
    return np.where((w_norm > 0) & (norm > 0), w_norm / norm, 1)


@rule
def lamb(w, s, g, h):
    moments(s, g, h)
    m_hat = s["m"] / (1 - h["beta_1_power"])
    v_hat = s["v"] / (1 - h["beta_2_power"])
    update = m_hat / (np.sqrt(v_hat) + h["epsilon"]) + h["lamb_weight_decay"] * w
    return w - h["learning_rate"] * trust_ratio(w, update) * update


def belief(s, g, h):
    s["m"] = average(s["m"], g, h["beta_1"])
    s["s"] = average(s["s"], (g - s["m"]) ** 2, h["beta_2"]) + h["epsilon"]


@rule
def adabelief(w, s, g, h):
    belief(s, g, h)
    m_hat = s["m"] / (1 - h["beta_1_power"])
    s_hat = s["s"] / (1 - h["beta_2_power"])
    return w - h["learning_rate"] * m_hat / (np.sqrt(s_hat) + h["epsilon"])


def rectified(w, s, g, h, second):
    """Rectified Adam that divides by the root of `second`, once that can be trusted."""
    m = average(s["m"], g, h["beta_1"]) if h["nesterov"] else s["m"]
    m_hat = m / (1 - h["beta_1_power"])
    longest = 2 / (1 - h["beta_2"]) - 1
    length = longest - 2 * h["step"] * h["beta_2_power"] / (1 - h["beta_2_power"])
    if length < h["sma_threshold"]:
        return w - h["learning_rate"] * m_hat
    rectifier = np.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
    v_hat = second / (1 - h["beta_2_power"])
    return w - h["learning_rate"] * rectifier * m_hat / (np.sqrt(v_hat) + h["epsilon"])


@rule
def radam(w, s, g, h):
    moments(s, g, h)
    return rectified(w, s, g, h, s["v"])


@rule
def radam_amsgrad(w, s, g, h):
    moments(s, g, h)
    s["vhat"] = np.maximum(s["vhat"], s["v"])
    return rectified(w, s, g, h, s["vhat"])


# ---- Sparse group lasso, arXiv 2107.14432 ----


def solve(dual, divisor, l2, l21):
    """w from s = clip(z) - z, row by row: the lasso of the row's norm."""
    limit = l21 * np.sqrt(dual.shape[1])
    norm = np.linalg.norm(dual, axis=1, keepdims=True)
    shrunk = dual * (1 - limit / norm) if limit > 0 else dual
    return np.where(norm > limit, shrunk / (divisor + 2 * l2), 0)


def group(w, s, h, decay, change, before, divisor):
    """One step: `change` is what the plain rule divides by `divisor`; w is the value before its decay."""
    lr = h["learning_rate"]
    before = np.where(s["z"] == 0, 0, before)
    s["z"] = s["z"] + change + before * w - divisor * (w - decay * w)
    dual = np.clip(s["z"], -lr * h["l1"], lr * h["l1"]) - s["z"]
    return solve(dual, divisor, lr * h["l2"], lr * h["l21"])


@rule
def group_adam(w, s, g, h, decay):
    before = np.sqrt(s["v"]) + h["epsilon"]
    moments(s, g, h)
    return group(w, s, h, decay, adam_rate(h) * s["m"], before, np.sqrt(s["v"]) + h["epsilon"])


@rule
def group_amsgrad(w, s, g, h, decay):
    before = np.sqrt(s["vhat"]) + h["epsilon"]
    moments(s, g, h)
    s["vhat"] = np.maximum(s["vhat"], s["v"])
    return group(w, s, h, decay, adam_rate(h) * s["m"], before, np.sqrt(s["vhat"]) + h["epsilon"])


@rule
def group_adagrad(w, s, g, h, decay):
    before = np.sqrt(s["accumulator"] + h["epsilon_inside"]) + h["epsilon"]
    s["accumulator"] = s["accumulator"] + g**2
    after = np.sqrt(s["accumulator"] + h["epsilon_inside"]) + h["epsilon"]
    return group(w, s, h, decay, h["learning_rate"] * g, before, after)


@rule
def group_momentum(w, s, g, h, decay):
    change = -momentum(np.zeros_like(w), s, g, h)
    return group(w, s, h, decay, change, np.ones_like(w), np.ones_like(w))


@rule
def group_adabelief(w, s, g, h, decay):
    before = np.sqrt(s["s"]) + h["epsilon"]
    belief(s, g, h)
    return group(w, s, h, decay, adam_rate(h) * s["m"], before, np.sqrt(s["s"]) + h["epsilon"])


@rule
def group_lamb(w, s, g, h, decay):
    before = np.sqrt(s["v"]) + h["epsilon"]
    moments(s, g, h)
    after = np.sqrt(s["v"]) + h["epsilon"]
    numerator = np.sqrt(1 - h["beta_2_power"]) / (1 - h["beta_1_power"]) * s["m"]
    ratio = trust_ratio(w - decay * w, numerator / after)
    return group(w, s, h, decay, h["learning_rate"] * ratio * numerator, before, after)


@rule
def group_ftrl(w, s, g, h):
    dual, quadratic = ftrl_dual(w, s, g, h)
    return solve(dual, quadratic - 2 * h["l2"], h["l2"], h["l21"])
