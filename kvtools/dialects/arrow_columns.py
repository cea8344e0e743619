"""A table as Arrow columns: what Parquet files, Arrow files and `TableReader.to_arrow` have in common.

    key        int64, int32, uint64 or uint32
    value      fixed_size_list<type>[dim]; bfloat16, which Arrow has not, as the float32 of the same number
    slot_<s>   fixed_size_list<type>[width], one for each optimizer slot
    freq, version   integers

No column has nulls. The schema's metadata carry the table's description (`table_record`) under "kvtools". A file of
another program has no such description: which of its columns are keys and values is then told by names and types.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtools.dialects.interface import (
    KEYS_AND_VALUES,
    Array,
    Chunk,
    Columns,
    OpenOptions,
    SlotSchema,
    TableReader,
    TableSchema,
    numpy_dtype,
    row_bytes,
)
from kvtools.dialects.table_record import COUNTER_DTYPES, KEY_DTYPES, VALUE_DTYPES, table_json
from kvtools.errors import BadInputError, CorruptFileError, MissingDependencyError

DESCRIPTION = b"kvtools"
"""The key of the table's description in the metadata of an Arrow schema."""

_KEY_NAMES = ("key", "keys", "id", "ids", "feature_id", "item_id", "user_id", "index")
_VALUE_NAMES = ("value", "values", "embedding", "embeddings", "vector", "vectors", "emb", "weight", "weights")
_FREQ_NAMES = ("freq", "freqs", "frequency", "frequencies", "count", "counts")
_VERSION_NAMES = ("version", "versions")
_NUMBERED = re.compile(r"(.*?)(\d+)", re.S)


@dataclass(frozen=True)
class ColumnMap:
    """Which Arrow columns make the columns of a table: one of lists, or several of numbers, for values and slots."""

    key: str
    value: tuple[str, ...]
    slots: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    freq: str | None = None
    version: str | None = None

    def chosen(self, columns: Columns) -> list[str]:
        """Return the Arrow columns to read."""
        names = [self.key]
        if columns.values:
            names += self.value
        if columns.slots:
            names += [name for slot in self.slots.values() for name in slot]
        if columns.freqs and self.freq:
            names.append(self.freq)
        if columns.versions and self.version:
            names.append(self.version)
        return list(dict.fromkeys(names))


