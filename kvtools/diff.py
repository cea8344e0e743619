"""What changed between two tables, or two checkpoints, of any dialects: rows, columns, types, dense variables.

Where both tables have the same keys in the same order they are streamed side by side. Otherwise the rows are matched
by key first (`kvtools.key_join`), one table is streamed and the other's rows are gathered, a block at a time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.admission_filter import can_join, joined_filter
from kvtools.dialects.chunk import KEYS, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.schema import (
    ADMISSION_FILTER,
    ROW_EXTRAS,
    SlotSchema,
    VariableSchema,
    numpy_dtype,
    row_bytes,
)
from kvtools.engine import run_all
from kvtools.errors import UnknownTableError, UsageError
from kvtools.joined_table import told_policies
from kvtools.key_join import row_numbers, sorted_buckets
from kvtools.remote.paths import shown_path
from kvtools.row_norms import row_norms
from kvtools.table_view import TableView, replace_schema

_KEY_ROWS = 1 << 18
_FEW = 5
_RANKS = tuple(start.rstrip("_") for start in ROW_EXTRAS)
"""What a comparison calls the numbers that rows are evicted by."""

Unequal = Callable[[Array, Array], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class ColumnDiff:
    """How a column changed: "values", "freqs", "versions", "slot:<name>", "eviction_scores" or "eviction_orders".

    `changed` rows differ. Of these rows' numbers, `max_change` and `mean_change` are the largest and the mean absolute
    difference, `l2_change` is the Euclidean norm of all differences, and `relative_change` is that over the norm
    of what stood there before. A number that became, or was, NaN or infinite has no difference: `non_finite` counts
    them.
    """

    name: str
    changed: int = 0
    max_change: float = 0.0
    mean_change: float = 0.0
    l2_change: float = 0.0
    relative_change: float = 0.0
    non_finite: int = 0


@dataclass(frozen=True)
class Mover:
    """A row whose value moved far: the Euclidean norm of its change, and of the value before and after."""

    key: int
    l2_change: float
    l2_before: float
    l2_after: float


@dataclass(frozen=True)
class TableDiff:
    """What changed between table a and table b.

    Rows are matched by key, the n-th row of a key with the n-th: `rows_a` = `removed` + `changed` + `unchanged`, and
    `rows_b` = `added` + `changed` + `unchanged`. A row has changed if any column that both tables have differs.

    `columns` are those that both have with the same width; `only_in_a` and `only_in_b` name the others. `schema` says
    what differs in form alone (types, parts, dialect) and `extras` what beside the rows differs: arrays, by name, and
    what versions count, where both record it.
    Scores and orders that rows are evicted by are columns; orders, which are of a part, where both have as many parts.
    `added_keys` and `removed_keys` are the first few. `max_change` and `mean_change` are those of the values.
    """

    name_a: str
    name_b: str
    rows_a: int
    rows_b: int
    added: int
    removed: int
    changed: int
    unchanged: int
    max_change: float
    mean_change: float
    columns: Mapping[str, ColumnDiff]
    movers: tuple[Mover, ...] = ()
    added_keys: tuple[int, ...] = ()
    removed_keys: tuple[int, ...] = ()
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    schema: tuple[str, ...] = ()

    @property
    def same_rows(self) -> bool:
        """Whether both have the same keys, and each row is the same in all columns that both have."""
        return not (self.added or self.removed or self.changed)

    @property
    def same(self) -> bool:
        """Whether both hold the same: rows, columns and arrays beside the rows; in whatever form."""
        return self.same_rows and not (self.only_in_a or self.only_in_b or self.extras)


@dataclass(frozen=True)
class VariableDiff:
    """What changed in a dense variable: how many numbers (or strings), and how far; `numbers` is None for strings."""

    name: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    changed: int
    numbers: ColumnDiff | None = None

    @property
    def same(self) -> bool:
        """Whether both hold the same."""
        return self.shape_a == self.shape_b and not self.changed


@dataclass(frozen=True)
class CheckpointDiff:
    """What changed between two checkpoints; the names are of tables and variables that only one of them has."""

    path_a: str
    path_b: str
    dialect_a: str
    dialect_b: str
    tables: tuple[TableDiff, ...]
    variables: tuple[VariableDiff, ...]
    tables_only_in_a: tuple[str, ...] = ()
    tables_only_in_b: tuple[str, ...] = ()
    variables_only_in_a: tuple[str, ...] = ()
    variables_only_in_b: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether both hold the same tables and variables, in whatever form."""
        alone = (
            self.tables_only_in_a,
            self.tables_only_in_b,
            self.variables_only_in_a,
            self.variables_only_in_b,
        )
        return not any(alone) and all(table.same for table in self.tables) and all(v.same for v in self.variables)


