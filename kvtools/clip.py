"""Which rows are worth their memory: the criteria by which `kvtools clip` and `kvtools export` leave rows out.

Which criteria hold for which table is a `Policy` (`clip_policy.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvtools.dialects.chunk import KEYS, Array, Chunk, Columns
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import TableSchema, VersionUnit, row_bytes
from kvtools.dialects.writing import WriteOptions
from kvtools.engine import run_all
from kvtools.errors import BadInputError, UsageError
from kvtools.key_join import repeated_rows, row_numbers
from kvtools.key_list import KeyList
from kvtools.migrate import Account, write_tables
from kvtools.read_ahead import read_ahead
from kvtools.row_mask import RowMask
from kvtools.row_norms import any_in_row, as_floats, row_norms, rows_not_finite
from kvtools.table_view import MaskedTable, changed_tables
from kvtools.top_rows import Scores, keep_top, sortable

if TYPE_CHECKING:
    from kvtools.where import Where  # with DuckDB, which is loaded where there is a condition

By = Literal["freq", "l2", "abs", "version"]
"""What rows are compared by."""

_SECONDS_PER_DAY = 86_400
_KEY_ROWS = 1 << 18


@dataclass(frozen=True)
class Clip:
    """Cut each row whose largest absolute value ("abs") or Euclidean norm ("l2") is below `threshold`.

    A row with a NaN or an infinity is no small row: it is kept, and counted by `non_finite`.

    Raises:
        UsageError: there is no such norm, or the threshold is negative, NaN or infinite.

    Example:
        >>> Clip("abs", 0.5).keep(np.array([[0.5, 0.0], [0.4, -0.4], [np.nan, 0.0]])).tolist()
        [True, False, True]
    """

    norm: Literal["abs", "l2"]
    threshold: float

    def __post_init__(self) -> None:
        if self.norm not in ("abs", "l2"):
            raise UsageError(f"clipping: got norm {self.norm!r}, expected 'abs' or 'l2'")
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise UsageError(
                f"clipping by {self.norm}: got threshold {self.threshold}, expected a finite number of 0 or more"
            )

    def keep(self, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which rows of `values` [n, dim] are kept, bool [n]."""
        if self.norm == "abs":
            # Neither below nor, for a NaN, comparable.
            return any_in_row(~(np.abs(as_floats(values)) < self.threshold))
        below: npt.NDArray[np.bool_] = row_norms(values, self.norm) < self.threshold
        return ~below


@dataclass(frozen=True)
class Age:
    """Cut rows whose version lies further back than `amount` from `now`.

    `timed` says that `amount` is in seconds and that versions are times; else both are steps. `now` is Unix seconds,
    or a step; the present, or the table's largest version, if None.
    """

    amount: int
    timed: bool
    now: int | None = None

    def __post_init__(self) -> None:
        if self.amount < 0:
            raise UsageError(f"clipping by age: got an age of {self.amount}, expected 0 or more")


@dataclass(frozen=True)
class Top:
    """Keep the `rows` rows with the highest `by`; of equal ones those with the smallest keys."""

    rows: int
    by: By

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise UsageError(f"clipping to the top rows: got {self.rows}, expected 0 or more")
        if self.by not in get_args(By):
            raise UsageError(f"clipping to the top rows: got by {self.by!r}, expected one of {', '.join(get_args(By))}")


