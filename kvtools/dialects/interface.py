"""What every dialect gives: a schema per table, and its rows as a stream of chunks of NumPy columns.

Inspection, clipping, export and serving are written once, over this interface. A new dialect is one file
with a `sniff` function, a `Checkpoint` and a `TableReader`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.errors import UnknownTableError

Array = npt.NDArray[Any]

Progress = Callable[[str, int, int], None]
"""Called while work goes on, with a table's name, the rows done and its rows in all."""

CHUNK_BYTES = 8 << 20
"""About how many bytes of values a chunk holds unless the caller says how many rows it wants."""


@dataclass(frozen=True)
class SlotSchema:
    """An optimizer slot: one row of `width` numbers beside each value row."""

    name: str
    width: int
    dtype: str


@dataclass(frozen=True)
class TableSchema:
    """What a table holds. `rows` and `bytes` are sums over its parts; `bytes` counts every column."""

    name: str
    dialect: str
    key_dtype: str
    value_dtype: str
    dim: int
    rows: int
    parts: int
    slots: tuple[SlotSchema, ...]
    has_freqs: bool
    has_versions: bool
    bytes: int


@dataclass(frozen=True)
class VariableSchema:
    """A dense variable beside the tables."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Chunk:
    """A run of rows, n of them, as columns in the same order.

    `keys` [n]; `values` [n, dim]; `slots[name]` [n, width]; `freqs` and `versions` [n], or None where the
    table has none or they were not asked for. Columns that were not asked for are left out: values is None,
    slots is empty.
    """

    keys: Array
    values: Array | None = None
    slots: Mapping[str, Array] = field(default_factory=dict)
    freqs: Array | None = None
    versions: Array | None = None


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


class TableReader(ABC):
    """One table of a checkpoint, opened for reading. Row i is the i-th of the stream, in any part."""

    schema: TableSchema

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """The NumPy type of the values, bfloat16 included."""
        return numpy_dtype(self.schema.value_dtype)

    def chunk_rows(self) -> int:
        """Return how many rows make a chunk of about `CHUNK_BYTES`."""
        return max(1, CHUNK_BYTES // (self.schema.dim * self.value_dtype.itemsize + 8))

    @abstractmethod
    def chunks(
        self, columns: Columns = ALL_COLUMNS, *, chunk_rows: int | None = None, verify: bool = True
    ) -> Iterator[Chunk]:
        """Yield all rows, in order and without loading more than a chunk.

        With `verify`, the columns' bytes are checked against the checksums that the format has, and
        `CorruptFileError` is raised before the stream ends. Columns may be read-only views of mapped files.
        """

    @abstractmethod
    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these int64 numbers [n], in their order, without checking checksums."""

    def all_keys(self, *, verify: bool = True) -> Array:
        """Return a copy of all keys [rows], in row order."""
        keys = np.empty(self.schema.rows, self.schema.key_dtype)
        position = 0
        for chunk in self.chunks(KEYS, chunk_rows=1 << 20, verify=verify):
            keys[position : position + len(chunk.keys)] = chunk.keys
            position += len(chunk.keys)
        return keys


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: `path` as resolved, the tables by name, and the dense variables beside them."""

    path: Path
    dialect: str
    tables: Mapping[str, TableReader]
    variables: tuple[VariableSchema, ...]

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


def _list_names(names: Mapping[str, object], limit: int = 8) -> str:
    if not names:
        return "no tables"
    shown = ", ".join(f"'{name}'" for name in list(names)[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