def import_pyarrow(doing: str) -> Any:
    """Return the module pyarrow; raises `MissingDependencyError` where it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise MissingDependencyError(
            f"{doing}: Arrow and Parquet need pyarrow, which is not installed; run `pip install 'kvtools[formats]'`"
        ) from None
    return pyarrow


@contextlib.contextmanager
def arrow_errors(doing: str) -> Iterator[None]:
    """Turn what pyarrow raises for a damaged file into one of our errors."""
    pyarrow = import_pyarrow(doing)
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, IndexError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CorruptFileError(f"{doing}: {reason}; the file is truncated or damaged, copy it again") from error


def column_map(schema: TableSchema) -> ColumnMap:
    """Return what the columns of a table are called; slots whose names Arrow cannot take get others."""
    slots: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for slot in schema.slots:
        wanted = name = "slot_" + slot.name.encode("utf-8", "backslashreplace").decode()
        number = 2
        while name in taken:
            name, number = f"{wanted}_{number}", number + 1
        taken.add(name)
        slots[slot.name] = (name,)
    return ColumnMap(
        "key", ("value",), slots, "freq" if schema.has_freqs else None, "version" if schema.has_versions else None
    )


def arrow_schema(
    schema: TableSchema, columns: Columns, metadata: Mapping[str, str] | None = None, *, describe: bool = True
) -> Any:
    """Return the Arrow schema of these columns of a table, with its description and `metadata`."""
    pyarrow = import_pyarrow("making Arrow columns")
    names = column_map(schema)

    def lists(name: str, dtype: str, width: int) -> Any:
        number = pyarrow.field("element", _arrow_type(pyarrow, dtype), nullable=False)
        return pyarrow.field(name, pyarrow.list_(number, width), nullable=False)

    fields = [pyarrow.field(names.key, _arrow_type(pyarrow, schema.key_dtype), nullable=False)]
    if columns.values:
        fields.append(lists(names.value[0], schema.value_dtype, schema.dim))
    for slot in schema.slots if columns.slots else ():
        fields.append(lists(names.slots[slot.name][0], slot.dtype, slot.width))
    if columns.freqs and schema.freq_dtype and names.freq:
        fields.append(pyarrow.field(names.freq, _arrow_type(pyarrow, schema.freq_dtype), nullable=False))
    if columns.versions and schema.version_dtype and names.version:
        fields.append(pyarrow.field(names.version, _arrow_type(pyarrow, schema.version_dtype), nullable=False))
    described = {DESCRIPTION.decode(): table_json(schema)} if describe else {}
    return pyarrow.schema(fields, metadata={**described, **(metadata or {})})


def arrow_batch(chunk: Chunk, schema: Any) -> Any:
    """Return a chunk as a record batch of `schema`, without copying what Arrow can hold as it is."""
    pyarrow = import_pyarrow("making Arrow columns")
    columns = [column for column in (chunk.keys, chunk.values, *chunk.slots.values()) if column is not None]
    columns += [column for column in (chunk.freqs, chunk.versions) if column is not None]
    arrays = []
    for column, described in zip(columns, schema, strict=True):
        numbers = np.ascontiguousarray(widened(column)).reshape(-1)
        if column.ndim == 1:
            arrays.append(pyarrow.array(numbers, described.type))
        else:
            flat = pyarrow.array(numbers, described.type.value_type)
            arrays.append(pyarrow.FixedSizeListArray.from_arrays(flat, type=described.type))
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


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
        rows = np.asarray(rows, np.int64)
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
            return _numbers(batch.column(batch.schema.get_field_index(name)), dtype, f"{doing}, column '{name}'")

        def rows(these: tuple[str, ...], dtype: str, width: int) -> Array:
            if len(these) == 1 and _is_list(batch.schema.field(these[0]).type):
                column = batch.column(batch.schema.get_field_index(these[0]))
                return _lists(column, dtype, width, f"{doing}, column '{these[0]}'")
            return np.stack([numbers(name, dtype) for name in these], axis=1)

        return Chunk(
            keys=numbers(names.key, schema.key_dtype),
            values=rows(names.value, schema.value_dtype, schema.dim) if columns.values else None,
            slots={slot.name: rows(names.slots[slot.name], slot.dtype, slot.width) for slot in schema.slots}
            if columns.slots
            else {},
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


def empty_chunk(schema: TableSchema, rows: int, columns: Columns) -> Chunk:
    """Return a chunk to be filled."""
    return Chunk(
        keys=np.empty(rows, numpy_dtype(schema.key_dtype)),
        values=np.empty((rows, schema.dim), numpy_dtype(schema.value_dtype)) if columns.values else None,
        slots={slot.name: np.empty((rows, slot.width), numpy_dtype(slot.dtype)) for slot in schema.slots}
        if columns.slots
        else {},
        freqs=np.empty(rows, schema.freq_dtype) if columns.freqs and schema.freq_dtype else None,
        versions=np.empty(rows, schema.version_dtype) if columns.versions and schema.version_dtype else None,
    )


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
    key_dtype = _dtype_name(keys)
    if key_dtype not in KEY_DTYPES:
        notes.append(f"keys are stored as {key_dtype} and read as int64")
        key_dtype = "int64"

    def width(these: tuple[str, ...]) -> int:
        kind = schema.field(these[0]).type
        if not _is_list(kind):
            return len(these)
        fixed = getattr(_storage(kind), "list_size", None)
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
        found = _dtype_name(_storage(kind).value_type if _is_list(kind) else kind)
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
        freq_dtype=_dtype_name(schema.field(names.freq).type) if names.freq else None,
        version_dtype=_dtype_name(schema.field(names.version).type) if names.version else None,
        notes=tuple(notes),
    )
    table = dataclasses.replace(table, bytes=table.rows * row_bytes(table))
    return ArrowTable(table, parts, names)


def _told_apart(schema: Any, doing: str) -> tuple[ColumnMap, list[str]]:
    import pyarrow.types as types

    there = ", ".join(f"{column.name} {column.type}" for column in list(schema)[:12])
    integers = [column.name for column in schema if types.is_integer(column.type)]
    floats = [column.name for column in schema if types.is_floating(column.type)]
    lists = [column.name for column in schema if _is_list(column.type)]

    key = _named(integers, _KEY_NAMES) or (integers[0] if len(integers) == 1 else None)
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
        value = _numbered(floats)
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
    return found if found and _dtype_name(schema.field(found).type) in COUNTER_DTYPES else None


def _numbered(floats: Sequence[str]) -> tuple[str, ...]:
    """Return the largest group of columns that count on from 0 or 1 (c0, c1, ...), in that order; else all columns."""
    groups: dict[str, dict[int, str]] = {}
    for name in floats:
        found = _NUMBERED.fullmatch(name)
        if found and len(found[2]) < 10:
            groups.setdefault(found[1], {})[int(found[2])] = name
    whole = [group for group in groups.values() if max(group) - min(group) + 1 == len(group) and min(group) in (0, 1)]
    if not whole or max(map(len, whole)) < 2:
        return tuple(floats)
    largest = max(whole, key=len)
    return tuple(largest[number] for number in sorted(largest))


def _storage(kind: Any) -> Any:
    return getattr(kind, "storage_type", kind)


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    kind = _storage(kind)
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and (types.is_floating(kind.value_type) or types.is_integer(kind.value_type)))


def _dtype_name(kind: Any) -> str:
    return str(np.dtype(kind.to_pandas_dtype()).name)


def _arrow_type(pyarrow: Any, dtype: str) -> Any:
    return pyarrow.float32() if dtype == "bfloat16" else pyarrow.from_numpy_dtype(np.dtype(dtype))


def widened(column: Array) -> Array:
    """Return bfloat16 numbers as the float32 of the same bits and 16 zeros after them; others as they are."""
    if column.dtype.name != "bfloat16":
        return column
    return (np.ascontiguousarray(column).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrowed(numbers: Array, dtype: str, doing: str) -> Array:
    wanted = numpy_dtype(dtype)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        if np.any(bits & 0xFFFF):
            raise CorruptFileError(
                f"{doing}: got numbers of more bits than bfloat16 has, expected bfloat16 as the description says; the"
                " values were changed after the file was written"
            )
        return (bits >> 16).astype(np.uint16).view(wanted)
    return numbers if numbers.dtype == wanted else numbers.astype(wanted)


def _numbers(column: Any, dtype: str, doing: str) -> Array:
    if column.null_count:
        raise BadInputError(f"{doing}: got {column.null_count} nulls, expected a number in every row; fill them first")
    return _narrowed(column.to_numpy(zero_copy_only=False), dtype, doing)


def _lists(column: Any, dtype: str, width: int, doing: str) -> Array:
    column = getattr(column, "storage", column)
    if column.null_count:
        raise BadInputError(f"{doing}: got {column.null_count} nulls, expected {width} numbers in every row")
    offsets = getattr(column, "offsets", None)
    if offsets is not None:
        lengths = np.diff(offsets.to_numpy())
        if np.any(lengths != width):
            wrong = int(lengths[np.flatnonzero(lengths != width)[0]])
            raise BadInputError(f"{doing}: got a list of {wrong} numbers, expected {width} in every row")
    return _numbers(column.flatten(), dtype, doing).reshape(-1, width)
