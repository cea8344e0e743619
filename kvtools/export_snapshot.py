"""Write tables as a snapshot, which `kvtools serve` maps and answers from at once: see docs/dialects/snapshot.md."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.cast import FLOATS, CastTable, ColumnCost
from kvtools.clip import Choice
from kvtools.clip_policy import Policy, choose_all
from kvtools.default_row import with_default_row
from kvtools.dialects import snapshot
from kvtools.dialects.chunk import Array, Chunk, Columns
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.schema import DEFAULT_ROW, TableSchema, numpy_dtype
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, UsageError
from kvtools.export import TableExport, left_out, signature_names
from kvtools.migrate import check_output, write_tables
from kvtools.row_norms import any_in_row, rows_not_finite
from kvtools.snapshot import Snapshot
from kvtools.table_view import MaskedTable, TableView

DTYPES = ("float32", "float16", "bfloat16", "int8")
_LARGEST = {"float32": "3.40e+38", "float16": "65504", "bfloat16": "3.39e+38", "int8": "3.40e+38"}


def export_snapshot(
    checkpoint: Checkpoint,
    output: Path,
    *,
    tables: Sequence[str] = (),
    policy: Policy | None = None,
    keep_zeros: bool = False,
    dtype: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    force: bool = False,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> list[TableExport]:
    """Write tables of `checkpoint` as a snapshot `output`.

    Where a key is there twice, its last row counts. Every byte read is checked against its checksum. Optimizer slots
    are left out; frequencies and versions go along.

    Args:
        checkpoint: an opened checkpoint, of any dialect.
        output: the file to write; it appears when it is whole, and what stood there stays if anything fails.
        tables: the tables' names; all if empty.
        policy: which rows to leave out.
        keep_zeros: keep rows of zeros alone; they are what a missing key gives, and left out otherwise.
        dtype: what rows of floating-point numbers become: one of `DTYPES`, "int8" with a float32 scale for each row; as
            they are if None, and where they are integers.
        metadata: what else to record of each table.
        force: replace a file that is there.
        memory: how many bytes of rows to hold; more go through the disk.
        progress: called as rows are read and written.

    Raises:
        UnknownTableError: the checkpoint has no such table.
        UsageError: there is no type `dtype` for rows.
        OutputError: `output` exists, or cannot be written.
        CorruptFileError: the checkpoint's data is damaged.
        BadInputError: there is no table; a number is too large for `dtype`; or a row has NaN or infinity, which int8
            does not hold.

    Example:
        ```python
        from kvtools.dialects.detect import open_checkpoint
        export_snapshot(open_checkpoint("model.ckpt-100"), Path("model.kvsnap"), dtype="bfloat16")
        ```
    """
    readers = checkpoint.select(tables)
    if not readers:
        raise BadInputError(f"exporting '{checkpoint.path}': it has no key-value table; see `kvtools inspect`")
    _check_dtype(dtype)
    check_output(output, snapshot.NAME, force=force)
    choices = choose_for_snapshot(
        checkpoint,
        tables=tables,
        policy=policy,
        keep_zeros=keep_zeros,
        dtype=dtype,
        memory=memory,
        progress=progress,
    )
    kept: list[TableReader] = []
    for reader, choice in zip(readers, choices, strict=True):
        table: TableReader = MaskedTable(reader, choice.mask)
        changed = _changes(reader.schema, dtype)
        if dtype is not None and changed:
            table = _NarrowTable(table, dtype)
        kept.append(_CountedTable(table, metadata or {}, finite=changed and dtype == "int8"))
    options = WriteOptions(compression="int8" if dtype == "int8" else None, memory=memory, force=force)
    account = write_tables(kept, output, snapshot.NAME, options=options, progress=progress)
    written = Snapshot(output)
    signatures = signature_names([reader.schema.name for reader in readers])
    exports = []
    for reader, table, choice, told in zip(readers, kept, choices, account.tables, strict=True):
        native = written.table(table.schema.name).native
        row_bytes = native.row_bytes + 8
        whole = (told.rows_written + choice.cut) * _stored_bytes(reader.schema, None)
        assert isinstance(table, _CountedTable)
        exports.append(
            TableExport(
                name=table.schema.name,
                signature=signatures[table.schema.name],
                key_dtype=native.key_dtype,
                value_dtype="int8" if native.quantized else native.value_dtype,
                dim=native.dim,
                rows=told.rows_written,
                cut=choice.cut,
                duplicates=choice.hidden + native.duplicates,
                non_finite=table.non_finite,
                bytes=told.rows_written * row_bytes,
                bytes_saved=max(0, whole - told.rows_written * row_bytes),
                left_out=left_out(reader.schema, snapshot.DIALECT),
                failed=choice.failed,
                lookups=choice.lookups,
                lookups_missed=choice.lookups_missed,
                notes=dtype_notes(reader.schema, dtype),
            )
        )
    return exports


def choose_for_snapshot(
    checkpoint: Checkpoint,
    *,
    tables: Sequence[str] = (),
    policy: Policy | None = None,
    keep_zeros: bool = False,
    dtype: str | None = None,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> list[Choice]:
    """Decide which rows `export_snapshot` would keep, and write nothing; arguments and errors are its own.

    Whether numbers fit `dtype` only the writing finds.
    """
    _check_dtype(dtype)
    return choose_all(
        checkpoint,
        policy or Policy(),
        tables=tables,
        distinct=True,
        zeros=lambda table: not keep_zeros and missing_is_zeros(table),
        size=lambda schema: _stored_bytes(schema, dtype),
        memory=memory,
        progress=progress,
    )


def dtype_notes(schema: TableSchema, dtype: str | None) -> tuple[str, ...]:
    """Say what of a table's rows does not become what was asked for, one sentence each."""
    if dtype is None or _changes(schema, dtype):
        return ()
    return (f"its {schema.value_dtype} rows are written as they are: only floating-point numbers become {dtype}",)


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"exporting a snapshot: got --dtype {dtype}, expected {', '.join(DTYPES)}")


