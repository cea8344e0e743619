"""An index of keys that is arrays and arithmetic alone, so that a graph of stock TensorFlow operations can be it.

For a fixed set of n keys there is a slot for each, no two the same, among 2% more slots than keys. All numbers are
int64, which wrap around, and shifts are signed, as TensorFlow has them:

    hash   = key * MIX[0] + seed
    hash   = (hash ^ (hash >> 32)) * MIX[1]
    hash   = (hash ^ (hash >> 29)) * MIX[2]
    bucket = ((hash >> 32) & 0xFFFFFFFF) * buckets >> 32
    slot   = ((((hash ^ (pilots[bucket] * PILOT)) * SLOT) >> 32) & 0xFFFFFFFF) * slots >> 32

Whoever asks compares the key that lies in the slot with the one asked for: a key that is none of the set gets some
slot, too. A bucket has four keys on average, and its pilot, found by trying, keeps them apart: one byte a key.

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

KEYS_PER_BUCKET = 4
_ROOM = 50  # one slot in so many stays free: the last keys find theirs sooner
_SEEDS = 8
_MOST_KEYS = (2**31 - 2) // (_ROOM + 1) * _ROOM


@dataclass(frozen=True)
class PerfectHash:
    """A slot for each key of a set: see the top of this file.

    seed    a signed number of 64 bits
    slots   how many there are
    pilots  a number for each bucket, int32 [buckets]

    Example:
        >>> found = perfect_hash(np.array([5, -7, 2**62]))
        >>> len(set(found.slots_of(np.array([5, -7, 2**62])).tolist())), found.slots
        (3, 4)
    """

    seed: int
    slots: int
    pilots: npt.NDArray[np.int32]

    def slots_of(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the slot of each key, int64 [n] -> int64 [n]; of a key that is none of the set, some slot."""
        slots = np.empty(len(keys), np.int64)
        _perfect_hash.slots_of(np.ascontiguousarray(keys), self.seed % 2**64, self.slots, self.pilots, slots)
        return slots


def perfect_hash(keys: npt.NDArray[np.int64], progress: Callable[[int], object] = lambda _: None) -> PerfectHash:
    """Find a slot for each of `keys`, int64 [n], none of them twice; some three million a second.

    It takes 13 bytes of memory a key, and gives 1 of pilots. The same keys, in any order, give the same.

    Args:
        keys: what to find slots for.
        progress: called with how many keys have theirs, now and then.

    Raises:
        BadInputError: a key is there twice, or there are over 2,105,376,050 of them.
    """
    if len(keys) > _MOST_KEYS:
        raise BadInputError(
            f"making an index: got {len(keys)} keys, expected {_MOST_KEYS} at most; split the table first, see"
            " `kvtools split`"
        )
    keys = np.ascontiguousarray(keys, np.int64)
    slots = len(keys) + len(keys) // _ROOM + 1
    pilots = np.zeros(max(1, -(-len(keys) // KEYS_PER_BUCKET)), np.int32)
    for attempt in range(_SEEDS):
        # Any odd steps do: the hash mixes them.
        seed = (attempt + 1) * 0x9E3779B97F4A7C15 % 2**64
        if _perfect_hash.build(keys, seed, slots, pilots, progress):
            return PerfectHash(seed - 2**64 if seed >= 2**63 else seed, slots, pilots)
    raise BadInputError(f"making an index of {len(keys)} keys: some are there twice; see `kvtools verify`")
