"""An index of keys that is arrays and arithmetic alone, so that a graph of stock TensorFlow operations can be it.

For a fixed set of n keys there is a slot for each, no two the same, among 2% more slots than keys. All numbers have 64
bits and wrap around, and high(x) = x >> 32 is the upper half of a number, without a sign:

    hash   = key * seed
    hash   = (hash + high(hash)) * MIX
    bucket = high(high(hash) * buckets)
    slot   = high(high(hash * pilots[bucket]) * slots)

Whoever asks compares the key that lies in the slot with the one asked for: a key that is none of the set gets some
slot, too. A bucket has three keys on average, and its pilot, an odd number found by trying, keeps them apart: 2.7 bytes
a key. Every operation costs a pass over the keys where a graph does it, so there are few. None is a shift or bitwise:
converters to smaller runtimes know none of int64.

Giulio Ermanno Pibiri and Roberto Trani, PTHash: Revisiting FCH Minimal Perfect Hashing, SIGIR 2021,
https://arxiv.org/abs/2104.10402
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtools import _perfect_hash
from kvtools.errors import BadInputError

MIX: int = _perfect_hash.MIX
_KEYS_PER_BUCKET = 3
_ROOM = 50  # one slot in so many stays free: the last keys find theirs sooner
_SEEDS = 32
MOST_KEYS = (2**31 - 2) // (_ROOM + 1) * _ROOM
"""More cannot be indexed."""


@dataclass(frozen=True)
class PerfectHash:
    """A slot for each key of a set: see the top of this file.

    seed    a number of 64 bits, odd
    slots   how many there are
    pilots  a number for each bucket, int64 [buckets]

    Example:
        >>> found = perfect_hash(np.array([5, -7, 2**62]))
        >>> len(set(found.slots_of(np.array([5, -7, 2**62])).tolist())), found.slots
        (3, 4)
    """

    seed: int
    slots: int
    pilots: npt.NDArray[np.int64]

    def slots_of(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the slot of each key, int64 [n] -> int64 [n]; of a key that is none of the set, some slot."""
        slots = np.empty(len(keys), np.int64)
        _perfect_hash.slots_of(np.ascontiguousarray(keys), self.seed, self.slots, self.pilots, slots)
        return slots


def perfect_hash(keys: npt.NDArray[np.int64], progress: Callable[[int], object] = lambda _: None) -> PerfectHash:
    """Find a slot for each of `keys`, int64 [n], none of them twice; some five million a second.

    It takes 12 bytes of memory a key, beside the pilots. The same keys, in any order, give the same.

    Args:
        keys: what to find slots for.
        progress: called with how many keys have theirs, now and then.

    Raises:
        BadInputError: a key is there twice, or there are over 2,105,376,100 of them.
    """
    check_count(len(keys))
    keys = np.ascontiguousarray(keys, np.int64)
    slots = len(keys) + len(keys) // _ROOM + 1
    pilots = np.zeros(len(keys) // _KEYS_PER_BUCKET + 1, np.int64)
    for attempt in range(_SEEDS):
        # Any odd numbers do that have nothing to do with each other, or with steps between keys.
        seed = (0xD6E8FEB86659FD93 * (2 * attempt + 1) ^ 0x2545F4914F6CDD1C) % 2**64
        if _perfect_hash.build(keys, seed, slots, pilots, progress):
            return PerfectHash(seed, slots, pilots)
        if attempt == 0 and len(np.unique(keys)) != len(keys):
            raise BadInputError(f"making an index of {len(keys)} keys: some are there twice; see `kvtools verify`")
    raise BadInputError(f"making an index of {len(keys)} keys: no function keeps them apart; use another index")


def check_count(keys: int) -> None:
    """Raise `BadInputError` where there are more keys than an index can have."""
    if keys > MOST_KEYS:
        raise BadInputError(
            f"making an index: got {keys} keys, expected {MOST_KEYS} at most; split the table first, see"
            " `kvtools split`"
        )
