"""Tables made of columns, in one or more parts; and such tables whose slots have keys, and an order, of their own."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from kvtools.dialects.bundle import BundleTensor
from kvtools.dialects.chunk import CHUNK_BYTES, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.column import Column
from kvtools.dialects.interface import Finding, TableReader, Unmatched
from kvtools.dialects.options import DEFAULT_MEMORY
from kvtools.dialects.schema import TableSchema
from kvtools.engine import run_all
from kvtools.key_join import match_rows

_ROWS_FOR_THREADS = 1 << 14
"""How many rows are taken of several parts at once."""


@dataclass(frozen=True)
class Part:
    """The columns of one part, all of the same number of rows.

    `rows` may be smaller than the columns' own number of rows: the rest is no part of the table.
    """

    rows: int
    keys: Column
    values: Column
    slots: Mapping[str, Column] = field(default_factory=dict)
    freqs: Column | None = None
    versions: Column | None = None


class ColumnTable(TableReader):
    """The parts of a table, one after the other; `decode_keys` turns stored keys into the schema's type."""

    picks_slots = True

    def __init__(
        self,
        schema: TableSchema,
        parts: Sequence[Part],
        decode_keys: Callable[[Array], Array] | None = None,
        extras: Mapping[str, Column] | None = None,
    ) -> None:
        checked = bool(parts) and all(isinstance(part.values, BundleTensor) for part in parts)
        self.schema = dataclasses.replace(schema, checksums="CRC-32C" if checked else schema.checksums)
        self.direct = all(getattr(part.values, "direct", False) for part in parts)
        self._parts = tuple(parts)
        self._decode_keys = decode_keys
        self._extras = dict(extras or {})
        self._starts = np.cumsum([0, *(part.rows for part in self._parts)])

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        source = self._parts[part]
        chosen = _chosen(source, columns)
        streams = {name: tensor.chunks(rows, verify=verify) for name, tensor in chosen.items()}
        for start in range(0, max(tensor.rows for tensor in chosen.values()), rows):
            n = max(0, min(rows, source.rows - start))
            # Rows past the table's own are read too, so that the checksum of the whole column is known.
            arrays = {name: next(stream, None) for name, stream in streams.items()}
            if n:
                yield self._chunk({k: a[:n] for k, a in arrays.items() if a is not None}, part)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        rows = self.row_numbers(rows)
        if len(self._parts) == 1:
            chosen = _chosen(self._parts[0], columns)
            return self._chunk({name: tensor.take(rows) for name, tensor in chosen.items()})
        which = np.searchsorted(self._starts, rows, side="right") - 1
        ascending = bool((which[1:] >= which[:-1]).all())
        # Only parts that have some of the rows are looked at: a table may have thousands.
        order = None if ascending else np.argsort(which, kind="stable")
        numbers, starts = np.unique(which if order is None else which[order], return_index=True)
        stops = [*starts[1:].tolist(), len(rows)]
        places: list[Any] = [slice(*ends) for ends in zip(starts.tolist(), stops, strict=False)]
        if order is not None:
            places = [order[place] for place in places]
        found = [_chosen(self._parts[number], columns) for number in numbers.tolist()]
        arrays: dict[Any, Array] = {}
        for tensors in (_chosen(self._parts[0], columns), *found):
            for name, tensor in tensors.items():
                if name not in arrays:
                    arrays[name] = np.empty((len(rows), *tensor.row_shape), tensor.dtype)

        def copy(at: int) -> None:
            here = places[at]
            for name, tensor in found[at].items():
                arrays[name][here] = tensor.take(rows[here] - self._starts[numbers[at]])

        for _ in run_all(copy, range(len(found)), workers=None if len(rows) >= _ROWS_FOR_THREADS else 1):
            pass
        return self._chunk(arrays)

    def extra(self, name: str) -> Array:
        """Return an extra array, checked; see `TableReader.extra`."""
        column = self._extras[name]
        array = np.empty((column.rows, *column.row_shape), column.dtype)
        start = 0
        for rows in column.chunks(max(1, CHUNK_BYTES // max(1, column.dtype.itemsize * _width(column)))):
            array[start : start + len(rows)] = rows
            start += len(rows)
        return array

    def _chunk(self, arrays: dict[Any, Array], part: int = 0) -> Chunk:
        keys = arrays[("keys", "")]
        return Chunk(
            keys=self._decode_keys(keys) if self._decode_keys else keys,
            values=arrays.get(("values", "")),
            slots={name: array for (kind, name), array in arrays.items() if kind == "slot"},
            freqs=arrays.get(("freqs", "")),
            versions=arrays.get(("versions", "")),
            part=part,
        )


def _chosen(part: Part, columns: Columns) -> dict[tuple[str, str], Column]:
    chosen = {("keys", ""): part.keys}
    if columns.values:
        chosen["values", ""] = part.values
    chosen.update({("slot", name): tensor for name, tensor in part.slots.items() if columns.has_slot(name)})
    if columns.freqs and part.freqs is not None:
        chosen["freqs", ""] = part.freqs
    if columns.versions and part.versions is not None:
        chosen["versions", ""] = part.versions
    return chosen


_KEY_ROWS = 1 << 18
_FEW = 5


@dataclass(frozen=True)
class KeyedColumn:
    """A column that is a table of its own: keys and rows of every part, in its own order, maybe of other keys.

    Engines that keep a table per optimizer slot save it so. `severity` is how bad it is when the keys differ from
    the table's. `fill` is what a row that it lacks is made of.
    """

    keys: Sequence[Column]
    values: Sequence[Column]
    severity: Literal["error", "warning", "info"] = "error"
    fill: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(column.rows for column in self.keys)


class KeyedSlotsTable(ColumnTable):
    """A table with columns that have keys of their own, joined by key.

    Args:
        schema: the table, with the joined columns among its slots, or as its frequencies or versions.
        parts: the columns that are in the table's own order.
        keyed: the joined columns by name: "slot:<name>", "freqs" or "versions".
        memory: what the join may hold; more spills to disk.
        decode_keys, extras: as for `ColumnTable`.

    Where a part of a joined column has the table's keys in the table's order it is streamed along. Otherwise its rows
    are found by key (the last one counts), and a row that it lacks is its `fill`: `check` and `unmatched` tell of both.
    """

    def __init__(
        self,
        schema: TableSchema,
        parts: Sequence[Part],
        keyed: Mapping[str, KeyedColumn],
        *,
        memory: int = DEFAULT_MEMORY,
        decode_keys: Callable[[Array], Array] | None = None,
        extras: Mapping[str, Column] | None = None,
    ) -> None:
        super().__init__(schema, parts, decode_keys, extras)
        self._keyed = dict(keyed)
        self._memory = memory
        self._row_maps: dict[int, Array] = {}
        self._same: dict[int, bool] = {}
        self._verified: set[str] = set()
        self._went_along: set[tuple[str, int]] = set()
        self._joining = threading.Lock()

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        wanted = self._wanted(columns)
        streams = {name: _Aligned(self._keyed[name], part, rows, verify, self._decoded) for name in wanted}
        start = int(self._starts[part])
        for chunk in super().read_part(part, columns, rows, verify):
            joined = {}
            for name, stream in streams.items():
                column = stream.next(chunk.keys) if stream.rows == self._parts[part].rows else None
                if column is None:
                    stream.rows = -1  # from here on by key
                    column = self._rows_of(name, np.arange(start, start + len(chunk)), verify)
                joined[name] = column
            start += len(chunk)
            yield self._with(chunk, joined)
        self._went_along.update(
            (name, part) for name, stream in streams.items() if stream.rows == self._parts[part].rows
        )

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        rows = self.row_numbers(rows)
        joined = {name: self._rows_of(name, rows, verify=False) for name in self._wanted(columns)}
        return self._with(super().take(rows, columns), joined)

    def check(self) -> Iterator[Finding]:
        """Yield where the keys of a joined column differ from the table's."""
        for name, column in self._keyed.items():
            missing, surplus = self._differences(name)
            if missing:
                yield Finding(
                    column.severity, "slot-keys", self.schema.name, f"{missing}; they read as {_zeros(column)}"
                )
            if surplus:
                yield Finding(column.severity, "slot-keys", self.schema.name, f"{surplus}; they are left out")

    def unmatched(self) -> Unmatched:
        """Return what of the slots does not fit the rows; see `TableReader.unmatched`.

        Counters are not told of: engines count keys that have no row, and rows without a counter were never counted.
        """
        found = {name: self._differences(name) for name in self._keyed if name.startswith("slot:")}
        return Unmatched(
            tuple(surplus for _, surplus in found.values() if surplus),
            tuple(
                f"{missing}; they became {_zeros(self._keyed[name])}" for name, (missing, _) in found.items() if missing
            ),
        )

    def filled(self, slots: Mapping[str, float]) -> KeyedSlotsTable:
        """Return the table with what the rows that slots lack are made of, by their names, where no file says it."""
        table = copy.copy(self)
        fills = {f"slot:{slot}": number for slot, number in slots.items()}
        table._keyed = {
            name: dataclasses.replace(column, fill=fills[name]) if name in fills else column
            for name, column in self._keyed.items()
        }
        return table

    def _wanted(self, columns: Columns) -> list[str]:
        return [
            name
            for name in self._keyed
            if (columns.freqs and name == "freqs")
            or (columns.versions and name == "versions")
            or (name.startswith("slot:") and columns.has_slot(name.removeprefix("slot:")))
        ]

    def _with(self, chunk: Chunk, joined: Mapping[str, Array]) -> Chunk:
        slots = dict(chunk.slots)
        slots.update({name.removeprefix("slot:"): rows for name, rows in joined.items() if name.startswith("slot:")})
        ordered = {slot.name: slots[slot.name] for slot in self.schema.slots if slot.name in slots}
        return dataclasses.replace(
            chunk,
            slots=ordered,
            freqs=joined.get("freqs", chunk.freqs),
            versions=joined.get("versions", chunk.versions),
        )

    def _rows_of(self, name: str, rows: Array, verify: bool) -> Array:
        """Copy the rows of a joined column that belong to these rows of the table."""
        column = self._keyed[name]
        at = np.asarray(self._row_numbers(name, rows, verify))
        first = column.values[0]
        result = np.full((len(rows), *first.row_shape), column.fill, first.dtype)
        start = 0
        for values in column.values:
            here = np.flatnonzero((at >= start) & (at < start + values.rows))
            if len(here):
                result[here] = values.take(at[here] - start)
            start += values.rows
        return result

    def _row_numbers(self, name: str, rows: Array, verify: bool) -> Array:
        """Return which rows of a joined column belong to these of the table; no join where the keys are the same."""
        if not verify:
            with self._joining:
                if self._same_keys(self._keyed[name]):
                    return rows
        numbers: Array = self._row_map(name, verify)[rows]
        return numbers

    def _row_map(self, name: str, verify: bool) -> Array:
        with self._joining:
            column, keys = self._keyed[name], id(self._keyed[name].keys)  # columns of the same keys share a map
            if verify and name not in self._verified:  # rows taken one by one are not checked: check all of them once
                for values in column.values:
                    for _ in values.chunks(max(1, _KEY_ROWS // max(1, _width(values)))):
                        pass
                self._verified.add(name)
            if keys not in self._row_maps:
                self._row_maps[keys] = match_rows(
                    self._own_keys(), self._keys_of(column), (self.rows, column.rows), memory=self._memory
                )
            return self._row_maps[keys]

    def _own_keys(self) -> Iterator[Array]:
        for part in range(self.parts):
            for chunk in super().read_part(part, Columns(), _KEY_ROWS, False):
                yield chunk.keys

    def _keys_of(self, column: KeyedColumn) -> Iterator[Array]:
        for keys in column.keys:
            for chunk in keys.chunks(_KEY_ROWS, verify=False):
                yield self._decoded(chunk)

    def _decoded(self, keys: Array) -> Array:
        return self._decode_keys(keys) if self._decode_keys else keys

    def _same_keys(self, column: KeyedColumn) -> bool:
        which = id(column.keys)
        if which not in self._same:
            own, other = self._own_keys(), self._keys_of(column)
            self._same[which] = [keys.rows for keys in column.keys] == list(self.schema.part_rows) and all(
                np.array_equal(a, b) for a, b in zip(own, other, strict=True)
            )
        return self._same[which]

    def _differences(self, name: str) -> tuple[str, str]:
        """Say which rows a joined column lacks, and how many it has too many; empty where it is not so."""
        column, every_part = self._keyed[name], {(name, part) for part in range(self.parts)}
        if len(column.keys) == self.parts and every_part <= self._went_along:
            return "", ""
        with self._joining:
            if self._same_keys(column):
                return "", ""
        what = name.replace("slot:", "slot ")
        missing = np.flatnonzero(self._row_map(name, verify=False) < 0)
        few = ", ".join(map(str, super().take(missing[:_FEW], Columns()).keys.tolist())) + ", ..." * (
            len(missing) > _FEW
        )
        surplus = self._surplus(column)
        return (
            f"{what} has no row for {len(missing)} of {self.rows} keys ({few})" if len(missing) else "",
            f"{what} has {surplus} rows whose keys the table has not, or has twice" if surplus else "",
        )

    def _surplus(self, column: KeyedColumn) -> int:
        """Count the rows of a joined column that no row of the table takes."""
        back = match_rows(self._keys_of(column), self._own_keys(), (column.rows, self.rows), memory=self._memory)
        return int(np.count_nonzero(back < 0))


class _Aligned:
    """The rows of one part of a joined column, as long as its keys go along with the table's."""

    def __init__(
        self, column: KeyedColumn, part: int, rows: int, verify: bool, decode: Callable[[Array], Array]
    ) -> None:
        self._decode = decode
        there = part < len(column.keys)
        self.rows = column.keys[part].rows if there else -1
        self._keys = column.keys[part].chunks(rows, verify=verify) if there else iter(())
        self._values = column.values[part].chunks(rows, verify=verify) if there else iter(())

    def next(self, keys: Array) -> Array | None:
        """Return the next rows if their keys are `keys`, else None."""
        own, values = next(self._keys, None), next(self._values, None)
        if own is None or values is None or not np.array_equal(self._decode(own), keys):
            return None
        return values


def _zeros(column: KeyedColumn) -> str:
    return f"{column.fill:g}" if column.fill else "zeros"


def _width(column: Column) -> int:
    return int(np.prod(column.row_shape, dtype=np.int64))
