"""Lookups say where rows lie: the same place for a key's whole life, none for a key without a row."""

from __future__ import annotations

import numpy as np
import pytest

from kvtools._kvtable import Table

NOWHERE = np.uint64(2**64 - 1)
KEYS = {
    "int64": np.array([5, -1, 2**63 - 1, -(2**63), 0, 5]),
    "int32": np.array([5, -1, 2**31 - 1, -(2**31), 0, 5], np.int32),
    "uint64": np.array([5, 1, 2**63, 2**64 - 1, 0, 5], np.uint64),
}


@pytest.mark.parametrize("key_dtype", KEYS)
def test_a_lookup_finds_the_positions_that_the_insert_gave(key_dtype):
    table = Table(key_dtype, "float32", 3)
    keys = KEYS[key_dtype]
    inserted, found = np.zeros(6, np.uint64), np.zeros(6, np.uint64)
    table.gather(keys, positions=found)
    assert (found == NOWHERE).all()
    table.gather_or_insert(keys, positions=inserted)
    table.gather(keys, positions=found)
    np.testing.assert_array_equal(found, inserted)
    assert len(set(found.tolist())) == 5 and found[0] == found[5]


def test_positions_stay_through_growth_and_new_slots():
    table = Table("int64", "float32", 1)
    keys = np.arange(5000)
    before, after = np.zeros(5000, np.uint64), np.zeros(5000, np.uint64)
    table.gather_or_insert(keys, positions=before)
    table.gather_or_insert(np.arange(5000, 100_000))
    table.ensure_slots([("m", 1)])
    table.gather_or_insert(keys, positions=after)
    np.testing.assert_array_equal(before, after)
    assert (before >> np.uint64(32)).max() < 64 and len(np.unique(before)) == 5000


def test_a_batch_of_old_and_new_keys():
    table = Table("int64", "float32", 2, initializer=1.0)
    table.gather_or_insert(np.arange(0, 20_000, 2))
    positions, again = np.zeros(20_000, np.uint64), np.zeros(20_000, np.uint64)
    table.gather_or_insert(np.arange(20_000), positions=positions)
    table.gather(np.arange(20_000), positions=again)
    np.testing.assert_array_equal(positions, again)
    table.remove(np.array([7]))
    table.gather(np.array([7]), positions=again[:1])
    assert again[0] == NOWHERE
