"""Training over the ranks ends with the rows that stock TensorFlow has after the same global batches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin.sok as sok

sys.path.insert(0, str(Path(__file__).parent))
from conformance import KINDS, Table, make_table, random_batch, reference, train

STEPS = 100
Reference = Callable[..., list[np.ndarray]]


@pytest.fixture(scope="module", autouse=True)
def _sok_started() -> None:
    sok.init()


def _tables(rank: int, size: int, dtype: tf.DType = tf.float32) -> tuple[list[Table], list[str], list[bool]]:
    """Two tables of each kind, with and without weights, each of another width; the combiners; which have weights."""
    kinds = [kind for kind in KINDS for _ in range(2)]
    tables = [make_table(kind, rank, size, 2 + number, dtype) for number, kind in enumerate(kinds)]
    return tables, ["sum", "mean", "sqrtn", "sum", "mean", "sqrtn", "mean", "sum"], [False, True] * len(KINDS)


@pytest.fixture
def reference_of_rank_0(rank: int, gather: Callable[[Any], list[Any]]) -> Reference:
    """`reference`, which is the same on each rank: one of them trains the dense variables, and the others are told."""

    def of_rank_0(*args: Any, **kwargs: Any) -> list[np.ndarray]:
        rows: list[np.ndarray] = gather(reference(*args, **kwargs) if rank == 0 else None)[0]
        return rows

    return of_rank_0


def _largest_difference(tables: list[Table], expected: list[np.ndarray], rank: int, size: int) -> float:
    differences = [
        np.abs(table.local_rows(rank, size) - rows[table.held(rank, size)]).max(initial=0.0)
        for table, rows in zip(tables, expected, strict=True)
    ]
    return float(max(differences))


@pytest.mark.thorough
def test_sgd_gives_the_rows_of_stock_tensorflow(rank: int, size: int, reference_of_rank_0: Reference) -> None:
    rng = np.random.default_rng(1)
    tables, combiners, weighted = _tables(rank, size)
    batches = [[random_batch(rng, every_row=False) for _ in tables] for _ in range(STEPS)]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    train(tables, combiners, optimizer, batches, rank, size, weighted=weighted)
    expected = reference_of_rank_0(tables, combiners, tf.keras.optimizers.SGD(0.1), batches, weighted=weighted)
    assert _largest_difference(tables, expected, rank, size) < 1e-6


@pytest.mark.parametrize(
    "traced", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["eager", "tf.function"]
)
def test_any_number_of_ranks_gives_the_rows_of_one(
    traced: bool, rank: int, size: int, reference_of_rank_0: Reference
) -> None:
    rng = np.random.default_rng(2)
    tables, combiners, weighted = _tables(rank, size)
    steps = STEPS if traced else 5  # eager steps are slow
    batches = [[random_batch(rng, every_row=True) for _ in tables] for _ in range(steps)]
    make = tf.keras.optimizers.Adam
    train(tables, combiners, sok.OptimizerWrapper(make(0.01)), batches, rank, size, traced=traced, weighted=weighted)
    expected = reference_of_rank_0(tables, combiners, make(0.01), batches, weighted=weighted)
    assert _largest_difference(tables, expected, rank, size) < 1e-6


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda optimizers: optimizers.SGD(0.05),
    "momentum": lambda optimizers: optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda optimizers: optimizers.Adam(0.05),
    "Adamax": lambda optimizers: optimizers.Adamax(0.05),
    "Adadelta": lambda optimizers: optimizers.Adadelta(0.05),
    "Adagrad": lambda optimizers: optimizers.Adagrad(0.05),
    "Ftrl": lambda optimizers: optimizers.Ftrl(0.05),
}
MAKERS = {
    "keras": tf.keras.optimizers,
    "tf_keras": tf_keras.optimizers,
    "legacy": tf_keras.optimizers.legacy,
}


@pytest.mark.parametrize(
    ("maker", "optimizer"),
    [("keras", name) for name in OPTIMIZERS]
    + [(maker, "Adam") for maker in ("tf_keras", "legacy")]
    + [
        pytest.param(maker, name, marks=pytest.mark.thorough)
        for maker in ("tf_keras", "legacy")
        for name in ("momentum", "Ftrl")
    ],
)
def test_optimizer_updates_tables_as_it_does_a_tf_variable(
    maker: str, optimizer: str, rank: int, size: int, reference_of_rank_0: Reference
) -> None:
    rng = np.random.default_rng(3)
    table = make_table("hbm", rank, size, 4)
    batches = [[random_batch(rng, every_row=True)] for _ in range(20)]
    make = OPTIMIZERS[optimizer]
    train([table], ["sum"], sok.OptimizerWrapper(make(MAKERS[maker])), batches, rank, size)
    (expected,) = reference_of_rank_0([table], ["sum"], make(MAKERS[maker]), batches)
    held = table.held(rank, size)
    local = table.local_rows(rank, size)
    assert np.square(local - expected[held]).mean() < 1e-6
    assert not np.allclose(local, table.initial[held], atol=1e-4)  # they did train


@pytest.mark.parametrize("kind", KINDS)
def test_sok_sgd_takes_the_learning_rate_off_the_gradient(
    kind: str, rank: int, size: int, reference_of_rank_0: Reference
) -> None:
    rng = np.random.default_rng(4)
    table = make_table(kind, rank, size, 4)
    batches = [[random_batch(rng, every_row=False)] for _ in range(5)]
    optimizer = sok.SGD(lr=0.3)
    train([table], ["sum"], optimizer, batches, rank, size, traced=False)
    expected = reference_of_rank_0([table], ["sum"], tf.keras.optimizers.SGD(0.3), batches)
    assert _largest_difference([table], expected, rank, size) < 1e-6
    optimizer.lr = 0.0
    train([table], ["sum"], optimizer, batches, rank, size, traced=False)
    assert _largest_difference([table], expected, rank, size) < 1e-6


def test_variables_of_sok_are_told_from_others() -> None:
    static, dynamic = sok.Variable(np.zeros([4, 2]), dtype=tf.float32), sok.DynamicVariable(2)
    dense = [tf.Variable([1.0]), tf.keras.layers.Dense(1)]
    dense[1].build([None, 2])
    others = [dense[0], *dense[1].trainable_variables]
    ours, rest = sok.filter_variables([others[0], static, *others[1:], dynamic])
    assert [id(v) for v in ours] == [id(static), id(dynamic)]
    assert [id(v) for v in rest] == [id(v) for v in others]
    assert sok.filter_variables([]) == ([], [])


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_assigned_rows_are_exported(var_type: str, rank: int) -> None:
    rng = np.random.default_rng(rank)
    v = sok.DynamicVariable(3, "13", var_type)
    keys = rng.permutation(np.unique(rng.integers(-(2**60), 2**60, 500)))
    rows = rng.normal(size=[len(keys), 3]).astype(np.float32)
    assert sok.assign(v, keys, rows) is v
    sok.assign(v, keys[:10], -rows[:10])  # the others stay
    expected = {key: row for key, row in zip(keys.tolist(), np.concatenate([-rows[:10], rows[10:]]), strict=True)}
    indices, values = sok.export(v)
    assert indices.dtype == tf.int64 and values.dtype == tf.float32
    assert sorted(indices.numpy().tolist()) == sorted(expected)
    np.testing.assert_array_equal(values, [expected[key] for key in indices.numpy().tolist()])
    np.testing.assert_array_equal(v.size, [len(keys), 3])