def _changes(schema: TableSchema, dtype: str | None) -> bool:
    """Tell whether the rows of a table become `dtype`: integers, whatever they count or name, are never rounded."""
    return dtype is not None and schema.value_dtype in FLOATS


def missing_is_zeros(table: TableReader) -> bool:
    """Tell whether a missing key always gets zeros: a table may have a row of its own for them."""
    told = with_default_row(table)
    return all(extra.name != DEFAULT_ROW or not told.extra(extra.name).any() for extra in told.schema.extras)


def _stored_bytes(schema: TableSchema, dtype: str | None) -> int:
    """Return the bytes of a row in a snapshot, and of its key."""
    dtype = dtype if _changes(schema, dtype) else None
    scale = 4 if dtype == "int8" else 0
    return scale + schema.dim * numpy_dtype(dtype or schema.value_dtype).itemsize + 8


class _NarrowTable(CastTable):
    """A table in another type, which refuses a number that the type is too small for: none becomes infinite."""

    def __init__(self, source: TableReader, dtype: str) -> None:
        super().__init__(source, value_dtype="float32" if dtype == "int8" else dtype)
        self._dtype = dtype
        # What missing keys get, of the source and here: made of an initializer, or stored.
        tables = with_default_row(source), with_default_row(self)
        if all(any(extra.name == DEFAULT_ROW for extra in table.schema.extras) for table in tables):
            was, became = (table.extra(DEFAULT_ROW) for table in tables)
            self._check(was[None], became[None], "the default row")

    def _cast(self, chunk: Chunk, costs: dict[str, ColumnCost]) -> Chunk:
        cast = super()._cast(chunk, costs)
        if chunk.values is not None and cast.values is not None:
            self._check(chunk.values, cast.values, "the row of key {}", chunk.keys)
        return cast

    def _check(self, was: Array, became: Array, whose: str, keys: Array | None = None) -> None:
        """Raise `BadInputError` where a finite number of rows [n, dim] became infinite."""
        if not rows_not_finite(became).any():
            return
        lost = np.isinf(became) & np.isfinite(was)
        rows = np.flatnonzero(any_in_row(lost))
        if not len(rows):
            return
        number = float(was[rows[0]][lost[rows[0]]][0])
        row = whose.format(None if keys is None else keys[rows[0]])
        raise BadInputError(
            f"writing table '{self.schema.name}' as {self._dtype}: {row} has {number:g}, which would become infinite,"
            f" expected at most {_LARGEST[self._dtype]} in size; write another type, or drop such rows"
        )


class _CountedTable(TableView):
    """A table that counts its rows with NaN or infinity as they are read, or refuses them."""

    def __init__(self, source: TableReader, metadata: Mapping[str, Any], *, finite: bool) -> None:
        whole = {**source.schema.metadata, **metadata}
        super().__init__(source, dataclasses.replace(source.schema, slots=(), metadata=whole))
        self.non_finite = 0
        self._finite = finite
        self._counting = threading.Lock()

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        for chunk in self.source.read_part(part, columns, rows, verify):
            if chunk.values is not None:
                found = np.flatnonzero(rows_not_finite(chunk.values))
                if self._finite and len(found):
                    raise BadInputError(
                        f"writing table '{self.schema.name}' as int8: the row of key {chunk.keys[found[0]]} has NaN or"
                        " infinity, which int8 with a scale does not hold; write another type, or drop such rows"
                    )
                with self._counting:
                    self.non_finite += len(found)
            yield chunk
