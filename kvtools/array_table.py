"""A table made of arrays in memory: how a program's own rows reach every dialect that can be written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, get_args

import numpy as np

from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.schema import ExtraSchema, SlotSchema, TableSchema, VersionUnit, row_bytes
from kvtools.errors import BadInputError, UsageError
from kvtools.partition import RULES, owners

_KEY_DTYPES = ("int64", "int32", "uint64", "uint32")
_VALUE_DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "bool")
_COUNTER_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class ArrayTable(TableReader):
    """A table of NumPy columns, all of the same number of rows.

    Args:
        name: the table's name.
        keys: integers [n].
        values: numbers [n, dim].
        slots: optimizer slots by name, [n, width] each.
        freqs: how often each key was seen, integers [n].
        versions: when each row was written, integers [n].
        version_unit: what `versions` count.
        part_rows: how many rows each part has, in order; one part of all rows if None.
        partition: the rule that decided a key's part, if there is one; see `kvtools.partition`.
        extras: arrays that belong to the table as a whole; see `ExtraSchema`.
        metadata: what else is to be recorded, ready for JSON.

    Raises:
        BadInputError: the columns do not fit together.

    Example:
        >>> table = ArrayTable("emb", np.array([7, -2]), np.float32([[1, 2], [3, 4]]))
        >>> table.take(np.array([1])).values.tolist()
        [[3.0, 4.0]]
    """

    picks_slots = True
    direct = True

    def __init__(
        self,
        name: str,
        keys: Array,
        values: Array,
        *,
        slots: Mapping[str, Array] | None = None,
        freqs: Array | None = None,
        versions: Array | None = None,
        version_unit: VersionUnit = "unknown",
        part_rows: Sequence[int] | None = None,
        partition: str | None = None,
        extras: Mapping[str, Array] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        slots, extras = dict(slots or {}), dict(extras or {})
        columns = {"keys": (keys, 1), "values": (values, 2), "freqs": (freqs, 1), "versions": (versions, 1)}
        columns |= {f"slot {slot}": (rows, 2) for slot, rows in slots.items()}
        for column, (rows, dimensions) in columns.items():
            if rows is not None and (rows.ndim != dimensions or len(rows) != len(keys)):
                expected = f"[{len(keys)}{', width' * (dimensions - 1)}]"
                raise BadInputError(f"making table '{name}': {column} are {list(rows.shape)}, expected {expected}")
        parts = (len(keys),) if part_rows is None else tuple(part_rows)
        if sum(parts) != len(keys):
            raise BadInputError(f"making table '{name}': its parts have {sum(parts)} rows, expected {len(keys)}")
        self._chunk = Chunk(keys, values, slots, freqs, versions)
        self._extras = extras
        schema = TableSchema(
            name=name,
            dialect="memory",
            key_dtype=keys.dtype.name,
            value_dtype=values.dtype.name,
            dim=values.shape[1],
            part_rows=parts,
            slots=tuple(SlotSchema(slot, rows.shape[1], rows.dtype.name) for slot, rows in slots.items()),
            freq_dtype=None if freqs is None else freqs.dtype.name,
            version_dtype=None if versions is None else versions.dtype.name,
            version_unit=version_unit,
            partition=partition,
            extras=tuple(ExtraSchema(extra, array.dtype.name, array.shape) for extra, array in extras.items()),
            metadata=dict(metadata or {}),
        )
        size = len(keys) * row_bytes(schema) + sum(array.nbytes for array in extras.values())
        self.schema = dataclasses.replace(schema, bytes=size)

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield views of the rows of one part; see `TableReader.read_part`."""
        start = sum(self.schema.part_rows[:part])
        stop = start + self.schema.part_rows[part]
        for first in range(start, stop, rows):
            chunk = self._chosen(columns).take(slice(first, min(first + rows, stop)))
            yield dataclasses.replace(chunk, part=part)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return self._chosen(columns).take(self.row_numbers(rows))

    def extra(self, name: str) -> Array:
        """Return an extra array; see `TableReader.extra`."""
        return self._extras[name]

    def _chosen(self, columns: Columns) -> Chunk:
        all_columns = self._chunk
        return Chunk(
            keys=all_columns.keys,
            values=all_columns.values if columns.values else None,
            slots={name: rows for name, rows in all_columns.slots.items() if columns.has_slot(name)},
            freqs=all_columns.freqs if columns.freqs else None,
            versions=all_columns.versions if columns.versions else None,
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
        extras: arrays that belong to the table as a whole; see `kvtools.dialects.schema.ExtraSchema`.
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
    if not isinstance(name, str):
        raise UsageError(f"making a table of arrays: got name {name!r}, expected text")
    if not (slots is None or isinstance(slots, Mapping)) or not all(isinstance(slot, str) for slot in slots or ()):
        raise UsageError(f"{doing}: got slots {slots!r:.60}, expected arrays [n, width] by name")
    if not isinstance(parts, Integral) or parts < 1 or partition not in RULES:
        raise UsageError(
            f"{doing}: got {parts} parts by rule '{partition}', expected 1 or more, by {' or '.join(RULES)}"
        )
    if version_unit not in get_args(VersionUnit):
        raise UsageError(f"{doing}: got version_unit {version_unit!r}, expected {', '.join(get_args(VersionUnit))}")
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
    part_rows = [n]
    if parts > 1:
        owner = owners(keys, parts, partition)
        rows = rows.take(np.argsort(owner, kind="stable"))
        part_rows = np.bincount(owner, minlength=parts).tolist()
    assert rows.values is not None
    return ArrayTable(
        name,
        rows.keys,
        rows.values,
        slots=rows.slots,
        freqs=rows.freqs,
        versions=rows.versions,
        version_unit="unknown" if versions is None else version_unit,
        part_rows=part_rows,
        partition=partition,
        extras=beside,
        metadata=metadata,
    )


def _array(
    doing: str, what: str, given: Any, dtypes: tuple[str, ...], shape: tuple[str, ...], rows: int | None
) -> Array:
    expected = ", ".join(["n" if rows is None else str(rows), *shape[1:]])
    try:
        array: Array = np.asarray(given)
    except ValueError as error:
        raise UsageError(f"{doing}: {what} are lists of several lengths, expected an array [{expected}]") from error
    if array.dtype.name not in dtypes:
        rows_apart = array.dtype == object and len(shape) == 2  # as a column of pandas has them
        hint = "; numpy.stack makes one array of rows that lie apart" if rows_apart else ""
        raise UsageError(f"{doing}: {what} are {array.dtype.name}, expected {' or '.join(dtypes)}{hint}")
    fits = array.ndim == len(shape) and (rows is None or len(array) == rows) and 0 not in array.shape[1:]
    if not fits:
        raise UsageError(f"{doing}: {what} have shape {list(array.shape)}, expected [{expected}]")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
