"""A table made of arrays in memory: how a program's own rows reach every dialect that can be written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
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
    row_bytes,
)
from kvtools.errors import BadInputError


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
        self.schema = dataclasses.replace(schema, bytes=len(keys) * row_bytes(schema))

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield views of the rows of one part; see `TableReader.read_part`."""
        start = sum(self.schema.part_rows[:part])
        stop = start + self.schema.part_rows[part]
        for first in range(start, stop, rows):
            chunk = self._chosen(columns).take(slice(first, min(first + rows, stop)))
            yield dataclasses.replace(chunk, part=part)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return self._chosen(columns).take(np.asarray(rows, np.int64))

    def extra(self, name: str) -> Array:
        """Return an extra array; see `TableReader.extra`."""
        return self._extras[name]

    def _chosen(self, columns: Columns) -> Chunk:
        all_columns = self._chunk
        return Chunk(
            keys=all_columns.keys,
            values=all_columns.values if columns.values else None,
            slots=all_columns.slots if columns.slots else {},
            freqs=all_columns.freqs if columns.freqs else None,
            versions=all_columns.versions if columns.versions else None,
        )
