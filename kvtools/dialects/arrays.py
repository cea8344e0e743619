"""Tables made of NumPy arrays that the caller has in memory: what to write them with, in any dialect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvtools.dialects.interface import (
    KEYS_AND_VALUES,
    Array,
    Chunk,
    Columns,
    ExtraSchema,
    SlotSchema,
    TableReader,
    TableSchema,
    VersionUnit,
)
from kvtools.errors import BadInputError, UsageError
from kvtools.partition import RULES, owners

NAME = "arrays"
_KEY_DTYPES = ("int64", "int32", "uint64", "uint32")
_VALUE_DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "bool")
_COUNTER_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class ArrayTable(TableReader):
    """A table of arrays; see `table_from_arrays`. It shares their memory."""

    def __init__(self, schema: TableSchema, rows: Chunk, extras: Mapping[str, Array]) -> None:
        self.schema = schema
        self._rows = rows
        self._extras = dict(extras)
        self._starts = np.cumsum([0, *schema.part_rows]).tolist()

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        for start in range(self._starts[part], self._starts[part + 1], rows):
            yield self._chunk(slice(start, min(start + rows, self._starts[part + 1])), columns, part)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return self._chunk(np.asarray(rows, np.int64), columns, 0)

    def extra(self, name: str) -> Array:
        """Return an extra array; see `TableReader.extra`."""
        return self._extras[name]

    def _chunk(self, which: Any, columns: Columns, part: int) -> Chunk:
        rows = self._rows
        assert rows.values is not None
        return Chunk(
            keys=rows.keys[which],
            values=rows.values[which] if columns.values else None,
            slots={name: slot[which] for name, slot in rows.slots.items()} if columns.slots else {},
            freqs=rows.freqs[which] if columns.freqs and rows.freqs is not None else None,
            versions=rows.versions[which] if columns.versions and rows.versions is not None else None,
            part=part,
        )


def table_from_arrays(
    name: str,
    keys: Any,
    values: Any,
    *,
    slots: Mapping[str, Any] | None = None,
    freqs: Any = None,
    versions: Any = None,
    version_unit: VersionUnit = "unknown",
    parts: int = 1,
    partition: str = "floor_mod",
    extras: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> TableReader:
    """Make a table of arrays, to be written in any dialect by `kvtools.write_tables`.

    Args:
        name: the table's name.
        keys: [n], int64, int32, uint64 or uint32, each key once.
        values: [n, dim], a float type (bfloat16 is that of `ml_dtypes`), int8, int32, int64 or bool.
        slots: optimizer slots by name, each [n, width].
        freqs: [n] integers, how often each key was met.
        versions: [n] integers, when each row was last written.
        version_unit: what versions count: "seconds" or "days" of Unix time, "steps" or "unknown".
        parts: how many parts the table has; with more than 1 the arrays are copied, sorted by part.
        partition: the rule by which a key belongs to a part, one of `kvtools.partition.RULES`.
        extras: arrays that belong to the table as a whole; see `kvtools.dialects.interface.ExtraSchema`.
        metadata: what else to record, ready for JSON, where a dialect records such a thing.

    Raises:
        UsageError: an array of another type or shape, no name, or numbers that make no sense.
        BadInputError: a key is there twice.

    Example:
        >>> table = table_from_arrays("user", np.array([7, -3]), np.float32([[1, 2], [3, 4]]), parts=2)
        >>> table.schema.part_rows, [chunk.keys.tolist() for chunk in table.chunks()]
        ((0, 2), [[7, -3]])
    """
    doing = f"making table '{name}' of arrays"
    if not name:
        raise UsageError("making a table of arrays: it has no name, expected one")
    if parts < 1 or partition not in RULES:
        raise UsageError(
            f"{doing}: got {parts} parts by rule '{partition}', expected 1 or more, by {' or '.join(RULES)}"
        )
    keys = _array(doing, "keys", keys, _KEY_DTYPES, ("n",), None)
    n = len(keys)
    values = _array(doing, "values", values, _VALUE_DTYPES, ("n", "dim"), n)
    arrays = {
        slot: _array(doing, f"slot '{slot}'", array, _VALUE_DTYPES, ("n", "width"), n)
        for slot, array in (slots or {}).items()
    }
    freqs = None if freqs is None else _array(doing, "freqs", freqs, _COUNTER_DTYPES, ("n",), n)
    versions = None if versions is None else _array(doing, "versions", versions, _COUNTER_DTYPES, ("n",), n)
    beside = {extra: np.asarray(array) for extra, array in (extras or {}).items()}
    ordered = np.sort(keys)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise BadInputError(f"{doing}: key {ordered[twice[0]]} is there more than once, expected each key once")
    rows = Chunk(keys, values, arrays, freqs, versions)
    part_rows: tuple[int, ...] = (n,)
    if parts > 1:
        owner = owners(keys, parts, partition)
        rows = rows.take(np.argsort(owner, kind="stable"))
        part_rows = tuple(np.bincount(owner, minlength=parts).tolist())
    columns = [keys, values, *arrays.values(), *(c for c in (freqs, versions) if c is not None)]
    schema = TableSchema(
        name=name,
        dialect=NAME,
        key_dtype=keys.dtype.name,
        value_dtype=values.dtype.name,
        dim=values.shape[1],
        part_rows=part_rows,
        slots=tuple(SlotSchema(slot, array.shape[1], array.dtype.name) for slot, array in arrays.items()),
        freq_dtype=None if freqs is None else freqs.dtype.name,
        version_dtype=None if versions is None else versions.dtype.name,
        version_unit=version_unit if versions is not None else "unknown",
        partition=partition,
        extras=tuple(ExtraSchema(extra, array.dtype.name, array.shape) for extra, array in beside.items()),
        metadata=dict(metadata or {}),
        bytes=sum(array.nbytes for array in (*columns, *beside.values())),
    )
    return ArrayTable(schema, rows, beside)


def _array(
    doing: str, what: str, given: Any, dtypes: tuple[str, ...], shape: tuple[str, ...], rows: int | None
) -> Array:
    array: Array = np.asarray(given)
    if array.dtype.name not in dtypes:
        raise UsageError(f"{doing}: {what} are {array.dtype.name}, expected {' or '.join(dtypes)}")
    fits = array.ndim == len(shape) and (rows is None or len(array) == rows) and 0 not in array.shape[1:]
    if not fits:
        expected = ", ".join(["n" if rows is None else str(rows), *shape[1:]])
        raise UsageError(f"{doing}: {what} have shape {list(array.shape)}, expected [{expected}]")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
