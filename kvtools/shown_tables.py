"""What a prompt and a notebook show of a checkpoint and of a table."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from kvtools.dialects.chunk import Array
from kvtools.dialects.schema import TableSchema
from kvtools.errors import KvtoolsError

if TYPE_CHECKING:
    from kvtools.dialects.interface import Checkpoint, TableReader

_TABLES_SHOWN = 20
_ROWS_SHOWN = 5
_NUMBERS_SHOWN = 4


def counted(count: int, thing: str) -> str:
    """Write how many of something there are.

    >>> counted(1, "table"), counted(1200, "row")
    ('1 table', '1,200 rows')
    """
    return f"{count:,} {thing}{'s' * (count != 1)}"


def table_text(table: TableReader) -> str:
    """Return one line about a table."""
    schema = getattr(table, "schema", None)
    if schema is None:
        return f"<{type(table).__name__}>"
    beside = [slot.name for slot in schema.slots]
    beside += ["freq"] * schema.has_freqs + ["version"] * schema.has_versions
    parts = "" if schema.parts == 1 else f", {schema.parts} parts"
    more = f", with {', '.join(beside)}" if beside else ""
    rows = counted(schema.rows, "row")
    return f"<table {schema.name!r}: {rows} of {schema.dim} {schema.value_dtype} by {schema.key_dtype}{parts}{more}>"


def checkpoint_text(checkpoint: Checkpoint) -> str:
    """Return a checkpoint as lines: what it is, and its tables."""
    lines = [f"<{checkpoint.dialect} checkpoint '{checkpoint.path}': {counted(len(checkpoint.tables), 'table')}"]
    tables = list(checkpoint.tables.values())
    lines += [f"  {table_text(table)[1:-1]}" for table in tables[:_TABLES_SHOWN]]
    lines += [f"  and {len(tables) - _TABLES_SHOWN} more"] * (len(tables) > _TABLES_SHOWN)
    lines += [f"  {len(checkpoint.broken)} cannot be read: {', '.join(list(checkpoint.broken)[:3])}"] * bool(
        checkpoint.broken
    )
    return "\n".join(lines) + ">"


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """Return a checkpoint as a table of HTML."""
    head = ["table", "rows", "dim", "values", "keys", "parts", "beside"]
    rows = [_described(table.schema) for table in list(checkpoint.tables.values())[:_TABLES_SHOWN]]
    more = len(checkpoint.tables) - _TABLES_SHOWN
    about = f"{checkpoint.dialect} checkpoint {checkpoint.path}: {counted(len(checkpoint.tables), 'table')}"
    return f"<p>{escape(about)}</p>{_html(head, rows)}" + (f"<p>and {more} more</p>" if more > 0 else "")


def table_html(table: TableReader) -> str:
    """Return a table as HTML: a line about it, and its first rows, if they can be read."""
    about = f"<p>{escape(table_text(table)[1:-1])}</p>"
    try:
        chunk = table.to_numpy(limit=_ROWS_SHOWN)
    except KvtoolsError as error:
        return f"{about}<p>{escape(str(error))}</p>"
    columns: dict[str, Array | None] = {"key": chunk.keys, "value": chunk.values, **chunk.slots}
    columns |= {"freq": chunk.freqs, "version": chunk.versions}
    there = {name: [_cell(row) for row in column] for name, column in columns.items() if column is not None}
    rows = [list(row) for row in zip(*there.values(), strict=True)]
    return about + _html(list(there), rows) + "<p>...</p>" * (table.rows > _ROWS_SHOWN)


def _described(schema: TableSchema) -> list[str]:
    beside = [slot.name for slot in schema.slots]
    beside += ["freq"] * schema.has_freqs + ["version"] * schema.has_versions
    numbers = [f"{schema.rows:,}", str(schema.dim), schema.value_dtype, schema.key_dtype, str(schema.parts)]
    return [schema.name, *numbers, ", ".join(beside)]


def _cell(row: Array) -> str:
    if row.ndim == 0:
        return str(row)
    return " ".join(f"{float(number):.6g}" for number in row[:_NUMBERS_SHOWN]) + " ..." * (len(row) > _NUMBERS_SHOWN)


def _html(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
