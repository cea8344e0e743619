"""Keys that wait for admission in several tables, as those of one: each once, by the rule for rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.interface import TableReader
from kvtools.errors import BadInputError

KEYS, FREQS, VERSIONS = "filtered_keys", "filtered_freqs", "filtered_versions"


class WaitingKeys:
    """The keys that wait in any of several tables: `keys` sorted, each once, and the table that each is of.

    Of a key that waits in several the count and version are those of the last one, or of the first, or of the newest;
    for "sum" and "mean" counts are added up, as far as their type goes, and the largest version is kept. Where one
    table has a key twice, its last counts.

    Args:
        name: the name of the whole.
        sources: the tables.
        labels: what to call each in an error.
        on_conflict: the rule, as for rows; see `kvtools.merge`.
        dtype: of the keys.
        deleted: the keys that each table deletes from those before it.

    Raises:
        BadInputError: "error", and a key that waits in two tables.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[TableReader],
        labels: Sequence[str],
        on_conflict: str,
        dtype: np.dtype[Any],
        deleted: Sequence[Array],
    ) -> None:
        self._name = name
        self._labels = labels
        self._error = on_conflict == "error"
        having = [[extra.name for extra in source.schema.extras] for source in sources]
        there = [number for number, names in enumerate(having) if KEYS in names]
        of = {number: sources[number].extra(KEYS).astype(dtype, copy=False) for number in there}
        keys = np.concatenate([np.empty(0, dtype), *of.values()])
        source = np.concatenate([np.empty(0, np.int64), *(np.full(len(of[number]), number) for number in there)])
        counters: dict[str, Array] = {}
        for counter in (FREQS, VERSIONS):
            if any(counter in having[number] for number in there):
                counters[counter] = np.concatenate(
                    [
                        sources[number].extra(counter)
                        if counter in having[number]
                        else np.zeros(len(keys_of), np.uint8)
                        for number, keys_of in of.items()
                    ]
                )
        gone = np.zeros(len(keys), np.bool_)
        for number, removed in enumerate(deleted):
            if len(removed):
                gone |= (source < number) & np.isin(keys, removed)
        order = np.flatnonzero(~gone)
        order = order[np.lexsort((order, keys[order]))]  # by key; of a key in the order of the tables
        repeated = _followed(keys[order]) & (np.append(source[order][1:], -1) == source[order])
        order = order[~repeated]
        if on_conflict == "newest" and VERSIONS in counters:
            order = order[np.lexsort((order, counters[VERSIONS][order], keys[order]))]
        if on_conflict == "first":
            order = order[np.lexsort((-order, keys[order]))]
        sorted_keys, again = keys[order], _followed(keys[order])
        if self._error and again.any():
            at = int(np.flatnonzero(again)[0])
            raise self._conflict(sorted_keys[at], "waits for admission", source[order][at], source[order][at + 1])
        if on_conflict in ("sum", "mean") and again.any():
            starts = np.flatnonzero(~np.concatenate([[False], again[:-1]]))
            if FREQS in counters:
                counters[FREQS] = _added(counters[FREQS][order], starts)
            if VERSIONS in counters:
                counters[VERSIONS] = np.maximum.reduceat(counters[VERSIONS][order], starts)
        else:
            counters = {counter: numbers[order][~again] for counter, numbers in counters.items()}
        self.keys = sorted_keys[~again]
        self._source = source[order][~again]
        self._counters = counters
        self._have_rows = np.zeros(len(self.keys), np.bool_)
        self._any = bool(there)

    def __len__(self) -> int:
        return len(self.keys)

    def have_rows(self, keys: Array, sources: Array) -> None:
        """Take in keys that have rows, which wait no more, and the tables that the rows are of."""
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        found = self.keys[at] == keys
        other = found & (self._source[at] != sources)
        if self._error and other.any():
            row = int(np.flatnonzero(other)[0])
            raise self._conflict(keys[row], "has a row", sources[row], self._source[at[row]])
        self._have_rows[at[found]] = True

    def extras(self) -> dict[str, Array]:
        """Return the extra arrays of the whole: the keys that have no row, and their counters."""
        if not self._any:
            return {}
        stay = ~self._have_rows
        return {KEYS: self.keys[stay], **{name: numbers[stay] for name, numbers in self._counters.items()}}

    def _conflict(self, key: int, what: str, one: int, other: int) -> BadInputError:
        return BadInputError(
            f"merging into table '{self._name}': key {key} {what} in {self._labels[one]} and waits for admission in"
            f" {self._labels[other]}; choose what becomes of such keys with --on-conflict"
        )


def _followed(keys: Array) -> Array:
    """Tell of each of some sorted keys whether it stands again."""
    followed: Array = np.append(keys[1:] == keys[:-1], False)[: len(keys)]
    return followed


def _added(counts: Array, starts: Array) -> Array:
    """Return the sums of runs that start there, none beyond the largest number of the type."""
    if not len(counts):
        return counts
    largest = np.iinfo(counts.dtype).max
    total = np.add.reduceat(counts.astype(np.uint64), starts)
    over = np.add.reduceat(counts.astype(np.float64), starts) >= float(largest)
    sums: Array = np.where(over, np.uint64(largest), total).astype(counts.dtype)
    return sums
