"""Tables out of columns that have nothing but names: those that kvtools wrote, and what strangers call theirs.

What kvtools writes: `<table>.keys`, `<table>.values`, `<table>.freqs`, `<table>.versions`, `<table>.slot.<slot>` and
`<table>.<extra>`, and a description of the tables (`schema_record.py`) that names the column of each.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from kvtools.dialects.column import Column
from kvtools.dialects.column_table import ColumnTable, Part
from kvtools.dialects.interface import (
    Array,
    OpenOptions,
    TableReader,
    TableSchema,
    VariableSchema,
    numpy_dtype,
    row_bytes,
)
from kvtools.dialects.schema_record import (
    COUNTER_DTYPES,
    KEY_DTYPES,
    VALUE_DTYPES,
    check_options,
    decode_schema,
    schema_record,
)
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError

_KINDS = {
    "keys": ("keys", "key", "ids", "id", "indices"),
    "values": ("values", "value", "weights", "weight", "embeddings", "embedding", "vectors"),
    "freqs": ("freqs", "freq", "frequencies", "counts"),
    "versions": ("versions", "version"),
}
_KIND_OF = {word: kind for kind, words in _KINDS.items() for word in words}
_NAMED = re.compile(rf"(?:(?P<table>.*)[._/:-])?(?P<word>{'|'.join(_KIND_OF)})", re.S | re.I)
_SMALL_INTEGERS = ("int8", "int16", "uint8", "uint16")


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
    names = {"keys": f"{schema.name}.keys", "values": f"{schema.name}.values"}
    if schema.has_freqs:
        names["freqs"] = f"{schema.name}.freqs"
    if schema.has_versions:
        names["versions"] = f"{schema.name}.versions"
    names.update({f"slot:{slot.name}": f"{schema.name}.slot.{slot.name}" for slot in schema.slots})
    names.update({f"extra:{extra.name}": f"{schema.name}.{extra.name}" for extra in schema.extras})
    return names


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


def column_record(schema: TableSchema) -> dict[str, Any]:
    """Return the description of a table that names its columns."""
    return schema_record(schema, columns=column_names(schema))


def described_tables(
    records: list[Mapping[str, Any]], columns: Mapping[str, Column], dialect: str, options: OpenOptions, where: str
) -> tuple[dict[str, TableReader], dict[str, KvtoolsError]]:
    """Return the tables that kvtools described, by name, and those that are broken (`OpenOptions.lenient`).

    Raises:
        CorruptFileError: a description is wrong, or a column is missing or of another type or shape.
        UsageError: an option contradicts a description.
    """
    tables: dict[str, TableReader] = {}
    broken: dict[str, KvtoolsError] = {}
    for number, record in enumerate(records):
        name = record.get("name") if isinstance(record.get("name"), str) else f"number {number}"
        doing = f"opening table '{name}' of '{where}'"
        try:
            schema = decode_schema(record, dialect, doing)
            if schema.name in tables:
                raise CorruptFileError(f"{doing}: it is described twice; write it again")
            check_options(schema, options, doing)
            tables[schema.name] = _described(schema, record.get("columns"), columns, doing)
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[str(name)] = error
    return tables, broken


def _described(schema: TableSchema, names: Any, columns: Mapping[str, Column], doing: str) -> ColumnTable:
    found: dict[str, Column] = {}
    for place, (dtype, shape) in column_shapes(schema).items():
        name = names.get(place) if isinstance(names, dict) else None
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
    columns: Mapping[str, Column], default_name: str, dialect: str, options: OpenOptions, where: str
) -> tuple[dict[str, TableReader], set[str]]:
    """Return the tables that a stranger's arrays seem to be, and the names of the arrays that they are made of.

    Arrays that are called `keys` and `values`, or `<table>.keys` and `<table>.values`, make a table; so do `ids`,
    `weights`, `embeddings` and the like. Where there are none, each matrix of numbers is a table whose keys are its
    row numbers. The notes of a table say what was taken for what.

    Raises:
        BadInputError: arrays that are called so and are no keys and rows; or no array that could be a table.
        UsageError: an option contradicts the arrays.
    """
    groups: dict[str, dict[str, str]] = {}
    for name in columns:
        found = _NAMED.fullmatch(name)
        if found:
            table, kind = found["table"] or default_name, _KIND_OF[found["word"].lower()]
            groups.setdefault(table, {}).setdefault(kind, name)
    tables: dict[str, TableReader] = {}
    used: set[str] = set()
    for table, names in groups.items():
        if {"keys", "values"} <= names.keys():
            tables[table] = _inferred(table, names, columns, dialect, options, where)
            used |= set(names.values())
    if tables:
        return tables, used
    for name, column in columns.items():
        if len(column.row_shape) == 1 and column.row_shape[0] > 0 and column.dtype.name in VALUE_DTYPES:
            note = f"the keys are the row numbers of array '{name}': it has no keys beside it"
            tables[name] = _table(name, RowNumbers(column.rows), column, None, None, (note,), dialect, options, where)
            used.add(name)
    return tables, used


def _inferred(
    table: str, names: Mapping[str, str], columns: Mapping[str, Column], dialect: str, options: OpenOptions, where: str
) -> ColumnTable:
    doing = f"opening table '{table}' of '{where}'"
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
    notes = [f"keys are array '{names['keys']}' and values array '{names['values']}', by their names"]
    counters: dict[str, Column] = {}
    for kind in ("freqs", "versions"):
        if kind in names:
            column = columns[names[kind]]
            if column.dtype.name in COUNTER_DTYPES and not column.row_shape and column.rows == keys.rows:
                counters[kind] = column
                notes.append(f"{kind} are array '{names[kind]}', by its name")
            else:
                notes.append(f"array '{names[kind]}' was left out: it is {_shape(column)}, expected a count per key")
    return _table(
        table, keys, values, counters.get("freqs"), counters.get("versions"), tuple(notes), dialect, options, where
    )


def _table(
    name: str,
    keys: Column,
    values: Column,
    freqs: Column | None,
    versions: Column | None,
    notes: tuple[str, ...],
    dialect: str,
    options: OpenOptions,
    where: str,
) -> ColumnTable:
    schema = TableSchema(
        name=name,
        dialect=dialect,
        key_dtype=keys.dtype.name,
        value_dtype=values.dtype.name,
        dim=values.row_shape[0],
        part_rows=(keys.rows,),
        freq_dtype=None if freqs is None else freqs.dtype.name,
        version_dtype=None if versions is None else versions.dtype.name,
        notes=notes,
    )
    check_options(schema, options, f"opening table '{name}' of '{where}'")
    schema = dataclasses.replace(schema, bytes=schema.rows * row_bytes(schema))
    return ColumnTable(schema, [Part(keys.rows, keys, values, {}, freqs, versions)])


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
