"""Conditions on rows, as SQL writes them: `freq < 3 and norm < 0.01`; and numbers of rows: `freq / norm`.

The expressions are those of `kvtools sql`, computed by the same DuckDB over each chunk of a table's rows; the names are
those of `kvtools.sql.columns`. NaN is what it is to DuckDB: equal to itself, and larger than every number. A row for
which a condition is neither true nor false (NULL) does not meet it.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvtools.dialects.arrow_columns import import_pyarrow
from kvtools.dialects.chunk import Array, Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.schema import SlotSchema, TableSchema
from kvtools.errors import UsageError
from kvtools.sql.columns import (
    QueryColumn,
    find_column,
    near,
    query_batch,
    query_columns,
    query_schema,
    stored_columns,
    written,
)
from kvtools.sql.connection import connect, first_line, import_duckdb, lock, wider_hint
from kvtools.sql.syntax import Node, nodes, parse, unstable_function

_MEMORY = 256 << 20
"""What DuckDB may hold to judge one chunk."""
_KEPT = 64
"""For how many conditions a thread keeps a connection ready."""


_T = TypeVar("_T", bound="_OfRow")


@dataclass(frozen=True)
class _OfRow:
    """An expression about one row. `text` is as it was written; `names` are the columns that it is about, as there."""

    text: str
    names: tuple[str, ...]

    @classmethod
    def parse(cls: type[_T], text: str) -> _T:
        """Read an expression: no subquery, nothing that is about several rows, and nothing that is not the same of a
        row each time, such as `random()`: rows are judged chunk by chunk, and some more than once.

        Raises:
            UsageError: it is no such expression; the message says where it stops being one.
            MissingDependencyError: duckdb is not installed.
        """
        text = text.strip()
        return cls(text, tuple(dict.fromkeys(_names(_expression(text), text, frozenset()))))

    def columns_of(self, table: TableReader) -> Columns:
        """Return what is to be read of a table for it, having tried the expression on no rows.

        Raises:
            UsageError: the table has not what the expression is about, or that is not of a type that fits.
        """
        columns = self._chosen(table.schema)
        self._evaluator(columns)
        # A chunk of some slots would not tell that the name of one is that of another, too.
        plain = all(column.name == column.slot for column in query_columns(table.schema) if column.kind == "slot")
        return stored_columns(columns, some_slots=table.picks_slots and plain)

    def _computed(self, chunk: Chunk) -> Array:
        return self._evaluator(self._chosen(_schema_of(chunk))).of(chunk)

    def _chosen(self, schema: TableSchema) -> tuple[QueryColumn, ...]:
        there = query_columns(schema)
        chosen = []
        for name in self.names:
            column = find_column(name, there)
            if column is None:
                of = f" of table '{schema.name}'" if schema.name else ""
                raise UsageError(
                    f"judging rows{of} by {self.text!r}: got {name!r}, expected one of"
                    f" {', '.join(written(column.name) for column in there)}{near(name, [c.name for c in there])}"
                )
            chosen.append(column)
        return tuple(dict.fromkeys(chosen))

    def _evaluator(self, columns: tuple[QueryColumn, ...]) -> _Evaluator:
        ready: dict[Any, _Evaluator] = _THREAD.__dict__.setdefault("ready", {})
        found = ready.get((self, columns))
        if found is None:
            found = self._kind(self.text, columns)
            while len(ready) >= _KEPT:
                ready.pop(next(iter(ready)))
            ready[self, columns] = found
        return found

    @property
    def _kind(self) -> type[_Evaluator]:
        raise NotImplementedError


@dataclass(frozen=True)
class Where(_OfRow):
    """A condition that each row of a table meets or not.

    Example:
        >>> from kvtools.array_table import ArrayTable
        >>> table = ArrayTable("emb", np.array([7, -2]), np.float32([[3, 4], [0, 0]]), freqs=np.array([1, 9]))
        >>> where = Where.parse("norm > 1 and freq < 3")
        >>> where.names, where.columns_of(table)
        (('norm', 'freq'), Columns(values=True, slots=False, freqs=True, versions=False))
        >>> [where.mask(chunk).tolist() for chunk in table.chunks(where.columns_of(table))]
        [[True, False]]
    """

    def mask(self, chunk: Chunk) -> npt.NDArray[np.bool_]:
        """Return which rows of a chunk meet the condition, bool [n]; the chunk has what `columns_of` asks for.

        Raises:
            UsageError: a row makes no sense to it, as in a cast that fails.
        """
        return self._computed(chunk)

    @property
    def _kind(self) -> type[_Evaluator]:
        return _Condition


@dataclass(frozen=True)
class Expression(_OfRow):
    """A number for each row of a table.

    Example:
        >>> from kvtools.array_table import ArrayTable
        >>> table = ArrayTable("emb", np.array([7, -2]), np.float32([[3, 4], [0, 0]]), freqs=np.array([10, 9]))
        >>> by = Expression.parse("freq / norm")
        >>> [by.values(chunk).tolist() for chunk in table.chunks(by.columns_of(table))]
        [[2.0, inf]]
    """

    def values(self, chunk: Chunk) -> Array:
        """Return the number of each row of a chunk, int64, uint64 or float64 [n], NaN where it is NULL.

        Raises:
            UsageError: a row makes no sense to it, as in a sum that is too large.
        """
        return self._computed(chunk)

    @property
    def _kind(self) -> type[_Evaluator]:
        return _Number


_THREAD = threading.local()
atexit.register(_THREAD.__dict__.clear)  # before DuckDB itself is gone


class _Evaluator:
    """An expression prepared for columns of given types. Belongs to one thread."""

    def __init__(self, text: str, columns: tuple[QueryColumn, ...]) -> None:
        self._doing = f"judging rows by {text!r}"
        self._duckdb = import_duckdb(self._doing)
        # A column of its own, so that a condition may be about no column at all.
        self._columns = (*columns, QueryColumn(_ROW, "part", "int32"))
        self._rows = _Rows(query_schema(self._columns))
        self._connection = connect(self._doing, memory=_MEMORY)
        self._connection.register("chunk", self._rows)
        lock(self._connection)
        # A WHERE takes no aggregate, which the other two would.
        self._run(f"describe select 1 from chunk where ({text}\n) is not null")
        kind = str(self._run(f"describe select ({text}\n) from chunk")["column_type"][0])
        self._run(f"prepare computed as select {self._wanted(text, kind)} as computed from chunk")

    def _wanted(self, text: str, kind: str) -> str:
        """Return what is to be selected, for an expression of this type; raises `UsageError` where it is of no use."""
        raise NotImplementedError

    def of(self, chunk: Chunk) -> Array:
        self._rows.batch = query_batch(chunk, self._columns, self._rows.schema)
        try:
            computed: Array = self._run("execute computed")["computed"]
        finally:
            self._rows.batch = None
        return computed

    def _run(self, text: str) -> Any:
        try:
            return self._connection.execute(text).fetchnumpy()
        except self._duckdb.Error as error:
            raise UsageError(f"{self._doing}: {first_line(error)}{self._wider(error)}") from None

    def _wider(self, error: Exception) -> str:
        """Return what to do about a number that does not fit its type, "" for other errors."""
        whole = [column.name for column in self._columns if column.kind in ("key", "freq", "version")]
        return wider_hint(error, written(whole[0]) if whole else "key")


class _Condition(_Evaluator):
    """What is true or false of a row; neither counts as false."""

    def _wanted(self, text: str, kind: str) -> str:
        if kind != "BOOLEAN":
            raise UsageError(f"{self._doing}: got an expression of type {kind}, expected a condition, as in freq < 3")
        return f"coalesce(({text}\n), false)"


class _Number(_Evaluator):
    """A number for each row."""

    def _wanted(self, text: str, kind: str) -> str:
        if kind in _SIGNED:
            return f"cast(({text}\n) as bigint)"
        if kind == "UBIGINT":
            return f"({text}\n)"
        if kind not in ("FLOAT", "DOUBLE", "HUGEINT", "UHUGEINT") and not kind.startswith("DECIMAL"):
            raise UsageError(f"{self._doing}: got an expression of type {kind}, expected a number, as in freq / norm")
        return f"cast(({text}\n) as double)"

    def of(self, chunk: Chunk) -> Array:
        computed = super().of(chunk)
        if not np.ma.is_masked(computed):
            return np.asarray(computed)
        return np.ma.filled(computed.astype(np.float64), np.nan)


_SIGNED = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER")


class _Rows:
    """The rows of one chunk after the other, for DuckDB, which holds on to this and not to who computes."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self.batch: Any = None

    def __arrow_c_schema__(self) -> Any:
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        pyarrow = import_pyarrow("judging rows")
        batches = [] if self.batch is None else [self.batch]
        return pyarrow.RecordBatchReader.from_batches(self.schema, batches).__arrow_c_stream__()


