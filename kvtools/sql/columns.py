"""A table's columns as queries see them: `key`, `value`, slots by their names, `freq`, `version`, `norm` and `part`.

    key       BIGINT, INTEGER, UBIGINT or UINTEGER
    value     FLOAT[dim], or whatever the table's type is; float16 and bfloat16 are FLOAT
    Adam.m    a column for each optimizer slot, FLOAT[width]
    freq, version   BIGINT, where the table has them; UBIGINT where the table's are uint64
    norm      the Euclidean norm of `value`, DOUBLE, computed as it is asked for
    part      the number of the part that a row lies in, from 0

DuckDB does not tell upper from lower case in names; a slot whose name is taken so is `slot_<name>`, or numbered.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvtools.dialects.arrow_columns import arrow_numbers, import_pyarrow, widened
from kvtools.dialects.chunk import Array, Chunk, Columns
from kvtools.dialects.schema import TableSchema
from kvtools.row_norms import row_norms

MOST_FIXED = 100_000
"""The widest array that DuckDB has; wider rows are lists."""

Kind = Literal["key", "value", "slot", "freq", "version", "norm", "part"]


@dataclass(frozen=True)
class QueryColumn:
    """One column of a table: what queries call it, what it is, of which slot, of which type, and how wide.

    `dtype` is NumPy's name of the type of its numbers; `width` is 0 for a number per row.
    """

    name: str
    kind: Kind
    dtype: str
    width: int = 0
    slot: str = ""

    @property
    def computed(self) -> bool:
        """Whether no file has it."""
        return self.kind in ("norm", "part")


def query_columns(schema: TableSchema) -> tuple[QueryColumn, ...]:
    """Return the columns of a table, in the order of `select *`.

    >>> [column.name for column in query_columns(TableSchema("emb", "tfplugin", "int64", "float32", 4, (10,)))]
    ['key', 'value', 'norm', 'part']
    """
    fixed = [QueryColumn("key", "key", schema.key_dtype), QueryColumn("value", "value", schema.value_dtype, schema.dim)]
    last = []
    if schema.freq_dtype:
        last.append(QueryColumn("freq", "freq", _counter(schema.freq_dtype)))
    if schema.version_dtype:
        last.append(QueryColumn("version", "version", _counter(schema.version_dtype)))
    last.append(QueryColumn("norm", "norm", "float64"))
    last.append(QueryColumn("part", "part", "int32"))
    names = slot_names([slot.name for slot in schema.slots])
    slots = [
        QueryColumn(name, "slot", slot.dtype, slot.width, slot.name)
        for name, slot in zip(names, schema.slots, strict=True)
    ]
    return (*fixed, *slots, *last)


def _counter(dtype: str) -> str:
    """Return the type in which a counter is computed with: one that `-freq` and `freq - 5` fit."""
    return dtype if dtype == "uint64" else "int64"


_TAKEN = ("key", "value", "freq", "version", "norm", "part")


def slot_names(slots: Sequence[str]) -> list[str]:
    """Return what queries call the slots of a table.

    >>> slot_names(["Adam.m", "freq", "m", "M"])
    ['Adam.m', 'slot_freq', 'm', 'slot_M']
    """
    names: list[str] = []
    taken = set(_TAKEN)
    for slot in slots:
        plain = slot.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
        wanted = name = plain if plain and plain.casefold() not in taken else f"slot_{plain}"
        number = 2
        while name.casefold() in taken:
            name, number = f"{wanted}_{number}", number + 1
        taken.add(name.casefold())
        names.append(name)
    return names


def unique_names(names: Sequence[str]) -> list[str]:
    """Return what queries call the tables of a checkpoint: of those that differ in upper and lower case alone, or are
    not called what text can be, all but the first are numbered.

    >>> unique_names(["user", "User", "ads/emb"])
    ['user', 'User_2', 'ads/emb']
    """
    taken: set[str] = set()
    unique = []
    for each in names:
        plain = each.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
        name, number = plain or "table", 2
        while name.casefold() in taken:
            name, number = f"{plain}_{number}", number + 1
        taken.add(name.casefold())
        unique.append(name)
    return unique


def find_column(name: str, columns: Iterable[QueryColumn]) -> QueryColumn | None:
    """Return the column of this name, upper or lower case."""
    return next((column for column in columns if column.name.casefold() == name.casefold()), None)


def near(name: str, names: Iterable[str]) -> str:
    """Return a question for what was meant by a name that there is not, "" where nothing is near.

    >>> near("frequ", ["key", "value", "freq"])
    '; did you mean freq?'
    """
    by_fold = {each.casefold(): each for each in names}
    found = difflib.get_close_matches(name.casefold(), by_fold, 1)
    return f"; did you mean {written(by_fold[found[0]])}?" if found else ""


_RESERVED = """
    all analyse analyze and anti any array as asc asof asymmetric at authorization binary both by case cast check
    collate collation column columns concurrently constraint create cross default deferrable desc describe distinct
    do else end except false fetch for foreign freeze from full generated glob group having ilike in initially inner
    intersect into is isnull join lambda lateral leading left like limit map natural not notnull null offset on only
    or order outer overlaps pivot pivot_longer pivot_wider placing positional primary qualify references returning
    right select semi show similar some struct summarize symmetric table tablesample then to trailing true try_cast
    tuple union unique unpack unpivot using variadic verbose when where window with
