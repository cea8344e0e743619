"""Tables out of columns that have nothing but names: those that kvtools wrote, and what strangers call theirs.

What kvtools writes: `<table>.keys`, `<table>.values`, `<table>.freqs`, `<table>.versions`, `<table>.slot.<slot>` and
`<table>.<extra>`, and a description of all tables, JSON, that says which column is called what:

    {"format": 1, "tables": [{..., "columns": {"keys": "ads/emb.keys", "values": "ads/emb.values"}}]}

where the other fields are those of `table_record.py`. Keys that are the row numbers 0, 1, ... need no column: their
name is null.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.bundle.checksum import extend
from kvtools.dialects.chunk import Array
from kvtools.dialects.column import Column
from kvtools.dialects.column_table import ColumnTable, Part
from kvtools.dialects.dialect import Holds
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import SlotSchema, TableSchema, VariableSchema, numpy_dtype, row_bytes
from kvtools.dialects.table_record import (
    COUNTER_DTYPES,
    KEY_DTYPES,
    VALUE_DTYPES,
    is_count,
    json_object,
    table_json,
    table_schema,
)
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError

FORMAT = 1
_CHECKSUM = "checksum"

HOLDS = Holds(
    key_dtypes=KEY_DTYPES,
    value_dtypes=VALUE_DTYPES,
    freq_dtypes=COUNTER_DTYPES,
    version_dtypes=COUNTER_DTYPES,
    many_parts=False,
    extras=None,
    metadata=None,
)
"""What tables of named columns hold: everything, in one part."""
WITHOUT_VARIABLES = "write hdf5, or the tables alone, `kvtools migrate SRC DST --table '*'`"
"""What to do about a dense variable of a type that a format has not."""
HOLDS_WITH_VARIABLES = dataclasses.replace(HOLDS, variables=True)
"""The same where other arrays stand beside them."""

_KINDS = {
    "keys": ("keys", "key", "ids", "id", "indices"),
    "values": ("values", "value", "weights", "weight", "embeddings", "embedding", "vectors"),
    "freqs": ("freqs", "freq", "frequencies", "counts"),
    "versions": ("versions", "version"),
}
_KIND_OF = {word: kind for kind, words in _KINDS.items() for word in words}
_NAMED = re.compile(rf"(?:(?P<table>.*)[._/:-])?(?P<word>{'|'.join(_KIND_OF)})", re.S | re.I)
_SPECIAL = re.compile("[\\x00-\\x1f\\x7f\\ud800-\\udfff]")  # what zip files or JSON readers trip over
_SMALL_INTEGERS = ("int8", "int16", "uint8", "uint16")


@dataclass(frozen=True)
class Container:
    """What columns lie in, and how it is opened; `checksums` is what `TableSchema` says of them."""

    path: Path
    dialect: str
    options: OpenOptions
    checksums: str | None


class ConvertedColumn:
    """A column whose stored numbers are read as another type: bfloat16 kept as uint16, or the other byte order."""

    def __init__(self, column: Column, dtype: np.dtype[Any], convert: Callable[[Array], Array]) -> None:
        self._column = column
        self._convert = convert
        self.dtype = dtype
        self.name = column.name
        self.rows = column.rows
        self.row_shape = column.row_shape

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield all rows; see `Column.chunks`."""
        return map(self._convert, self._column.chunks(chunk_rows, verify=verify))

    def take(self, rows: Array) -> Array:
        """Copy rows; see `Column.take`."""
        return self._convert(self._column.take(rows))

    def read(self) -> Array:
        """Return all rows; see `Column.read`."""
        return self._convert(self._column.read())


