"""Which part of a partitioned table a key belongs to, by the rules of the engines.

floor_mod   key floor-mod parts, unsigned for unsigned keys: tfplugin, TFPlus, TFRA, SOK (-1 of 3 parts is part 2)
mod_1000    (key floor-mod 1000) mod parts: DeepRec, whose checkpoints group rows in 1,000 buckets
low_31_bits (key and 0x7fffffff) mod parts: TFRA built for CUDA, int64 keys
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

RULES = ("floor_mod", "mod_1000", "low_31_bits")


def owners(keys: Array, parts: int, rule: str) -> npt.NDArray[np.int64]:
    """Return the part of each of `keys` [n], any integer type, as int64 [n].

    >>> owners(np.array([-1, 0, 7]), 3, "floor_mod").tolist()
    [2, 0, 1]
    >>> owners(np.array([2**64 - 1], np.uint64), 10, "floor_mod").tolist()
    [5]
    """
    if rule == "mod_1000":
        keys, rule = _modulo(keys, 1000), "floor_mod"
    elif rule == "low_31_bits":
        keys, rule = keys & keys.dtype.type(0x7FFFFFFF), "floor_mod"
    if rule != "floor_mod":
        raise ValueError(f"unknown partition rule {rule!r}; expected one of {', '.join(RULES)}")
    owner: npt.NDArray[np.int64] = _modulo(keys, parts).astype(np.int64)
    return owner


def _modulo(keys: Array, divisor: int) -> Array:
    if divisor > np.iinfo(keys.dtype).max:
        keys = keys.astype(np.int64)
    if divisor & (divisor - 1) == 0:  # the same, and ten times as fast
        bits: Array = keys & keys.dtype.type(divisor - 1)
        return bits
    remainder: Array = keys % keys.dtype.type(divisor)
    return remainder