"""
"""Words that are no names in SQL unless they are in quotes."""


def written(name: str) -> str:
    """Return a name as it is written in a query: in quotes where it is no plain word, or one of SQL's own.

    >>> written("freq"), written("Adam.m")
    ('freq', '"Adam.m"')
    """
    plain = name.isascii() and name.isidentifier() and name.casefold() not in _RESERVED.split()
    return name if plain else '"' + name.replace('"', '""') + '"'


def stored_columns(columns: Iterable[QueryColumn], *, some_slots: bool = False) -> Columns:
    """Return what is to be read of a table for these columns; `some_slots` where it reads slots one by one."""
    columns = tuple(columns)
    kinds = {column.kind for column in columns}
    slots = frozenset(column.slot for column in columns if column.kind == "slot")
    return Columns(
        values=not kinds.isdisjoint(("value", "norm")),
        slots=slots if some_slots and slots else bool(slots),
        freqs="freq" in kinds,
        versions="version" in kinds,
    )


def arrow_type(column: QueryColumn) -> Any:
    """Return the Arrow type of a column, one that DuckDB takes."""
    pyarrow = import_pyarrow("making Arrow columns")
    plain = column.dtype in ("bfloat16", "float16")
    number = pyarrow.float32() if plain else pyarrow.from_numpy_dtype(np.dtype(column.dtype))
    if column.kind not in ("value", "slot"):
        return number
    element = pyarrow.field("element", number, nullable=False)
    return pyarrow.list_(element, column.width) if 0 < column.width <= MOST_FIXED else pyarrow.list_(element)


def query_schema(columns: Iterable[QueryColumn]) -> Any:
    """Return the Arrow schema of these columns."""
    pyarrow = import_pyarrow("making Arrow columns")
    return pyarrow.schema([pyarrow.field(column.name, arrow_type(column), nullable=False) for column in columns])


def query_batch(chunk: Chunk, columns: Sequence[QueryColumn], schema: Any) -> Any:
    """Return these columns of a chunk as a record batch of `schema`, without copying what Arrow can hold as it is."""
    pyarrow = import_pyarrow("making Arrow columns")
    arrays = [
        arrow_column(column_numbers(chunk, column), field.type) for column, field in zip(columns, schema, strict=True)
    ]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def column_numbers(chunk: Chunk, column: QueryColumn) -> Array:
    """Return a column of a chunk that has what it is made of, [n] or [n, width]."""
    numbers: Array | None
    if column.kind == "part":
        return chunk.part_numbers()
    if column.kind == "norm" and chunk.values is not None:
        return row_norms(chunk.values, "l2")
    if column.kind == "slot":
        numbers = chunk.slots.get(column.slot)
    else:
        stored = {"key": chunk.keys, "value": chunk.values, "freq": chunk.freqs, "version": chunk.versions}
        numbers = stored.get(column.kind)
    if numbers is None:
        raise ValueError(f"the chunk was read without what column '{column.name}' is made of")
    if column.kind in ("freq", "version"):
        return numbers.astype(column.dtype, copy=False)
    return widened(numbers) if numbers.dtype != np.float16 else numbers.astype(np.float32)


def arrow_column(numbers: Array, kind: Any) -> Any:
    """Return numbers [n] or [n, width] as an Arrow array of a type that `arrow_type` gave."""
    pyarrow = import_pyarrow("making Arrow columns")
    if numbers.ndim == 1:
        return arrow_numbers(numbers, kind)
    flat = arrow_numbers(np.ascontiguousarray(numbers).reshape(-1), kind.value_type)
    if 0 < numbers.shape[1] <= MOST_FIXED:
        return pyarrow.FixedSizeListArray.from_arrays(flat, type=kind)
    ends = np.arange(len(numbers) + 1, dtype=np.int32) * np.int32(numbers.shape[1])
    return pyarrow.ListArray.from_arrays(arrow_numbers(ends, pyarrow.int32()), flat, type=kind)