def compare_tables(
    a: TableReader,
    b: TableReader,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    memory: int = DEFAULT_MEMORY,
    top: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> TableDiff:
    """Compare two tables row by row, by key, in bounded memory.

    Args:
        a: the table before; b: the table after. Their dialects, types, parts and row orders may differ.
        rtol, atol: a number is the same if it is off by at most `atol + rtol * |a|`. With both 0, if its bits are
            equal, of numbers of different types if their values are. NaN is the same as NaN. Counters must be equal.
        memory: bytes to hold at most, beside a chunk of rows; what needs more goes to temporary files.
        top: how many rows that moved furthest to name.
        workers: parts at once, where parts can be compared apart; the processors there are if None.
        progress: called as rows of `a` are compared.

    Raises:
        UsageError: a negative tolerance.
        CorruptFileError: the rows of a table are damaged. Where rows are gathered by key, only the checksums of `a`
            are checked.

    Example:
        ```python
        before, after = kvtools.open("model.ckpt-100"), kvtools.open("model.ckpt-200")
        print(compare_tables(before.table("user"), after.table("user")).changed)
        ```
    """
    if not (rtol >= 0 and atol >= 0):
        raise UsageError(f"comparing tables: got rtol {rtol} and atol {atol}, expected 0 or more")
    table_a, table_b = a, b
    orders = a.parts == b.parts
    a, b = _with_ranks(a, orders, memory), _with_ranks(b, orders, memory)
    both, only_in_a, only_in_b = _columns_of(a, b)
    compare = _Comparison(both, rtol, atol, top, a.rows, a.schema.name, progress)
    added_keys: list[int] = []
    removed_keys: list[int] = []
    added = removed = 0
    if _same_keys(a, b):
        aligned = a.schema.part_rows == b.schema.part_rows
        parts: Sequence[int | None] = range(a.parts) if aligned else [None]

        def side_by_side(part: int | None) -> _Sums:
            return compare.rows(_pairs(a, b, compare.columns, part))

        sums = list(run_all(side_by_side, parts, workers=workers))
    else:
        match = _Match(a, b, memory)
        added, removed = match.added, match.removed
        added_keys, removed_keys = match.added_keys, match.removed_keys
        sums = [compare.rows(_gathered(a, b, match.rows, compare.columns, memory))]
    total = compare.merged(sums)
    columns = {name: sums_of.result(name) for name, sums_of in total.columns.items()}
    values = columns.get("values", ColumnDiff("values"))
    return TableDiff(
        name_a=a.schema.name,
        name_b=b.schema.name,
        rows_a=a.rows,
        rows_b=b.rows,
        added=added,
        removed=removed,
        changed=total.changed,
        unchanged=total.rows - total.changed,
        max_change=values.max_change,
        mean_change=values.mean_change,
        columns=columns,
        movers=compare.movers(total),
        added_keys=tuple(added_keys),
        removed_keys=tuple(removed_keys),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        extras=_different_extras(table_a, table_b),
        schema=_form(table_a, table_b),
    )


def compare_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    *,
    tables: Sequence[str] = (),
    rtol: float = 0.0,
    atol: float = 0.0,
    memory: int = DEFAULT_MEMORY,
    top: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> CheckpointDiff:
    """Compare the tables and the dense variables of two checkpoints, matched by name.

    Args:
        a: the checkpoint before; b: the one after; of any dialects.
        tables: compare these tables alone, and no variables; "x=y" compares table x of `a` with y of `b`.
        rtol, atol, memory, top, workers, progress: as for `compare_tables`; the tolerance is for variables too.

    Raises:
        UnknownTableError: a name in `tables` is of no table.

    Example:
        ```python
        diff = compare_checkpoints(kvtools.open("model.ckpt-100"), kvtools.open("tables.h5"))
        print(diff.same, [table.changed for table in diff.tables])
        ```
    """
    pairs = [pair for name in tables for pair in _pairs_named(a, b, name)]
    if not tables:
        pairs = [(name, name) for name in a.tables if name in b.tables]
    found = [
        compare_tables(
            a.table(of_a),
            b.table(of_b),
            rtol=rtol,
            atol=atol,
            memory=memory,
            top=top,
            workers=workers,
            progress=progress,
        )
        for of_a, of_b in pairs
    ]
    variables: list[VariableDiff] = []
    alone: dict[str, tuple[str, ...]] = {}
    if not tables:
        of_a, of_b = {v.name: v for v in a.variables}, {v.name: v for v in b.variables}
        variables = [
            compare_variables(a, b, variable, of_b[name], rtol, atol) for name, variable in of_a.items() if name in of_b
        ]
        alone = {
            "tables_only_in_a": tuple(name for name in a.tables if name not in b.tables),
            "tables_only_in_b": tuple(name for name in b.tables if name not in a.tables),
            "variables_only_in_a": tuple(name for name in of_a if name not in of_b),
            "variables_only_in_b": tuple(name for name in of_b if name not in of_a),
        }
    return CheckpointDiff(
        shown_path(a.path), shown_path(b.path), a.dialect, b.dialect, tuple(found), tuple(variables), **alone
    )


@dataclass
class _ColumnSums:
    """Running sums of one column; see `ColumnDiff`."""

    changed: int = 0
    numbers: int = 0
    largest: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    squares_before: float = 0.0
    non_finite: int = 0

    def add(self, before: Array, after: Array) -> npt.NDArray[np.float64]:
        """Take in rows that differ; return the differences as float64 [n, width], 0 where there is none."""
        before, after = _wide(before), _wide(after)
        with np.errstate(invalid="ignore", over="ignore"):
            change = np.abs(after - before)
        finite = np.isfinite(change)
        if not finite.all():
            # NaN before and after is no change; every other number without a difference is counted.
            self.non_finite += int(np.count_nonzero(~finite & ~(np.isnan(before) & np.isnan(after))))
            change = np.where(finite, change, 0.0)
            before = np.where(finite, before, 0.0)
        self.changed += len(change)
        self.numbers += int(np.count_nonzero(finite))
        self.largest = max(self.largest, float(change.max(initial=0.0)))
        with np.errstate(over="ignore"):
            self.total += float(change.sum())
            self.squares += float(np.einsum("ij,ij->", change, change))
            self.squares_before += float(np.einsum("ij,ij->", before, before))
        return change

    def merge(self, other: _ColumnSums) -> None:
        self.largest = max(self.largest, other.largest)
        for name in ("changed", "numbers", "total", "squares", "squares_before", "non_finite"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def result(self, name: str) -> ColumnDiff:
        return ColumnDiff(
            name=name,
            changed=self.changed,
            max_change=self.largest,
            mean_change=self.total / self.numbers if self.numbers else 0.0,
            l2_change=math.sqrt(self.squares),
            relative_change=_ratio(math.sqrt(self.squares), math.sqrt(self.squares_before)),
            non_finite=self.non_finite,
        )


@dataclass
class _Sums:
    """What was found so far. `movers` [n, 3] are the rows that moved furthest: norms of change, before and after."""

    columns: dict[str, _ColumnSums]
    rows: int = 0
    changed: int = 0
    movers: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 3)))
    mover_keys: Array = field(default_factory=lambda: np.empty(0, np.int64))


