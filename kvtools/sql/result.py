"""The answer to a query: a stream of Arrow batches, or a table of any library that takes those."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from html import escape
from typing import Any, Protocol

from kvtools.dialects.arrow_columns import import_pyarrow
from kvtools.errors import MissingDependencyError, UsageError

_SHOWN_ROWS = 20
_SHOWN_NUMBERS = 4


class Asked(Protocol):
    """What a result reads: a query that runs."""

    column_names: list[str]

    @property
    def schema(self) -> Any:
        """The Arrow schema of the answer; waits for its first rows."""
        ...

    def batches(self) -> Iterator[Any]:
        """Yield the record batches of the answer, once."""
        ...

    def close(self) -> None:
        """End the query."""
        ...


class QueryResult:
    """The answer to a query, computed as it is read, and read once: by `batches`, or by what takes an Arrow stream
    (`polars.DataFrame(result)`, `duckdb.sql("from result")`, `pyarrow.table(result)`).

    `to_arrow` and what goes by it (`to_pandas`, `to_polars`, `rows`) keep all rows, and can be called again. As a
    context manager, or by `close`, it ends a query that is not wanted to its end.

    `column_names` are those of the query.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self.column_names = asked.column_names
        self._stream: Iterator[Any] | None = asked.batches()
        self._head: list[Any] = []
        self._table: Any = None
        weakref.finalize(self, asked.close)  # of an answer that nobody wants any more, too

    @property
    def schema(self) -> Any:
        """The Arrow schema of the answer; waits for its first rows."""
        return self._asked.schema

    def batches(self) -> Iterator[Any]:
        """Yield the answer as `pyarrow.RecordBatch`es.

        Raises:
            UsageError: it was read already.
            KvtoolsError: whatever the query fails with on the way.
        """
        if self._table is not None:
            yield from self._table.to_batches()
            return
        if self._stream is None:
            raise UsageError("reading the answer to a query: it was read already; ask again, or keep it by to_arrow()")
        stream, self._stream = self._stream, None
        head, self._head = self._head, []
        try:
            yield from head
            yield from stream
        finally:
            self.close()

    def to_arrow(self) -> Any:
        """Return the answer as a `pyarrow.Table`."""
        if self._table is None:
            self._table = import_pyarrow("reading an answer").Table.from_batches(self.batches(), schema=self.schema)
        return self._table

    def to_pandas(self) -> Any:
        """Return the answer as a `pandas.DataFrame`; vectors are a column of NumPy arrays."""
        try:
            import pandas  # noqa: F401
        except ImportError:
            raise MissingDependencyError(
                "converting an answer to pandas: pandas is not installed; run `pip install pandas`"
            ) from None
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        """Return the answer as a `polars.DataFrame`; vectors are a column of arrays."""
        try:
            import polars
        except ImportError:
            raise MissingDependencyError(
                "converting an answer to Polars: polars is not installed; run `pip install polars`"
            ) from None
        return polars.DataFrame(self.to_arrow())

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the answer as a list of tuples of Python objects."""
        table = self.to_arrow()
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True)) if table.num_columns else []

    def close(self) -> None:
        """End the query, if it has not ended; what was read of it stays."""
        self._asked.close()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        pyarrow = import_pyarrow("reading an answer")
        if self._table is not None:
            return self._table.__arrow_c_stream__(requested_schema)
        reader = pyarrow.RecordBatchReader.from_batches(self.schema, self.batches())
        return reader.__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> Any:
        return self.schema.__arrow_c_schema__()

    def __enter__(self) -> QueryResult:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return int(self.to_arrow().num_rows)

    def _first(self) -> tuple[list[list[str]], bool]:
        """Return the cells of the first rows, and whether there are more; they are not lost to who reads later."""
        if self._table is not None:
            batches, more = self._table.slice(0, _SHOWN_ROWS).to_batches(), self._table.num_rows > _SHOWN_ROWS
        elif self._stream is None:
            return [], False
        else:
            while sum(len(batch) for batch in self._head) <= _SHOWN_ROWS:
                batch = next(self._stream, None)
                if batch is None:
                    break
                self._head.append(batch)
            batches, more = self._head, sum(len(batch) for batch in self._head) > _SHOWN_ROWS
        rows: list[list[str]] = []
        for batch in batches:
            columns = [column.slice(0, _SHOWN_ROWS - len(rows)).to_pylist() for column in batch.columns]
            rows += [[_cell(value) for value in row] for row in zip(*columns, strict=True)]
            if len(rows) >= _SHOWN_ROWS:
                break
        return rows, more

    def __repr__(self) -> str:
        if self._table is None and self._stream is None:
            return f"<the answer to a query: {', '.join(self.column_names)}; read already>"
        rows, more = self._first()
        lines = [self.column_names, *rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(self.column_names))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*text, *["..."] * more])

    def _repr_html_(self) -> str:
        if self._table is None and self._stream is None:
            return f"<p>{escape(repr(self))}</p>"
        rows, more = self._first()
        head = "".join(f"<th>{escape(name)}</th>" for name in self.column_names)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" + "<p>...</p>" * more


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        shown = " ".join(_cell(number) for number in value[:_SHOWN_NUMBERS])
        return shown + " ..." * (len(value) > _SHOWN_NUMBERS)
    return f"{value:.6g}" if isinstance(value, float) else "NULL" if value is None else str(value)
