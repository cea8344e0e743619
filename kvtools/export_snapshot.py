"""Write tables as a snapshot, which `kvtools serve` maps and answers from at once: see docs/dialects/snapshot.md."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtools.cast import CastTable
from kvtools.clip import Choice, Clip, Criteria, choose_rows
from kvtools.dialects import snapshot
from kvtools.dialects.chunk import KEYS, Chunk, Columns
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, UsageError
from kvtools.export import TableExport, left_out, signature_names
from kvtools.key_join import repeated_rows
from kvtools.migrate import check_output, write_tables
from kvtools.row_norms import non_finite_rows
from kvtools.snapshot import Snapshot
from kvtools.table_view import MaskedTable, TableView

DTYPES = ("float32", "float16", "bfloat16", "int8")

_KEY_BYTES = 8


def export_snapshot(
    checkpoint: Checkpoint,
    output: Path,
    *,
    tables: Sequence[str] = (),
    clip: Clip | None = None,
    dtype: str | None = None,
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
        clip: leave out the rows under this threshold.
        dtype: what rows become: one of `DTYPES`, "int8" with a float32 scale for each row; as they are if None.
        force: replace a file that is there.
        memory: how many bytes of rows to hold; more go through the disk.
        progress: called as rows are read and written.

    Raises:
        UnknownTableError: the checkpoint has no such table.
        UsageError: values of a table cannot be of type `dtype`.
        OutputError: `output` exists, or cannot be written.
        CorruptFileError: the checkpoint's data is damaged.
        BadInputError: there is no table; or a row has NaN or infinity, which int8 does not hold.

    Example:
        ```python
        from kvtools.dialects.detect import open_checkpoint
        export_snapshot(open_checkpoint("model.ckpt-100"), Path("model.kvsnap"), dtype="bfloat16")
        ```
    """
    readers = checkpoint.select(tables)
    if not readers:
        raise BadInputError(f"exporting '{checkpoint.path}': it has no key-value table; see `kvtools inspect`")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"exporting a snapshot: got --dtype {dtype}, expected {', '.join(DTYPES)}")
    check_output(output, snapshot.NAME, force=force)
    kept: list[TableReader] = []
    cut, replaced = [0] * len(readers), [0] * len(readers)
    for number, reader in enumerate(readers):
        if clip is not None:
            choice, replaced[number] = _choose(reader, clip, memory, progress)
            cut[number] = reader.rows - replaced[number] - sum(choice.mask.kept_rows())
            reader = MaskedTable(reader, choice.mask)
        if dtype is not None:
            reader = CastTable(reader, value_dtype="float32" if dtype == "int8" else dtype)
        kept.append(_CountedTable(reader))
    options = WriteOptions(compression="int8" if dtype == "int8" else None, memory=memory, force=force)
    account = write_tables(kept, output, snapshot.NAME, options=options, progress=progress)
    written = Snapshot(output)
    signatures = signature_names([reader.schema.name for reader in readers])
    exports = []
    for reader, table, rows_cut, hidden, told in zip(readers, kept, cut, replaced, account.tables, strict=True):
        native = written.table(table.schema.name).native
        row_bytes = native.row_bytes + _KEY_BYTES
        whole = (told.rows_written + rows_cut) * (native.dim * reader.value_dtype.itemsize + _KEY_BYTES)
        assert isinstance(table, _CountedTable)
        exports.append(
            TableExport(
                name=table.schema.name,
                signature=signatures[table.schema.name],
                key_dtype=native.key_dtype,
                value_dtype="int8" if native.quantized else native.value_dtype,
                dim=native.dim,
                rows=told.rows_written,
                cut=rows_cut,
                duplicates=hidden + native.duplicates,
                non_finite=table.non_finite,
                bytes=told.rows_written * row_bytes,
                bytes_saved=max(0, whole - told.rows_written * row_bytes),
                left_out=left_out(reader.schema, snapshot.DIALECT),
            )
        )
    return exports


def _choose(reader: TableReader, clip: Clip, memory: int, progress: Progress | None) -> tuple[Choice, int]:
    """Choose rows by `clip`, and none that a later one hides: that one may be cut, and its key is gone then."""
    choice = choose_rows(reader, Criteria(norms=(clip,)), memory=memory, progress=progress)
    keys = (chunk.keys for chunk in reader.chunks(KEYS, rows=1 << 18))
    hidden = repeated_rows(keys, reader.rows, memory=memory)
    choice.mask.clear(hidden)
    return choice, len(hidden)


class _CountedTable(TableView):
    """A table that counts its rows with NaN or infinity as they are read."""

    def __init__(self, source: TableReader) -> None:
        super().__init__(source, dataclasses.replace(source.schema, slots=()))
        self.non_finite = 0
        self._counting = threading.Lock()

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        for chunk in self.source.read_part(part, columns, rows, verify):
            if chunk.values is not None:
                found = non_finite_rows(chunk.values)
                with self._counting:
                    self.non_finite += found
            yield chunk