class _Comparison:
    """Compares chunks of matched rows in the columns `names`."""

    def __init__(
        self,
        names: Sequence[str],
        rtol: float,
        atol: float,
        top: int,
        rows: int,
        table: str,
        progress: Progress | None,
    ) -> None:
        self.names = tuple(names)
        self.columns = Columns(
            values="values" in names,
            slots=any(name.startswith("slot:") or name in _RANKS for name in names),
            freqs="freqs" in names,
            versions="versions" in names,
        )
        self._unequal: Unequal = _different_bits
        if rtol > 0 or atol > 0:
            self._unequal = lambda a, b: _beyond(a, b, rtol, atol)
        self._top = top
        self._table, self._total, self._progress = table, rows, progress
        self._done, self._lock = 0, threading.Lock()

    def rows(self, pairs: Iterator[tuple[Chunk, Chunk, int]]) -> _Sums:
        """Compare pairs of chunks with the same keys; the number says how many rows of a were gone through."""
        sums = _Sums({name: _ColumnSums() for name in self.names})
        for before, after, read in pairs:
            changed = np.zeros(len(before), np.bool_)
            for name in self.names:
                changed |= self._column(name, before, after, sums)
            sums.rows += len(before)
            sums.changed += int(np.count_nonzero(changed))
            self._advance(read)
        return sums

    def merged(self, parts: Sequence[_Sums]) -> _Sums:
        """Return the sums of all parts."""
        total = _Sums({name: _ColumnSums() for name in self.names})
        for part in parts:
            for name, column in part.columns.items():
                total.columns[name].merge(column)
            total.rows += part.rows
            total.changed += part.changed
            self._keep_movers(total, part.mover_keys, part.movers)
        return total

    def movers(self, sums: _Sums) -> tuple[Mover, ...]:
        """Return the rows that moved furthest, the furthest first."""
        order = np.lexsort((sums.mover_keys, -sums.movers[:, 0]))
        return tuple(Mover(int(sums.mover_keys[i]), *sums.movers[i].tolist()) for i in order)

    def _column(self, name: str, before: Chunk, after: Chunk, sums: _Sums) -> npt.NDArray[np.bool_]:
        old, new = _matrix(before, name), _matrix(after, name)
        different = (_different_bits if old.dtype.kind in "iub" else self._unequal)(old, new)
        rows = np.flatnonzero(different)
        if len(rows):
            change = sums.columns[name].add(old[rows], new[rows])
            if name == "values" and self._top:
                norms = np.sqrt(np.einsum("ij,ij->i", change, change))
                self._keep_movers(
                    sums,
                    before.keys[rows],
                    np.stack([norms, row_norms(_wide(old[rows]), "l2"), row_norms(_wide(new[rows]), "l2")], axis=1),
                )
        return different

    def _keep_movers(self, sums: _Sums, keys: Array, movers: npt.NDArray[np.float64]) -> None:
        if not len(movers):
            return
        movers = np.concatenate([sums.movers, movers])
        keys = np.concatenate([sums.mover_keys.astype(keys.dtype), keys])
        if len(movers) > self._top:
            kept = np.lexsort((keys, -movers[:, 0]))[: self._top]
            movers, keys = movers[kept], keys[kept]
        sums.movers, sums.mover_keys = movers, keys

    def _advance(self, rows: int) -> None:
        if self._progress:
            with self._lock:
                self._done += rows
                self._progress(self._table, self._done, self._total)


