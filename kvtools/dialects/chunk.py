"""Rows as NumPy columns, and which columns of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

CHUNK_BYTES = 1 << 20
"""About how many bytes of all its columns a chunk holds unless the caller says how many rows it wants. More is no
faster: chunks of this size stay in the processor's cache between reading, checking and writing."""


@dataclass(frozen=True)
class Chunk:
    """A run of rows of one part, n of them, as columns in the same order.

    `keys` [n]; `values` [n, dim]; `slots[name]` [n, width]; `freqs` and `versions` [n], or None where the
    table has none or they were not asked for. Columns that were not asked for are left out: values is None,
    slots is empty. Rows that were taken of several parts have `parts` [n] in place of `part`.
    """

    keys: Array
    values: Array | None = None
    slots: Mapping[str, Array] = field(default_factory=dict)
    freqs: Array | None = None
    versions: Array | None = None
    part: int = 0
    parts: Array | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def part_numbers(self) -> Array:
        """Return the number of the part that each row lies in, int32 [n].

        >>> Chunk(np.array([5, 7]), part=3).part_numbers().tolist()
        [3, 3]
        """
        return np.full(len(self), self.part, np.int32) if self.parts is None else self.parts.astype(np.int32)

    def take(self, rows: Any) -> Chunk:
        """Return the chunk of these rows only: row numbers, a boolean mask or a slice, as NumPy indexes.

        >>> Chunk(np.array([5, 7]), freqs=np.array([1, 2])).take([1]).freqs.tolist()
        [2]
        """
        return Chunk(
            keys=self.keys[rows],
            values=None if self.values is None else self.values[rows],
            slots={name: slot[rows] for name, slot in self.slots.items()},
            freqs=None if self.freqs is None else self.freqs[rows],
            versions=None if self.versions is None else self.versions[rows],
            part=self.part,
            parts=None if self.parts is None else self.parts[rows],
        )


@dataclass(frozen=True)
class Columns:
    """Which columns beside the keys to read; the bytes of the others are never touched.

    `slots` is all of them or none; of a reader with `picks_slots` also the names of some.
    """

    values: bool = False
    slots: bool | frozenset[str] = False
    freqs: bool = False
    versions: bool = False

    def __or__(self, other: Columns) -> Columns:
        """Return the columns of both.

        >>> Columns(values=True) | Columns(freqs=True)
        Columns(values=True, slots=False, freqs=True, versions=False)
        """
        named = [slots for slots in (self.slots, other.slots) if isinstance(slots, frozenset)]
        return Columns(
            self.values or other.values,
            self.slots is True or other.slots is True or frozenset().union(*named) or False,
            self.freqs or other.freqs,
            self.versions or other.versions,
        )

    def has_slot(self, name: str) -> bool:
        """Tell whether the slot of this name is to be read.

        >>> Columns(slots=frozenset({"m"})).has_slot("v"), Columns(slots=True).has_slot("v")
        (False, True)
        """
        return name in self.slots if isinstance(self.slots, frozenset) else self.slots


KEYS = Columns()
KEYS_AND_VALUES = Columns(values=True)
ALL_COLUMNS = Columns(values=True, slots=True, freqs=True, versions=True)