class RowNumbers:
    """The column 0, 1, 2, ...: the keys of a matrix whose rows are looked up by number."""

    def __init__(self, rows: int) -> None:
        self.name = "row numbers"
        self.dtype = np.dtype(np.int64)
        self.rows = rows
        self.row_shape: tuple[int, ...] = ()

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield all numbers; see `Column.chunks`."""
        for start in range(0, self.rows, chunk_rows):
            yield np.arange(start, min(start + chunk_rows, self.rows))

    def take(self, rows: Array) -> Array:
        """Return the numbers of these rows."""
        return np.array(rows, np.int64)

    def read(self) -> Array:
        """Return all numbers."""
        return np.arange(self.rows)


def column_names(schema: TableSchema) -> dict[str, str]:
    """Return what the columns of a table are called, by the names of `plain_columns`; extras are "extra:<name>".

    >>> column_names(TableSchema("emb", "npz", "int64", "float32", 4, (7,)))
    {'keys': 'emb.keys', 'values': 'emb.values'}
    """
    names = {"keys": "keys", "values": "values"}
    if schema.has_freqs:
        names["freqs"] = "freqs"
    if schema.has_versions:
        names["versions"] = "versions"
    names.update({f"slot:{slot.name}": f"slot.{slot.name}" for slot in schema.slots})
    names.update({f"extra:{extra.name}": extra.name for extra in schema.extras})
    return {place: _SPECIAL.sub("_", f"{schema.name}.{name}") for place, name in names.items()}


def column_shapes(schema: TableSchema) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and the shape of each column of a table, by the names of `plain_columns`."""
    rows = schema.rows
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "keys": (schema.key_dtype, (rows,)),
        "values": (schema.value_dtype, (rows, schema.dim)),
    }
    if schema.freq_dtype:
        shapes["freqs"] = schema.freq_dtype, (rows,)
    if schema.version_dtype:
        shapes["versions"] = schema.version_dtype, (rows,)
    shapes.update({f"slot:{slot.name}": (slot.dtype, (rows, slot.width)) for slot in schema.slots})
    shapes.update({f"extra:{extra.name}": (extra.dtype, extra.shape) for extra in schema.extras})
    return shapes


def describe_tables(
    schemas: Sequence[TableSchema],
    names: Callable[[TableSchema], Mapping[str, str | None]] = column_names,
    **others: Any,
) -> str:
    """Return the description of all tables, and what else the container wants to say, in ASCII; `checksum` is that of
    all of it.

    `names` says what a table's columns are called; keys that are called None are the row numbers.
    """
    tables = [{**json.loads(table_json(schema)), "columns": names(schema)} for schema in schemas]
    description = {"format": FORMAT, "tables": tables, **others}
    return _compact({**description, _CHECKSUM: _checksum(description)})


def _compact(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"))


def _checksum(description: Mapping[str, Any]) -> str:
    """Return the CRC-32C of a description without its checksum, eight hexadecimal digits."""
    return f"{extend(0, _compact(description).encode()):08x}"


def read_description(text: str | bytes, doing: str) -> dict[str, Any]:
    """Return what `describe_tables` wrote; what was written before it had a checksum is taken as it is.

    Raises:
        BadInputError: a format of a later kvtools.
        CorruptFileError: it is no such description, or not as it was written.
    """
    description = json_object(text, doing)
    told = description.pop(_CHECKSUM, None)
    if told is not None and told != _checksum(description):
        raise CorruptFileError(
            f"{doing}: the checksum of its description is {_checksum(description)}, expected {json.dumps(told)[:20]}:"
            " it is damaged, copy the file again"
        )
    number, tables = description.get("format"), description.get("tables")
    if is_count(number) and number > FORMAT:
        raise BadInputError(f"{doing}: got format {number}, expected at most {FORMAT}; update kvtools")
    if number != FORMAT or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise CorruptFileError(
            f"{doing}: got a description of format {json.dumps(number)[:20]} whose tables are {json.dumps(tables)[:60]}"
            f", expected format {FORMAT} and a list of objects; write it again"
        )
    return description


def described_tables(
    records: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Column],
    container: Container,
) -> tuple[dict[str, TableReader], dict[str, KvtoolsError]]:
    """Return the tables that kvtools described, by name, and those that are broken (`OpenOptions.lenient`).

    Raises:
        CorruptFileError: a description is wrong, or a column is missing or of another type or shape.
    """
    tables: dict[str, TableReader] = {}
    broken: dict[str, KvtoolsError] = {}
    for number, record in enumerate(records):
        name = record.get("name") if isinstance(record.get("name"), str) else f"number {number}"
        doing = f"opening table '{name}' of '{container.path}'"
        try:
            schema = table_schema(json.dumps(record), container.dialect, doing)
            if schema.parts != 1:
                raise CorruptFileError(f"{doing}: it has {schema.parts} parts, expected one; write it again")
            if schema.name in tables:
                raise CorruptFileError(f"{doing}: it is described twice; write it again")
            schema = dataclasses.replace(schema, checksums=container.checksums)
            tables[schema.name] = _described(schema, record.get("columns"), columns, doing)
        except KvtoolsError as error:
            if not container.options.lenient:
                raise
            broken[str(name)] = error
    return tables, broken