_ROW = "kvtools row"


def _schema_of(chunk: Chunk) -> TableSchema:
    """Return the schema of a table that has what a chunk has."""
    values = chunk.values
    return TableSchema(
        name="",
        dialect="",
        key_dtype=chunk.keys.dtype.name,
        value_dtype="float32" if values is None else values.dtype.name,
        dim=0 if values is None else values.shape[1],
        part_rows=(len(chunk),),
        slots=tuple(SlotSchema(name, rows.shape[1], rows.dtype.name) for name, rows in chunk.slots.items()),
        freq_dtype=None if chunk.freqs is None else chunk.freqs.dtype.name,
        version_dtype=None if chunk.versions is None else chunk.versions.dtype.name,
    )


def _expression(text: str) -> Node:
    """Return the syntax tree of the one expression that a text is."""
    doing = f"reading the condition {text!r}"
    if not text:
        raise UsageError("reading a condition: got nothing, expected an expression such as freq < 3")
    parse(text, doing, before="select 1 where ")  # so that it tells of a fault where it is, and not of the bracket
    try:
        select = parse(f"select ({text}\n)", doing)
    except UsageError:
        select = {}
    plain = (
        select.get("type") == "SELECT_NODE"
        and len(select["select_list"]) == 1
        and select["from_table"]["type"] == "EMPTY"
        and not any(select.get(part) for part in _CLAUSES)
        and not select["cte_map"]["map"]
    )
    if not plain:
        raise UsageError(f"{doing}: got more than an expression, expected one such as freq < 3")
    expression: Node = select["select_list"][0]
    changing = unstable_function(expression, "reading a condition")
    if changing is not None:
        raise UsageError(
            f"{doing}: got {changing}(), whose answer is not the same each time, expected what a row alone tells:"
            " hash(key) % 10 < 5 for half of the rows, epoch(timestamp '2026-01-31') for a time"
        )
    return expression


