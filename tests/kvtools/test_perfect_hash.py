"""Slots for keys: every key one of its own, by the arithmetic that a graph does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.errors import BadInputError
from kvtools.perfect_hash import MIX, MOST_KEYS, PerfectHash, check_count, perfect_hash


def wrapped(number: int) -> np.int64:
    return np.uint64(number).astype(np.int64)


def slots_in_numpy(found: PerfectHash, keys: np.ndarray) -> np.ndarray:
    """As kvtools/perfect_hash.py says it, in int64 alone."""

    def high(number: np.ndarray) -> np.ndarray:
        return (number >> 32) & np.int64(0xFFFFFFFF)

    with np.errstate(over="ignore"):
        hashed = keys * wrapped(found.seed)
        hashed = (hashed + high(hashed)) * wrapped(MIX)
        bucket = high(high(hashed) * len(found.pilots))
        return high(high(hashed * found.pilots[bucket]) * found.slots)


def check(keys: np.ndarray) -> PerfectHash:
    found = perfect_hash(keys)
    slots = found.slots_of(keys)
    assert len(np.unique(slots)) == len(keys)
    if len(keys):
        assert slots.min() >= 0 and slots.max() < found.slots
    np.testing.assert_array_equal(slots, slots_in_numpy(found, keys))
    others = np.array([0, -1, 2**63 - 1, -(2**63), 12345], np.int64)
    np.testing.assert_array_equal(found.slots_of(others), slots_in_numpy(found, others))
    return found


@given(st.sets(st.integers(-(2**63), 2**63 - 1), max_size=200))
def test_every_key_has_a_slot_of_its_own(keys: set[int]) -> None:
    found = check(np.array([*keys], np.int64))
    assert found.slots == len(keys) + len(keys) // 50 + 1


@pytest.mark.parametrize(
    "keys",
    [
        np.arange(200_000),
        np.arange(-100_000, 100_000),  # a key beside its complement
        np.arange(100_000) << 40,
        np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200_000),
        np.arange(100_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        (np.arange(100_000) % 1000 << 32) | (np.arange(100_000) // 1000),
        np.arange(100_000, dtype=np.uint64) * np.uint64(pow(0xF3AD0A292935208F, -1, 2**64)),
    ],
    ids=["counted", "signed", "high bits", "random", "steps", "fields", "steps against the seed"],
)
def test_keys_of_any_pattern(keys: np.ndarray) -> None:
    check(np.unique(keys.astype(np.int64)))


def test_the_order_of_keys_changes_nothing() -> None:
    keys = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 5_000)
    one, other = perfect_hash(keys), perfect_hash(keys[::-1])
    assert (one.seed, one.slots) == (other.seed, other.slots)
    np.testing.assert_array_equal(one.pilots, other.pilots)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_function_that_is_tried_does(seed: int) -> None:
    """Others are for sets of keys that go against it; each costs as long as the search takes."""
    keys = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, 20_000)
    assert perfect_hash(np.append(keys, 0)).seed == perfect_hash(np.array([1])).seed


def test_a_key_that_is_there_twice() -> None:
    with pytest.raises(BadInputError, match="index of 4 keys: some are there twice"):
        perfect_hash(np.array([5, 6, 7, 5]))


def test_progress_comes_and_may_end_it() -> None:
    told: list[int] = []
    perfect_hash(np.arange(1_200_000), told.append)
    assert told and told == sorted(told) and told[-1] <= 1_200_000

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perfect_hash(np.arange(1_200_000), stop)


def test_too_many_keys() -> None:
    check_count(MOST_KEYS)
    with pytest.raises(BadInputError, match="got 2105376101 keys, expected 2105376100 at most; split the table first"):
        check_count(MOST_KEYS + 1)


@given(st.integers(0, 300), st.integers(0, 2**64 - 1), st.integers(0, 63))
def test_keys_in_steps_of_any_size(count: int, step: int, bit: int) -> None:
    steps = np.arange(count, dtype=np.uint64) * np.uint64(step)
    check(np.unique(np.concatenate([steps, steps ^ np.uint64(1 << bit), ~steps]).view(np.int64)))