def _columns_of(a: TableReader, b: TableReader) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
    """Return the columns that both have, and those that only one has; one of different widths is not the same.

    Counters of no rows are nothing that the other lacks: some dialects have them always.
    """
    of_a, of_b = _widths(a), _widths(b)
    both = [name for name in of_a if of_b.get(name) == of_a[name]]

    def rest(table: TableReader, names: Mapping[str, int]) -> tuple[str, ...]:
        return tuple(
            f"{name} [{names[name]}]" if name in of_a and name in of_b else name
            for name in names
            if name not in both and (table.rows or name not in ("freqs", "versions"))
        )

    return both, rest(a, of_a), rest(b, of_b)


def _widths(table: TableReader) -> dict[str, int]:
    schema = table.schema
    widths = {"values": schema.dim}
    widths.update({slot.name if slot.name in _RANKS else f"slot:{slot.name}": slot.width for slot in schema.slots})
    if schema.has_freqs:
        widths["freqs"] = 1
    if schema.has_versions:
        widths["versions"] = 1
    return widths


def _matrix(chunk: Chunk, name: str) -> Array:
    """Return a column as [n, width]."""
    slot = name in _RANKS or name.startswith("slot:")
    column = chunk.slots[name.removeprefix("slot:")] if slot else getattr(chunk, name)
    assert column is not None
    matrix: Array = column.reshape(len(column), -1) if len(column) else column.reshape(0, 1)
    return matrix


