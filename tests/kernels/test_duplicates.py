"""Equal keys in one batch."""

import numpy as np
import pytest

from kvtools._kvtable import Table

SIZES = [3, 200, 70_000]


def batch(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.integers(-(n // 3) - 1, n // 3, n), rng.integers(-9, 9, (n, 2)).astype(np.float32)


@pytest.mark.parametrize("n", SIZES)
def test_upsert_lets_the_last_win(n, small_table):
    keys, rows = batch(n)
    small_table.upsert(keys, rows)
    last = {int(key): i for i, key in enumerate(keys)}
    expected = rows[[last[int(key)] for key in keys]]
    np.testing.assert_array_equal(small_table.gather(keys), expected)
    assert len(small_table) == len(last)


@pytest.mark.parametrize("n", SIZES)
def test_accumulate_adds_all_and_counts_each(n, small_table):
    keys, rows = batch(n)
    small_table.accumulate(keys, rows, frequency=2, version=5)
    unique, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    expected = np.zeros((len(unique), 2), np.float32)
    np.add.at(expected, inverse, rows)
    np.testing.assert_array_equal(small_table.gather(unique), expected)
    freqs, versions = small_table.gather_stamps(unique)
    np.testing.assert_array_equal(freqs, 2 * counts)
    assert (versions == 5).all()


def test_accumulate_adds_duplicates_in_the_order_of_the_batch():
    table = Table("int64", "float32", 1)
    rows = np.array([[1e8], [1.0], [-1e8], [1.0]], np.float32)
    table.accumulate(np.zeros(4, np.int64), rows)
    expected = np.float32(0)
    for row in rows[:, 0]:
        expected = np.float32(expected + row)
    assert table.gather(np.zeros(1, np.int64))[0, 0] == expected


@pytest.mark.parametrize("n", SIZES)
def test_inserted_is_true_for_each_occurrence_of_a_new_key(n, small_table):
    keys, _ = batch(n)
    old = np.unique(keys)[::2].copy()
    small_table.upsert(old, np.ones((len(old), 2), np.float32), frequency=7)
    small_table.remove(old[::2].copy())  # so that rows are reused
    there = small_table.contains(keys)
    inserted = np.zeros(n, bool)
    rows = small_table.gather_or_insert(keys, frequency=1, version=3, inserted=inserted)
    np.testing.assert_array_equal(inserted, ~there)
    np.testing.assert_array_equal(rows, np.repeat(there[:, None], 2, 1).astype(np.float32))
    unique, counts = np.unique(keys, return_counts=True)
    freqs, _ = small_table.gather_stamps(unique)
    was_there = np.isin(unique, keys[there])
    np.testing.assert_array_equal(freqs, np.where(was_there, 7, counts))


def test_frequency_saturates(small_table):
    key = np.zeros(1, np.int64)
    small_table.gather_or_insert(key, frequency=2**32 - 2)
    small_table.upsert(key, np.zeros((1, 2), np.float32), frequency=5)
    assert small_table.gather_stamps(key)[0][0] == 2**32 - 1
