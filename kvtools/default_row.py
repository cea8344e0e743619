"""The row that a key without one would begin with in training, where all keys would begin with the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.interface import TableReader
from kvtools.dialects.schema import DEFAULT_ROW, ExtraSchema, TableSchema, numpy_dtype
from kvtools.table_view import TableView


def with_default_row(table: TableReader) -> TableReader:
    """Return `table` with the extra array `default_row`, [dim] of its value type, if its initializer is a constant.

    Training gives a new key that row. With any other initializer a new key's row depends on the key, and a table of
    which none is recorded tells nothing: such a table is returned as it is, and so is one that has a default row.
    """
    row = _constant_row(table.schema)
    if row is None or any(extra.name == DEFAULT_ROW for extra in table.schema.extras):
        return table
    return _WithDefaultRow(table, row)


def _constant_row(schema: TableSchema) -> Array | None:
    initializer = schema.metadata.get("initializer")
    if not isinstance(initializer, dict) or initializer.get("kind") != "constant":
        return None
    return constant_row(initializer.get("a", 0.0), schema.value_dtype, schema.dim)


def constant_row(constant: Any, value_dtype: str, dim: int) -> Array | None:
    """Return the row [dim] of a constant as the engine makes it; None if there is none of this type.

    >>> constant_row(0.5, "float32", 2).tolist()
    [0.5, 0.5]
    """
    if isinstance(constant, bool) or not isinstance(constant, (int, float)):
        return None
    dtype = numpy_dtype(value_dtype)
    # As the engine makes it: a number of two bytes is rounded from a float32.
    exact = np.float32 if value_dtype in ("float16", "bfloat16") else np.float64
    with np.errstate(over="ignore", invalid="ignore"):
        number = exact(constant).astype(dtype)
    if value_dtype not in ("float16", "bfloat16", "float32", "float64") and number != constant:
        return None  # no value of an integer type
    return np.full(dim, number, dtype)


class _WithDefaultRow(TableView):
    def __init__(self, source: TableReader, row: Array) -> None:
        extra = ExtraSchema(DEFAULT_ROW, source.schema.value_dtype, row.shape)
        super().__init__(source, dataclasses.replace(source.schema, extras=(*source.schema.extras, extra)))
        self._row = row

    def extra(self, name: str) -> Array:
        """Return an extra array; see `TableReader.extra`."""
        return self._row if name == DEFAULT_ROW else self.source.extra(name)
