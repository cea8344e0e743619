"""Matching of keys against dicts, in memory and spilled to disk."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.errors import ScratchError
from kvtools.key_join import match_rows, repeated_rows, row_numbers, sorted_buckets
from kvtools.row_mask import RowMask

EXTREME = [0, -1, 1, 2**63 - 1, -(2**63), 1000, -1000]
KEYS = st.lists(st.sampled_from(EXTREME) | st.integers(-(2**63), 2**63 - 1), max_size=60)


def streamed(keys: np.ndarray, pieces: int = 3) -> list[np.ndarray]:
    return np.array_split(keys, pieces)


@settings(deadline=None)
@given(wanted=KEYS, have=KEYS)
def test_match_is_the_last_row_of_a_key(wanted: list[int], have: list[int]) -> None:
    last = {key: row for row, key in enumerate(have)}
    want, there = np.array(wanted, np.int64), np.array(have, np.int64)
    rows = match_rows(streamed(want), streamed(there), (len(want), len(there)), memory=1 << 20)
    assert rows.tolist() == [last.get(key, -1) for key in wanted]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint64", "uint32"])
@pytest.mark.parametrize("memory", [1 << 30, 100_000, 1])
def test_spilled_buckets_give_the_same(dtype: str, memory: int) -> None:
    rng = np.random.default_rng(0)
    limits = np.iinfo(dtype)
    pool = rng.integers(limits.min, limits.max, 3000, dtype=dtype, endpoint=True)
    pool[:2] = limits.min, limits.max
    have, wanted = rng.permutation(pool)[:2000], rng.permutation(pool)[:2500]
    last = {int(key): row for row, key in enumerate(have)}
    got = match_rows(streamed(wanted), streamed(have), (len(wanted), len(have)), memory=memory)
    assert got.tolist() == [last.get(int(key), -1) for key in wanted]

    keys = rng.choice(pool, 5000)
    last = {int(key): row for row, key in enumerate(keys)}
    expected = [row for row, key in enumerate(keys) if last[int(key)] > row]
    assert repeated_rows(streamed(keys), len(keys), memory=memory).tolist() == expected


def test_a_key_is_in_one_bucket_only_and_every_row_comes_once() -> None:
    keys = np.random.default_rng(0).integers(-500, 500, 4000)
    seen: set[int] = set()
    rows: list[int] = []
    buckets = 0
    for (bucket,) in sorted_buckets([streamed(keys, 7)], len(keys), memory=20_000):
        buckets += 1
        here = set(bucket.keys.tolist())
        assert not here & seen
        assert (np.diff(bucket.keys) >= 0).all()
        np.testing.assert_array_equal(keys[bucket.rows], bucket.keys)
        seen |= here
        rows += bucket.rows.tolist()
    assert buckets > 5 and sorted(rows) == list(range(len(keys)))


def test_empty_sides() -> None:
    none = np.empty(0, np.int64)
    assert match_rows([], [none], (0, 0), memory=1).tolist() == []
    assert match_rows([np.array([5])], [], (1, 0), memory=1).tolist() == [-1]
    assert repeated_rows([], 0, memory=1).tolist() == []


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files of more than 4 KiB are refused by the system, as by a disk without room for them."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize(
    "work",
    [
        lambda: row_numbers(10_000, memory=1000),
        lambda: RowMask([1_000_000], memory=1000),
        lambda: repeated_rows([np.arange(10_000)], 10_000, memory=1000 * 64),
    ],
    ids=["row numbers", "mask", "buckets"],
)
def test_no_room_for_temporary_files_is_told_with_their_folder(
    work: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ScratchError, match=r"^writing temporary files in '.*': .*; make room there, name another"):
        work()
    assert not list(tmp_path.iterdir())


def test_spilled_files_are_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    keys = np.arange(5000)
    rows = match_rows([keys], [keys[::-1]], (5000, 5000), memory=1000)
    assert isinstance(rows, np.memmap) and rows[0] == 4999
    assert list(tmp_path.iterdir()) == []
    assert not isinstance(row_numbers(10, memory=1 << 20), np.memmap)
