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
import numpy.typing as npt

from kvtools.errors import KvtoolsError, UnknownTableError

Array = npt.NDArray[Any]

Progress = Callable[[str, int, int], None]
"""Called while work goes on, from any thread, with a table's name, the rows done and its rows in all."""

VersionUnit = Literal["seconds", "days", "steps", "unknown"]
"""What a version counts: Unix seconds, Unix days, training steps, or nobody knows."""

CHUNK_BYTES = 1 << 20
"""About how many bytes of all its columns a chunk holds unless the caller says how many rows it wants. More is no
faster: chunks of this size stay in the processor's cache between reading, checking and writing."""

DEFAULT_MEMORY = 1 << 30
"""How many bytes an operation may hold unless told otherwise; what needs more spills to disk."""


@dataclass(frozen=True)
class SlotSchema:
    """An optimizer slot: one row of `width` numbers beside each value row."""

    name: str
    width: int
    dtype: str


@dataclass(frozen=True)
class ExtraSchema:
    """An array that belongs to a table as a whole, not to its rows.

    The names that dialects share: "initial_values" [M, dim] (new rows are copied from it), "initial_values_<part>" (where
    a part has others than that), "blacklist" (keys that are never stored), "filtered_keys" / "filtered_freqs" / "filtered_versions" (keys seen, not yet admitted),
    "deleted_keys" (of an increment: keys to remove), "eviction_scores_<part>" (of a table with a capacity: a number for
    each row, in the order of the rows as they are stored: it holds for this file only, and no writer takes it).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TableSchema:
    """What a table holds.

    `part_rows` are the rows of each part, in order. `freq_dtype` and `version_dtype` are None where the table has no
    such column. `partition` names the rule that decides a key's part (`kvtools.partition`), None where the dialect
    has none. `checksums` says what the columns' bytes are checked against as they are read, as in "CRC-32C"; None
    where the format has nothing of the kind. `metadata` is what else the format records, ready for JSON:
    "initializer", "object_path", ... `notes` say what was inferred or assumed because the files do not record it.
    `bytes` counts every column.
    """

    name: str
    dialect: str
    key_dtype: str
    value_dtype: str
    dim: int
    part_rows: tuple[int, ...]
    slots: tuple[SlotSchema, ...] = ()
    freq_dtype: str | None = None
    version_dtype: str | None = None
    version_unit: VersionUnit = "unknown"
    partition: str | None = None
    checksums: str | None = None
    extras: tuple[ExtraSchema, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bytes: int = 0

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(self.part_rows)

    @property
    def parts(self) -> int:
        """How many parts the table has; 1 or more."""
        return len(self.part_rows)

    @property
    def has_freqs(self) -> bool:
        """Whether rows have frequencies."""
        return self.freq_dtype is not None

    @property
    def has_versions(self) -> bool:
        """Whether rows have versions."""
        return self.version_dtype is not None


@dataclass(frozen=True)
class VariableSchema:
    """A dense variable beside the tables."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Chunk:
    """A run of rows of one part, n of them, as columns in the same order.

    `keys` [n]; `values` [n, dim]; `slots[name]` [n, width]; `freqs` and `versions` [n], or None where the
    table has none or they were not asked for. Columns that were not asked for are left out: values is None,
    slots is empty.
    """

    keys: Array
    values: Array | None = None
    slots: Mapping[str, Array] = field(default_factory=dict)
    freqs: Array | None = None
    versions: Array | None = None
    part: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, rows: Any) -> Chunk:
        """Return the chunk of these rows only: row numbers, a boolean mask or a slice, as NumPy indexes.

        >>> Chunk(np.array([5, 7]), freqs=np.array([1, 2])).take([1]).freqs.tolist()
        [2]
        """
        return Chunk(
            keys=self.keys[rows],
            values=None if self.values is None else self.values[rows],
            slots={name: slot[rows] for name, slot in self.slots.items()},
            freqs=None if self.freqs is None else self.freqs[rows],
            versions=None if self.versions is None else self.versions[rows],
            part=self.part,
        )


@dataclass(frozen=True)
class Columns:
    """Which columns beside the keys to read; the bytes of the others are never touched."""

    values: bool = False
    slots: bool = False
    freqs: bool = False
    versions: bool = False


KEYS = Columns()
KEYS_AND_VALUES = Columns(values=True)
ALL_COLUMNS = Columns(values=True, slots=True, freqs=True, versions=True)


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


