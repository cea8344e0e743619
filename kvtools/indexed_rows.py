"""The variables of a table in an exported model, written in the order that its index wants.

hash     keys [rows] and values [rows + n] as they come; a hash table is made of the keys when the model is loaded
perfect  keys [slots], values [slots + n], and the pilots: see `perfect_hash.py`; nothing is made when it is loaded

The n rows behind are those for keys that are not there. The slots that no key has hold a key of another slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from kvtools import _perfect_hash
from kvtools.dialects.bundle import BundleWriter
from kvtools.dialects.chunk import Array
from kvtools.errors import BadInputError, UsageError
from kvtools.perfect_hash import PerfectHash, perfect_hash
from kvtools.slot_order import SlotOrderWriter
from kvtools.stock_model.table import PerfectSlots, StockTable

Index = Literal["hash", "perfect"]
"""The kinds of index."""
INDEXES: tuple[Index, ...] = get_args(Index)
DEFAULT_INDEX: Index = "hash"
"""The faster one on CPUs without XLA."""
_SLOTS_AT_ONCE = 1 << 20


def check_index(index: str) -> None:
    """Raise `UsageError` where there is no such index."""
    if index not in INDEXES:
        raise UsageError(f"exporting: got index '{index}', expected one of {', '.join(INDEXES)}")


@dataclass(frozen=True)
class SlotOrder:
    """The slots of a table's keys: `keys` [slots] is the key of each, `free_key` where a slot has none."""

    perfect: PerfectHash
    keys: Array
    free_key: int

    @property
    def in_graph(self) -> PerfectSlots:
        """What a graph computes slots by."""
        return PerfectSlots(self.perfect.seed, self.perfect.slots, len(self.perfect.pilots))

    def described(self) -> dict[str, Any]:
        """Return what the manifest says: by it the free slots are told from the one that has their key."""
        owner = self.perfect.slots_of(np.array([self.free_key], np.int64))[0]
        return {"slots": self.perfect.slots, "free_slots": {"key": self.free_key, "but": int(owner)}}


def slot_order(keys: Array, progress: Callable[[int], object] = lambda _: None) -> SlotOrder:
    """Find slots for keys, int64 [n], none of them twice; arguments and errors as of `perfect_hash`."""
    perfect = perfect_hash(keys, progress)
    free_key = int(keys[0]) if len(keys) else 0
    in_slots = np.full(perfect.slots, free_key, np.int64)
    for start in range(0, len(keys), _SLOTS_AT_ONCE):
        some = keys[start : start + _SLOTS_AT_ONCE]
        in_slots[perfect.slots_of(some)] = some
    return SlotOrder(perfect, in_slots, free_key)


class Rows(Protocol):
    """Where the rows of a table go."""

    @property
    def turns(self) -> int:
        """How often all rows have to be appended, in any order, each time followed by `end_turn`."""

    def append(self, keys: Array, rows: Array) -> None:
        """Write some rows [n, *row_shape], and their keys, int64 [n]."""

    def end_turn(self) -> None:
        """Say that all rows were appended."""


@contextmanager
def table_rows(
    writer: BundleWriter, table: StockTable, order: SlotOrder | None, behind: Array, *, most_turns: int = 1
) -> Iterator[Rows]:
    """Write the variables of a table, of what is appended.

    Args:
        writer: the bundle.
        table: what its tensors are called.
        order: the slots of its keys; None for a hash table.
        behind: rows [n, *row_shape] for keys that are not there, the row of zeros first.
        most_turns: how often the rows may be asked for.
    """
    if order is None:
        in_turn = _InTurn(writer, table, behind)
        yield in_turn
        in_turn.finish()
        return
    tensor, places = table.tensor("values"), order.perfect.slots
    with SlotOrderWriter(
        writer, tensor, behind.dtype, behind.shape[1:], places, behind, most_turns=most_turns
    ) as values:
        yield _InSlots(order, table.name, values)
    writer.array(table.tensor("keys"), order.keys)
    writer.array(table.tensor("index"), order.perfect.pilots)


class _InTurn:
    """Rows as they come."""

    turns = 1

    def __init__(self, writer: BundleWriter, table: StockTable, behind: Array) -> None:
        self._writer, self._table, self._behind = writer, table, behind
        self._keys: list[Array] = []
        writer.begin(table.tensor("values"), behind.dtype, behind.shape[1:])

    def append(self, keys: Array, rows: Array) -> None:
        self._writer.append(rows)
        self._keys.append(keys)

    def end_turn(self) -> None:
        """Do nothing: all is written."""

    def finish(self) -> None:
        """Write the rows behind, and the keys."""
        self._writer.append(self._behind)
        self._writer.end()
        self._writer.begin(self._table.tensor("keys"), np.dtype(np.int64), ())
        for keys in self._keys:
            self._writer.append(keys)
        if not self._keys:
            # TensorFlow initialises no hash table with nothing. Nobody asks this one.
            self._writer.append(np.zeros(1, np.int64))
        self._writer.end()


class _InSlots:
    """Rows in the order of the slots of their keys."""

    def __init__(self, order: SlotOrder, table: str, values: SlotOrderWriter) -> None:
        self._order, self._table, self._values = order, table, values

    @property
    def turns(self) -> int:
        """How often all rows have to be appended."""
        return self._values.turns

    def end_turn(self) -> None:
        """Write what waits in memory."""
        self._values.end_turn()

    def append(self, keys: Array, rows: Array) -> None:
        slots = self._order.perfect.slots_of(keys)
        if not _perfect_hash.lie_in(np.ascontiguousarray(keys), slots, self._order.keys):
            raise BadInputError(
                f"exporting table '{self._table}': it has other keys than when its index was made; export it while"
                " nothing writes to it"
            )
        self._values.put(slots, rows)
