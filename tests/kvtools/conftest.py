"""Tables of plain NumPy arrays, the reference that what was written and read again is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvtools.dialects.interface import (
    ALL_COLUMNS,
    Array,
    Chunk,
    Columns,
    ExtraSchema,
    SlotSchema,
    TableReader,
    TableSchema,
    numpy_dtype,
    row_bytes,
)


@dataclass
class ArrayTable(TableReader):
    """A table of arrays in memory, cut into parts of these rows."""

    name: str
    keys: Array
    values: Array
    slot_arrays: dict[str, Array] = field(default_factory=dict)
    freqs: Array | None = None
    versions: Array | None = None
    extras: dict[str, Array] = field(default_factory=dict)
    part_rows: tuple[int, ...] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def schema(self) -> TableSchema:  # type: ignore[override]
        return TableSchema(
            name=self.name,
            dialect="arrays",
            key_dtype=self.keys.dtype.name,
            value_dtype=self.values.dtype.name,
            dim=self.values.shape[1],
            part_rows=self.part_rows or (len(self.keys),),
            slots=tuple(SlotSchema(name, a.shape[1], a.dtype.name) for name, a in self.slot_arrays.items()),
            freq_dtype=None if self.freqs is None else self.freqs.dtype.name,
            version_dtype=None if self.versions is None else self.versions.dtype.name,
            version_unit="steps" if self.versions is not None else "unknown",
            extras=tuple(ExtraSchema(name, a.dtype.name, a.shape) for name, a in self.extras.items()),
            metadata=self.metadata,
        )

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        ends = np.cumsum([0, *self.schema.part_rows])
        for start in range(int(ends[part]), int(ends[part + 1]), rows):
            yield self.take(np.arange(start, min(start + rows, ends[part + 1])), columns)

    def take(self, rows: Array, columns: Columns = ALL_COLUMNS) -> Chunk:
        return Chunk(
            self.keys[rows],
            self.values[rows] if columns.values else None,
            {name: array[rows] for name, array in self.slot_arrays.items()} if columns.slots else {},
            self.freqs[rows] if columns.freqs and self.freqs is not None else None,
            self.versions[rows] if columns.versions and self.versions is not None else None,
        )

    def extra(self, name: str) -> Array:
        return self.extras[name]


def _make_table(
    name: str = "scope/emb",
    rows: int = 50,
    dim: int = 4,
    key_dtype: str = "int64",
    value_dtype: str = "float32",
    slots: tuple[str, ...] = ("Adam.m", "Adam.v"),
    slot_width: int | None = None,
    freq_dtype: str | None = None,
    version_dtype: str | None = None,
    parts: int = 1,
    seed: int = 0,
    **others: Any,
) -> ArrayTable:
    rng = np.random.default_rng(seed)
    limits = np.iinfo(key_dtype)
    extreme = [limits.min, limits.max, 0, 1, -1, -7, limits.max - 1]
    drawn = rng.integers(limits.min, limits.max, rows, dtype=key_dtype, endpoint=True)
    first = np.array([key for key in extreme if limits.min <= key <= limits.max], key_dtype)
    keys = np.array(list(dict.fromkeys([*first.tolist(), *drawn.tolist()]))[:rows], key_dtype)
    dtype = numpy_dtype(value_dtype)

    def draw(width: int) -> Array:
        numbers: Array = (rng.normal(size=(rows, width)) * 10).astype(dtype)
        return numbers

    def count(counter: str | None) -> Array | None:
        return None if counter is None else rng.integers(0, np.iinfo(counter).max, rows, dtype=counter, endpoint=True)

    cuts = np.linspace(0, rows, parts + 1).astype(int)
    return ArrayTable(
        name,
        keys,
        draw(dim),
        {slot: draw(slot_width or dim) for slot in slots},
        count(freq_dtype),
        count(version_dtype),
        part_rows=tuple(np.diff(cuts).tolist()),
        **others,
    )


def _same_rows(got: TableReader, expected: ArrayTable, *, rows: int | None = None, any_order: bool = False) -> None:
    """Check all columns of a table, streamed and taken, bit by bit."""
    schema, wanted = got.schema, expected.schema
    assert (schema.key_dtype, schema.value_dtype, schema.rows) == (wanted.key_dtype, wanted.value_dtype, wanted.rows)
    assert sorted(schema.slots, key=str) == sorted(wanted.slots, key=str)
    chunks = list(got.chunks(rows=rows))
    assert all(len(chunk) <= (rows or len(chunk)) for chunk in chunks)
    streamed = np.concatenate([chunk.keys for chunk in chunks]) if chunks else expected.keys[:0]
    order = np.argsort(expected.keys, kind="stable") if any_order else np.arange(len(expected.keys))
    back = np.argsort(streamed, kind="stable") if any_order else np.arange(len(streamed))
    np.testing.assert_array_equal(streamed[back], expected.keys[order])
    if not chunks:
        return
    assert schema.dim == wanted.dim
    joined = {
        "values": np.concatenate([c.values for c in chunks if c.values is not None]),
        **{s.name: np.concatenate([c.slots[s.name] for c in chunks]) for s in wanted.slots},
    }
    plain = {"values": expected.values, **expected.slot_arrays}
    for name in ("freqs", "versions"):
        column = getattr(expected, name)
        assert (getattr(chunks[0], name) is None) == (column is None)
        if column is not None:
            joined[name] = np.concatenate([getattr(c, name) for c in chunks])
            plain[name] = column
    for name, column in joined.items():
        assert column.dtype == plain[name].dtype, name
        assert column[back].tobytes() == plain[name][order].tobytes(), name
    picked = np.random.default_rng(1).integers(0, schema.rows, 20)
    taken = got.take(picked, ALL_COLUMNS)
    np.testing.assert_array_equal(taken.keys, streamed[picked])
    assert taken.values is not None and taken.values.tobytes() == joined["values"][picked].tobytes()
    for name in expected.slot_arrays:
        assert taken.slots[name].tobytes() == joined[name][picked].tobytes()
    for name, column in (("freqs", taken.freqs), ("versions", taken.versions)):
        assert column is None or column.tobytes() == joined[name][picked].tobytes()
    assert row_bytes(schema) == row_bytes(wanted)


@pytest.fixture(scope="session")
def make_table() -> Callable[..., ArrayTable]:
    """Draw a table with extreme keys among its own."""
    return _make_table


@pytest.fixture(scope="session")
def same_rows() -> Callable[..., None]:
    """Compare a table that was read with the one that was written."""
    return _same_rows
