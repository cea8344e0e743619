"""What a table, a slot, an array beside them and a dense variable are: their names, types and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from kvtools.dialects.chunk import ALL_COLUMNS, Columns

VersionUnit = Literal["seconds", "days", "steps", "unknown"]
"""What a version counts: Unix seconds, Unix days, training steps, or nobody knows."""


@dataclass(frozen=True)
class SlotSchema:
    """An optimizer slot: one row of `width` numbers beside each value row."""

    name: str
    width: int
    dtype: str


@dataclass(frozen=True)
class ExtraSchema:
    """An array that belongs to a table as a whole, not to its rows.

    The names that dialects share: "initial_values" [M, dim] (new rows are copied from it), "initial_values_<part>"
    (where a part has others than that), "blacklist" (keys that are never stored), "filtered_keys" / "filtered_freqs" /
    "filtered_versions" (keys seen, not yet admitted), "deleted_keys" (of an increment: keys to remove),
    "eviction_scores_<part>" and "eviction_orders_<part>" (of a table with a capacity: a number for each row, in the
    order of the rows as they are stored: it holds for this file only, and no writer takes it),
    "admission_filter_<part>" (the cells of a counting Bloom filter; `kvtools.admission_filter` joins them).
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
    `bytes` counts every column. `rows_as` is "int8" or "int4" where rows are stored so, and read as `value_dtype`:
    it is of these files, and not carried along.
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
    rows_as: str | None = None

    @cached_property
    def rows(self) -> int:
        """Rows of all parts; added up once, as whoever reads a part asks for them, and there may be thousands."""
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


INITIAL_VALUES = "initial_values"
DEFAULT_ROW = "default_row"
"""What a lookup gives for a key without a row, where it is asked for: [dim], of the values' type."""


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


#: What the names of extras that are the filter of admission of a part, which follows, begin with.
ADMISSION_FILTER = "admission_filter_"

#: What the names of extras with a number for each row of a part, which follows, begin with.
ROW_EXTRAS = ("eviction_scores_", "eviction_orders_")


def part_of_row_extra(name: str) -> int | None:
    """Return the part of whose rows an extra array has a number each; None for others.

    >>> part_of_row_extra("eviction_scores_3"), part_of_row_extra("blacklist")
    (3, None)
    """
    start = next((start for start in ROW_EXTRAS if name.startswith(start)), None)
    return None if start is None else int(name.removeprefix(start))


def has_values_dtype(name: str) -> bool:
    """Tell whether an extra of this name is of the values' type, and stays so when they get another.

    >>> has_values_dtype("default_row"), has_values_dtype("initial_values_2"), has_values_dtype("blacklist")
    (True, True, False)
    """
    return name == DEFAULT_ROW or are_initial_values(name)


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
    size += sum(slot.width * numpy_dtype(slot.dtype).itemsize for slot in schema.slots if columns.has_slot(slot.name))
    if columns.freqs and schema.freq_dtype:
        size += numpy_dtype(schema.freq_dtype).itemsize
    if columns.versions and schema.version_dtype:
        size += numpy_dtype(schema.version_dtype).itemsize
    return size
