"""Increments: what changed between two checkpoints, written as a member of a chain; and the one writer of members.

`docs/chain.md` specifies what an increment has: every column of the rows that changed or were born, the keys that went,
and all dense variables.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools import chain
from kvtools.chain_fold import has_scores, newest_of, record_at, with_record
from kvtools.chain_place import chain_at, is_chain
from kvtools.dialects.chunk import ALL_COLUMNS, KEYS, Array, Chunk
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.location import locate
from kvtools.dialects.options import DEFAULT_MEMORY, OpenOptions, Progress
from kvtools.dialects.schema import ROW_EXTRAS, ExtraSchema, part_of_row_extra, row_bytes
from kvtools.dialects.tfplugin import NAME as TFPLUGIN
from kvtools.dialects.tfplugin import PART_RECORDS, part_prefix, part_records
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, UsageError
from kvtools.key_join import match_rows
from kvtools.migrate import Account, output_of, write_tables
from kvtools.partition import owners
from kvtools.replace_output import check_not_read
from kvtools.row_mask import RowMask
from kvtools.table_view import MaskedTable

_KEY_ROWS = 1 << 18


@dataclasses.dataclass(frozen=True)
class Changes:
    """What changed in a table from one checkpoint to another: rows that `born`, `changed` and `removed` count."""

    table: str
    born: int
    changed: int
    removed: int
    unchanged: int


class IncrementTable(MaskedTable):
    """The rows of a table that a mask keeps, and keys that went: what an increment has of it.

    Args:
        source: the whole table.
        mask: the rows that changed, or were born.
        removed: the keys that went, [R] of the key type; none of them has a row.
        born: how many rows of each part were born.
    """

    def __init__(self, source: TableReader, mask: RowMask, removed: Array, born: Sequence[int]) -> None:
        super().__init__(source, mask)
        self.removed = removed
        self.born = tuple(born)
        schema = self.schema
        extras = [e for e in schema.extras if not e.name.startswith(ROW_EXTRAS) and e.name != "deleted_keys"]
        for extra in schema.extras:
            if (part := part_of_row_extra(extra.name)) is not None:
                extras.append(ExtraSchema(extra.name, "uint64", (schema.part_rows[part],)))
        extras.append(ExtraSchema("deleted_keys", schema.key_dtype, removed.shape))
        metadata = {**schema.metadata, "increment": True}
        if schema.dialect == TFPLUGIN:
            metadata.setdefault(PART_RECORDS, part_records(source))
        self.schema = dataclasses.replace(schema, extras=tuple(extras), metadata=metadata)

    def extra(self, name: str) -> Array:
        """Return an extra array; see `TableReader.extra`."""
        if name == "deleted_keys":
            return self.removed
        array = self.source.extra(name)
        part = part_of_row_extra(name)
        if part is None:
            return array
        kept: Array = array[self.mask.get(part, 0, len(array))]
        return kept


def increment_of(
    before: TableReader, after: TableReader, *, memory: int = DEFAULT_MEMORY, progress: Progress | None = None
) -> tuple[IncrementTable, Changes]:
    """Return what changed from one state of a table to a later one, to the bit, in bounded memory.

    Raises:
        BadInputError: the two differ in types, width, slots or counters: no increment leads from one to the other.
        CorruptFileError: rows of a table are damaged; of `before`, whose rows are gathered, only its keys are checked.
    """
    _check_alike(before, after)
    at = match_rows(_keys(after), _keys(before), (after.rows, before.rows), memory=memory)
    back = match_rows(_keys(before), _keys(after), (before.rows, after.rows), memory=memory)
    removed = _taken_keys(before, back < 0)
    del back
    ranks = [(_all(start, before), _all(start, after)) for start in ROW_EXTRAS]
    mask = RowMask(after.schema.part_rows, memory=memory)
    born = [0] * after.parts
    changed = row = done = 0
    step = max(after.chunk_rows(ALL_COLUMNS), memory // (8 * row_bytes(after.schema)))
    for part in range(after.parts):
        start = 0
        for chunk in after.chunks(ALL_COLUMNS, rows=min(step, 1 << 16), part=part):
            of = np.asarray(at[row : row + len(chunk)])
            there = np.flatnonzero(of >= 0)
            order = there[np.argsort(of[there], kind="stable")]
            was = before.take(of[order], ALL_COLUMNS)
            differs = _different(was, chunk.take(order))
            for rank, later in ranks:
                if rank is not None and later is not None:
                    differs |= rank[of[order]] != later[row + order]
            kept = of < 0
            born[part] += int(np.count_nonzero(kept))
            changed += int(np.count_nonzero(differs))
            kept[order[differs]] = True
            mask.put(part, start, kept)
            start += len(chunk)
            row += len(chunk)
            done += len(chunk)
            if progress:
                progress(after.schema.name, done, after.rows)
    table = IncrementTable(after, mask, removed, born)
    births = sum(born)
    return table, Changes(after.schema.name, births, changed, len(removed), after.rows - births - changed)


def write_increment(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    open_options: OpenOptions | None = None,
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[Account, list[Changes], chain.Record]:
    """Write the increment that leads from one checkpoint to a later one, as the next member of the first one's chain.

    Args:
        before: a checkpoint in our own layout, a member of a chain or none, or a chain, of which the newest is meant.
        after: another state of the same tables, in our own layout: a checkpoint or a chain.
        output: the increment's prefix; in a chain's folder `<name>-<number>.delta`.
        open_options: how to open both.
        options, workers, progress: as for `kvtools.migrate.write_tables`.

    Returns:
        The account, what changed in each table, and the record that was written.

    Raises:
        BadInputError: one is in another dialect, or the tables differ in more than their rows.
        UsageError: the name of `output` gives another number than it would have.
        OutputError: `output` exists, is one of the two, or cannot be written.

    Example:
        ```python
        write_increment("monday.ckpt", "tuesday.ckpt", "tuesday.delta")
        ```
    """
    options = options or WriteOptions()
    a, b = open_checkpoint(before, open_options), open_checkpoint(after, open_options)
    for path, one in ((before, a), (after, b)):
        if one.dialect != TFPLUGIN:
            raise BadInputError(
                f"writing increment '{output}': '{path}' is of dialect {one.dialect}, expected {TFPLUGIN}; migrate it"
                " first: kvtools migrate --to tfplugin"
            )
    if set(a.tables) != set(b.tables):
        only = sorted(set(a.tables) ^ set(b.tables))[0]
        raise BadInputError(
            f"writing increment '{output}': table '{only}' is in one of '{before}' and '{after}' alone, and increments"
            " neither make nor drop tables; begin a chain with the later checkpoint instead"
        )
    if not a.tables:
        raise BadInputError(f"writing increment '{output}': '{before}' has no key-value table; see `kvtools inspect`")
    check_not_read(
        Path(output_of(output, TFPLUGIN, [a, b])).absolute(), [_record_of(path)[0] for path in (before, after)]
    )
    record = _next_record(before, after)
    named = chain.member_of(output)
    if named is not None and (named.kind, named.number) != ("delta", record.sequence):
        raise UsageError(
            f"writing increment '{output}': its number is {record.sequence}, after '{before}'; end its name in"
            f" -{record.sequence}.delta, or in no number"
        )
    tables, changes = [], []
    for name, table in b.tables.items():
        increment, counts = increment_of(a.tables[name], table, memory=options.memory, progress=progress)
        tables.append(increment)
        changes.append(counts)
    account = write_member(output, tables, record, beside=b, options=options, workers=workers, progress=progress)
    return account, changes, record


def _next_record(before: str | os.PathLike[str], after: str | os.PathLike[str]) -> chain.Record:
    """Return the record of the increment that comes after a checkpoint, but for its tables."""
    prefix, record = _record_of(before)
    if record is None:  # it counts as a full checkpoint that begins a chain, of the number in its name
        named = chain.member_of(prefix)
        number = named.number if named is not None else 0
        digest = chain.fingerprint(prefix)
        previous, full, name = chain.Previous(number, digest), number, str(uuid.UUID(digest[:32]))
    else:
        previous = chain.Previous(record.sequence, chain.fingerprint(prefix))
        if record.kind == "full" and record.previous is not None and record.previous.sequence == record.sequence:
            previous = record.previous  # the increment of the same moment, which others may have instead
        full, name = record.full, record.chain
    to, told = _record_of(after)
    when = told.time if told is not None else Path(f"{to}.index").stat().st_mtime
    step = told.step if told is not None else None
    return chain.Record(name, previous.sequence + 1, "delta", full, previous, when, step, {})


def _record_of(path: str | os.PathLike[str]) -> tuple[Path, chain.Record | None]:
    """Return the prefix of a checkpoint, of a chain its last member's, and its record, None where it has none."""
    prefix = newest_of(chain_at(path))[-1].prefix if is_chain(path) else locate(Path(path)).prefix
    return prefix, record_at(prefix)


