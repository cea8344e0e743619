"""A table as NumPy arrays, as an Arrow table and as a pandas DataFrame, whole or its first rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from kvtools.dialects.arrow_columns import arrow_batch, arrow_schema, column_map, empty_chunk, import_pyarrow, widened
from kvtools.dialects.chunk import ALL_COLUMNS, Array, Chunk, Columns
from kvtools.dialects.schema import TableSchema
from kvtools.errors import MissingDependencyError, UsageError
from kvtools.table_names import near


class Rows(Protocol):
    """What is converted: a `TableReader`, or what streams rows as one does."""

    schema: TableSchema

    @property
    def rows(self) -> int:
        """How many rows there are."""
        ...

    @property
    def key_dtype(self) -> np.dtype[Any]:
        """The NumPy type of the keys."""
        ...

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """The NumPy type of the values."""
        ...

    def chunks(self, columns: Columns = ..., *, rows: int | None = ...) -> Iterator[Chunk]:
        """Yield all rows in order."""
        ...


NAMES = ("values", "slots", "freqs", "versions")
"""The columns that can be chosen, beside the keys."""


def to_numpy(table: Rows, columns: Sequence[str] | None = None, *, limit: int | None = None) -> Chunk:
    """Return the rows of a table as NumPy columns, which may be the table's own: copy them before you change them.

    Of a table of one part that is not compressed they are read once, to where they stay.

    Args:
        table: any table; its checksums are checked.
        columns: which of "values", "slots", "freqs" and "versions" to read beside the keys; all if None.
        limit: how many rows to read, the first ones; all if None. All of them must fit in memory.

    Returns:
        One `Chunk`: `keys` [n], `values` [n, dim], `slots` (name to [n, width]), `freqs` and `versions` [n]. Columns
        that were not chosen, or that the table has not, are None.

    Raises:
        UsageError: a column of another name.
        CorruptFileError: the table is damaged.

    Example:
        >>> from kvtools.array_table import ArrayTable
        >>> table = ArrayTable("emb", np.array([7, -2]), np.float32([[1, 2], [3, 4]]))
        >>> to_numpy(table, ["values"], limit=1).values.tolist()
        [[1.0, 2.0]]
    """
    chosen = _chosen(columns)
    rows = _rows(table, limit)
    _ = table.key_dtype, table.value_dtype  # A table of strings refuses here, and says why.
    if rows and len([part for part in table.schema.part_rows if part]) == 1:
        chunks = table.chunks(chosen, rows=rows)
        first = next(chunks, None)
        if first is not None and len(first) == rows:
            if rows == table.rows:
                for _ in chunks:  # to the end, where checksums are checked
                    pass
            return first
    whole = empty_chunk(table.schema, rows, chosen)
    at = 0
    for chunk in _first(table, chosen, rows):
        end = at + len(chunk)
        for into, part in _pairs(whole, chunk):
            into[at:end] = part
        at = end
    return whole


def to_arrow(table: Rows, columns: Sequence[str] | None = None, *, limit: int | None = None) -> Any:
    """Return the rows of a table as a `pyarrow.Table`.

    Its columns are `key`, `value` (a fixed_size_list of dim numbers), `slot_<name>` (such lists too), `freq` and
    `version`. bfloat16, which Arrow has not, becomes the float32 of the same number.

    Args:
        table, columns, limit: as for `to_numpy`.

    Raises:
        MissingDependencyError: pyarrow is not installed.

    Example:
        >>> from kvtools.array_table import ArrayTable
        >>> table = ArrayTable("emb", np.array([7, -2]), np.float32([[1, 2], [3, 4]]))
        >>> to_arrow(table).column("value").to_pylist()
        [[1.0, 2.0], [3.0, 4.0]]
    """
    pyarrow = import_pyarrow(f"converting table '{table.schema.name}' to Arrow")
    chosen = _chosen(columns)
    # No description of the table: whoever writes these rows to a file may have changed them.
    schema = arrow_schema(table.schema, chosen, describe=False)
    batches = [arrow_batch(chunk, schema) for chunk in _first(table, chosen, _rows(table, limit))]
    return pyarrow.Table.from_batches(batches, schema=schema)


def to_pandas(
    table: Rows,
    columns: Sequence[str] | None = None,
    *,
    limit: int | None = None,
    vectors: Literal["columns", "arrays"] = "arrays",
) -> Any:
    """Return the rows of a table as a `pandas.DataFrame`.

    Args:
        table, columns, limit: as for `to_numpy`.
        vectors: "arrays" makes one column `value` of NumPy arrays [dim], and `slot_<name>`: easy to look at and to
            join; they are views of one array [n, dim], which `numpy.stack` makes again. "columns" makes a column of
            each number, `value_0` to `value_<dim - 1>` and `slot_<name>_0`, ...: one block of memory, on which pandas
            computes at full speed. bfloat16 becomes float32 in both.

    Raises:
        MissingDependencyError: pandas is not installed.

    Example:
        >>> from kvtools.array_table import ArrayTable
        >>> table = ArrayTable("emb", np.array([7, -2]), np.float32([[1, 2], [3, 4]]))
        >>> to_pandas(table).set_index("key").value[-2].tolist()
        [3.0, 4.0]
        >>> to_pandas(table, vectors="columns").columns.tolist()
        ['key', 'value_0', 'value_1']
    """
    try:
        import pandas
    except ImportError:
        raise MissingDependencyError(
            f"converting table '{table.schema.name}' to pandas: pandas is not installed; run `pip install pandas`"
        ) from None
    if vectors not in ("columns", "arrays"):
        raise UsageError(f"converting to pandas: got vectors {vectors!r}, expected 'columns' or 'arrays'")
    whole = to_numpy(table, columns, limit=limit)
    names = column_map(table.schema)
    frames = [pandas.DataFrame({names.key: whole.keys})]

    def add(name: str, rows: Array) -> None:
        rows = widened(rows)
        if vectors == "columns":
            frames.append(pandas.DataFrame(rows, columns=[f"{name}_{number}" for number in range(rows.shape[1])]))
        else:
            cells = np.empty(len(rows), object)
            cells[:] = list(rows)
            frames.append(pandas.DataFrame({name: cells}))

    if whole.values is not None:
        add(names.value[0], whole.values)
    for slot, rows in whole.slots.items():
        add(names.slots[slot][0], rows)
    if whole.freqs is not None:
        frames.append(pandas.DataFrame({names.freq: whole.freqs}))
    if whole.versions is not None:
        frames.append(pandas.DataFrame({names.version: whole.versions}))
    return pandas.concat(frames, axis=1)


def _chosen(names: Sequence[str] | None) -> Columns:
    if names is None:
        return ALL_COLUMNS
    if isinstance(names, str):
        raise UsageError(f"choosing columns: got {names!r}, expected a list: [{names!r}]")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise UsageError(
            f"choosing columns: got {unknown[0]!r}, expected a list of {', '.join(map(repr, NAMES))}; keys always come"
            f"{near(unknown[0], NAMES)}"
        )
    return Columns(**{name: name in names for name in NAMES})


def _rows(table: Rows, limit: int | None) -> int:
    if limit is not None and limit < 0:
        raise UsageError(f"choosing rows: got a limit of {limit}, expected 0 or more")
    return table.rows if limit is None else min(limit, table.rows)


def _first(table: Rows, columns: Columns, rows: int) -> Iterator[Chunk]:
    """Yield the first rows; if that is all, the stream is read to its end, where checksums are checked."""
    left = rows
    for chunk in table.chunks(columns):
        if left < len(chunk):
            if left:
                yield chunk.take(slice(0, left))
            return
        yield chunk
        left -= len(chunk)


def _pairs(into: Chunk, chunk: Chunk) -> Iterator[tuple[Array, Array]]:
    yield into.keys, chunk.keys
    for mine, column in ((into.values, chunk.values), (into.freqs, chunk.freqs), (into.versions, chunk.versions)):
        if mine is not None and column is not None:
            yield mine, column
    for name, slot in chunk.slots.items():
        yield into.slots[name], slot
