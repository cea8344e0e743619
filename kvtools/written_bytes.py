"""How many bytes a row takes where it is written: what a budget counts, and what is told of the rows that are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from kvtools.dialects import savedmodel
from kvtools.dialects.detect import dialect_named
from kvtools.dialects.schema import TableSchema
from kvtools.fit import as_rows_of, written_row_bytes
from kvtools.migrate import fit_among
from kvtools.narrow_rows import Dtypes, bytes_of_values, dtype_of
from kvtools.quantized_rows import QUANTIZED


def row_bytes_in(
    to: str, tables: Iterable[str], *, dtype: Dtypes = None, compression: str | None = None
) -> Callable[[TableSchema], int]:
    """Return what tells, of a table's schema, the bytes of a row in dialect `to`: its key and what is kept beside.

    Args:
        to: the dialect, "savedmodel" for a model that looks the tables up.
        tables: the names of all tables that are written.
        dtype: what rows become; see `kvtools.narrow_rows.dtype_of`.
        compression: that of the writer; "int8" and "int4" are types of rows.

    Raises:
        BadInputError: by the function: the dialect cannot hold the table.

    >>> schema = TableSchema("emb", "npz", "int64", "float32", 4, (9,), freq_dtype="uint32")
    >>> row_bytes_in("snapshot", ["emb"])(schema), row_bytes_in("savedmodel", ["emb"])(schema)
    (28, 24)
    """
    if to == savedmodel.NAME:
        return lambda schema: bytes_of_values(schema, dtype) + 8
    dialect = dialect_named(to)
    fit = fit_among([*tables], dialect)

    def size(schema: TableSchema) -> int:
        became = dtype_of(schema, dtype)
        packed = became if became in QUANTIZED else None
        value = "float32" if packed else became or schema.value_dtype
        follow = dialect.holds.slot_dtype_is_value
        slots = tuple(
            dataclasses.replace(slot, dtype=value) if follow and slot.dtype == schema.value_dtype else slot
            for slot in schema.slots
        )
        fitted = fit(dataclasses.replace(schema, value_dtype=value, slots=slots), dialect)
        packed = packed or (compression if compression in QUANTIZED else None)
        return written_row_bytes(as_rows_of(fitted, dialect, packed).schema, dialect)

    return size
