"""Tables made of Arrow record batches, described by kvtools or told by the names and types of a stranger's columns."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvtools.dialects.arrow_columns import (
    ColumnMap,
    arrow_errors,
    empty_chunk,
    flat_numbers,
    is_list,
    list_numbers,
    storage_type,
    type_name,
)
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import SlotSchema, TableSchema, row_bytes
from kvtools.dialects.table_record import COUNTER_DTYPES, KEY_DTYPES, VALUE_DTYPES
from kvtools.errors import BadInputError, CorruptFileError

_KEY_NAMES = ("key", "keys", "id", "ids", "feature_id", "item_id", "user_id", "index")
_VALUE_NAMES = ("value", "values", "embedding", "embeddings", "vector", "vectors", "emb", "weight", "weights")
_FREQ_NAMES = ("freq", "freqs", "frequency", "frequencies", "count", "counts")
_VERSION_NAMES = ("version", "versions")
_NUMBERED = re.compile(r"(.*?)(\d+)", re.S)


class ArrowPart(ABC):
    """The rows of one part of a table, as record batches."""

    name: str
    rows: int

    @abstractmethod
    def batches(self, columns: Sequence[str], rows: int, verify: bool) -> Iterator[Any]:
        """Yield all rows of these columns in order, in batches of any length."""

    @abstractmethod
    def take(self, columns: Sequence[str], rows: Array) -> Iterator[tuple[Any, Array, Array]]:
        """Find rows by their numbers, int64 [n] in ascending order.

        Yields batches, each with the places in `rows` that it serves and the row numbers within the batch.
        """


class ArrowTable(TableReader):
    """A table made of record batches, in one or more parts."""

    picks_slots = True

    def __init__(
        self,
        schema: TableSchema,
        parts: Sequence[ArrowPart],
        names: ColumnMap,
        extras: Mapping[str, Callable[[], Array]] | None = None,
    ) -> None:
        self.schema = schema
        self._parts = tuple(parts)
        self._names = names
        self._extras = dict(extras or {})
        self._starts = np.cumsum([0, *(part.rows for part in self._parts)])

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        source = self._parts[part]
        doing = f"reading table '{self.schema.name}' from '{source.name}'"
        count = 0
        with arrow_errors(doing):
            for batch in source.batches(self._names.chosen(columns), rows, verify):
                for start in range(0, batch.num_rows, rows):
                    yield self._chunk(batch.slice(start, rows), columns, part, doing)
                count += batch.num_rows
        if count != source.rows:
            raise CorruptFileError(f"{doing}: got {count} rows, expected {source.rows}; the file is damaged")

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        rows = self.row_numbers(rows)
        result = self._empty(len(rows), columns)
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        ends = np.searchsorted(ordered, self._starts)
        for number, part in enumerate(self._parts):
            first, last = int(ends[number]), int(ends[number + 1])
            if first == last:
                continue
            doing = f"reading rows of table '{self.schema.name}' from '{part.name}'"
            with arrow_errors(doing):
                local = ordered[first:last] - self._starts[number]
                for batch, places, within in part.take(self._names.chosen(columns), local):
                    chunk = self._chunk(batch, columns, number, doing)
                    _put(result, order[first:last][places], chunk.take(within))
        return result

    def extra(self, name: str) -> Array:
        """Return an extra array; see `TableReader.extra`."""
        return self._extras[name]()

    def _chunk(self, batch: Any, columns: Columns, part: int, doing: str) -> Chunk:
        schema, names = self.schema, self._names

        def numbers(name: str, dtype: str) -> Array:
            return flat_numbers(batch.column(batch.schema.get_field_index(name)), dtype, f"{doing}, column '{name}'")

        def rows(these: tuple[str, ...], dtype: str, width: int) -> Array:
            if len(these) == 1 and is_list(batch.schema.field(these[0]).type):
                column = batch.column(batch.schema.get_field_index(these[0]))
                return list_numbers(column, dtype, width, f"{doing}, column '{these[0]}'")
            return np.stack([numbers(name, dtype) for name in these], axis=1)

        return Chunk(
            keys=numbers(names.key, schema.key_dtype),
            values=rows(names.value, schema.value_dtype, schema.dim) if columns.values else None,
            slots={
                slot.name: rows(names.slots[slot.name], slot.dtype, slot.width)
                for slot in schema.slots
                if columns.has_slot(slot.name)
            },
            freqs=numbers(names.freq, schema.freq_dtype)
            if columns.freqs and names.freq and schema.freq_dtype
            else None,
            versions=numbers(names.version, schema.version_dtype)
            if columns.versions and names.version and schema.version_dtype
            else None,
            part=part,
        )

    def _empty(self, rows: int, columns: Columns) -> Chunk:
        return empty_chunk(self.schema, rows, columns)


def _put(result: Chunk, places: Array, rows: Chunk) -> None:
    result.keys[places] = rows.keys
    for into, column in ((result.values, rows.values), (result.freqs, rows.freqs), (result.versions, rows.versions)):
        if into is not None and column is not None:
            into[places] = column
    for name, slot in rows.slots.items():
        result.slots[name][places] = slot


def stranger_table(
    name: str,
    dialect: str,
    schema: Any,
    parts: Sequence[ArrowPart],
    options: OpenOptions,
    doing: str,
    notes: Sequence[str] = (),
) -> ArrowTable:
    """Make a table of columns that are not described, by their names and types.

    Raises:
        BadInputError: it cannot be told which columns are the keys or the values.
        UsageError: the options contradict the columns.
    """
    names, told = _told_apart(schema, doing)
    notes = [*told, *notes]
    keys = schema.field(names.key).type
    key_dtype = type_name(keys)
    if key_dtype not in KEY_DTYPES:
        notes.append(f"keys are stored as {key_dtype} and read as int64")
        key_dtype = "int64"

    def width(these: tuple[str, ...]) -> int:
        kind = schema.field(these[0]).type
        if not is_list(kind):
            return len(these)
        fixed = getattr(storage_type(kind), "list_size", None)
        if fixed is not None:
            return int(fixed)
        for part in parts:
            if part.rows:
                with arrow_errors(doing):
                    first = next(iter(part.batches([these[0]], 1, False))).column(0)
                    return len(first[0].values or ())
        return options.dim or 0

    def dtype(these: tuple[str, ...]) -> str:
        kind = schema.field(these[0]).type
        found = type_name(storage_type(kind).value_type if is_list(kind) else kind)
        if found not in VALUE_DTYPES:
            raise BadInputError(
                f"{doing}: column '{these[0]}' is {kind}, expected lists of {' or '.join(VALUE_DTYPES)}"
            )
        return found

    dim = width(names.value)
    if dim < 1:
        raise BadInputError(
            f"{doing}: got no width of the values in column '{names.value[0]}', its lists are empty; give it with --dim"
        )
    value_dtype = dtype(names.value)
    widths = {slot: width(these) for slot, these in names.slots.items()}
    names = ColumnMap(
        names.key, names.value, {s: t for s, t in names.slots.items() if widths[s]}, names.freq, names.version
    )
    table = TableSchema(
        name=name,
        dialect=dialect,
        key_dtype=key_dtype,
        value_dtype=value_dtype,
        dim=dim,
        part_rows=tuple(part.rows for part in parts),
        slots=tuple(SlotSchema(slot, widths[slot], dtype(these)) for slot, these in names.slots.items()),
        freq_dtype=type_name(schema.field(names.freq).type) if names.freq else None,
        version_dtype=type_name(schema.field(names.version).type) if names.version else None,
        notes=tuple(notes),
    )
    table = dataclasses.replace(table, bytes=table.rows * row_bytes(table))
    return ArrowTable(table, parts, names)


def _told_apart(schema: Any, doing: str) -> tuple[ColumnMap, list[str]]:
    import pyarrow.types as types

    there = ", ".join(f"{column.name} {column.type}" for column in list(schema)[:12])
    integers = [column.name for column in schema if types.is_integer(column.type)]
    floats = [column.name for column in schema if types.is_floating(column.type)]
    lists = [column.name for column in schema if is_list(column.type)]

    key = _named(integers, _KEY_NAMES)
    if key is None and len(integers) == 1 and _named([column.name for column in schema], _KEY_NAMES) is None:
        key = integers[0]
    if key is None:
        raise BadInputError(
            f"{doing}: it cannot be told which column is the keys: got {there}; call an integer column 'key'"
        )
    notes = [f"keys are column '{key}'"]
    value: tuple[str, ...]
    chosen = _named(lists, _VALUE_NAMES) or (lists[0] if len(lists) == 1 else None)
    if chosen is not None:
        value = (chosen,)
        notes.append(f"values are column '{chosen}'")
    elif lists:
        raise BadInputError(
            f"{doing}: it cannot be told which column is the values: got {there}; call a column of lists 'value'"
        )
    elif floats:
        value = _numbered(floats) or tuple(floats)
        with_integers = _numbered([*floats, *(name for name in integers if name != key)])
        if set(value) < set(with_integers):
            name = next(name for name in with_integers if name not in value)
            raise BadInputError(
                f"{doing}: column '{name}' is {schema.field(name).type}, expected floats, as '{value[0]}' is; cast it"
            )
        notes.append(f"values are the {len(value)} columns '{value[0]}' to '{value[-1]}'")
    else:
        raise BadInputError(
            f"{doing}: there are no values: got {there}; expected a column of lists of numbers called 'value', or"
            " columns of floats"
        )
    freq, version = _counter(schema, integers, _FREQ_NAMES, key), _counter(schema, integers, _VERSION_NAMES, key)
    slots = {name.removeprefix("slot_"): (name,) for name in lists if name not in value}
    if slots:
        notes.append(f"other columns of lists are read as slots: {', '.join(slots)}")
    used = {key, *value, freq, version, *lists}
    left = [column.name for column in schema if column.name not in used]
    if left:
        notes.append(f"columns left aside: {', '.join(left)}")
    return ColumnMap(key, value, slots, freq, version), notes


def _named(there: Sequence[str], names: Sequence[str]) -> str | None:
    lowered = {name.lower(): name for name in reversed(there)}
    return next((lowered[name] for name in names if name in lowered), None)


def _counter(schema: Any, integers: Sequence[str], names: Sequence[str], key: str) -> str | None:
    found = _named([name for name in integers if name != key], names)
    return found if found and type_name(schema.field(found).type) in COUNTER_DTYPES else None


def _numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Return the largest group of columns that count on from 0 or 1 (c0, c1, ...), in that order; there may be none."""
    groups: dict[str, dict[int, str]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        if found and len(found[2]) < 10:
            groups.setdefault(found[1], {})[int(found[2])] = name
    whole = [group for group in groups.values() if max(group) - min(group) + 1 == len(group) and min(group) in (0, 1)]
    if not whole or max(map(len, whole)) < 2:
        return ()
    largest = max(whole, key=len)
    return tuple(largest[number] for number in sorted(largest))
