"""Rows and gradients that travel in 16 bits: within the stated error of those that travel as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin.sok as sok

ROWS = 50
#: The most that rounding to nearest changes a number, as a share of it.
ROUNDING = {tf.float16: 2**-11, tf.bfloat16: 2**-8}


@pytest.fixture(scope="module", autouse=True)
def _sok_started() -> None:
    sok.init()


def _tables(rank: int, size: int, dtype: tf.DType = tf.float32) -> list[Any]:
    """Tables of positive rows, so that no sum of them cancels what was rounded."""
    rng = np.random.default_rng(3)
    wholes = [rng.uniform(0.1, 2.0, [ROWS, dim]) for dim in (3, 16)]
    dynamic = sok.DynamicVariable(3, dtype=dtype, name="dynamic")
    keys = np.arange(rank, ROWS, size)
    sok.assign(dynamic, keys, tf.cast(wholes[0][keys], dtype))
    return [dynamic, sok.Variable(wholes[1], dtype=dtype, name="static")]


def _batch(rank: int, step: int) -> tuple[list[tf.RaggedTensor], list[tf.RaggedTensor]]:
    rng = np.random.default_rng([7, rank, step])
    lengths = [rng.integers(0, 5, 20) for _ in range(2)]
    ids = [tf.RaggedTensor.from_row_lengths(rng.integers(0, ROWS, n.sum()), n) for n in lengths]
    weights = [one.with_values(rng.uniform(0.5, 2.0, one.values.shape[0]).astype(np.float32)) for one in ids]
    return ids, weights


def _run(tables: list[Any], combiners: list[str], rank: int, wire: Any, traced: bool) -> list[np.ndarray]:
    """Pooled rows, the gradients by key of this rank, and those of the weights."""
    ids, weights = _batch(rank, 0)
    upstream = np.random.default_rng([9, rank]).uniform(0.5, 2.0, [20, 1]).astype(np.float32)

    def step() -> Any:
        with tf.GradientTape() as tape:
            values = [one.values for one in weights]
            tape.watch(values)
            weighted = [one.with_values(value) for one, value in zip(weights, values, strict=True)]
            pooled = sok.lookup_sparse(tables, ids, weighted, combiners, wire_dtype=wire)
            loss = tf.add_n([tf.reduce_sum(tf.cast(rows, tf.float32) * upstream) for rows in pooled])
        return pooled, tape.gradient(loss, [*tables, *values])

    pooled, gradients = (tf.function(step, autograph=False) if traced else step)()
    dense = []
    for gradient in gradients[:2]:
        rows = np.zeros([ROWS, gradient.values.shape[-1]], np.float32)
        np.add.at(rows, gradient.indices.numpy(), tf.cast(gradient.values, tf.float32).numpy())
        dense.append(rows)
    # Weights of a sum: the gradient of a mean's is a difference, in which what was rounded counts for more.
    return [*(rows.numpy() for rows in pooled), *dense, *([gradients[2].numpy()] if combiners[0] == "sum" else [])]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("wire", [tf.float16, tf.bfloat16, "bfloat16"])
@pytest.mark.parametrize("combiners", [["sum", "mean"], ["sqrtn", "sum"]])
def test_what_travels_in_16_bits_is_what_travels_in_32_but_for_its_rounding(
    combiners: list[str], wire: Any, traced: bool, rank: int, size: int
) -> None:
    tables = _tables(rank, size)
    expected = _run(tables, combiners, rank, None, traced)
    found = _run(tables, combiners, rank, wire, traced)
    bound = ROUNDING[tf.as_dtype(wire)] + 1e-6
    for one, other in zip(found, expected, strict=True):
        assert (np.abs(one - other) <= bound * np.abs(other)).all()
    if size > 1:
        assert any((one != other).any() for one, other in zip(found, expected, strict=True))
    for one, other in zip(_run(tables, combiners, rank, tf.float32, traced), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize(("dtype", "wire"), [(tf.float32, tf.float16), (tf.float32, tf.bfloat16), (tf.bfloat16, None)])
def test_gradients_of_what_is_read_twice_are_summed(
    dtype: tf.DType, wire: tf.DType | None, traced: bool, rank: int, size: int
) -> None:
    """The second derivative by rows: both the rows and the gradient by the weights are of them."""
    table = _tables(rank, size, dtype)[0]
    ids, weights = (both[0] for both in _batch(rank, 0))

    def step(wire: Any) -> Any:
        values = weights.values
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(values)
                rows = sok.lookup_sparse(table, ids, weights.with_values(values), "sum", wire_dtype=wire)
                loss = tf.reduce_sum(tf.cast(rows, tf.float32) ** 2)
            loss = tf.reduce_sum(inner.gradient(loss, values))
        return outer.gradient(loss, table)

    def of_rows(wire: Any) -> np.ndarray:
        gradient = (tf.function(step, autograph=False) if traced else step)(wire)
        rows = np.zeros([ROWS, 3])
        np.add.at(rows, gradient.indices.numpy(), tf.cast(gradient.values, tf.float64).numpy())
        return rows

    if dtype == tf.float32:
        found, expected = of_rows(wire), of_rows(None)
    else:  # beside the same rows in 32 bits
        found = of_rows(None)
        table = _tables(rank, size)[0]
        whole = tf.cast(np.random.default_rng(3).uniform(0.1, 2.0, [ROWS, 3]), tf.bfloat16)
        keys = np.arange(rank, ROWS, size)
        sok.assign(table, keys, tf.cast(tf.gather(whole, keys), tf.float32))
        expected = of_rows(None)
    assert expected.any()
    # All that is rounded on the way is positive: rows, gradients of these, and their sums.
    assert (np.abs(found - expected) <= 8 * ROUNDING[wire or dtype] * expected).all()


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_rows_of_other_types_travel_as_they_are(dtype: tf.DType, rank: int, size: int) -> None:
    tables = _tables(rank, size, dtype)
    whole = tf.cast(np.random.default_rng(3).uniform(0.1, 2.0, [ROWS, 3]), dtype)
    ids = tf.constant([0, 1, 7, rank, ROWS - 1], tf.int64)
    for wire in (None, tf.float16, tf.bfloat16):
        rows = sok.all2all_dense_embedding(tables[0], ids, wire_dtype=wire)
        assert rows.dtype == dtype
        np.testing.assert_array_equal(tf.cast(rows, tf.float64), tf.cast(tf.gather(whole, ids), tf.float64))
    pooled, _, gradient = _run(tables, ["sum", "mean"], rank, None, False)[:3]
    assert pooled.dtype == dtype.as_numpy_dtype and np.isfinite(gradient).all() and gradient.any()


def test_plain_lookups_travel_in_16_bits_too(rank: int, size: int) -> None:
    tables = _tables(rank, size)
    for table in tables:
        ids = tf.constant([[0, 1, rank], [7, 7, 3]], tf.int64)
        wide = sok.all2all_dense_embedding(table, ids).numpy()
        rounded = tf.cast(tf.cast(wide, tf.bfloat16), tf.float32) if size > 1 else wide
        np.testing.assert_array_equal(sok.all2all_dense_embedding(table, ids, wire_dtype=tf.bfloat16), rounded)


@pytest.mark.parametrize("wire", [tf.float64, tf.int8, "float8", 16])
def test_other_wire_types_are_refused(wire: Any, rank: int, size: int) -> None:
    table = sok.DynamicVariable(2, name="refused")
    errors = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(errors, match="wire_dtype must be float16, bfloat16, float32 or None, got"):
        sok.lookup_sparse(table, tf.ragged.constant([[1]], tf.int64), wire_dtype=wire)
    with pytest.raises(errors, match="wire_dtype must be float16, bfloat16, float32 or None, got"):
        sok.all2all_dense_embedding(table, tf.constant([1], tf.int64), wire_dtype=wire)
