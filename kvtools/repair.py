"""Mend what `kvtools verify` finds wrong with the rows of tables, and say of each thing what was done.

A table is read through a pile of views, each of which mends one thing, in this order:

    ProvenRows     of a damaged table the rows whose bytes are proven good, if that is asked for (`kvtools.proven_rows`)
    MaskedTable    without rows that hold a NaN or an infinity, and without rows whose key the table bans
    FiniteTable    or with zeros, or what a new row begins with, in the place of such rows
    MergedTable    with each key once

Keys come after numbers: where the last row of a key is dropped for a NaN, an earlier one is that key's last. Readers
give slots that have keys of their own in the table's order, and writers put each row into the part that owns its key:
so orphans, and rows in another part than theirs, are mended by writing. All else is carried along bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from kvtools.chain_reader import refuse_increments
from kvtools.default_row import constant_row, with_default_row
from kvtools.dialects.chunk import KEYS, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.detect import dialect_named
from kvtools.dialects.interface import Checkpoint, TableReader, Unmatched
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import (
    DEFAULT_ROW,
    ROW_EXTRAS,
    SlotSchema,
    TableSchema,
    VariableSchema,
    numpy_dtype,
    part_of_row_extra,
)
from kvtools.dialects.snapshot import NAME as SNAPSHOT
from kvtools.dialects.tfplugin import NAME as TFPLUGIN
from kvtools.dialects.tfplugin import PART_RECORDS, part_records
from kvtools.dialects.writing import WriteOptions
from kvtools.engine import run_all
from kvtools.errors import BadInputError, KvtoolsError, UnknownTableError, UsageError
from kvtools.key_join import row_numbers, sorted_buckets
from kvtools.merge import MergedTable, cut_freqs
from kvtools.migrate import Account, check_output, output_of, write_tables
from kvtools.partition import owners
from kvtools.proven_rows import prove
from kvtools.row_mask import RowMask
from kvtools.row_norms import rows_not_finite
from kvtools.table_names import is_pattern, listed, matching, near
from kvtools.table_view import MaskedTable, TableView

NanRule = Literal["drop", "zero", "default"]
DuplicatesRule = Literal["last", "first", "sum", "error"]
Kind = Literal["nan", "duplicates", "orphans"]

_KEY_ROWS = 1 << 18
_BANNED = "blacklist"
_NUMBERS = Columns(values=True, slots=True)
_BY_READING = ("slot-keys", "partition-offset", "wrong-bucket")
"""Findings of a dialect's own that reading a table, and writing it again, mends."""
_NOT_READ = "slot-rows"
_UNPROVEN = "its format has no checksums: nothing proves that the rows that were read are what was written"


@dataclass(frozen=True)
class Repairs:
    """What becomes of rows that are wrong.

    nan         rows with a NaN or an infinity: dropped, or the column that has one becomes zeros, or what a new row has
    nan_of      other rules for tables of these names; patterns, as file names have in a shell, the first that matches;
                each is of some table that is mended
    duplicates  rows of one key: the last or the first stays, they are added up, or they are an error
    only        mend these kinds alone
    salvage     of what is damaged, keep what is proven good; else it is an error

    Raises:
        UsageError: there is no such rule.

    Example:
        >>> Repairs(nan_of=(("user", "zero"),)).nan_rule("user"), Repairs().nan_rule("user")
        ('zero', 'drop')
    """

    nan: NanRule = "drop"
    nan_of: tuple[tuple[str, NanRule], ...] = ()
    duplicates: DuplicatesRule = "last"
    only: frozenset[Kind] = frozenset(get_args(Kind))
    salvage: bool = False

    def __post_init__(self) -> None:
        for rule in (self.nan, *(rule for _, rule in self.nan_of)):
            _check_known("--nan", rule, get_args(NanRule))
        _check_known("--duplicates", self.duplicates, get_args(DuplicatesRule))
        for kind in self.only:
            _check_known("--only", kind, get_args(Kind))

    def nan_rule(self, table: str) -> NanRule | None:
        """Return what becomes of rows of a table that are not finite; None where they stay."""
        if "nan" not in self.only:
            return None
        of_this = (rule for pattern, rule in self.nan_of if matching([pattern], [table])[0])
        return next(of_this, self.nan)

    def check_names(self, doing: str, tables: Sequence[str]) -> None:
        """Raise `UnknownTableError` where a rule is of none of `tables`: misspelt, most likely."""
        for pattern, rule in self.nan_of:
            if not matching([pattern], tables)[0]:
                what = "no table matches" if is_pattern(pattern) else "no such table among those to mend"
                raise UnknownTableError(
                    f"{doing}: --nan {pattern}={rule}: {what}; they are {listed(tables)}{near(pattern, tables)}"
                )


