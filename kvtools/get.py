"""The rows of given keys: found in one pass over a table's keys, read in the order in which they were asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtools._key_index import KeyIndex
from kvtools.dialects.chunk import ALL_COLUMNS, KEYS, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.schema import row_bytes
from kvtools.errors import UsageError
from kvtools.field_names import FIELDS, field_name
from kvtools.row_filter import RowFilter
from kvtools.row_norms import row_norms
from kvtools.sql.columns import slot_names
from kvtools.table_names import near
from kvtools.table_view import TableView, replace_schema

_KEY_ROWS = 1 << 18
_CHUNK_BYTES = 1 << 22


def rows_of_keys(table: TableReader, keys: Array, *, progress: Progress | None = None) -> npt.NDArray[np.int64]:
    """Return the number of each key's row in a table, int64 [n], -1 where it has none, the last one of several.

    Args:
        table: its keys are streamed once, and checked against their checksums.
        keys: integers [n], any type, any order; one outside the range of the table's key type is not in it.
        progress: called as keys are read.
    """
    found = np.full(len(keys), -1, np.int64)
    limits = np.iinfo(table.key_dtype)
    fitting = np.flatnonzero((keys >= int(limits.min)) & (keys <= int(limits.max)))
    if not len(fitting):
        return found
    index = KeyIndex(_as_int64(keys[fitting].astype(table.key_dtype)))
    rows = np.full(len(fitting), -1, np.int64)
    start = 0
    for chunk in table.chunks(KEYS, rows=_KEY_ROWS):
        index.find(_as_int64(chunk.keys), start, rows)
        start += len(chunk)
        if progress:
            progress(table.schema.name, start, table.rows)
    index.spread(rows)
    found[fitting] = rows
    return found


def _as_int64(keys: Array) -> npt.NDArray[np.int64]:
    """Return int64 numbers, a different one for each key of any integer type [n]."""
    return np.ascontiguousarray(keys.view(np.int64) if keys.dtype.itemsize == 8 else keys.astype(np.int64))


def read_rows(
    table: TableReader, rows: Array, columns: Columns = ALL_COLUMNS, *, memory: int = DEFAULT_MEMORY
) -> Iterator[Chunk]:
    """Yield the rows of these numbers [n], in their order, in chunks; only those of a snapshot are checked.

    The rows of some chunks together, of one where rows can be had one by one, are read in the table's own order, which
    is what a disk, and a compressed file, likes.
    """
    size = row_bytes(table.schema, columns)
    step, some = max(1, memory // (8 * size)), max(1, _CHUNK_BYTES // size)
    if table.direct:  # whoever takes the chunks works on one while the next is read
        step = min(step, some)
    ends = np.cumsum(table.schema.part_rows)
    for start in range(0, len(rows), step):
        numbers = rows[start : start + step]
        order = np.argsort(numbers)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        taken = table.take(numbers[order], columns)
        if table.parts > 1:
            taken = dataclasses.replace(taken, parts=np.searchsorted(ends, numbers[order], side="right"))
        for first in range(0, len(back), some):
            yield taken.take(back[first : first + some])


def passing_rows(
    table: TableReader, rows: Array, where: RowFilter, *, memory: int = DEFAULT_MEMORY
) -> npt.NDArray[np.bool_]:
    """Return which of the rows of these numbers, int64 [n], meet a condition, bool [n]."""
    masks = [where.mask(chunk) for chunk in read_rows(table, rows, where.columns_of(table), memory=memory)]
    return np.concatenate([np.empty(0, np.bool_), *masks])


class ChosenRows(TableView):
    """Some rows of a table, in a given order, as a table of one part.

    Args:
        source: the table.
        rows: their numbers, int64 [n].
    """

    def __init__(self, source: TableReader, rows: Array) -> None:
        super().__init__(source, replace_schema(source, part_rows=(len(rows),), partition=None))
        self.rows_chosen = rows

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows; see `TableReader.read_part`."""
        for start in range(0, len(self.rows_chosen), rows):
            yield self.take(np.arange(start, min(start + rows, len(self.rows_chosen))), columns)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return dataclasses.replace(self.source.take(self.rows_chosen[self.row_numbers(rows)], columns), part=0)


@dataclasses.dataclass(frozen=True)
class ColumnChoice:
    """Which columns to show: `columns`, of the slots only those named in `slots`, all if None, and of what is
    `computed` "norm" and "part"."""

    columns: Columns
    slots: frozenset[str] | None = None
    computed: tuple[str, ...] = ()

    @property
    def to_read(self) -> Columns:
        """What of a table is to be read to show these."""
        return self.columns | Columns(values="norm" in self.computed)

    def shown(self, chunk: Chunk) -> Chunk:
        """Return a chunk with the chosen columns only, of one that may have more."""
        slots = {name: rows for name, rows in chunk.slots.items() if self.slots is None or name in self.slots}
        return dataclasses.replace(
            chunk,
            values=chunk.values if self.columns.values else None,
            slots=slots if self.columns.slots else {},
            freqs=chunk.freqs if self.columns.freqs else None,
            versions=chunk.versions if self.columns.versions else None,
        )

    def numbers(self, chunk: Chunk) -> dict[str, Array]:
        """Return what is computed of a chunk, which has what that needs, by name, [n] each."""
        found: dict[str, Array] = {}
        if "norm" in self.computed and chunk.values is not None:
            found["norm"] = row_norms(chunk.values, "l2")
        if "part" in self.computed:
            found["part"] = chunk.part_numbers()
        return found


def choose_columns(names: Sequence[str], tables: Sequence[TableReader]) -> ColumnChoice:
    """Return the choice of these columns: `FIELDS`, plurals too, or a slot's name; all if none. Keys are always there.

    A slot that is called as a field is `slot_<name>`, as in `kvtools sql`.

    Raises:
        UsageError: no table has a column of a name.
    """
    if not names:
        return ColumnChoice(ALL_COLUMNS)
    known: dict[str, set[str]] = {}
    for table in tables:
        for slot, label in zip(table.slots, slot_names(table.slots), strict=True):
            for name in {slot, label} - {"key", *FIELDS}:
                known.setdefault(name, set()).add(slot)
    chosen = {name if name in known else field_name(name.strip()) for name in names}
    for name in names:
        if name not in known and field_name(name.strip()) not in {"key", *FIELDS, *known}:
            there = ["key", *FIELDS, *sorted(known)]
            raise UsageError(
                f"reading columns: got --columns {name!r}, expected some of {', '.join(there)}{near(name, there)}"
            )
    slots = frozenset(slot for name in chosen for slot in known.get(name, ()))
    columns = Columns("value" in chosen, "slots" in chosen or bool(slots), "freq" in chosen, "version" in chosen)
    computed = tuple(name for name in ("norm", "part") if name in chosen)
    return ColumnChoice(columns, None if "slots" in chosen else slots, computed)