def names_in(records: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of all arrays that a description says are columns."""
    columns = [record.get("columns") for record in records]
    return {name for names in columns if isinstance(names, dict) for name in names.values() if isinstance(name, str)}


def _described(schema: TableSchema, names: Any, columns: Mapping[str, Column], doing: str) -> ColumnTable:
    found: dict[str, Column] = {}
    for place, (dtype, shape) in column_shapes(schema).items():
        name = names.get(place, "") if isinstance(names, dict) else ""
        if place == "keys" and name is None and dtype == "int64":
            found[place] = RowNumbers(schema.rows)
            continue
        if not isinstance(name, str) or name not in columns:
            raise CorruptFileError(f"{doing}: there is no array {name!r} for its {place}; write it again")
        column = columns[name]
        if dtype == "bfloat16" and column.dtype == np.uint16:
            column = ConvertedColumn(column, numpy_dtype(dtype), _as_bfloat16)
        if column.dtype.name != dtype or (column.rows, *column.row_shape) != shape:
            raise CorruptFileError(
                f"{doing}: array '{name}' is {column.dtype.name} {[column.rows, *column.row_shape]}, expected {dtype}"
                f" {list(shape)}; write it again"
            )
        found[place] = column
    part = Part(
        schema.rows,
        found["keys"],
        found["values"],
        {slot.name: found[f"slot:{slot.name}"] for slot in schema.slots},
        found.get("freqs"),
        found.get("versions"),
    )
    extras = {extra.name: found[f"extra:{extra.name}"] for extra in schema.extras}
    return ColumnTable(schema, [part], extras=extras)


def inferred_tables(
    columns: Mapping[str, Column],
    container: Container,
    matrices: Callable[[Collection[str]], Sequence[str]] = list,
    slots: Mapping[str, Mapping[str, Column]] | None = None,
    refused: Mapping[str, KvtoolsError] | None = None,
) -> tuple[dict[str, TableReader], set[str]]:
    """Return the tables that a stranger's arrays seem to be, and the names of the arrays that they are made of.

    Arrays that are called `keys` and `values`, or `<table>.keys` and `<table>.values`, make a table; so do `ids`,
    `weights`, `embeddings` and the like; matrices that are called `<table>.slot.<slot>` are slots of it. Where there
    are none, each matrix of numbers is a table whose keys are its row numbers, or those that `matrices` chooses by
    name; `slots` are the optimizer slots of such. The notes of a table say what was taken for what. `refused` are
    arrays that are no columns, such as strings, and why.

    Raises:
        BadInputError: arrays that are called so and are no keys and rows; or no array that could be a table.
    """
    refused = refused or {}
    groups: dict[str, dict[str, str]] = {}
    for name in (*columns, *refused):
        found = _NAMED.fullmatch(name)
        if found:
            table, kind = found["table"] or container.path.stem, _KIND_OF[found["word"].lower()]
            groups.setdefault(table, {}).setdefault(kind, name)
    tables: dict[str, TableReader] = {}
    used: set[str] = set()
    for table, names in groups.items():
        if {"keys", "values"} <= names.keys():
            for name in (names["keys"], names["values"]):
                if name in refused:
                    raise refused[name]
            names = {kind: name for kind, name in names.items() if name in columns}
            tables[table] = _inferred(table, names, columns, container, used)
    if not tables:
        for name in matrices([name for name, column in columns.items() if is_matrix(column)]):
            column = columns[name]
            note = "the keys are the row numbers of this array, which has no keys beside it"
            part = Part(column.rows, RowNumbers(column.rows), column, (slots or {}).get(name, {}))
            tables[name] = _table(name, part, (note,), container)
            used.add(name)
    return tables, used


def is_matrix(column: Column) -> bool:
    """Tell whether a column could be the values of a table: rows of numbers."""
    return len(column.row_shape) == 1 and column.row_shape[0] > 0 and column.dtype.name in VALUE_DTYPES


def _inferred(
    table: str, names: Mapping[str, str], columns: Mapping[str, Column], container: Container, used: set[str]
) -> ColumnTable:
    """Return the table of the arrays of these names, and add those that it is made of to `used`."""
    doing = f"opening table '{table}' of '{container.path}'"
    keys, values = columns[names["keys"]], columns[names["values"]]
    if keys.dtype.name not in (*KEY_DTYPES, *_SMALL_INTEGERS) or keys.row_shape:
        raise BadInputError(
            f"{doing}: array '{names['keys']}' is {_shape(keys)}, expected integers [rows] as keys; rename it if it is"
            " none"
        )
    if keys.dtype.name in _SMALL_INTEGERS:
        keys = ConvertedColumn(keys, np.dtype(np.int32), _as_int32)
    if values.dtype.name not in VALUE_DTYPES or len(values.row_shape) != 1 or values.row_shape[0] < 1:
        raise BadInputError(
            f"{doing}: array '{names['values']}' is {_shape(values)}, expected numbers [rows, dim]; rename it if it is"
            " no table's"
        )
    if keys.rows != values.rows:
        raise BadInputError(
            f"{doing}: array '{names['keys']}' has {keys.rows} keys and '{names['values']}' {values.rows} rows,"
            " expected as many; they are of different tables, or one is cut"
        )
    used |= {names["keys"], names["values"]}
    notes = [f"keys are array '{names['keys']}' and values array '{names['values']}', by their names"]
    counters: dict[str, Column] = {}
    for kind in ("freqs", "versions"):
        if kind in names:
            column = columns[names[kind]]
            if column.dtype.name in COUNTER_DTYPES and not column.row_shape and column.rows == keys.rows:
                counters[kind] = column
                used.add(names[kind])
                notes.append(f"{kind} are array '{names[kind]}', by its name")
            else:
                notes.append(f"array '{names[kind]}' was left out: it is {_shape(column)}, expected a count per key")
    start = f"{table}.slot."
    slots = {
        name.removeprefix(start): column
        for name, column in columns.items()
        if len(name) > len(start) and name.startswith(start) and is_matrix(column) and column.rows == keys.rows
    }
    if slots:
        used |= {start + slot for slot in slots}
        notes.append(f"slots are arrays '{start}<slot>', by their names: {', '.join(slots)}")
    part = Part(keys.rows, keys, values, slots, counters.get("freqs"), counters.get("versions"))
    return _table(table, part, tuple(notes), container)


def _table(name: str, part: Part, notes: tuple[str, ...], container: Container) -> ColumnTable:
    schema = TableSchema(
        name=name,
        dialect=container.dialect,
        key_dtype=part.keys.dtype.name,
        value_dtype=part.values.dtype.name,
        dim=part.values.row_shape[0],
        part_rows=(part.rows,),
        slots=tuple(SlotSchema(slot, rows.row_shape[0], rows.dtype.name) for slot, rows in part.slots.items()),
        freq_dtype=None if part.freqs is None else part.freqs.dtype.name,
        version_dtype=None if part.versions is None else part.versions.dtype.name,
        checksums=container.checksums,
        notes=notes,
    )
    return ColumnTable(dataclasses.replace(schema, bytes=schema.rows * row_bytes(schema)), [part])


def variables_of(
    columns: Mapping[str, Column], shapes: Mapping[str, tuple[int, ...]], used: set[str]
) -> tuple[VariableSchema, ...]:
    """Return the arrays that are part of no table, as dense variables; a scalar has shape ()."""
    return tuple(
        VariableSchema(name, column.dtype.name, shapes[name], _bytes(column))
        for name, column in columns.items()
        if name not in used
    )


def variable_chunks(columns: Mapping[str, Column], shapes: Mapping[str, tuple[int, ...]], name: str) -> Iterator[Array]:
    """Yield the rows of an array in chunks; see `Checkpoint.read_variable`."""
    column = columns[name]
    row = _bytes(column) // max(1, column.rows)
    for chunk in column.chunks(max(1, (2 << 20) // max(1, row))):
        yield chunk if shapes[name] else chunk.reshape(())


def _shape(column: Column) -> str:
    return f"{column.dtype.name} {[column.rows, *column.row_shape]}"


def _bytes(column: Column) -> int:
    return column.rows * column.dtype.itemsize * math.prod(column.row_shape)


def _as_int32(stored: Array) -> Array:
    return stored.astype(np.int32)


def _as_bfloat16(stored: Array) -> Array:
    return stored.view(numpy_dtype("bfloat16"))