@dataclass(frozen=True)
class OpenOptions:
    """How to open a checkpoint: what its files do not say, and how much memory a reader may hold.

    `key_dtype`, `value_dtype` and `dim` are for formats that do not record them; for one that does record them they are
    a check (`contradicted_by`). With `lenient`, a table that cannot be opened is left out and named in
    `Checkpoint.broken`.
    """

    dialect: str | None = None
    key_dtype: str | None = None
    value_dtype: str | None = None
    dim: int | None = None
    memory: int = DEFAULT_MEMORY
    lenient: bool = False

    def contradicted_by(self, schema: TableSchema) -> str | None:
        """Return what a table says against these options, or None if it agrees.

        >>> OpenOptions(dim=9).contradicted_by(TableSchema("emb", "npz", "int64", "float32", 4, (7,)))
        'got --dim 9, it says 4; leave the option out'
        """
        for option, wanted, got in (
            ("--key-dtype", self.key_dtype, schema.key_dtype),
            ("--value-dtype", self.value_dtype, schema.value_dtype),
            ("--dim", self.dim, schema.dim),
        ):
            if wanted is not None and wanted != got:
                return f"got {option} {wanted}, it says {got}; leave the option out"
        return None


@dataclass(frozen=True)
class Origin:
    """Where a table was opened, so that another process can open it again."""

    path: str
    options: OpenOptions
    table: str


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
        """Copy the rows of these int64 numbers [n], in their order, without checking checksums."""

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
        from kvtools.convert import to_numpy

        return to_numpy(self, columns, limit=limit)

    def to_arrow(self, columns: Sequence[str] | None = None, *, limit: int | None = None) -> Any:
        """Return all rows, or the first `limit`, as a `pyarrow.Table`; see `kvtools.convert.to_arrow`."""
        from kvtools.convert import to_arrow

        return to_arrow(self, columns, limit=limit)

    def to_pandas(
        self,
        columns: Sequence[str] | None = None,
        *,
        limit: int | None = None,
        vectors: Literal["columns", "arrays"] = "columns",
    ) -> Any:
        """Return all rows, or the first `limit`, as a `pandas.DataFrame`; see `kvtools.convert.to_pandas`."""
        from kvtools.convert import to_pandas

        return to_pandas(self, columns, limit=limit, vectors=vectors)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self.origin is None:
            return super().__reduce_ex__(protocol)
        from kvtools.dialects.detect import open_table

        return open_table, (self.origin,)


def no_variable(name: str) -> Iterator[Array]:
    """Stand in for `Checkpoint.read_variable` where a format has no dense variables."""
    raise KeyError(name)


def no_findings() -> Iterator[Finding]:
    """Stand in for `Checkpoint.check` where a format has nothing to check as a whole."""
    return iter(())


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: `path` as resolved (a URL without its password), the tables by name, and the dense
    variables beside them.

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


INITIAL_VALUES = "initial_values"


def initial_values_of(part: int | str) -> str:
    """Return what the initial values of one part are called, where they are not those of all.

    >>> initial_values_of(3)
    'initial_values_3'
    """
    return f"{INITIAL_VALUES}_{part}"


def part_of_initial_values(name: str) -> int | None:
    """Return whose initial values an extra of this name is; None if it is no part's alone.

    >>> part_of_initial_values("initial_values_3"), part_of_initial_values("initial_values")
    (3, None)
    """
    number = name.removeprefix(f"{INITIAL_VALUES}_")
    return int(number) if number != name and number.isdecimal() else None


def are_initial_values(name: str) -> bool:
    """Tell whether an extra of this name is initial values, of all parts or of one.

    >>> are_initial_values("initial_values"), are_initial_values("blacklist")
    (True, False)
    """
    return name == INITIAL_VALUES or part_of_initial_values(name) is not None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy type called `name`, bfloat16 included.

    >>> numpy_dtype("bfloat16").itemsize
    2
    """
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def row_bytes(schema: TableSchema, columns: Columns = ALL_COLUMNS) -> int:
    """Return how many bytes one row takes in these columns and the keys.

    >>> row_bytes(TableSchema("emb", "tfplugin", "int64", "float32", 16, (10,)))
    72
    """
    size = numpy_dtype(schema.key_dtype).itemsize
    if columns.values:
        size += schema.dim * numpy_dtype(schema.value_dtype).itemsize
    if columns.slots:
        size += sum(slot.width * numpy_dtype(slot.dtype).itemsize for slot in schema.slots)
    if columns.freqs and schema.freq_dtype:
        size += numpy_dtype(schema.freq_dtype).itemsize
    if columns.versions and schema.version_dtype:
        size += numpy_dtype(schema.version_dtype).itemsize
    return size


def _list_names(names: Mapping[str, object], limit: int = 8) -> str:
    if not names:
        return "no tables"
    shown = ", ".join(f"'{name}'" for name in list(names)[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
