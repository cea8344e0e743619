"""What every dialect gives: a schema per table, and its rows as a stream of chunks of NumPy columns.

Inspection, statistics, checks, clipping, migration, export and serving are written once, over this interface. A new
dialect is one file with a `DIALECT` (see `dialect.py`), a `TableReader` and, where the format can be written, a
`CheckpointWriter` (see `writing.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np

from kvtools import convert
from kvtools.dialects.chunk import ALL_COLUMNS, CHUNK_BYTES, KEYS, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import TableSchema, VariableSchema, numpy_dtype, row_bytes
from kvtools.errors import KvtoolsError, UnknownTableError
from kvtools.remote.shown import shown


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


class TableReader(ABC):
    """One table of a checkpoint, opened for reading. Row i is the i-th of the stream of all parts.

    A reader that a dialect opened can be pickled: it is opened again where it is loaded. So can one that is made of
    others (clipped, merged, ...), if its own state can be.
    """

    schema: TableSchema
    origin: Origin | None = None

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
        """
        rows = rows or self.chunk_rows(columns)
        for number in range(self.parts) if part is None else [part]:
            yield from self.read_part(number, columns, rows, verify)

    @abstractmethod
    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part, `rows` at a time; see `chunks`. Columns may be read-only views of files."""

    @abstractmethod
    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these int64 numbers [n], in their order.

        Only a snapshot's are checked against checksums: those of other formats are of whole files, or columns.
        """

    def extra(self, name: str) -> Array:
        """Return the array of this name from `schema.extras`, checked against its checksums; it may be read-only."""
        raise KeyError(name)

    def check(self) -> Iterator[Finding]:
        """Yield what is wrong with the table in ways that only its dialect knows; reads as much as that takes."""
        return iter(())

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
        vectors: Literal["columns", "arrays"] = "columns",
    ) -> Any:
        """Return all rows, or the first `limit`, as a `pandas.DataFrame`; see `kvtools.convert.to_pandas`."""
        return convert.to_pandas(self, columns, limit=limit, vectors=vectors)

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


@dataclass(frozen=True)
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
        """Return the table `name`; raises `UnknownTableError` naming the tables that there are."""
        if name not in self.tables:
            raise UnknownTableError(
                f"opening table '{name}' of '{self.path}': no such table; it has {_list_names(self.tables)}"
            )
        return self.tables[name]

    def select(self, names: Sequence[str]) -> list[TableReader]:
        """Return these tables, each once, or all tables if `names` is empty."""
        return [self.table(name) for name in dict.fromkeys(names)] if names else list(self.tables.values())


def _list_names(names: Mapping[str, object], limit: int = 8) -> str:
    if not names:
        return "no tables"
    shown = ", ".join(f"'{name}'" for name in list(names)[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