def _check_alike(before: TableReader, after: TableReader) -> None:
    one, two = before.schema, after.schema
    pairs: list[tuple[str, Any, Any]] = [
        ("the keys' type", one.key_dtype, two.key_dtype),
        ("the values' type", one.value_dtype, two.value_dtype),
        ("dim", one.dim, two.dim),
        ("slots", sorted(map(str, one.slots)), sorted(map(str, two.slots))),
        ("frequencies", one.freq_dtype, two.freq_dtype),
        ("versions", one.version_dtype, two.version_dtype),
        ("eviction scores", has_scores(one), has_scores(two)),
    ]
    for what, was, now in pairs:
        if was != now:
            raise BadInputError(
                f"making an increment of table '{two.name}': {what} differ: {was} before and {now} after; no increment"
                " leads from one to the other, begin a chain with the later checkpoint"
            )


def _keys(table: TableReader) -> Iterator[Array]:
    for chunk in table.chunks(KEYS, rows=_KEY_ROWS):
        yield chunk.keys


def _taken_keys(table: TableReader, wanted: Array) -> Array:
    """Return the keys of the rows that a mask [rows] names."""
    taken, at = [np.empty(0, table.key_dtype)], 0
    for keys in _keys(table):
        taken.append(keys[wanted[at : at + len(keys)]])
        at += len(keys)
    return np.concatenate(taken)