def _check_known(option: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise UsageError(f"repairing: got {option} {given}, expected {', '.join(known)}")


@dataclass(frozen=True)
class RepairedTable:
    """What was done to one table.

    rows           how many it had, lost ones included
    kept           how many it has
    non_finite     how many rows have a NaN or an infinity, by column: "values", "slot Adam.m"
    dropped        how many rows were left out for that
    replaced       how many rows had a column replaced for that
    extras         how many numbers were replaced in arrays that belong to the table as a whole, by their names
    duplicates     how many rows had the key of another one, and were left out or added to it
    misplaced      how many rows go to another part, which owns their key
    banned         how many rows were left out as the table bans their key
    orphans        what was mended of columns with keys of their own, a sentence each
    lost           what could not be rescued, a sentence each; `lost_rows` of the rows are among that
    notes          what else there is to know of it, a sentence each
    """

    table: str
    rows: int
    kept: int
    non_finite: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0
    replaced: int = 0
    extras: Mapping[str, int] = field(default_factory=dict)
    duplicates: int = 0
    misplaced: int = 0
    banned: int = 0
    orphans: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    lost_rows: int = 0
    notes: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether nothing was to be mended."""
        return self == RepairedTable(self.table, self.rows, self.rows, notes=self.notes)


@dataclass(frozen=True)
class Repair:
    """What a repair did: the account of what was written, what was mended by table, and what else was lost."""

    account: Account
    tables: tuple[RepairedTable, ...]
    lost: tuple[str, ...] = ()


def repair(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    repairs: Repairs | None = None,
    *,
    to: str | None = None,
    tables: Sequence[str] = (),
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Repair:
    """Write a checkpoint without what `kvtools verify` finds wrong with its rows.

    Args:
        checkpoint: what to read, opened leniently where some of it cannot be read.
        output: where to write it.
        repairs: what becomes of rows that are wrong.
        to: the dialect to write; that of `checkpoint` if None.
        tables: which tables to mend; all if empty. The others, and the dense variables, are written as they are.
        options: what to ask of the writer.
        workers: how many parts to work on at once.
        progress: called as rows are read and written.

    Raises:
        BadInputError: a table cannot be read, and that is not to be salvaged; or a key stands twice, and that is an
            error; or there is no row to begin with in the place of one that is not finite.
        UnknownTableError: there is no such table, or a rule is of none of those that are mended.
        CorruptFileError: the same, where bytes differ from their checksum.
        OutputError: `output` exists, or cannot be written.

    Example:
        ```python
        done = repair(kvtools.open("model.ckpt-100"), "mended.ckpt-100", Repairs(nan="zero"))
        print([(table.table, table.replaced, table.duplicates) for table in done.tables])
        ```
    """
    repairs = repairs or Repairs()
    options = options or WriteOptions()
    to = to or checkpoint.dialect
    doing = f"repairing '{checkpoint.path}'"
    if checkpoint.broken and not repairs.salvage:
        name, error = next(iter(checkpoint.broken.items()))
        raise type(error)(
            f"{doing}: table '{name}' cannot be opened: {error}; --salvage writes the others, and names what is lost"
        )
    if not checkpoint.tables:
        raise BadInputError(f"{doing}: it has no key-value table that can be opened; see `kvtools inspect`")
    named = [name for name in tables if name not in checkpoint.broken]
    chosen = {table.schema.name for table in checkpoint.select(named)} if named or not tables else set()
    repairs.check_names(doing, checkpoint.names_of(tables) if tables else [*checkpoint.tables, *checkpoint.broken])
    refuse_increments(doing, list(checkpoint.tables.values()))
    check_output(output_of(output, to, [checkpoint]), to, force=options.force)
    written: list[TableReader] = []
    told: list[RepairedTable] = []
    for name, table in checkpoint.tables.items():
        if name not in chosen:
            written.append(_WithParts(table) if table.schema.dialect == to == TFPLUGIN else table)
            continue
        mended, said = _mended(table, repairs, to, options.memory, workers, progress)
        written.append(mended)
        told.append(said)
    lost = [f"table '{name}': {error}" for name, error in checkpoint.broken.items()]
    beside = checkpoint
    if repairs.salvage:
        beside, of_variables = _readable_variables(checkpoint)
        lost += of_variables
    rows_as = {table.schema.name: table.schema.rows_as for table in written if table.schema.rows_as}
    if to == SNAPSHOT:
        options = dataclasses.replace(options, rows_as=rows_as)
    account = write_tables(
        written,
        output,
        to,
        beside=beside,
        options=options,
        workers=workers,
        progress=progress,
        keys_once="duplicates" in repairs.only and len(told) == len(written),
    )
    cut = {table.schema.name: cut_freqs(table) for table in written}
    return Repair(_with_losses(account, told, lost, cut), tuple(told), tuple(lost))


def _with_losses(
    account: Account, told: Sequence[RepairedTable], lost: Sequence[str], cut: Mapping[str, tuple[str, ...]]
) -> Account:
    """Return the account of what was written with what could not be rescued, and what was cut: it is not lossless."""
    of_tables: dict[str, tuple[str, ...]] = {}
    for one in told:
        rows = f"{one.lost_rows:,} of {one.rows:,} rows, which are not proven good"
        of_tables[one.table] = (rows,) if one.lost_rows else one.lost
    tables = [
        dataclasses.replace(table, losses=(*table.losses, *of_tables.get(table.name, ()), *cut.get(table.name, ())))
        for table in account.tables
    ]
    return dataclasses.replace(account, tables=tuple(tables), losses=(*account.losses, *lost))


def _mended(
    table: TableReader, repairs: Repairs, to: str, memory: int, workers: int | None, progress: Progress | None
) -> tuple[TableReader, RepairedTable]:
    """Return a table as it is to be written, and what was done to it."""
    schema = table.schema
    rows = schema.rows
    lost: tuple[str, ...] = ()
    mended: TableReader = table
    if repairs.salvage:
        mended, lost = prove(table, workers=workers, progress=progress)
    if mended is table and schema.dialect == to == TFPLUGIN:
        mended = _WithParts(mended)
    proven = mended.rows
    orphans, unread, has_banned = _told(table, repairs.salvage)
    rule = repairs.nan_rule(schema.name)
    found = _look(mended, rule, has_banned and "orphans" in repairs.only, memory, workers, progress)
    if found.cut:
        mended = _MaskedParts(mended, found.mask)
    if rule in ("zero", "default") and any(found.non_finite.values()):
        mended = FiniteTable(mended, *_fills(mended, rule))
    extras: dict[str, int] = {}
    if rule is not None:
        extras = _extras_not_finite(mended)
        if extras:
            mended = _FiniteExtras(mended, frozenset(extras))
    duplicates = 0
    if "duplicates" in repairs.only:
        mended, duplicates = _distinct(mended, repairs.duplicates, memory)
    if found.misplaced and dialect_named(to).holds.partition is None:  # no writer of it moves them
        mended = RoutedTable(mended, memory)
    if orphans:
        mended = _Matched(mended)
    notes = (_UNPROVEN,) if repairs.salvage and schema.checksums is None else ()
    said = RepairedTable(
        table=schema.name,
        rows=rows,
        kept=mended.rows,
        non_finite=found.non_finite,
        dropped=found.dropped,
        replaced=found.replaced,
        extras=extras,
        duplicates=duplicates,
        misplaced=found.misplaced,
        banned=found.banned,
        orphans=orphans,
        lost=(*lost, *unread),
        notes=notes,
        lost_rows=rows - proven,
    )
    return mended, said


def _told(table: TableReader, salvage: bool) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return what the dialect itself finds wrong with a table: what reading it mends, what it cannot read, and whether
    it has rows whose keys it bans."""
    try:
        found = list(table.check())
    except KvtoolsError:
        if not salvage:  # then it is named where rows are proven
            raise
        return (), (), False
    mended = tuple(finding.message for finding in found if finding.check in _BY_READING)
    unread = tuple(finding.message for finding in found if finding.check == _NOT_READ)
    return mended, unread, any(finding.check == _BANNED for finding in found)


@dataclass
class _Found:
    """What a reading of a table found; `mask` keeps the rows that stay."""

    mask: RowMask
    non_finite: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    replaced: int = 0
    misplaced: int = 0
    banned: int = 0

    @property
    def cut(self) -> int:
        return self.dropped + self.banned


def _look(
    table: TableReader,
    rule: NanRule | None,
    without_banned: bool,
    memory: int,
    workers: int | None,
    progress: Progress | None,
) -> _Found:
    """Read a table once, and find rows that are not finite, in another part than theirs, or banned."""
    schema = table.schema
    found = _Found(RowMask(schema.part_rows, memory=memory))
    banned = np.empty(0, table.key_dtype)
    if without_banned and any(extra.name == _BANNED for extra in schema.extras):
        banned = np.unique(table.extra(_BANNED).astype(table.key_dtype, copy=False))
    partition = schema.partition if schema.parts > 1 else None
    columns = KEYS if rule is None else _NUMBERS
    lock, done = threading.Lock(), 0
    non_finite: dict[str, int] = {}  # all columns in their order, whichever part is read first

    def read(part: int) -> None:
        nonlocal done
        at = 0
        for chunk in table.chunks(columns, part=part, rows=_KEY_ROWS if rule is None else None):
            bad = {}
            if chunk.values is not None:
                bad["values"] = rows_not_finite(chunk.values)
            bad |= {f"slot {name}": rows_not_finite(slot) for name, slot in chunk.slots.items() if slot.shape[1]}
            any_bad = np.zeros(len(chunk), np.bool_)
            for marks in bad.values():
                any_bad |= marks
            out = np.isin(chunk.keys, banned) if len(banned) else np.zeros(len(chunk), np.bool_)
            away = 0
            if partition is not None:
                away = int(np.count_nonzero(owners(chunk.keys, schema.parts, partition) != part))
            found.mask.put(part, at, ~(out | any_bad if rule == "drop" else out))
            at += len(chunk)
            with lock:
                for column, marks in bad.items():
                    non_finite[column] = non_finite.get(column, 0) + int(np.count_nonzero(marks))
                found.banned += int(np.count_nonzero(out))
                bad_rows = int(np.count_nonzero(any_bad & ~out))
                found.dropped += bad_rows if rule == "drop" else 0
                found.replaced += bad_rows if rule in ("zero", "default") else 0
                found.misplaced += away
                done += len(chunk)
                if progress:
                    progress(schema.name, done, schema.rows)

    for _ in run_all(read, range(schema.parts), workers=workers):
        pass
    found.non_finite.update({column: count for column, count in non_finite.items() if count})
    return found


class FiniteTable(TableView):
    """A table with `row` [dim] in the place of values that are not finite, and `slots[name]` [width] in that of such
    slots; a slot that has none of its own gets what the value is then."""

    def __init__(self, source: TableReader, row: Array, slots: Mapping[str, Array | None]) -> None:
        super().__init__(source, source.schema)
        self._row = row
        self._slots = dict(slots)

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        columns = self._needed(columns)
        return map(self._finite, self.source.read_part(part, columns, rows, verify))

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return self._finite(self.source.take(rows, self._needed(columns)))

    def _needed(self, columns: Columns) -> Columns:
        copies = columns.slots and any(row is None for row in self._slots.values())
        return dataclasses.replace(columns, values=True) if copies else columns

    def _finite(self, chunk: Chunk) -> Chunk:
        values = chunk.values
        if values is not None:
            values = _replaced(values, self._row)
        slots = {}
        for name, slot in chunk.slots.items():
            row = self._slots[name]
            if row is None:
                assert values is not None
                row = values
            slots[name] = _replaced(slot, row)
        return dataclasses.replace(chunk, values=values, slots=slots)


def _replaced(rows: Array, by: Array) -> Array:
    """Return `rows` [n, width] with `by`, [width] or [n, width], in the place of those that are not finite."""
    if not rows.shape[1]:
        return rows
    bad = rows_not_finite(rows)
    if not bad.any():
        return rows
    rows = np.array(rows)
    rows[bad] = by if by.ndim == 1 else by[bad].astype(rows.dtype, copy=False)
    return rows


def _fills(table: TableReader, rule: NanRule | None) -> tuple[Array, dict[str, Array | None]]:
    """Return what takes the place of values that are not finite, [dim], and of each slot, [width], None for a copy of
    the values."""
    row = np.zeros(table.dim, table.value_dtype)
    if rule == "zero":
        return row, {slot.name: np.zeros(slot.width, numpy_dtype(slot.dtype)) for slot in table.schema.slots}
    whole = with_default_row(table)
    if not any(extra.name == DEFAULT_ROW for extra in whole.schema.extras):
        raise BadInputError(
            f"repairing table '{table.schema.name}': there is no row that new keys begin with, its initializer"
            " draws another for each key or is not recorded; say --nan zero or --nan drop"
        )
    described = table.schema.metadata.get("slots")
    told = described if isinstance(described, Mapping) else {}
    return whole.extra(DEFAULT_ROW), {slot.name: _slot_row(table, slot, told) for slot in table.schema.slots}


def _slot_row(table: TableReader, slot: SlotSchema, described: Mapping[str, Any]) -> Array | None:
    record = described.get(slot.name)
    init = record.get("init", "constant") if isinstance(record, Mapping) else "constant"
    if init == "copy_value" and slot.width == table.dim:
        return None
    constant = record.get("constant", 0.0) if isinstance(record, Mapping) and init == "constant" else 0.0
    row = constant_row(constant, slot.dtype, slot.width)
    return np.zeros(slot.width, numpy_dtype(slot.dtype)) if row is None else row


def _extras_not_finite(table: TableReader) -> dict[str, int]:
    """Count the numbers that are not finite in arrays that belong to a table as a whole."""
    found = {}
    for extra in table.schema.extras:
        if numpy_dtype(extra.dtype).kind in "fV":
            array = table.extra(extra.name)
            bad = array.size - int(np.count_nonzero(np.isfinite(array)))
            if bad:
                found[extra.name] = bad
    return found


class _FiniteExtras(TableView):
    """A table with zeros in the place of numbers that are not finite in some of its extra arrays."""

    def __init__(self, source: TableReader, names: frozenset[str]) -> None:
        super().__init__(source, source.schema)
        self._names = names

    def extra(self, name: str) -> Array:
        array = self.source.extra(name)
        if name not in self._names:
            return array
        return np.where(np.isfinite(array), array, array.dtype.type(0))


class _Matched(TableView):
    """A table of which it is told as mended, and not as lost, what of its slots does not fit its rows."""

    def __init__(self, source: TableReader) -> None:
        super().__init__(source, source.schema)

    def unmatched(self) -> Unmatched:
        return Unmatched()


class _WithParts(TableView):
    """A table of our own layout with all that its parts record of themselves, to be written as training would."""

    def __init__(self, source: TableReader) -> None:
        metadata = {**source.schema.metadata, PART_RECORDS: part_records(source)}
        super().__init__(source, dataclasses.replace(source.schema, metadata=metadata))


class _MaskedParts(MaskedTable):
    """Rows that a mask keeps, and the scores of these rows alone."""

    def __init__(self, source: TableReader, mask: RowMask) -> None:
        super().__init__(source, mask)
        self.schema = _with_scores(self.schema)

    def extra(self, name: str) -> Array:
        return _scores_of(self.source, self.mask, name)


class _MergedParts(MergedTable):
    """As `MergedTable`, with the scores of the rows that stay."""

    def __init__(self, source: TableReader, mask: RowMask, *, others: Array | None) -> None:
        super().__init__(source, mask, others=others)
        self.schema = _with_scores(self.schema)

    def extra(self, name: str) -> Array:
        return _scores_of(self.source, self.mask, name)


def _with_scores(schema: TableSchema) -> TableSchema:
    rows = schema.part_rows
    extras = tuple(
        extra if (part := part_of_row_extra(extra.name)) is None else dataclasses.replace(extra, shape=(rows[part],))
        for extra in schema.extras
    )
    return dataclasses.replace(schema, extras=extras)


def _scores_of(source: TableReader, mask: RowMask, name: str) -> Array:
    array = source.extra(name)
    part = part_of_row_extra(name)
    if part is None:
        return array
    kept: Array = array[mask.get(part, 0, len(array))]
    return kept


class RoutedTable(TableView):
    """A table with each row in the part that owns its key by the rule of its schema; within a part in their order.

    All parts are read for each of them: it is for layouts that record a rule which no writer of theirs enforces.
    """

    def __init__(self, source: TableReader, memory: int) -> None:
        rule = source.schema.partition
        assert rule is not None
        self._rule = rule
        parts = source.schema.parts
        owner = row_numbers(source.rows, memory=memory)
        at = 0
        for chunk in source.chunks(KEYS, rows=_KEY_ROWS):
            owner[at : at + len(chunk)] = owners(chunk.keys, parts, rule)
            at += len(chunk)
        counts = np.bincount(owner, minlength=parts)
        extras = tuple(extra for extra in source.schema.extras if not extra.name.startswith(ROW_EXTRAS))
        super().__init__(source, dataclasses.replace(source.schema, part_rows=tuple(counts.tolist()), extras=extras))
        self._order = np.argsort(owner, kind="stable")

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        for chunk in self.source.chunks(columns, rows=rows, verify=verify):
            here = np.flatnonzero(owners(chunk.keys, self.schema.parts, self._rule) == part)
            if len(here):
                yield dataclasses.replace(chunk.take(here), part=part)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return self.source.take(self._order[self.row_numbers(rows)], columns)


def _distinct(table: TableReader, rule: DuplicatesRule, memory: int) -> tuple[TableReader, int]:
    """Return a table with each key once, and how many rows had the key of another one."""
    mask = RowMask(table.schema.part_rows, memory=memory, kept=True)
    others: Array | None = None
    count = 0
    stream = (chunk.keys for chunk in table.chunks(KEYS, rows=_KEY_ROWS))
    for (bucket,) in sorted_buckets([stream], table.rows, memory=memory):
        same = bucket.keys[1:] == bucket.keys[:-1]
        found = int(np.count_nonzero(same))
        if not found:
            continue
        if rule == "error":
            raise BadInputError(
                f"repairing table '{table.schema.name}': key {bucket.keys[1:][same][0]} stands in more than one row;"
                " nothing was written, say --duplicates last, first or sum"
            )
        count += found
        earlier, later = bucket.rows[:-1][same], bucket.rows[1:][same]
        if rule == "sum":
            if others is None:
                others = row_numbers(table.rows, memory=memory)
                others[:] = -1
            others[later] = earlier
        mask.clear(later if rule == "first" else earlier)
    if not count:
        return table, 0
    return _MergedParts(table, mask, others=others), count


def _readable_variables(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint without the dense variables that cannot be read, and what is said of these."""
    lost: list[str] = []

    def readable(variable: VariableSchema) -> bool:
        try:
            for _ in checkpoint.read_variable(variable.name):
                pass
        except KvtoolsError as error:
            lost.append(f"dense variable '{variable.name}': {error}")
            return False
        return True

    variables = tuple(filter(readable, checkpoint.variables))
    bookkeeping = tuple(filter(readable, checkpoint.bookkeeping))
    return dataclasses.replace(checkpoint, variables=variables, bookkeeping=bookkeeping), lost