def _different_bits(a: Array, b: Array) -> npt.NDArray[np.bool_]:
    """Tell which rows differ in a bit; of different types, in a value. NaN is like NaN, whatever its bits."""
    if a.dtype != b.dtype:
        if a.dtype.kind in "iub" and b.dtype.kind in "iub":
            unlike: npt.NDArray[np.bool_] = (a != b).any(axis=1)
            return unlike
        whole = [x.dtype.kind in "iub" for x in (a, b)]
        common = np.dtype(np.float64) if any(whole) else np.result_type(a.dtype, b.dtype)
        a, b = a.astype(common), b.astype(common)
    unsigned = f"u{a.dtype.itemsize}"
    bits_a, bits_b = np.ascontiguousarray(a).view(unsigned), np.ascontiguousarray(b).view(unsigned)
    if np.array_equal(bits_a, bits_b):
        return np.zeros(len(a), np.bool_)
    different: npt.NDArray[np.bool_] = (bits_a != bits_b).any(axis=1)
    if a.dtype.kind not in "iub":
        rows = np.flatnonzero(different)
        different[rows] = ((bits_a[rows] != bits_b[rows]) & ~(np.isnan(a[rows]) & np.isnan(b[rows]))).any(axis=1)
    return different


def _beyond(a: Array, b: Array, rtol: float, atol: float) -> npt.NDArray[np.bool_]:
    """Tell which rows have a number that is off by more than allowed."""
    different = _different_bits(a, b)
    rows = np.flatnonzero(different)
    before, after = _wide(a[rows]), _wide(b[rows])
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(after - before) <= atol + rtol * np.abs(before)
    # An infinity is near nothing but itself, however wide the tolerance that it would make.
    near &= np.isfinite(before) & np.isfinite(after)
    near |= (before == after) | (np.isnan(before) & np.isnan(after))
    different[rows] = ~near.all(axis=1)
    return different


def _columns_of_parts(x: Array, y: Array) -> tuple[Array, Array]:
    """Return numbers [n] of both as [n, 1]; as [n, 2], their real and imaginary parts, where some are complex."""
    if "c" not in (x.dtype.kind, y.dtype.kind):
        return x[:, None], y[:, None]
    both = [numbers if numbers.dtype.kind == "c" else numbers.astype(np.complex128) for numbers in (x, y)]
    before, after = (np.ascontiguousarray(z).view(z.real.dtype).reshape(-1, 2) for z in both)
    return before, after


def _wide(rows: Array) -> npt.NDArray[np.float64]:
    return rows.astype(np.float64)


def _ratio(change: float, before: float) -> float:
    if change == 0:
        return 0.0
    return change / before if before else math.inf


def _common_keys(a: TableReader, b: TableReader) -> tuple[np.dtype[Any], bool]:
    """Return the type in which keys of both are compared, and whether only its keys of 0 or more can match.

    A signed and an unsigned 64-bit type have no type in common: their bits are compared as int64, in which a negative
    key stands for different keys on the two sides.
    """
    types = {a.schema.key_dtype, b.schema.key_dtype}
    if len(types) == 1:
        return a.key_dtype, False
    return np.dtype(np.int64), "uint64" in types and any(numpy_dtype(name).kind == "i" for name in types)


def _keys(table: TableReader, dtype: np.dtype[Any]) -> Iterator[Array]:
    for chunk in table.chunks(KEYS, rows=_KEY_ROWS, verify=False):
        yield chunk.keys.astype(dtype, copy=False)


def _same_keys(a: TableReader, b: TableReader) -> bool:
    """Tell whether both tables have the same keys in the same order."""
    if a.rows != b.rows:
        return False
    dtype, mixed = _common_keys(a, b)
    streams = _rechunked(_keys(a, dtype), _keys(b, dtype))
    return all(np.array_equal(x, y) and not (mixed and (x < 0).any()) for x, y in streams)


