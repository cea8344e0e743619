"""What every dialect gives: a schema per table, and its rows as a stream of chunks of NumPy columns.

Inspection, statistics, checks, clipping, migration, export and serving are written once, over this interface. A new
dialect is one file with a `DIALECT` (see `dialect.py`), a `TableReader` and, where the format can be written, a
`CheckpointWriter` (see `writing.py`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from kvtools import convert
from kvtools.dialects.chunk import ALL_COLUMNS, CHUNK_BYTES, KEYS, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.options import DEFAULT_MEMORY, OpenOptions
from kvtools.dialects.schema import TableSchema, VariableSchema, numpy_dtype, row_bytes
from kvtools.errors import KvtoolsError, UnknownTableError, UsageError
from kvtools.remote.shown import shown
from kvtools.table_names import is_pattern, listed, matching, near

if TYPE_CHECKING:
    from kvtools.sql.result import QueryResult


@dataclass(frozen=True)
class Finding:
    """One thing that a check found: an "error" (data is lost or wrong), a "warning", or an "info".

    `check` is the check's short name, as in "duplicate-keys"; `message` a sentence with what was found, where, and
    what to do.
    """

    severity: Literal["error", "warning", "info"]
    check: str
    table: str
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", shown(self.message))


@dataclass(frozen=True)
class Origin:
    """Where a table was opened, so that another process can open it again, by `open_again(origin)`."""

    path: str
    options: OpenOptions
    table: str
    open_again: Callable[[Origin], TableReader]


def _of(module: str, name: str) -> Any:
    """Return a function that works on tables, from a module that is about them and is loaded where it is called."""
    return getattr(importlib.import_module(f"kvtools.{module}"), name)


class Unmatched(NamedTuple):
    """How columns with keys of their own differ from their table, a sentence each.

    left_out   rows of theirs that no row of the table takes
    made_up    rows of the table for which they have none
    """

    left_out: tuple[str, ...] = ()
    made_up: tuple[str, ...] = ()


class TableReader(ABC):
    """One table of a checkpoint, opened for reading. Row i is the i-th of the stream of all parts.

    A reader that a dialect opened can be pickled: it is opened again where it is loaded. So can one that is made of
    others (clipped, merged, ...), if its own state can be.
    """

    schema: TableSchema
    origin: Origin | None = None
    take_is_checked: bool = False
    """Whether `take` checks the bytes that it gives against checksums."""
    picks_slots: bool = False
    """Whether it reads slots one by one, where `Columns.slots` names some."""

    direct: bool = False
    """Whether `take` costs what its rows cost, wherever they lie: they are neither compressed nor far away."""

    @property
    def key_dtype(self) -> np.dtype[Any]:
        """The NumPy type of the keys."""
        return numpy_dtype(self.schema.key_dtype)

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """The NumPy type of the values, bfloat16 included."""
        return numpy_dtype(self.schema.value_dtype)

    @property
    def dim(self) -> int:
        """How many numbers a value row has."""
        return self.schema.dim

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return self.schema.rows

    @property
    def parts(self) -> int:
        """How many parts the table has."""
        return self.schema.parts

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the optimizer slots."""
        return tuple(slot.name for slot in self.schema.slots)

    def chunk_rows(self, columns: Columns = ALL_COLUMNS) -> int:
        """Return how many rows of these columns make a chunk of about `CHUNK_BYTES`."""
        return max(1, CHUNK_BYTES // row_bytes(self.schema, columns))

    def chunks(
        self, columns: Columns = ALL_COLUMNS, *, rows: int | None = None, part: int | None = None, verify: bool = True
    ) -> Iterator[Chunk]:
        """Yield all rows, or those of one part, in order and without loading more than a chunk.

        Args:
            columns: what to read beside the keys.
            rows: rows per chunk at the most; about `CHUNK_BYTES` of them if None. No chunk spans two parts.
            part: read this part only.
            verify: check the columns' bytes against the checksums that the format has.

        Raises:
            CorruptFileError: a checksum differs, told before the stream ends.
            UsageError: there is no such part, or `rows` is less than 1.
        """
        doing = f"reading table '{self.schema.name}'"
        if not isinstance(columns, Columns):
            raise UsageError(
                f"{doing}: got columns {columns!r}, expected Columns, as in Columns(values=True, freqs=True)"
            )
        if rows is not None and rows < 1:
            raise UsageError(f"{doing}: got {rows} rows per chunk, expected 1 or more")
        if part is not None and not 0 <= part < self.parts:
            raise UsageError(f"{doing}: got part {part}, expected one of 0 to {self.parts - 1}")
        return self._stream(columns, rows or self.chunk_rows(columns), part, verify)

    def _stream(self, columns: Columns, rows: int, part: int | None, verify: bool) -> Iterator[Chunk]:
        for number in range(self.parts) if part is None else [part]:
            yield from self.read_part(number, columns, rows, verify)

    @abstractmethod
    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part, `rows` at a time; see `chunks`. Columns may be read-only views of files."""

    @abstractmethod
    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these int64 numbers [n], in their order.

        Only a snapshot's are checked against checksums: those of other formats are of whole files, or columns.

        Raises:
            UsageError: what is asked for are no integers [n], or there are no such rows.
        """

    def row_numbers(self, rows: Any) -> npt.NDArray[np.int64]:
        """Return numbers of rows as `take` gets them as int64 [n]; raises `UsageError` where there is no such row."""
        numbers = np.asarray(rows)
        doing = f"taking rows of table '{self.schema.name}'"
        if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and len(numbers)):
            raise UsageError(
                f"{doing}: got {numbers.dtype}{list(numbers.shape)}, expected row numbers, integers [n]; those of a"
                " mask are numpy.flatnonzero(mask)"
            )
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < self.rows):
            wrong = numbers[(numbers < 0) | (numbers >= self.rows)][0]
            raise UsageError(f"{doing}: got row {wrong}, and it has {self.rows} rows, counted from 0")
        return numbers.astype(np.int64, copy=False)

    def extra(self, name: str) -> Array:
        """Return the array of this name from `schema.extras`, checked against its checksums; it may be read-only."""
        raise KeyError(name)

    def check(self) -> Iterator[Finding]:
        """Yield what is wrong with the table in ways that only its dialect knows; reads as much as that takes."""
        return iter(())

    def unmatched(self) -> Unmatched:
        """Return what of optimizer slots that have keys of their own does not fit the rows; reads keys alone."""
        return Unmatched()

    def all_keys(self, *, verify: bool = True) -> Array:
        """Return a copy of all keys [rows], in row order."""
        keys = np.empty(self.schema.rows, self.key_dtype)
        position = 0
        for chunk in self.chunks(KEYS, rows=1 << 18, verify=verify):
            keys[position : position + len(chunk.keys)] = chunk.keys
            position += len(chunk.keys)
        return keys

    def to_numpy(self, columns: Sequence[str] | None = None, *, limit: int | None = None) -> Chunk:
        """Return all rows, or the first `limit`, as one chunk of NumPy columns; see `kvtools.convert.to_numpy`."""
        return convert.to_numpy(self, columns, limit=limit)

    def to_arrow(self, columns: Sequence[str] | None = None, *, limit: int | None = None) -> Any:
        """Return all rows, or the first `limit`, as a `pyarrow.Table`; see `kvtools.convert.to_arrow`."""
        return convert.to_arrow(self, columns, limit=limit)

    def to_pandas(
        self,
        columns: Sequence[str] | None = None,
        *,
        limit: int | None = None,
        vectors: Literal["columns", "arrays"] = "arrays",
    ) -> Any:
        """Return all rows, or the first `limit`, as a `pandas.DataFrame`; see `kvtools.convert.to_pandas`."""
        return convert.to_pandas(self, columns, limit=limit, vectors=vectors)

    def get(self, keys: Any, default: Any = None) -> Any:
        """Return the values of keys, and what stands for those that are not there; see `kvtools.key_rows.get_rows`."""
        return _of("key_rows", "get_rows")(self, keys, default)

    def __getitem__(self, keys: Any) -> Array:
        """Return the values of a key, [dim], or of several, [n, dim]; raises `UnknownKeyError`, a `KeyError`."""
        values: Array = _of("key_rows", "rows_of")(self, keys)
        return values

    def __contains__(self, key: object) -> bool:
        return bool(_of("key_rows", "has_key")(self, key))

    def __len__(self) -> int:
        return self.rows

    def __bool__(self) -> bool:
        return True  # also without rows

    __iter__ = None
    """A table is read by `chunks`. Otherwise Python would look keys 0, 1, ... up."""

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError(f"table '{self.schema.name}' is several arrays; see to_numpy()")

    def __arrow_c_schema__(self) -> Any:
        return _of("arrow_stream", "stream_schema")(self).__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Give all rows to whoever takes an Arrow stream: DuckDB, Polars, pandas; see `kvtools.arrow_stream`."""
        return _of("arrow_stream", "stream")(self).__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        return str(_of("shown_tables", "table_text")(self))

    def _repr_html_(self) -> str:
        return str(_of("shown_tables", "table_html")(self))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self.origin is None:
            return super().__reduce_ex__(protocol)
        return self.origin.open_again, (self.origin,)


def no_variable(name: str) -> Iterator[Array]:
    """Stand in for `Checkpoint.read_variable` where a format has no dense variables."""
    raise KeyError(name)


def no_findings() -> Iterator[Finding]:
    """Stand in for `Checkpoint.check` where a format has nothing to check as a whole."""
    return iter(())


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """An opened checkpoint: `path` as resolved (a URL without its password; of a chain, its last member), the tables by
    name, and the dense variables beside them.

    `read_variable(name)` yields a dense variable's rows in chunks [n, ...]; a scalar is one array of shape [], and
    strings are one object array of bytes. `bookkeeping` are tensors of the framework, no variables: they are carried
    along only where the same dialect is written. `broken` tells why tables could not be opened (`OpenOptions.lenient`).
    `check()` yields what is wrong with the files as a whole, beyond what opening them and reading tables finds.
    """

    path: Path | str
    dialect: str
    tables: Mapping[str, TableReader]
    variables: tuple[VariableSchema, ...] = ()
    read_variable: Callable[[str], Iterator[Array]] = no_variable
    bookkeeping: tuple[VariableSchema, ...] = ()
    broken: Mapping[str, KvtoolsError] = field(default_factory=dict)
    check: Callable[[], Iterator[Finding]] = no_findings

    def table(self, name: str) -> TableReader:
        """Return the table `name`; raises `UnknownTableError` naming those that there are, or what is wrong with it."""
        if name in self.broken:
            raise self.broken[name]
        if name not in self.tables:
            raise no_such_table(name, self.path, self.tables)
        return self.tables[name]

    def __getitem__(self, name: str) -> TableReader:
        """Return the table `name`; raises `UnknownTableError`, a `KeyError`."""
        return self.table(name)

    def __contains__(self, name: object) -> bool:
        return name in self.tables

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the tables."""
        return iter(self.tables)

    def __len__(self) -> int:
        """How many tables there are."""
        return len(self.tables)

    def __bool__(self) -> bool:
        return True  # also without tables

    def __repr__(self) -> str:
        return str(_of("shown_tables", "checkpoint_text")(self))

    def _repr_html_(self) -> str:
        return str(_of("shown_tables", "checkpoint_html")(self))

    def sql(
        self, text: str, *, memory: int = DEFAULT_MEMORY, threads: int | None = None, **attached: Checkpoint
    ) -> QueryResult:
        """Ask the tables in SQL, beside them those of `attached` by name; see `kvtools.sql.query.query`.

        Example:
            ```python
            new, old = kvtools.open("model.ckpt-200"), kvtools.open("model.ckpt-100")
            new.sql("select key, value from user order by freq desc limit 20").to_pandas()
            new.sql("select count(*) from user anti join old.user using (key)", old=old).rows()
            ```
        """
        ask: Callable[..., QueryResult] = _of("sql.query", "query")
        return ask({"": self, **attached}, text, memory=memory, threads=threads)

    def names_of(self, patterns: Sequence[str]) -> list[str]:
        """Return the names that these are, or that match them as file names do in a shell, each once: of tables that
        could be opened, and of those that are broken.

        Raises:
            UnknownTableError: a pattern that no table is or matches.
        """
        names = [*self.tables, *self.broken]
        found, unmatched = matching(patterns, names)
        if unmatched:
            raise no_such_table(unmatched[0], self.path, names)
        return found

    def select(self, names: Sequence[str]) -> list[TableReader]:
        """Return these tables, each once, or all tables if `names` is empty.

        A name that no table has is a pattern, as for file names in a shell: "deep/*".

        Raises:
            UnknownTableError: a name that no table has, or matches; or that of a table that could not be opened.
            UsageError: `names` is one string, whose letters would be names.
        """
        if isinstance(names, str):
            raise UsageError(f"choosing tables of '{self.path}': got {names!r}, expected a list of names: [{names!r}]")
        return [self.table(name) for name in self.names_of(names)] if names else list(self.tables.values())


def no_such_table(name: str, path: Path | str, names: Iterable[str]) -> UnknownTableError:
    """Return what to raise where `name` is of no table, and matches none of the names that there are."""
    names = list(names)
    what = "no table matches" if is_pattern(name) else "no such table"
    return UnknownTableError(f"opening table '{name}' of '{path}': {what}; it has {listed(names)}{near(name, names)}")