@dataclass(frozen=True)
class Criteria:
    """Which rows to keep: those that pass all of these; `top` then chooses among them.

    zeros         cut rows of zeros alone
    norms         cut rows below these thresholds
    min_freq      cut rows seen less often
    age           cut rows last written long ago
    keep_keys     cut rows whose key is not listed
    drop_keys     cut rows whose key is listed
    where         cut rows that do not meet this condition
    drop_where    cut rows that meet this condition
    top           keep so many of the rest
    version_unit  what versions count, where the files do not say
    """

    norms: tuple[Clip, ...] = ()
    min_freq: int | None = None
    age: Age | None = None
    keep_keys: KeyList | None = None
    drop_keys: KeyList | None = None
    top: Top | None = None
    version_unit: VersionUnit | None = None
    zeros: bool = False
    where: Where | None = None
    drop_where: Where | None = None

    def __post_init__(self) -> None:
        if self.min_freq is not None and self.min_freq < 0:
            raise UsageError(f"clipping by frequency: got {self.min_freq}, expected 0 or more")

    @property
    def empty(self) -> bool:
        """Whether nothing would be cut."""
        return dataclasses.replace(self, version_unit=None) == Criteria()

    def described(self) -> dict[str, Any]:
        """Return the criteria as a policy file names them, lists of keys by their length.

        >>> Criteria(norms=(Clip("l2", 0.5),), top=Top(9, "freq")).described()
        {'clip-l2': 0.5, 'top-k': 9, 'by': 'freq'}
        """
        told: dict[str, Any] = {f"clip-{clip.norm}": clip.threshold for clip in self.norms}
        told["min-freq"] = self.min_freq
        told["older-than"] = self.age and f"{self.age.amount}{'s' if self.age.timed else ''}"
        told["now"] = self.age and self.age.now
        told["keep-keys"] = None if self.keep_keys is None else len(self.keep_keys)
        told["drop-keys"] = None if self.drop_keys is None else len(self.drop_keys)
        told["where"] = self.where and self.where.text
        told["drop-where"] = self.drop_where and self.drop_where.text
        told["top-k"], told["by"] = (self.top.rows, self.top.by) if self.top else (None, None)
        return {name: value for name, value in told.items() if value is not None}

    @property
    def conditions(self) -> tuple[Where, ...]:
        """The conditions, of both kinds."""
        return tuple(one for one in (self.where, self.drop_where) if one is not None)

    def columns_of(self, table: TableReader) -> Columns:
        """Return what has to be read of a table to decide.

        Raises:
            UsageError: the table has not what a condition is about.
        """
        columns = self.columns
        for condition in self.conditions:
            columns |= condition.columns_of(table)
        return columns

    @property
    def columns(self) -> Columns:
        """What has to be read to decide, but for conditions, for which that depends on the table."""
        by = self.top.by if self.top else None
        return Columns(
            values=self.zeros or bool(self.norms) or by in ("l2", "abs"),
            freqs=self.min_freq is not None or by == "freq",
            versions=self.age is not None or by == "version",
        )


@dataclass(frozen=True)
class Choice:
    """Which rows of a table are kept, and why the others are not.

    `failed` counts the rows that each criterion cuts; a row may fail several. `non_finite` rows hold a NaN or an
    infinity and passed the norms; `undated` rows have version 0, no time, and passed the age. `hidden_rows`, int64 [n],
    have a key that a later row has again; they are none of `rows`, and not kept. `lookups` is the sum of all rows'
    frequencies, `lookups_missed` that of the rows that are cut; None where the table has no frequencies. `scores`,
    uint64 [rows], are what rows can be compared by with those of other tables, if it was asked for.
    """

    table: str
    rows: int
    kept: int
    row_bytes: int
    failed: Mapping[str, int]
    non_finite: int
    undated: int
    lookups: int | None = None
    lookups_missed: int | None = None
    mask: RowMask = field(repr=False, compare=False, kw_only=True)
    hidden_rows: Array = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False, kw_only=True)
    scores: Scores | None = field(default=None, repr=False, compare=False, kw_only=True)

    @property
    def cut(self) -> int:
        """How many rows are left out."""
        return self.rows - self.kept

    @property
    def bytes(self) -> int:
        """The bytes of the rows that are kept, where they go."""
        return self.kept * self.row_bytes

    @property
    def bytes_saved(self) -> int:
        """The bytes that the rows that are cut would take."""
        return self.cut * self.row_bytes

    @property
    def hidden(self) -> int:
        """How many rows have a key that a later row has again."""
        return len(self.hidden_rows)


