"""Every update rule against plain NumPy, and what holds for all of them."""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from optimizer_cases import CASES, NAMES, hyperparameters, new_columns
from optimizer_reference import RULES, step

from kvtools._kvtable import apply_to_arrays, optimizers

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
DIMS = [1, 7, 8, 16, 64, 100, 129]
TOLERANCE = {np.float64: 1e-10, np.float32: 2e-5, np.float16: 2e-3, ml_dtypes.bfloat16: 1.6e-2}
SMALLEST = {np.float16: 2.0**-24}  # elsewhere far below what the cases have
GROUP_RULES = [name for name in optimizers() if name.startswith("group_")]


def assert_close(got, expected, dtype, scale):
    difference = np.abs(got.astype(np.float64) - expected)
    allowed = TOLERANCE[dtype] * (np.abs(expected) + scale) + SMALLEST.get(dtype, 0)
    assert (difference <= allowed).all(), (difference / allowed).max()


def test_every_rule_has_a_reference_and_a_case():
    assert set(optimizers()) == set(RULES) == {name for name, _ in CASES}


def test_every_rule_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "optimizer-rules.md").read_text()
    for name, rule in optimizers().items():
        for word in (name, *rule["hyperparameters"], *rule["slots"]):
            assert f"`{word}`" in page, word


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(("name", "changes"), CASES, ids=NAMES)
def test_each_step_is_the_reference_step(name, changes, dtype):
    rng = np.random.default_rng(1)
    for dim in DIMS:
        columns = new_columns(name, rng, (5, dim), dtype)
        for t in range(1, 7):
            gradient = (rng.normal(size=(5, dim)) * rng.choice([0.1, 1.0], size=(5, 1))).astype(dtype)
            h = hyperparameters(name, changes, t)
            before = [column.astype(np.float64) for column in columns]
            expected = step(name, before, gradient.astype(np.float64), h, optimizers()[name])
            assert apply_to_arrays(name, columns, gradient, h) == (5, 0)
            for i, (got, want) in enumerate(zip(columns, expected, strict=True)):
                # What cancels leaves an error of the size of what there was.
                assert_close(got, want, dtype, 1e-2 if i == 0 else 1e-2 * np.abs(want).max())


# A digest of what every rule makes of one sequence of steps, in each dtype, with either rounding.
DIGEST = """
import hashlib
import ml_dtypes
import numpy as np
from kvtools._kvtable import apply_to_arrays
from optimizer_cases import CASES, hyperparameters, new_columns

digest = hashlib.sha256()
for name, changes in CASES:
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        for dim in (1, 7, 16, 37, 100):
            rng = np.random.default_rng(dim)
            columns = new_columns(name, rng, (3, dim), dtype)
            for t in (1, 2, 3):
                gradient = rng.normal(size=(3, dim)).astype(dtype)
                given = hyperparameters(name, changes, t)
                apply_to_arrays(name, columns, gradient, given, stochastic_rounding=t == 2, seed=t)
            for column in columns:
                digest.update(column.tobytes())
# Numbers of every size and both signs.
for dtype in (np.float16, ml_dtypes.bfloat16):
    every = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(-1, 64)
    every[np.isnan(every)] = 1
    gradient = every * rng.uniform(-1, 1, every.shape).astype(dtype)
    for t in range(3):
        column = every.copy()
        apply_to_arrays("sgd", [column], gradient, {"learning_rate": 0.01}, stochastic_rounding=True, seed=t)
        digest.update(column.tobytes())
print(digest.hexdigest())
"""


def test_every_instruction_set_gives_the_same_bits():
    # A CPU that lacks one runs the next lower.
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", DIGEST],
            env=os.environ | {"KVTABLE_ISA": isa, "PYTHONPATH": str(Path(__file__).parent)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for isa in ("baseline", "avx2", "avx512")
    ]
    digests = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(set(digests)) == 1


def kin_of(name):
    return name.removeprefix("group_")


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", GROUP_RULES)
def test_group_rule_without_lambdas_is_its_kin(name, weight_decay):
    rng = np.random.default_rng(2)
    # LAMB's and AdaBelief's epsilon has another place in their group form.
    changes = {"weight_decay": weight_decay}
    if name in ("group_lamb", "group_adabelief"):
        changes["epsilon"] = 1e-20
    group = new_columns(name, rng, (6, 16), np.float64)
    plain = [column.copy() for column in group[: 1 + len(optimizers()[kin_of(name)]["slots"])]]
    for t in range(1, 12):
        gradient = rng.normal(size=(6, 16))
        gradient[t % 6] = 0
        apply_to_arrays(name, group, gradient, hyperparameters(name, changes, t))
        apply_to_arrays(kin_of(name), plain, gradient, hyperparameters(kin_of(name), changes, t))
        for a, b in zip(group, plain, strict=False):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in GROUP_RULES if name != "group_ftrl"])
