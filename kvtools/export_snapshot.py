"""Write tables as a snapshot, which `kvtools serve` maps and answers from at once: see docs/dialects/snapshot.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtools.chain_reader import refuse_increments
from kvtools.clip import Choice
from kvtools.clip_policy import Policy, choose_all
from kvtools.default_row import with_default_row
from kvtools.dialects import snapshot
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.schema import DEFAULT_ROW
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError
from kvtools.export import TableExport, left_out, signature_names
from kvtools.migrate import check_output, write_tables
from kvtools.narrow_rows import Dtypes, NarrowTable, check_dtypes, dtype_notes, dtype_of
from kvtools.remote.paths import local_path
from kvtools.snapshot import Snapshot
from kvtools.table_view import MaskedTable, TableView
from kvtools.written_bytes import row_bytes_in


def export_snapshot(
    checkpoint: Checkpoint,
    output: str | Path,
    *,
    tables: Sequence[str] = (),
    policy: Policy | None = None,
    keep_zeros: bool = False,
    dtype: Dtypes = None,
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
        dtype: what rows of floating-point numbers become, of all tables or by their names: one of
            `kvtools.narrow_rows.DTYPES`, "int8" and "int4" with an offset and a scale for each row; as they are if
            None, and where they are integers.
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
            and int4 do not hold.

    Example:
        ```python
        from kvtools.dialects.detect import open_checkpoint
        export_snapshot(open_checkpoint("model.ckpt-100"), Path("model.kvsnap"), dtype="bfloat16")
        ```
    """
    output = Path(local_path(output))
    readers = checkpoint.select(tables)
    if not readers:
        raise BadInputError(f"exporting '{checkpoint.path}': it has no key-value table; see `kvtools inspect`")
    refuse_increments(f"exporting '{checkpoint.path}'", readers)
    check_dtypes("exporting a snapshot", dtype)
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
    kept: list[NarrowTable] = []
    for reader, choice in zip(readers, choices, strict=True):
        masked = MaskedTable(reader, choice.mask)
        told_of_it = {**masked.schema.metadata, **(metadata or {})}
        schema = dataclasses.replace(masked.schema, slots=(), metadata=told_of_it)
        kept.append(NarrowTable(TableView(masked, schema), dtype_of(reader.schema, dtype)))
    rows_as = {table.schema.name: table.rows_as for table in kept if table.rows_as}
    options = WriteOptions(memory=memory, force=force, rows_as=rows_as)
    account = write_tables(kept, output, snapshot.NAME, options=options, progress=progress)
    written = Snapshot(output)
    whole_rows = row_bytes_in(snapshot.NAME, checkpoint.tables)
    signatures = signature_names([reader.schema.name for reader in readers])
    exports = []
    for reader, table, choice, told in zip(readers, kept, choices, account.tables, strict=True):
        native = written.table(table.schema.name).native
        whole = (told.rows_written + choice.cut) * whole_rows(reader.schema)
        exports.append(
            TableExport(
                name=table.schema.name,
                signature=signatures[table.schema.name],
                key_dtype=native.key_dtype,
                value_dtype=table.rows_as or native.value_dtype,
                dim=native.dim,
                rows=told.rows_written,
                cut=choice.cut,
                duplicates=choice.hidden + native.duplicates,
                non_finite=table.non_finite,
                bytes=told.bytes,
                bytes_saved=max(0, whole - told.bytes),
                left_out=left_out(reader.schema, snapshot.DIALECT),
                failed=choice.failed,
                lookups=choice.lookups,
                lookups_missed=choice.lookups_missed,
                notes=dtype_notes(reader.schema, dtype),
                rounding=table.rounding,
            )
        )
    return exports


def choose_for_snapshot(
    checkpoint: Checkpoint,
    *,
    tables: Sequence[str] = (),
    policy: Policy | None = None,
    keep_zeros: bool = False,
    dtype: Dtypes = None,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> list[Choice]:
    """Decide which rows `export_snapshot` would keep, and write nothing; arguments and errors are its own.

    Whether numbers fit `dtype` `narrow_rows.check_fits` tells.
    """
    check_dtypes("exporting a snapshot", dtype)
    return choose_all(
        checkpoint,
        policy or Policy(),
        tables=tables,
        distinct=True,
        zeros=lambda table: not keep_zeros and missing_is_zeros(table),
        size=row_bytes_in(snapshot.NAME, checkpoint.tables, dtype=dtype),
        memory=memory,
        progress=progress,
    )


def missing_is_zeros(table: TableReader) -> bool:
    """Tell whether a missing key always gets zeros: a table may have a row of its own for them."""
    told = with_default_row(table)
    return all(extra.name != DEFAULT_ROW or not told.extra(extra.name).any() for extra in told.schema.extras)