_CLAUSES = ("modifiers", "where_clause", "group_expressions", "group_sets", "having", "sample", "qualify")
"""What a SELECT may have beside expressions and tables, and a condition has not."""

_REFUSED = {
    "PARAMETER": "a parameter",
    "STAR": "a *",
    "SUBQUERY": "a subquery",
    "WINDOW": "a window function",
}
"""Classes of expressions that are about other rows, or no value."""


def _names(tree: Node, text: str, bound: frozenset[str]) -> Iterator[str]:
    """Yield the columns that an expression is about; `bound` are the parameters of lambdas around it."""
    doing = f"reading the condition {text!r}"
    pending: list[tuple[object, frozenset[str]]] = [(tree, bound)]
    while pending:
        node, bound = pending.pop()
        if isinstance(node, list):
            pending.extend((each, bound) for each in reversed(node))
        if not isinstance(node, dict):
            continue
        kind = node.get("class")
        if kind in _REFUSED:
            raise UsageError(f"{doing}: got {_REFUSED[kind]}, expected what can be told of one row")
        if kind == "LAMBDA":
            names = {name.casefold() for each in nodes(node["lhs"]) for name in each.get("column_names", ())}
            pending.append((node["expr"], bound | names))
            continue
        if kind == "COLUMN_REF":
            path = node["column_names"]
            if path[0].casefold() in bound:
                continue
            if len(path) > 1:
                name = ".".join(path)
                raise UsageError(
                    f"{doing}: got {name}, expected a column; a name with dots needs quotes: {written(name)}"
                )
            yield path[0]
            continue
        pending.extend((each, bound) for each in reversed(node.values()))
