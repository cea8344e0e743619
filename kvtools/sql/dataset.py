"""A table as a `pyarrow.dataset.Dataset`: of that DuckDB asks for the columns and rows that a query needs, and no more.

Its columns are called c0, c1, ..., in the order of `query_columns`; whoever asks in SQL asks a view of it.
"""

from __future__ import annotations

from typing import Any

import pyarrow
import pyarrow.dataset

from kvtools.dialects.interface import TableReader
from kvtools.sql.columns import QueryColumn, arrow_type, query_columns
from kvtools.sql.scan import Scan, Work


class TableDataset(pyarrow.dataset.Dataset):  # type: ignore[misc]  # pyarrow has no types
    """The rows of a table, read anew for each scan.

    Args:
        table: the table.
        name: what messages, and who is told of the progress, call it.
        work: what the scans of a query have in common.
    """

    def __init__(self, table: TableReader, name: str, work: Work) -> None:
        self._table, self._name, self._work = table, name, work
        self.columns: dict[str, QueryColumn] = {
            f"c{number}": column for number, column in enumerate(query_columns(table.schema))
        }
        self._schema = pyarrow.schema(
            [pyarrow.field(name, arrow_type(column), nullable=False) for name, column in self.columns.items()]
        )

    @property
    def schema(self) -> Any:
        """The Arrow schema of all columns."""
        return self._schema

    def scanner(self, columns: list[str] | None = None, filter: Any = None, **others: Any) -> _Scanner:
        """Return what reads these columns, all if None, of the rows that meet an expression."""
        chosen = list(self.columns) if columns is None else columns
        return _Scanner(Scan(self._table, self._name, self.columns, chosen, filter, self._work))

    def __reduce__(self) -> Any:
        raise TypeError("a table that is asked in SQL belongs to its query")


class _Scanner:
    """What DuckDB takes for a scanner of pyarrow."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self.projected_schema = scan.schema

    def to_reader(self) -> Any:
        """Return the batches."""
        return self._scan.reader()