def _all(start: str, table: TableReader) -> Array | None:
    """Return a number for each row, in their order, from the extras whose names begin so; None where a table has
    none."""
    names = [f"{start}{part}" for part in range(table.parts)]
    if not {extra.name for extra in table.schema.extras}.issuperset(names):
        return None
    return np.concatenate([table.extra(name) for name in names])


def _different(one: Chunk, other: Chunk) -> npt.NDArray[np.bool_]:
    """Tell which rows of two chunks of the same keys differ in any bit."""
    different = np.zeros(len(one), np.bool_)
    columns = [(one.values, other.values), (one.freqs, other.freqs), (one.versions, other.versions)]
    columns += [(slot, other.slots[name]) for name, slot in one.slots.items()]
    for x, y in columns:
        if x is not None and y is not None and len(x):
            different |= (_bits(x) != _bits(y)).any(axis=1)
    return different


def _bits(column: Array) -> Array:
    rows = np.ascontiguousarray(column).reshape(len(column), -1)
    return rows.view(f"u{rows.dtype.itemsize}")


def write_member(
    output: str | os.PathLike[str],
    tables: Sequence[TableReader],
    record: chain.Record,
    *,
    beside: Checkpoint | None = None,
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Account:
    """Write a member of a chain: a full checkpoint of whole tables, or an increment of `IncrementTable`s.

    Args:
        output: its prefix, `<folder>/<name>-<number>`, with `.delta` behind it for an increment.
        tables: what it has; what the record says of tables is counted from these.
        record: of the member, but for its tables.
        beside: a checkpoint whose dense variables and object graph it has.
        options, workers, progress: as for `kvtools.migrate.write_tables`, whose errors it raises.
    """
    counts: dict[str, chain.TableCounts] = {}
    for table in tables:
        counts |= _counts(table)
    source = beside or Checkpoint(Path(os.fspath(output)), TFPLUGIN, {table.schema.name: table for table in tables})
    return write_tables(
        tables,
        output,
        TFPLUGIN,
        beside=with_record(source, dataclasses.replace(record, tables=counts)),
        options=options,
        workers=workers,
        progress=progress,
    )


def _counts(table: TableReader) -> dict[str, chain.TableCounts]:
    """Return what a record says of the parts of a table."""
    schema = table.schema
    removed, born = np.zeros(schema.parts, np.int64), (0,) * schema.parts
    if isinstance(table, IncrementTable):
        removed = np.bincount(owners(table.removed, schema.parts, "floor_mod"), minlength=schema.parts)
        born = table.born
    return {
        part_prefix(schema, part): chain.TableCounts(rows, int(removed[part]), born[part])
        for part, rows in enumerate(schema.part_rows)
    }