def test_group_rule_takes_over_trained_rows_and_slots(name):
    """z alone is new: it starts from zeros beside values and moments that were trained by the plain rule."""
    rng = np.random.default_rng(3)
    changes = {"epsilon": 1e-20} if name in ("group_lamb", "group_adabelief") else {}
    plain = new_columns(kin_of(name), rng, (4, 8), np.float64)
    for t in range(1, 5):
        apply_to_arrays(kin_of(name), plain, rng.normal(size=(4, 8)), hyperparameters(kin_of(name), changes, t))
    group = [*(column.copy() for column in plain), np.zeros((4, 8))]
    for t in range(5, 9):
        gradient = rng.normal(size=(4, 8))
        apply_to_arrays(kin_of(name), plain, gradient, hyperparameters(kin_of(name), changes, t))
        apply_to_arrays(name, group, gradient, hyperparameters(name, changes, t))
        np.testing.assert_allclose(group[0], plain[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", GROUP_RULES)
def test_lasso_zeroes_a_row_and_lets_it_come_back(name, dtype):
    """Row 0 gets no gradient to speak of; row 1 a steady one. Then row 0 gets its own."""
    rng = np.random.default_rng(4)
    columns = new_columns(name, rng, (2, 8), dtype)
    columns[0][:] = 0.01
    strong = np.ones(8)
    weak = 1e-3 * rng.normal(size=8)
    changes = {"l21": 1.0, "l1": 1e-3} if name != "group_ftrl" else {"l21": 2.0, "l1": 1e-3}
    for t in range(1, 16):
        gradient = np.stack([weak, strong]).astype(dtype)
        apply_to_arrays(name, columns, gradient, hyperparameters(name, changes, t))
    assert (columns[0][0] == 0).all()
    assert (columns[0][1] < 0).all()
    for t in range(16, 80):
        apply_to_arrays(name, columns, np.stack([-strong, strong]).astype(dtype), hyperparameters(name, changes, t))
    assert (columns[0][0] > 0).all()


@pytest.mark.parametrize("name", GROUP_RULES)
def test_nothing_survives_a_large_lasso(name):
    rng = np.random.default_rng(5)
    columns = new_columns(name, rng, (5, 7), np.float32)
    for t in range(1, 4):
        gradient = rng.normal(size=(5, 7)).astype(np.float32)
        apply_to_arrays(name, columns, gradient, hyperparameters(name, {"l21": 1e6}, t))
    assert (columns[0] == 0).all()
    assert np.isfinite(columns[-1]).all()
    assert (columns[-1] != 0).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", list(optimizers()))
def test_rows_without_a_gradient_stay_and_rows_are_chosen_by_number(name, dtype):
    rng = np.random.default_rng(6)
    columns = new_columns(name, rng, (6, 9), dtype)
    gradient = rng.normal(size=(3, 9)).astype(dtype)
    rows = np.array([4, 0, 3])
    before = [column.copy() for column in columns]
    alone = [column[rows] for column in columns]
    h = hyperparameters(name, {}, 1)
    assert apply_to_arrays(name, columns, gradient, h, rows=rows) == (3, 0)
    assert apply_to_arrays(name, alone, gradient, h) == (3, 0)
    for column, old, chosen in zip(columns, before, alone, strict=True):
        np.testing.assert_array_equal(column[rows], chosen)
        np.testing.assert_array_equal(np.delete(column, rows, 0), np.delete(old, rows, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", list(optimizers()))
def test_gradients_that_are_not_finite(name, dtype):
    rng = np.random.default_rng(7)
    clean = new_columns(name, rng, (3, 20), dtype)
    gradient = rng.normal(size=(3, 20)).astype(dtype)
    gradient[1, 17] = np.nan
    h = hyperparameters(name, {}, 1)

    skipping = [column.copy() for column in clean]
    assert apply_to_arrays(name, skipping, gradient, h, skip_nonfinite=True) == (2, 1)
    for column, old in zip(skipping, clean, strict=True):
        np.testing.assert_array_equal(column[1], old[1])

    columns = [column.copy() for column in clean]
    assert apply_to_arrays(name, columns, gradient, h) == (3, 0)
    assert np.isnan(columns[0][1, 17])
    for column, other in zip(columns, skipping, strict=True):
        np.testing.assert_array_equal(column[[0, 2]], other[[0, 2]])

    gradient[1, 17] = -np.inf
    assert apply_to_arrays(name, skipping, gradient, h, skip_nonfinite=True) == (2, 1)


def test_no_rows():
    value = np.ones((0, 4), np.float32)
    assert apply_to_arrays("sgd", [value], value, {"learning_rate": 1.0}) == (0, 0)
    rows = np.ones((2, 4), np.float32)
    assert apply_to_arrays("sgd", [rows], value, {"learning_rate": 1.0}, rows=np.zeros(0, np.int64)) == (0, 0)
    assert (rows == 1).all()


# ---- Stochastic rounding ----


def rounded(values, dtype, seed):
    """float32 numbers rounded by what SGD does with them: 0 - (-1 * x)."""
    # The learning rate brings in what the dtype does not hold: values are lr * gradient.
    column = np.zeros((values.shape[0], 1), dtype)
    ones = np.ones((values.shape[0], 1), dtype)
    for value in np.unique(values):
        rows = np.flatnonzero(values == value)
        h = {"learning_rate": -float(value)}
        apply_to_arrays("sgd", [column], ones[rows], h, rows=rows, stochastic_rounding=True, seed=seed)
    return column[:, 0]


def neighbours(value, dtype):
    below = np.array(value).astype(dtype)
    below = below if float(below) <= value else np.nextafter(below, np.array(-np.inf, dtype))
    return below, np.nextafter(below, np.array(np.inf, dtype))


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(
    "value", [1.001, -1.001, 1.9999, 3.3e-3, -7.7e4 / 2, 6.1e-5, 5.99e-5, 1.3e-7, 2e-8, 60000.7, -0.3]
)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(value, dtype):
    n = 40000
    value = float(np.float32(value))
    got = rounded(np.full(n, value), dtype, seed=11)
    below, above = neighbours(value, dtype)
    assert set(np.unique(got.astype(np.float64))) <= {float(below), float(above)}
    fraction = (value - float(below)) / (float(above) - float(below))
    five_deviations = 5 * np.sqrt(fraction * (1 - fraction) / n) + 1e-4
    assert abs((got.astype(np.float64) == float(above)).mean() - fraction) < five_deviations


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=lambda dtype: dtype.__name__)
def test_stochastic_rounding_leaves_exact_numbers(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(-1, 64)
    kept = every.copy()
    h = {"learning_rate": 0.0}
    for seed in range(3):
        apply_to_arrays("sgd", [kept], np.zeros_like(every), h, stochastic_rounding=True, seed=seed)
    numbers = ~np.isnan(every.astype(np.float32))
    # 0 - 0 * g: the bits stay, but for NaNs, which stay NaNs.
    np.testing.assert_array_equal(kept.view(np.uint16)[numbers], every.view(np.uint16)[numbers])
    assert np.isnan(kept[~numbers].astype(np.float32)).all()


def test_stochastic_rounding_beyond_the_largest_number_is_to_nearest():
    for dtype, below, at_least in [(np.float16, 65519.0, 65520.0), (ml_dtypes.bfloat16, 3.396e38, 3.3962e38)]:
        largest = float(ml_dtypes.finfo(dtype).max)
        values = np.full(300, below)
        assert (rounded(values, dtype, 1).astype(np.float64) == largest).all()
        assert np.isposinf(rounded(np.full(300, at_least), dtype, 1).astype(np.float64)).all()
        assert np.isneginf(rounded(np.full(300, -at_least), dtype, 1).astype(np.float64)).all()


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=lambda dtype: dtype.__name__)
def test_stochastic_rounding_is_a_function_of_seed_row_and_column(dtype):
    rng = np.random.default_rng(8)
    clean = new_columns("adam", rng, (64, 33), dtype)
    gradient = rng.normal(size=(64, 33)).astype(dtype)

    def run(rows, seed):
        columns = [column.copy() for column in clean]
        h = hyperparameters("adam", {}, 1)
        apply_to_arrays("adam", columns, gradient[rows], h, rows=rows, stochastic_rounding=True, seed=seed)
        return np.concatenate([column.view(np.uint16) for column in columns], axis=1)

    in_order = np.arange(64)
    np.testing.assert_array_equal(run(in_order, 1), run(in_order[::-1].copy(), 1))
    assert (run(in_order, 1) != run(in_order, 2)).any(axis=1).all()


def test_small_steps_are_not_lost_with_stochastic_rounding():
    """A hundred steps of a twentieth of what bfloat16 can resolve."""
    kept, moved = np.ones((500, 8), ml_dtypes.bfloat16), np.ones((500, 8), ml_dtypes.bfloat16)
    gradient = np.ones((500, 8), ml_dtypes.bfloat16)
    for t in range(100):
        apply_to_arrays("sgd", [kept], gradient, {"learning_rate": -(2.0**-7) / 20})
        apply_to_arrays("sgd", [moved], gradient, {"learning_rate": -(2.0**-7) / 20}, stochastic_rounding=True, seed=t)
    assert (kept == 1).all()
    assert abs(moved.astype(np.float64).mean() - (1 + 5 * 2.0**-7)) < 2.0**-7 / 4


def test_stochastic_rounding_does_nothing_to_wider_types():
    rng = np.random.default_rng(9)
    for dtype in (np.float32, np.float64):
        a = new_columns("adam", rng, (5, 8), dtype)
        b = [column.copy() for column in a]
        gradient = rng.normal(size=(5, 8)).astype(dtype)
        h = hyperparameters("adam", {}, 1)
        apply_to_arrays("adam", a, gradient, h)
        apply_to_arrays("adam", b, gradient, h, stochastic_rounding=True, seed=5)
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


# ---- What is refused ----


def refuse(match, optimizer="adam", error=ValueError, columns=None, gradient=None, h=None, rows=None):
    columns = [np.ones((2, 3), np.float32) for _ in range(3)] if columns is None else columns
    gradient = np.ones((2, 3), np.float32) if gradient is None else gradient
    h = hyperparameters("adam", {}, 1) if h is None else h
    before = [np.array(column) for column in columns]
    with pytest.raises(error, match=match):
        apply_to_arrays(optimizer, columns, gradient, h, rows=rows)
    for column, old in zip(columns, before, strict=True):
        np.testing.assert_array_equal(column, old)


def test_hyperparameters_that_are_refused_are_named():
    good = hyperparameters("adam", {}, 1)
    refuse("no optimizer 'adma'; expected one of adabelief, ", optimizer="adma")
    refuse("no hyperparameter 'beta1'", h=good | {"beta1": 0.9})
    refuse("'beta_1_power'", h={"learning_rate": 0.1, "beta_2_power": 0.9})
    refuse("'learning_rate'", h={"beta_1_power": 0.9, "beta_2_power": 0.9})
    refuse("learning_rate = nan; expected a finite number", h=good | {"learning_rate": np.nan})
    refuse("beta_1 = 1; expected at least 0 and less than 1", h=good | {"beta_1": 1.0})
    refuse("epsilon = -1e-07; expected 0 or more", h=good | {"epsilon": -1e-7})
    refuse("weight_decay = -1; expected 0 or more", h=good | {"weight_decay": -1.0})
    refuse("epsilon = inf", h=good | {"epsilon": np.inf})
    for divides in ("ftrl", "group_ftrl"):
        refuse("learning_rate = 0; expected more than 0", optimizer=divides, h={"learning_rate": 0.0})


@pytest.mark.parametrize(
    ("optimizer", "name", "bad"),
    [
        ("momentum", "nesterov", 0.5),
        ("momentum", "momentum", 1.5),
        ("adagrad_da", "step", 0.0),
        ("ftrl", "learning_rate_power", 0.5),
        ("group_adam", "l21", -1.0),
        ("group_ftrl", "l1", -1.0),
        ("rmsprop", "rho", 1.1),
        ("adam", "beta_2_power", 1.0),
    ],
)
def test_hyperparameters_out_of_range_are_refused(optimizer, name, bad):
    h = hyperparameters(optimizer, {}, 1) | {name: bad}
    columns = new_columns(optimizer, np.random.default_rng(0), (2, 3), np.float32)
    refuse(f"{optimizer} got {name} = ", optimizer=optimizer, columns=columns, h=h)


def test_arrays_that_do_not_fit_are_refused():
    ones = np.ones((2, 3), np.float32)
    refuse("columns has 1 arrays; optimizer adam expects 3: value, m, v", columns=[ones])
    refuse(r"columns\[1\] has shape \(2, 4\)", columns=[ones.copy(), np.ones((2, 4), np.float32), ones.copy()])
    refuse(r"columns\[2\] has dtype float64", error=TypeError, columns=[ones.copy(), ones.copy(), np.ones((2, 3))])
    refuse(r"columns\[0\] has shape \(3,\)", columns=[np.ones(3, np.float32)] * 3)
    refuse("int32", columns=[np.ones((2, 3), np.int32)] * 3)
    refuse("gradients has dtype float64", error=TypeError, gradient=np.ones((2, 3)))
    refuse(r"gradients has shape \(1, 3\); expected \(2, 3\)", gradient=ones[:1])
    refuse("rows has 2; expected 0 to 1", rows=np.array([0, 2]))
    refuse("rows has -1; expected 0 to 1", rows=np.array([0, -1]))
    refuse("rows has 1 twice", rows=np.array([1, 1]))
    refuse("rows has dtype int32", error=TypeError, rows=np.array([0, 1], np.int32))
    refuse("C-contiguous", columns=[np.ones((3, 2), np.float32).T for _ in range(3)])
