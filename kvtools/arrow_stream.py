"""A table as an Arrow stream (the PyCapsule interface), by which DuckDB, Polars, pandas and others take it as it is.

Columns are called as in queries: `key`, `value` (fixed_size_list), the slots by their names, `freq`, `version`. Rows
are read as the other side asks for them, some megabytes at a time, and are not copied on the way where Arrow holds them
as they lie. float16 and bfloat16, which DuckDB and Arrow have not, are the float32 of the same number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvtools.dialects.arrow_columns import import_pyarrow
from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.sql.columns import QueryColumn, query_batch, query_columns, query_schema

if TYPE_CHECKING:
    from kvtools.dialects.interface import TableReader

_BATCH_ROWS = 1 << 14


def stream(table: TableReader) -> Any:
    """Return a table as a `pyarrow.RecordBatchReader`, which reads it as it is read; checksums are checked."""
    pyarrow = import_pyarrow(f"reading table '{table.schema.name}' as Arrow")
    columns, schema = _columns(table), stream_schema(table)

    def batches() -> Iterator[Any]:
        for chunk in table.chunks(ALL_COLUMNS, rows=max(_BATCH_ROWS, table.chunk_rows())):
            yield query_batch(chunk, columns, schema)

    return pyarrow.RecordBatchReader.from_batches(schema, batches())


def stream_schema(table: TableReader) -> Any:
    """Return the Arrow schema of a table's stream."""
    _ = table.key_dtype, table.value_dtype  # a table of strings refuses here, and says why
    return query_schema(_columns(table))


def _columns(table: TableReader) -> list[QueryColumn]:
    stored = {"freq": table.schema.freq_dtype, "version": table.schema.version_dtype}
    return [
        dataclasses.replace(column, dtype=stored.get(column.kind) or column.dtype)
        for column in query_columns(table.schema)
        if not column.computed
    ]
