"""Initial values are a pure function of seed, key and column."""

from statistics import NormalDist

import ml_dtypes
import numpy as np
import pytest

from kvtools._kvtable import Table, hash_key, initial_values

KINDS = {
    "uniform": {"kind": "uniform", "low": -1.0, "high": 3.0, "seed": 11},
    "normal": {"kind": "normal", "mean": 2.0, "stddev": 0.5, "seed": 11},
    "truncated_normal": {"kind": "truncated_normal", "mean": 2.0, "stddev": 0.5, "seed": 11},
}
MOMENTS = {
    "uniform": (1.0, 4 / 12**0.5),
    "normal": (2.0, 0.5),
    "truncated_normal": (2.0, 0.5 * 0.8796256610342398),
}
MASK = 2**64 - 1


def mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def reference(keys: np.ndarray, dim: int, spec: dict, double: bool) -> np.ndarray:
    """The generator as the header words it, in NumPy."""
    stream = mix64(np.uint64(spec["seed"] & MASK) ^ mix64(keys.astype(np.int64).view(np.uint64)))
    words = dim if double else (dim + 1) // 2
    golden = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = mix64(stream[:, None] + golden)
    if not double:
        bits = np.stack([bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)], -1).reshape(len(keys), -1)[:, :dim]
    size, digits = (64, 53) if double else (32, 24)
    top = (bits >> np.uint64(size - digits)).astype(np.float64)
    if spec["kind"] == "uniform":
        return spec["low"] + (spec["high"] - spec["low"]) * top * 2.0**-digits
    signed = np.where(top >= 2.0 ** (digits - 1), top - 2.0**digits, top)
    centered = (signed + 0.5) * 2.0**-digits
    if spec["kind"] == "truncated_normal":
        centered *= NormalDist().cdf(2) - NormalDist().cdf(-2)
    quantile = np.vectorize(NormalDist().inv_cdf)(np.clip(0.5 + centered, 1e-17, 1 - 1e-16))
    return spec["mean"] + spec["stddev"] * quantile


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", [1, 2, 7])
def test_values_follow_the_reference(kind, dtype, dim):
    keys = np.array([0, 1, -1, 2**63 - 1, -(2**63), *range(1000, 1400)])
    got = initial_values(keys, dtype, dim, KINDS[kind])
    expected = reference(keys, dim, KINDS[kind], dtype == "float64")
    np.testing.assert_allclose(got, expected, rtol=3e-6 if dtype == "float32" else 1e-9, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16, "float64"])
def test_moments(kind, dtype):
    values = initial_values(np.arange(20000), dtype, 16, KINDS[kind]).astype(np.float64)
    mean, deviation = MOMENTS[kind]
    assert abs(values.mean() - mean) < 0.01
    assert abs(values.std() - deviation) < 0.01
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.03
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 0.03
    if kind == "uniform":
        assert values.min() >= -1 and (values.max() < 3 or np.dtype(dtype).itemsize == 2)
    if kind == "truncated_normal":
        assert abs(values - 2).max() <= 1.01


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_the_shards_and_the_threads_do_not_matter(kind):
    keys = np.random.default_rng(1).integers(-(2**62), 2**62, 30000)
    expected = initial_values(keys, "float32", 5, KINDS[kind])
    for shards, threads in [(1, 1), (64, 2), (8, 4)]:
        table = Table("int64", "float32", 5, initializer=KINDS[kind], shards=shards, threads=threads)
        order = np.random.default_rng(shards).permutation(len(keys))
        np.testing.assert_array_equal(table.gather_or_insert(keys[order]), expected[order])
        np.testing.assert_array_equal(table.gather(keys), expected)
        np.testing.assert_array_equal(table.gather_columns(keys)[0], expected)


def test_int32_keys_get_the_values_of_the_same_int64_keys():
    keys = np.array([0, -1, 5, -(2**31), 2**31 - 1])
    np.testing.assert_array_equal(
        initial_values(keys, "float32", 3, KINDS["normal"]),
        initial_values(keys.astype(np.int32), "float32", 3, KINDS["normal"]),
    )


def test_seeds_give_different_values():
    one, two = ({**KINDS["normal"], "seed": seed} for seed in (1, 2))
    keys = np.arange(1000)
    assert not np.isclose(initial_values(keys, "float32", 4, one), initial_values(keys, "float32", 4, two)).all(1).any()


def test_rows_are_chosen_by_hash():
    rows = np.arange(21, dtype=np.float32).reshape(7, 3)
    keys = np.arange(-50, 50)
    expected = rows[[hash_key(int(key) & MASK) % 7 for key in keys]]
    np.testing.assert_array_equal(initial_values(keys, "float32", 3, {"kind": "rows", "rows": rows}), expected)


def test_hash_key_is_the_documented_mix():
    keys = np.array([0, 1, 2**63, MASK], np.uint64)
    assert [hash_key(int(key)) for key in keys] == mix64(keys).tolist()


def test_setting_the_initializer_changes_only_rows_to_come(small_table):
    small_table.gather_or_insert(np.array([1]))
    small_table.initializer = 4.0
    assert small_table.initializer == {"kind": "constant", "value": 4.0}
    np.testing.assert_array_equal(small_table.gather_or_insert(np.array([1, 2])), [[0, 0], [4, 4]])


@pytest.mark.parametrize("kind", KINDS)
def test_the_initializer_is_given_back_as_it_was(kind):
    assert Table("int64", "float32", 2, initializer=KINDS[kind]).initializer == KINDS[kind]