def choose_rows(
    table: TableReader,
    criteria: Criteria,
    *,
    distinct: bool = False,
    score: By | None = None,
    size: int | None = None,
    memory: int = 1 << 30,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Choice:
    """Decide which rows of a table are kept; reads no more columns than the criteria are about.

    A row with a NaN or an infinity passes every norm, and comes first where the top rows by a norm are chosen.

    Args:
        table: the table.
        criteria: what a row must pass.
        distinct: leave out rows whose key a later one has again, before all else.
        score: keep in the choice by what its rows can be compared with other tables'; frequencies for each byte.
        size: the bytes of a row where it goes, its key included; those of all its columns if None.
        memory: bytes to stay within; what needs more goes to temporary files.
        workers: how many parts to read at once.
        progress: called as rows are read.

    Raises:
        BadInputError: the table has no frequencies or versions, or its versions' unit is unknown.

    Example:
        ```python
        table = kvtools.open("model.ckpt-100").table("user_emb")
        print(choose_rows(table, Criteria(norms=(Clip("abs", 1e-6),), min_freq=2)).cut)
        ```
    """
    schema = table.schema
    check_columns(schema, criteria)
    size = row_bytes(schema) if size is None else size
    columns = _columns(table, criteria, score)
    oldest = _oldest_version(table, criteria)
    nothing = np.empty(0, np.int64)
    by_keys = criteria.keep_keys is not None or criteria.drop_keys is not None or bool(criteria.conditions)
    if columns == KEYS and not by_keys:
        hidden = hidden_rows(table, memory) if distinct else nothing
        mask = RowMask(schema.part_rows, memory=memory, kept=True)  # nothing to read
        mask.clear(hidden)
        return account_of(table, mask, hidden, size)
    read = functools.partial(
        _read_and_choose, table, criteria, columns, oldest, score, size, memory, workers=workers, progress=progress
    )
    if not distinct:
        return read(nothing)
    if criteria.top or score or schema.rows < _KEY_ROWS:
        return read(hidden_rows(table, memory))
    # Most often no key is there twice: rows are read as if it were so, while that is looked into.
    with ThreadPoolExecutor(1, thread_name_prefix="kvtools-keys") as pool:
        looking = pool.submit(hidden_rows, table, memory)
        choice = read(nothing)
    hidden = looking.result()
    return read(hidden) if len(hidden) else choice


def _read_and_choose(
    table: TableReader,
    criteria: Criteria,
    columns: Columns,
    oldest: int | None,
    score: By | None,
    size: int,
    memory: int,
    hidden: Array,
    *,
    workers: int | None,
    progress: Progress | None,
) -> Choice:
    """`choose_rows` where columns are to be read, the rows `hidden` left out before all else."""
    schema = table.schema
    mask = RowMask(schema.part_rows, memory=memory)
    tops = row_numbers(schema.rows, memory=memory).view(np.uint64) if criteria.top else None
    scores = row_numbers(schema.rows, memory=memory).view(np.uint64) if score else None
    starts = np.cumsum([0, *schema.part_rows])
    lock, done = threading.Lock(), 0

    def read(part: int) -> tuple[dict[str, int], int, int]:
        nonlocal done
        failed: dict[str, int] = {}
        non_finite = undated = at = 0
        chunks = table.chunks(columns, part=part, rows=_chunk_rows(table, columns))
        for chunk in chunks if schema.parts > 1 else read_ahead(chunks):
            row = starts[part] + at
            there = np.ones(len(chunk), np.bool_)
            first, last = np.searchsorted(hidden, [row, row + len(chunk)])
            there[hidden[first:last] - row] = False
            kept = there.copy()
            for name, passed in passes(chunk, criteria, oldest).items():
                failed[name] = failed.get(name, 0) + int(np.count_nonzero(there & ~passed))
                kept &= passed
            if chunk.values is not None:
                non_finite += int(np.count_nonzero(rows_not_finite(chunk.values) & kept))
            if oldest is not None and criteria.age is not None and criteria.age.timed:
                undated += int(np.count_nonzero((chunk.versions == 0) & kept))
            mask.put(part, at, kept)
            if tops is not None and criteria.top is not None:
                tops[row : row + len(chunk)] = _scores(chunk, criteria.top.by)
            if scores is not None and score is not None:
                scores[row : row + len(chunk)] = _scores(chunk, score, size)
            at += len(chunk)
            with lock:
                done += len(chunk)
                if progress:
                    progress(schema.name, done, schema.rows)
        return failed, non_finite, undated

    failed: dict[str, int] = {}
    non_finite = undated = 0
    for part_failed, part_non_finite, part_undated in run_all(read, range(schema.parts), workers=workers):
        for name, count in part_failed.items():
            failed[name] = failed.get(name, 0) + count
        non_finite += part_non_finite
        undated += part_undated
    if criteria.top is not None and tops is not None:
        failed["top-k"] = keep_top(table, mask, tops, criteria.top.rows, memory=memory)
    choice = account_of(table, mask, hidden, size)
    return dataclasses.replace(choice, failed=failed, non_finite=non_finite, undated=undated, scores=scores)


def account_of(table: TableReader, mask: RowMask, hidden: Array, size: int) -> Choice:
    """Return the choice that a mask is, with nothing said of why.

    Args:
        table: the table.
        mask: which of its rows are kept.
        hidden: numbers of rows that are none of the table's, as a later one has their key, sorted, int64 [n].
        size: the bytes of a row where it goes.
    """
    schema = table.schema
    lookups, missed = _lookups(table, mask, hidden) if schema.has_freqs else (None, None)
    return Choice(
        table=schema.name,
        rows=schema.rows - len(hidden),
        kept=sum(mask.kept_rows()),
        row_bytes=size,
        failed={},
        non_finite=0,
        undated=0,
        lookups=lookups,
        lookups_missed=missed,
        mask=mask,
        hidden_rows=hidden,
    )


def rows_that_meet(
    tables: Sequence[TableReader],
    where: Where,
    *,
    size: Callable[[TableSchema], int] | None = None,
    memory: int = 1 << 30,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[list[TableReader], list[Choice]]:
    """Return tables without the rows that do not meet a condition, and what was chosen of each.

    Args:
        tables: any tables, which are read once for it.
        where: the condition.
        size: tells the bytes of a row where it goes, by the table's schema; those where it is, if None.
        memory: bytes to stay within.
        workers: how many parts to read at once.
        progress: called as rows are read.

    Raises:
        UsageError: a table has not what the condition is about; told before any row is read.
    """
    criteria = Criteria(where=where)
    for table in tables:
        criteria.columns_of(table)
    choices = [
        choose_rows(
            table,
            criteria,
            size=None if size is None else size(table.schema),
            memory=memory,
            workers=workers,
            progress=progress,
        )
        for table in tables
    ]
    return [MaskedTable(table, choice.mask) for table, choice in zip(tables, choices, strict=True)], choices


def write_chosen(
    checkpoint: Checkpoint,
    choices: Sequence[Choice],
    output: str | os.PathLike[str],
    *,
    to: str | None = None,
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Account:
    """Write a checkpoint without the rows that were cut; other tables and the dense variables are carried along.

    Slots, frequencies and versions stay with their rows.

    Args:
        checkpoint: what the choices were made from.
        choices: from `choose_all`.
        output: where to write.
        to: the dialect to write; that of `checkpoint` if None.
        options: what to ask of the writer.
        workers: how many parts to work on at once.
        progress: called as rows are written.

    Raises:
        OutputError: `output` exists, or cannot be written.
    """
    masks = {choice.table: choice.mask for choice in choices}
    return write_tables(
        changed_tables(checkpoint, list(masks), lambda table: MaskedTable(table, masks[table.schema.name])),
        output,
        to or checkpoint.dialect,
        beside=checkpoint,
        options=options,
        workers=workers,
        progress=progress,
    )


def _columns(table: TableReader, criteria: Criteria, score: By | None) -> Columns:
    return criteria.columns_of(table) | (Criteria(top=Top(0, score)).columns if score else KEYS)


def _chunk_rows(table: TableReader, columns: Columns) -> int:
    return table.chunk_rows(columns) if columns.values or columns.slots else _KEY_ROWS


def hidden_rows(table: TableReader, memory: int) -> Array:
    """Return the numbers of the rows whose key a later row has, counted along all parts, sorted, int64 [n]."""
    keys = (chunk.keys for chunk in table.chunks(KEYS, rows=_KEY_ROWS))
    return repeated_rows(keys, table.rows, memory=memory)


def _lookups(table: TableReader, mask: RowMask, hidden: Array) -> tuple[int, int]:
    """Return the sum of the frequencies of all rows but the hidden ones, and of those of them that are not kept."""
    lookups = kept = row = 0
    for part in range(table.parts):
        at = 0
        for chunk in table.chunks(Columns(freqs=True), part=part, rows=_KEY_ROWS):
            assert chunk.freqs is not None
            freqs = np.maximum(chunk.freqs.astype(np.int64), 0)
            first, last = np.searchsorted(hidden, [row, row + len(chunk)])
            freqs[hidden[first:last] - row] = 0
            lookups += _total(freqs)
            kept += _total(freqs[mask.get(part, at, len(chunk))])
            at += len(chunk)
            row += len(chunk)
    return lookups, lookups - kept


def _total(numbers: Array) -> int:
    """Return the sum of int64 numbers [n] of 0 or more, which may be beyond int64 itself."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())


def check_columns(schema: TableSchema, criteria: Criteria) -> None:
    """Raise what keeps a table from being judged by these criteria, reading none of it; see `choose_rows`."""
    for wanted, there, what in (
        (criteria.columns.freqs, schema.has_freqs, "frequencies"),
        (criteria.columns.versions, schema.has_versions, "versions"),
    ):
        if wanted and not there:
            raise BadInputError(
                f"clipping table '{schema.name}' by {what}: it has none; name the tables that have them with --table"
            )
    if criteria.age is None:
        return
    unit = criteria.version_unit or schema.version_unit
    doing = f"clipping table '{schema.name}' by age"
    if unit == "unknown":
        raise BadInputError(f"{doing}: nothing says what its versions count; say --version-unit seconds, days or steps")
    if (unit == "steps") == criteria.age.timed:
        expected = "a number of steps such as 100000" if unit == "steps" else "a time such as 30d or 12h"
        raise UsageError(f"{doing}: its versions count {unit}, so --older-than is {expected}; see also --version-unit")


def _oldest_version(table: TableReader, criteria: Criteria) -> int | None:
    """Return the smallest version that is not too old, or None if age is no criterion."""
    age = criteria.age
    if age is None:
        return None
    if age.timed:
        now = int(time.time()) if age.now is None else age.now
        # A day is too old when all of it is.
        days = (criteria.version_unit or table.schema.version_unit) == "days"
        return (now - age.amount) // _SECONDS_PER_DAY if days else now - age.amount
    if age.now is not None:
        return age.now - age.amount
    largest = None
    for chunk in table.chunks(Columns(versions=True), rows=_KEY_ROWS):
        if len(chunk) and chunk.versions is not None:
            largest = max(int(chunk.versions.max()), int(chunk.versions[0]) if largest is None else largest)
    return None if largest is None else largest - age.amount


def passes(chunk: Chunk, criteria: Criteria, oldest: int | None) -> dict[str, Array]:
    """Return, by criterion, which rows of a chunk pass it, bool [n]."""
    passes: dict[str, Array] = {}
    if criteria.zeros:
        assert chunk.values is not None
        with np.errstate(invalid="ignore"):  # of a NaN that signals
            passes["zeros"] = any_in_row(chunk.values != 0)  # a NaN is no zero
    for clip in criteria.norms:
        assert chunk.values is not None
        passes["max-abs" if clip.norm == "abs" else "l2"] = clip.keep(chunk.values)
    if criteria.min_freq is not None:
        assert chunk.freqs is not None
        passes["min-freq"] = _at_least(chunk.freqs, criteria.min_freq)
    if oldest is not None:
        assert chunk.versions is not None
        passes["older-than"] = _at_least(chunk.versions, oldest)
        if criteria.age is not None and criteria.age.timed:
            passes["older-than"] |= chunk.versions == 0
    if criteria.keep_keys is not None:
        passes["keys-file"] = criteria.keep_keys.contains(chunk.keys)
    if criteria.drop_keys is not None:
        passes["drop-keys-file"] = ~criteria.drop_keys.contains(chunk.keys)
    if criteria.where is not None:
        passes["where"] = criteria.where.mask(chunk)
    if criteria.drop_where is not None:
        passes["drop-where"] = ~criteria.drop_where.mask(chunk)
    return passes


def _at_least(numbers: Array, least: int) -> Array:
    limits = np.iinfo(numbers.dtype)
    if least > limits.max:
        return np.zeros(len(numbers), np.bool_)
    return np.asarray(numbers >= numbers.dtype.type(max(least, limits.min)))


def _scores(chunk: Chunk, by: By, size: int = 1) -> Scores:
    if by == "freq":
        assert chunk.freqs is not None
        return sortable(chunk.freqs if size == 1 else np.maximum(chunk.freqs.astype(np.float64), 0) / size)
    if by == "version":
        assert chunk.versions is not None
        return sortable(chunk.versions)
    assert chunk.values is not None
    norms = row_norms(chunk.values, by)
    # A row that is not finite is the last to be cut, whatever else is in it.
    return sortable(np.where(rows_not_finite(chunk.values), np.nan, norms))
