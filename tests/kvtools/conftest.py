"""Tables of plain NumPy arrays, the reference that what was written and read again is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.dialects.chunk import ALL_COLUMNS, Array
from kvtools.dialects.interface import TableReader
from kvtools.dialects.schema import numpy_dtype, row_bytes


class PlainTable(ArrayTable):
    """A table of arrays in memory that are at hand: what was written, to compare with what is read."""

    def __init__(self, name: str, keys: Array, values: Array, slots: dict[str, Array], **others: Any) -> None:
        super().__init__(name, keys, values, slots=slots, **others)
        self.name = name
        self.keys = keys
        self.values = values
        self.slot_arrays = slots
        self.freqs: Array | None = others.get("freqs")
        self.versions: Array | None = others.get("versions")


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
    own_keys: Array | None = None,
    **others: Any,
) -> PlainTable:
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
    return PlainTable(
        name,
        keys if own_keys is None else own_keys,
        draw(dim),
        {slot: draw(slot_width or dim) for slot in slots},
        freqs=count(freq_dtype),
        versions=count(version_dtype),
        part_rows=np.diff(cuts).tolist(),
        **{"version_unit": "steps" if version_dtype else "unknown", **others},
    )


def _same_rows(got: TableReader, expected: PlainTable, *, rows: int | None = None, any_order: bool = False) -> None:
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
def make_table() -> Callable[..., PlainTable]:
    """Draw a table with extreme keys among its own."""
    return _make_table


@pytest.fixture(scope="session")
def same_rows() -> Callable[..., None]:
    """Compare a table that was read with the one that was written."""
    return _same_rows