def _rechunked(left: Iterator[Array], right: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
    """Cut two streams of as many rows into pieces of equal lengths."""
    x, y = next(left, None), next(right, None)
    while x is not None and y is not None:
        n = min(len(x), len(y))
        yield x[:n], y[:n]
        x = x[n:] if len(x) > n else next(left, None)
        y = y[n:] if len(y) > n else next(right, None)


def _pairs(a: TableReader, b: TableReader, columns: Columns, part: int | None) -> Iterator[tuple[Chunk, Chunk, int]]:
    """Stream two tables with the same keys side by side, in chunks of equal lengths."""
    rows = min(a.chunk_rows(columns), b.chunk_rows(columns))
    left, right = a.chunks(columns, rows=rows, part=part), b.chunks(columns, rows=rows, part=part)
    x, y = next(left, None), next(right, None)
    while x is not None and y is not None:
        n = min(len(x), len(y))
        yield x.take(slice(0, n)), y.take(slice(0, n)), n
        x = x.take(slice(n, None)) if len(x) > n else next(left, None)
        y = y.take(slice(n, None)) if len(y) > n else next(right, None)


class _Ranked(TableView):
    """A table with the numbers that its rows are evicted by as slots of one, under the names of `_RANKS`."""

    def __init__(self, source: TableReader, ranks: Mapping[str, Array]) -> None:
        slots = tuple(SlotSchema(name, 1, numbers.dtype.name) for name, numbers in ranks.items())
        super().__init__(source, replace_schema(source, slots=(*source.schema.slots, *slots)))
        self._ranks = ranks
        self._part_starts = np.cumsum([0, *source.schema.part_rows])

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        at = int(self._part_starts[part])
        for chunk in self.source.read_part(part, columns, rows, verify):
            yield self._ranked(chunk, slice(at, at + len(chunk)), columns)
            at += len(chunk)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        return self._ranked(self.source.take(rows, columns), rows, columns)

    def _ranked(self, chunk: Chunk, rows: Array | slice, columns: Columns) -> Chunk:
        if not columns.slots:
            return chunk
        more = {name: numbers[rows, None] for name, numbers in self._ranks.items()}
        return dataclasses.replace(chunk, slots={**chunk.slots, **more})


def _with_ranks(table: TableReader, orders: bool, memory: int) -> TableReader:
    """Return a table with what its rows are evicted by as columns, without `orders` the scores alone."""
    ranks = {}
    for start, name in zip(ROW_EXTRAS, _RANKS, strict=True):
        if _has_ranks(table, start) and (orders or start != ROW_EXTRAS[1]):
            numbers = row_numbers(table.rows, memory=memory).view(np.uint64)
            at = 0
            for part, rows in enumerate(table.schema.part_rows):
                numbers[at : at + rows] = table.extra(f"{start}{part}")
                at += rows
            ranks[name] = numbers
    return _Ranked(table, ranks) if ranks else table


def _has_ranks(table: TableReader, start: str) -> bool:
    """Tell whether a table has a number for each of its rows in the extras whose names begin so."""
    shapes = {extra.name: extra.shape for extra in table.schema.extras}
    return all(shapes.get(f"{start}{part}") == (rows,) for part, rows in enumerate(table.schema.part_rows))


class _Match:
    """Which row of b belongs to each row of a: `rows` [rows of a], -1 for none."""

    def __init__(self, a: TableReader, b: TableReader, memory: int) -> None:
        self.rows = row_numbers(a.rows, memory=memory)
        self.rows[:] = -1
        matched = 0
        dtype, mixed = _common_keys(a, b)
        removed, added = _Few(a.key_dtype), _Few(b.key_dtype)
        buckets = sorted_buckets([_keys(a, dtype), _keys(b, dtype)], a.rows + b.rows, memory=memory)
        for before, after in buckets:
            # The n-th row of a key belongs to the n-th row of the same key.
            first = np.searchsorted(before.keys, before.keys)
            at = np.searchsorted(after.keys, before.keys) + np.arange(len(before.keys)) - first
            inside = at < len(after.keys)
            found = np.zeros(len(before.keys), np.bool_)
            found[inside] = after.keys[at[inside]] == before.keys[inside]
            if mixed:
                found &= before.keys >= 0
            self.rows[before.rows[found]] = after.rows[at[found]]
            taken = np.zeros(len(after.keys), np.bool_)
            taken[at[found]] = True
            matched += int(np.count_nonzero(found))
            removed.add(before.keys[~found], before.rows[~found])
            added.add(after.keys[~taken], after.rows[~taken])
        self.removed, self.added = a.rows - matched, b.rows - matched
        self.removed_keys, self.added_keys = removed.keys(), added.keys()


class _Few:
    """The keys of the first few rows."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._keys, self._rows = np.empty(0, dtype), np.empty(0, np.int64)

    def add(self, keys: Array, rows: Array) -> None:
        keys, rows = np.concatenate([self._keys, keys.astype(self._dtype)]), np.concatenate([self._rows, rows])
        order = np.argpartition(rows, _FEW)[:_FEW] if len(rows) > _FEW else np.arange(len(rows))
        self._keys, self._rows = keys[order], rows[order]

    def keys(self) -> list[int]:
        found: list[int] = self._keys[np.argsort(self._rows)].tolist()
        return found


def _gathered(
    a: TableReader, b: TableReader, match: Array, columns: Columns, memory: int
) -> Iterator[tuple[Chunk, Chunk, int]]:
    """Stream a, a block at a time, with the rows of b that belong to its rows, which are read in their own order."""
    width = row_bytes(a.schema, columns) + row_bytes(b.schema, columns)
    step = min(a.chunk_rows(columns), b.chunk_rows(columns))
    start = 0
    for chunk in a.chunks(columns, rows=max(step, memory // (4 * width))):
        at = np.asarray(match[start : start + len(chunk)])
        start += len(chunk)
        here = np.flatnonzero(at >= 0)
        here = here[np.argsort(at[here], kind="stable")]
        found = b.take(at[here], columns)
        for first in range(0, len(here), step):
            piece = slice(first, first + step)
            yield chunk.take(here[piece]), found.take(piece), 0
        yield chunk.take(here[:0]), found.take(slice(0, 0)), len(chunk)


def _different_extras(a: TableReader, b: TableReader) -> tuple[str, ...]:
    of_a, of_b = _extras_to_compare(a), _extras_to_compare(b)
    different = set(of_a) ^ set(of_b)
    for name in set(of_a) & set(of_b):
        before, after = of_a[name](), of_b[name]()
        if before.shape != after.shape or _different_bits(_flat(before), _flat(after)).any():
            different.add(name)
    if _count_otherwise(a, b):
        different.add(f"versions count: {a.schema.version_unit} -> {b.schema.version_unit}")
    return tuple(sorted(different))


def _count_otherwise(a: TableReader, b: TableReader) -> bool:
    """Tell whether the versions of both are known to count different things; those of no rows count nothing."""
    has_versions = a.schema.has_versions and b.schema.has_versions
    units = {a.schema.version_unit, b.schema.version_unit}
    return bool(a.rows and b.rows and has_versions and len(units) == 2 and "unknown" not in units)


def _extras_to_compare(table: TableReader) -> dict[str, Callable[[], Array]]:
    """Return how to read each extra array that has numbers: lists of keys by key, as their order is that of the parts,
    and filters of admission as a restore joins them."""
    by_row = tuple(start for start in ROW_EXTRAS if _has_ranks(table, start))  # compared as columns
    names = [e.name for e in table.schema.extras if 0 not in e.shape and not e.name.startswith(by_row)]
    read: dict[str, Callable[[], Array]] = {name: partial(table.extra, name) for name in names}
    for name in {"blacklist", "deleted_keys"} & read.keys():
        read[name] = partial(lambda name: np.sort(table.extra(name)), name)
    if "filtered_keys" in read:
        order = np.argsort(table.extra("filtered_keys"), kind="stable")
        for name in {"filtered_keys", "filtered_freqs", "filtered_versions"} & read.keys():
            read[name] = partial(lambda name: table.extra(name)[order], name)
    if can_join([table.schema]):
        read = {name: reader for name, reader in read.items() if not name.startswith(ADMISSION_FILTER)}
        read["admission_filter"] = partial(joined_filter, [table])
    return read


def _flat(array: Array) -> Array:
    return array.reshape(1, -1)


def _form(a: TableReader, b: TableReader) -> tuple[str, ...]:
    """Say how the tables differ in form: dialect, types and parts, and, where both record it, what training makes of
    them: what new rows begin with, and policies."""
    one, two = a.schema, b.schema
    pairs: list[tuple[str, object, object]] = [
        ("dialect", one.dialect, two.dialect),
        ("keys", one.key_dtype, two.key_dtype),
        ("values", one.value_dtype, two.value_dtype),
        ("dim", one.dim, two.dim),
        ("parts", one.parts, two.parts),
        ("freqs", one.freq_dtype, two.freq_dtype),
        ("versions", one.version_dtype, two.version_dtype),
    ]
    if not _count_otherwise(a, b):
        pairs.append(("versions count", one.version_unit, two.version_unit))
    slots = {slot.name: slot for slot in two.slots}
    pairs += [(f"slot {s.name}", s.dtype, slots[s.name].dtype) for s in one.slots if s.name in slots]
    if "initializer" in one.metadata and "initializer" in two.metadata:
        most = max(one.parts, two.parts)
        before, after = told_policies(one, most), told_policies(two, most)
        pairs.append(("initializer", _text(one.metadata, "initializer"), _text(two.metadata, "initializer")))
        pairs += [(name, _text(before, name), _text(after, name)) for name in dict.fromkeys([*before, *after])]
    return tuple(f"{what}: {was} -> {now}" for what, was, now in pairs if was != now and None not in (was, now))


def _text(told: Mapping[str, Any], name: str) -> str:
    return json.dumps(told[name], sort_keys=True) if name in told else "none"


def _pairs_named(a: Checkpoint, b: Checkpoint, text: str) -> list[tuple[str, str]]:
    """Return the tables of both that "x", "x=y" or a pattern names; a name may have "=" in it.

    Of a pattern these are the tables that both have.
    """
    if text not in a.tables and "=" in text:
        cuts = [at for at, character in enumerate(text) if character == "="]
        names = [(text[:at], text[at + 1 :]) for at in cuts]
        return [next((pair for pair in names if pair[0] in a.tables and pair[1] in b.tables), names[0])]
    if text in a.tables or text in b.tables:
        return [(text, text)]
    of_a, of_b = a.names_of([text]), b.names_of([text])
    both = [name for name in of_a if name in of_b]
    if not both:
        raise UnknownTableError(f"comparing '{a.path}' and '{b.path}': no table that matches '{text}' is in both")
    return [(name, name) for name in both]


def compare_variables(
    a: Checkpoint, b: Checkpoint, of_a: VariableSchema, of_b: VariableSchema, rtol: float = 0, atol: float = 0
) -> VariableDiff:
    """Compare a dense variable of one checkpoint with one of another; see `compare_checkpoints`."""
    strings = of_a.dtype == "string"
    if of_a.shape != of_b.shape or strings != (of_b.dtype == "string"):
        return VariableDiff(of_a.name, of_a.shape, of_b.shape, max(1, math.prod(of_a.shape)))
    sums, changed = _ColumnSums(), 0
    left = (rows.reshape(-1) for rows in a.read_variable(of_a.name))
    right = (rows.reshape(-1) for rows in b.read_variable(of_b.name))
    for x, y in _rechunked(left, right):
        if strings:
            changed += int(np.count_nonzero(x != y))
            continue
        before, after = _columns_of_parts(x, y)
        exact = before.dtype.kind in "iub" or not (rtol or atol)
        different = _different_bits(before, after) if exact else _beyond(before, after, rtol, atol)
        changed += int(np.count_nonzero(different))
        if different.any():
            sums.add(before[different], after[different])
    numbers = None if strings else sums.result(of_a.name)
    return VariableDiff(of_a.name, of_a.shape, of_b.shape, changed, numbers)
