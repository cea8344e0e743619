"""Write tables in any dialect: the one way in which kvtools turns tables into files.

`kvtools migrate`, `clip`, `cast`, `reshard`, `merge`, `split` and `rename` all open tables, wrap them in readers that
change them, and come here. A table is written in shards, one per part of the source where the dialect lets rows be
written in any order, else one per part of the target, else one; the same code runs for each, on threads or on Ray.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import operator
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.chunk import KEYS, Array, Chunk, Columns
from kvtools.dialects.detect import dialect_named, dialects, open_checkpoint, writable_dialects
from kvtools.dialects.dialect import Dialect
from kvtools.dialects.interface import Checkpoint, TableReader, Unmatched
from kvtools.dialects.location import locate, prefix_of_file
from kvtools.dialects.object_graph import OBJECT_GRAPH
from kvtools.dialects.options import OpenOptions, Progress
from kvtools.dialects.schema import TableSchema, VariableSchema
from kvtools.dialects.table_files import FOLDER_MARK
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter, WriteOptions
from kvtools.diff import compare_tables
from kvtools.dry_run import DroppingWriter
from kvtools.engine import Engine, run_all, started
from kvtools.errors import BadInputError, CheckFailedError, OutputError, ScratchError, UsageError
from kvtools.fit import Fit, FittedTable, as_rows_of, fit, without_row_extras, written_row_bytes
from kvtools.key_join import count_repeated, repeated_rows
from kvtools.partition import RULES, owners
from kvtools.quantized_rows import QUANTIZED, written_out
from kvtools.remote.paths import local_path, shown_path
from kvtools.replace_output import (
    check_free,
    check_not_in,
    check_reachable,
    check_replaceable,
    folder_above,
    replace_files,
    replace_folder,
)
from kvtools.row_mask import RowMask
from kvtools.shown_tables import counted
from kvtools.status_names import status_tables
from kvtools.table_names import listed, near
from kvtools.table_view import MaskedTable, rows_below
from kvtools.url_password import without_password

EVERY_ROW = "as many rows read and written as the source says it has"
EVERY_ROW_READ = "as many rows read as the source says it has"
KEPT_ROWS = "as many rows read and written as are kept of the source"
_READ = {EVERY_ROW: EVERY_ROW_READ, KEPT_ROWS: "as many rows read as are kept of the source"}
_KEY_ROWS = 1 << 18
_BYTES_PER_KEY = 16
"""What a key takes where all are sorted in memory: its place in what was read and in what is sorted."""
_BY_NAME = (
    "it has no path in the object graph that other tables have: a Saver restores it by its name, a tf.train.Checkpoint"
    " does not"
)
_NO_OBJECT_GRAPH = (
    "the object graph of tf.train.Checkpoint does not go along: what is made of this restores its variables by their"
    " names"
)
_LARGEST_CHUNK = 16
"""A chunk that is cut up for many parts is larger than others by up to this, so that each gets a run worth writing."""


@dataclass(frozen=True)
class TableAccount:
    """What became of one table; `repeated_keys` are the rows whose key stands again in a later row."""

    name: str
    rows_read: int
    rows_written: int
    parts: int
    bytes: int
    part_rows: tuple[int, ...] = ()
    losses: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    repeated_keys: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Account:
    """What a migration did: `losses` say what of the checkpoint, beside its tables, the target could not hold.

    `notes` say what else does not go along, as it is of TensorFlow's objects and no rows: it is lossless all the same.
    """

    output: str
    dialect: str
    tables: tuple[TableAccount, ...]
    variables: int
    losses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def lossless(self) -> bool:
        """Whether nothing was left out."""
        return not self.losses and not any(table.losses for table in self.tables)


@dataclass(frozen=True)
class CopyTask:
    """One shard of work: parts of a table to read, and where their rows go.

    `starts[source part][target part]` is the first row that the source part fills of the target part. With `route`
    the keys say to which part a row goes; without, all rows of a source part go to the one target part listed.
    `tell_keys` asks for the keys, too.
    """

    reader: TableReader
    fit: Fit
    shard: ShardWriter
    starts: Mapping[int, Mapping[int, int]]
    route: str | None
    tell_keys: bool = False


@dataclass(frozen=True)
class CopyResult:
    """What a shard of work did."""

    table: str
    rows: int
    cut_freqs: int
    written: Any = field(repr=False)
    keys: list[Array] = field(default_factory=list, repr=False)


def write_tables(
    tables: Sequence[TableReader],
    output: str | os.PathLike[str],
    to: str | Dialect,
    *,
    beside: Checkpoint | None = None,
    parts: int | Mapping[str, int] | None = None,
    options: WriteOptions | None = None,
    workers: int | None = None,
    engine: Engine = "local",
    progress: Progress | None = None,
    strict: bool = False,
    verify: bool = False,
    keys_once: bool = False,
) -> Account:
    """Write `tables` to `output` in dialect `to`; the output appears whole or not at all.

    Args:
        tables: any readers, with different names.
        output: a prefix, file, folder or URL, as the dialect makes.
        to: the dialect, or its name.
        beside: the checkpoint whose dense variables are written too, where the dialect holds them.
        parts: how many parts each table gets, or the tables of these names; as many as it has if None.
        options: what to ask of the writer; `options.force` replaces an output that is there, `options.dry_run` reads
            and routes every row, and writes nothing.
        workers: shards at once; the processors there are if None.
        engine: where the shards run; see `kvtools.engine`.
        progress: called as rows are written.
        strict: write nothing if anything would be lost.
        verify: open what was written, before it takes its place, and compare every row with the source by key.
        keys_once: no key stands twice in a table: the account counts none.

    Raises:
        CheckFailedError: with `strict`, the dialect cannot hold everything, or with `verify`, what was written is not
            what the source has; the message says what. Nothing is at `output` then, unless it is a URL.
        UsageError: the dialect cannot be written, two tables have one name, or a number makes no sense.
        BadInputError: a table has something that the dialect cannot hold and that is no column to leave out.
        CorruptFileError: the source's data is damaged.
        OutputError: `output` exists, or cannot be written.

    Example:
        ```python
        checkpoint = kvtools.open("model.ckpt-100")
        account = kvtools.write_tables(checkpoint.select([]), "tables.h5", "hdf5", beside=checkpoint)
        ```
    """
    options = options or WriteOptions()
    tables = _readers(tables, output)
    output = output_of(output, to, [beside] if beside else [])
    tables = [_writable(output, to).completed(table) for table in tables]
    plan = _plan(tables, output, to, beside, parts, options)
    dialect = plan.dialect
    assert dialect.write is not None
    _check_compression(dialect, options)
    check_output(output, dialect, force=options.force)
    _check_room(output, dialect, plan.fits)
    if strict:
        _check_lossless(plan.account)

    def fill(writer: CheckpointWriter) -> tuple[TableAccount, ...]:
        writer.plan([fitted.schema for fitted in plan.fits])
        accounts = tuple(
            _write_table(writer, table, fitted, dialect, options.memory, workers, engine, progress, keys_once=keys_once)
            for table, fitted in zip(tables, plan.fits, strict=True)
        )
        for variable in plan.variables:
            assert beside is not None
            writer.variable(variable, beside.read_variable(variable.name))
        return accounts

    if options.dry_run:
        renamed = _check_beginnings(plan, output, options, verify)
        nothing = DroppingWriter(keys_once=dialect.holds.keys_once, memory=options.memory)
        with started(engine), nothing as nowhere:
            account = dataclasses.replace(plan.account, tables=tuple(map(_only_read, fill(nowhere), renamed)))
        if strict:
            _check_lossless(account)
        return account
    with started(engine), _staging(str(output), dialect, options) as staging:
        with dialect.write(staging, options) as writer:
            _check_comparable(output, writer, options, verify)
            accounts = fill(writer)
        account = dataclasses.replace(plan.account, tables=accounts)
        if strict:
            _check_lossless(account)
        written = _Written(account.output, staging, dialect, options.memory)
        if dialect.output_kind(str(output)) != "url":
            account = _look(account, written, plan.fits)
        if verify:
            account = _verify(account, written, dialect, tables, plan.fits, options, workers, progress)
    return account


def _readers(tables: Iterable[TableReader], output: str | os.PathLike[str]) -> list[TableReader]:
    """Return tables as a list; raises `UsageError` where they are something else: a checkpoint, or one table alone."""
    found = None if isinstance(tables, TableReader | Mapping | Checkpoint) else list(tables)
    if found is None or not all(isinstance(table, TableReader) for table in found):
        what = tables if found is None else next(one for one in found if not isinstance(one, TableReader))
        raise UsageError(
            f"writing '{output}': got {type(what).__name__}, expected a list of tables; those of a checkpoint are"
            " checkpoint.select([])"
        )
    return found


def _check_compression(dialect: Dialect, options: WriteOptions) -> None:
    level = options.compression_level
    if not dialect.compresses and (options.compression not in (None, "none") or level is not None):
        got = f"--compression-level {level}" if level is not None else f"--compression {options.compression}"
        raise UsageError(f"writing {dialect.name}: got {got}, and it compresses nothing; leave the option out")


def _check_comparable(
    output: str | os.PathLike[str], writer: CheckpointWriter, options: WriteOptions, verify: bool
) -> None:
    if verify and not writer.exact:
        raise UsageError(
            f"writing '{output}': got --verify, which compares every number, and --compression"
            f" {options.compression}, which rounds; leave one of them out"
        )


def _check_beginnings(
    plan: _Plan, output: str | os.PathLike[str], options: WriteOptions, verify: bool
) -> list[list[str]]:
    """Raise what the dialect refuses, such as a name or a type, by letting it write all of it without rows.

    Return what goes by another name there, of each table.
    """
    dialect = plan.dialect
    assert dialect.write is not None
    if dialect.output_kind(str(output)) == "url":
        return [[] for _ in plan.fits]  # nothing may be begun there
    schemas = [
        dataclasses.replace(fitted.schema, part_rows=(0,) * fitted.schema.parts, extras=()) for fitted in plan.fits
    ]
    with _staging(str(output), dialect, options) as nowhere:
        with dialect.write(nowhere, options) as writer:
            _check_comparable(output, writer, options, verify)
            writer.plan(schemas)
            for schema in schemas:
                writer.table(schema, lambda: iter(())).close()
            for variable in plan.variables[: plan.account.variables]:  # without the bookkeeping
                writer.variable(dataclasses.replace(variable, shape=(0, *variable.shape[1:]), bytes=0), [])
        written = _Written(plan.account.output, nowhere, dialect, options.memory)
        return [_renamed_without_rows(schema, written, schemas) for schema in schemas]


def _renamed_without_rows(schema: TableSchema, written: _Written, others: Sequence[TableSchema]) -> list[str]:
    """Return what of a table that was written without rows goes by another name there."""
    name, checkpoint = written.find(schema)
    if name is not None:
        return _renamed(schema, checkpoint.tables[name], name)
    # What is not there may be told apart by its rows or by the arrays beside them.
    if schema.name not in checkpoint.broken and not any(schema.name.startswith(f"{other.name}/") for other in others):
        written.table(schema)
    return []


def _only_read(account: TableAccount, renamed: Sequence[str]) -> TableAccount:
    """Return what is said of a table of which nothing was written."""
    checks = tuple(_READ.get(check, check) for check in account.checks)
    return dataclasses.replace(account, checks=checks, changes=(*account.changes, *renamed))


class _Written:
    """What was written at `path`, opened to be read: once for all tables that are opened alike."""

    def __init__(self, output: str, path: str, dialect: Dialect, memory: int) -> None:
        self._output = output
        self._path = path
        self._dialect = dialect
        self._memory = memory
        self._opened: dict[OpenOptions, tuple[Checkpoint, dict[str, list[str]]]] = {}

    def table(self, schema: TableSchema) -> tuple[TableReader, str]:
        """Return what was written of a table, and the name that it goes by there.

        Raises:
            BadInputError: the dialect reads it back as something else.
        """
        name, checkpoint = self.find(schema)
        if name is None:
            there = checkpoint.broken.get(schema.name)
            reason = f"it cannot be read back: {there}" if there else "it would read it back under another name"
            undone = "delete it there" if self._dialect.output_kind(self._output) == "url" else "nothing was written"
            advice = "write another dialect" if there else "rename it first, see `kvtools rename`"
            raise BadInputError(
                f"writing table '{schema.name}' of '{self._output}' as {self._dialect.name}: {reason}; {undone},"
                f" {advice}"
            )
        return checkpoint.tables[name], name

    def find(self, schema: TableSchema) -> tuple[str | None, Checkpoint]:
        """Return the name that a table goes by there, None if it is not found, and the checkpoint."""
        told = OpenOptions(
            self._dialect.name,
            schema.key_dtype,
            schema.value_dtype,
            None if schema.rows or self._dialect.holds.empty_dim else schema.dim,
            self._memory,
            lenient=True,
            increments=True,
        )
        checkpoint, flattened = self._open(told)
        alike = flattened.get(schema.name.replace("/", "_"), [])
        return schema.name if schema.name in checkpoint.tables else alike[0] if len(alike) == 1 else None, checkpoint

    def _open(self, told: OpenOptions) -> tuple[Checkpoint, dict[str, list[str]]]:
        if told not in self._opened:
            checkpoint = open_checkpoint(self._path, told)
            flattened: dict[str, list[str]] = {}  # in names of files, engines write "_" for "/"
            for name in checkpoint.tables:
                flattened.setdefault(name.replace("/", "_"), []).append(name)
            self._opened[told] = checkpoint, flattened
        return self._opened[told]


def _look(account: Account, written: _Written, fits: Sequence[Fit]) -> Account:
    """Open what was written, reading no rows; return the account that says what goes by another name there."""
    accounts = []
    for fitted, said in zip(fits, account.tables, strict=True):
        table, name = written.table(fitted.schema)
        if table.rows != said.rows_written:
            raise CheckFailedError(
                f"writing table '{fitted.schema.name}' of '{account.output}': it would be read back with {table.rows}"
                f" rows, expected {said.rows_written}; nothing was written, report this"
            )
        changes = (*said.changes, *_renamed(fitted.schema, table, name))
        accounts.append(dataclasses.replace(said, changes=changes))
    return dataclasses.replace(account, tables=tuple(accounts))


def _renamed(schema: TableSchema, table: TableReader, name: str) -> list[str]:
    """Return what of a table of this schema, which was opened again under `name`, goes by another name there."""
    renamed = [] if name == schema.name else [f"its name is '{name}' there: the dialect has no '/' in names"]
    others = _slots_not_found(table, schema)
    if others:
        renamed.append(
            f"slots {', '.join(others)} go by other names there, or are tables of their own: the dialect tells slots by"
            " their names, see `kvtools rename`"
        )
    return renamed


def _slots_not_found(table: TableReader, schema: TableSchema) -> list[str]:
    """Return the slots that were written and that the dialect does not take for slots of the table when it reads it."""
    there = set(table.slots)
    return [slot.name for slot in schema.slots if slot.name not in there]


def _verify(
    account: Account,
    opened: _Written,
    dialect: Dialect,
    tables: Sequence[TableReader],
    fits: Sequence[Fit],
    options: WriteOptions,
    workers: int | None,
    progress: Progress | None,
) -> Account:
    """Compare what was written with the source, every row; return the account that says so."""
    where = "delete it" if dialect.output_kind(account.output) == "url" else "nothing was put there"
    accounts = []
    for table, fitted, said in zip(tables, fits, account.tables, strict=True):
        name = fitted.schema.name

        def advance(_: str, done: int, total: int, name: str = name) -> None:
            if progress:
                progress(f"{name} again", done, total)

        written, _ = opened.table(fitted.schema)
        others = _slots_not_found(written, fitted.schema)
        if others:
            raise CheckFailedError(
                f"verifying table '{name}' of '{account.output}': slots {', '.join(others)} would not be read back as"
                f" slots of it, but by other names or as tables of their own, so that nothing compares them; {where}:"
                " rename them first, see `kvtools rename`, leave --verify out, or write another dialect"
            )
        source: TableReader = FittedTable(table, fitted)
        if said.rows_written < said.rows_read:
            source = _last_rows(source, options.memory)
        diff = compare_tables(written, source, memory=options.memory, workers=workers, progress=advance)
        # A layout may have counters always, which are zeros where the source has none.
        more = [column for column in diff.only_in_a if column not in ("freqs", "versions")]
        if not diff.same_rows or diff.only_in_b or diff.extras or more:
            found = [
                f"{diff.added} rows missing" if diff.added else "",
                f"{diff.removed} rows too many" if diff.removed else "",
                f"{diff.changed} rows differ" if diff.changed else "",
                f"columns {', '.join(diff.only_in_b)} missing" if diff.only_in_b else "",
                f"columns {', '.join(more)} too many" if more else "",
                f"{', '.join(diff.extras)} differ" if diff.extras else "",
            ]
            raise CheckFailedError(
                f"verifying table '{name}' of '{account.output}': {', '.join(filter(None, found))}, compared with the"
                f" source; {where}: check the disk and report this if it happens again"
            )
        check = "every row read again and compared with the source, by key"
        accounts.append(dataclasses.replace(said, checks=(*said.checks, check)))
    return dataclasses.replace(account, tables=tuple(accounts))


def _last_rows(table: TableReader, memory: int) -> TableReader:
    """Return a table without the rows whose key stands again in a later one."""
    mask = RowMask(table.schema.part_rows, memory=memory, kept=True)
    mask.clear(repeated_rows((chunk.keys for chunk in table.chunks(KEYS, rows=_KEY_ROWS)), table.rows, memory=memory))
    return MaskedTable(table, mask)


@dataclass(frozen=True)
class _Plan:
    """How tables become an output; `variables` are the dense variables to write, bookkeeping included."""

    dialect: Dialect
    fits: tuple[Fit, ...]
    variables: tuple[VariableSchema, ...]
    account: Account


def _plan(
    tables: Sequence[TableReader],
    output: str | os.PathLike[str],
    to: str | Dialect,
    beside: Checkpoint | None,
    parts: int | Mapping[str, int] | None,
    options: WriteOptions,
) -> _Plan:
    dialect = _writable(output, to)
    names = [table.schema.name for table in tables]
    if parts is None or isinstance(parts, Mapping):
        wanted = dict(parts or {})
    else:
        wanted = dict.fromkeys(names, operator.index(parts))
    unknown = next((name for name in (*wanted, *options.rows_as) if name not in names), None)
    if unknown is not None:
        raise UsageError(
            f"writing '{output}': got something for table '{unknown}', expected one of those written:"
            f" {listed(names)}{near(unknown, names)}"
        )
    too_few = next((number for number in wanted.values() if number < 1), None)
    if too_few is not None:
        raise UsageError(f"writing '{output}': got {too_few} parts, expected 1 or more")
    counts = collections.Counter(table.schema.name for table in tables)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"writing '{output}': two tables are called '{twice}'; rename one, see `kvtools rename`")
    if dialect.output == "file_or_folder" and dialect.output_kind(str(output)) == "file" and len(tables) != 1:
        raise UsageError(
            f"writing '{output}': got {len(tables)} tables, expected one in a single {dialect.name} file; choose one"
            f" with --table, or name a folder, one that does not end in {' or '.join(dialect.suffixes)}"
        )
    fit_schema = fit_among(counts, dialect)
    fits = tuple(
        _partitioned(fit_schema(table.schema, dialect, parts=wanted.get(table.schema.name)), options)
        for table in tables
    )
    kept = dialect.holds.metadata
    if kept and "object_path" in kept and any("object_path" in fitted.schema.metadata for fitted in fits):
        fits = tuple(
            fitted
            if "object_path" in fitted.schema.metadata
            else dataclasses.replace(fitted, changes=(*fitted.changes, _BY_NAME))
            for fitted in fits
        )
    fits = tuple(_told_of_rows(fitted, dialect, options) for fitted in fits)
    losses: list[str] = []
    variables = beside.variables if beside else ()
    if variables and not dialect.holds.variables:
        size = sum(variable.bytes for variable in variables)
        losses.append(f"{counted(len(variables), 'dense variable')}, {size} bytes: the dialect holds tables only")
        variables = ()
    goes_along = beside is not None and beside.dialect == dialect.name and dialect.holds.variables
    bookkeeping = beside.bookkeeping if beside and goes_along else ()
    has_graph = beside is not None and any(variable.name == OBJECT_GRAPH for variable in beside.bookkeeping)
    notes = (_NO_OBJECT_GRAPH,) if has_graph and not bookkeeping else ()
    accounts = tuple(
        TableAccount(
            name=fitted.source.name,
            rows_read=0,
            rows_written=fitted.schema.rows,
            parts=fitted.schema.parts,
            bytes=fitted.schema.bytes,
            losses=fitted.losses,
            changes=fitted.changes,
        )
        for fitted in fits
    )
    shown = without_password(shown_path(output))
    account = Account(shown, dialect.name, accounts, len(variables), tuple(losses), notes)
    return _Plan(dialect, fits, (*variables, *bookkeeping), account)


def fit_among(tables: Iterable[str], dialect: Dialect) -> Callable[..., Fit]:
    """Return `kvtools.fit.fit`, or what takes its place where some tables of these names are counters of others."""
    return _without_counters if dialect.holds.status_tables and status_tables(tables) else fit


def _told_of_rows(fitted: Fit, dialect: Dialect, options: WriteOptions) -> Fit:
    """Say of rows that become int8 or int4 what they lose, and of those that are such that they will not be, where
    nobody asked for it."""
    packed = options.compression if options.compression in QUANTIZED else None
    rows_as = options.rows_as.get(fitted.source.name, packed)
    was = fitted.source.rows_as
    if was is None or rows_as is not None:
        return as_rows_of(fitted, dialect, rows_as)
    change = written_out(was)
    if dialect.name == "snapshot":
        change += f"; `kvtools cast --dtype {was}` makes such of them again, rounded once more"
    return dataclasses.replace(fitted, changes=(*fitted.changes, change))


def _without_counters(source: TableSchema, dialect: Dialect, parts: int | None = None) -> Fit:
    """As `fit`, of a table among others that are status: what it counts itself, nobody would look for."""
    fitted = fit(dataclasses.replace(source, freq_dtype=None, version_dtype=None), dialect, parts=parts)
    if not source.has_freqs and not source.has_versions:
        return fitted
    change = "what it counts itself is not written: the counters are the tables whose names begin with 'status/'"
    return dataclasses.replace(fitted, changes=(*fitted.changes, change))


def _check_lossless(account: Account) -> None:
    """Raise `CheckFailedError` saying what is lost, if anything is."""
    losses = [*account.losses, *(f"table '{table.name}': {loss}" for table in account.tables for loss in table.losses)]
    if losses:
        raise CheckFailedError(
            f"writing '{account.output}' as {account.dialect}: this would be lost: {'; '.join(losses)}; nothing was"
            " written, leave --strict out or write another dialect"
        )


def _writable(output: str | os.PathLike[str], to: str | Dialect) -> Dialect:
    dialect = dialect_named(to) if isinstance(to, str) else to
    if dialect.write is None:
        raise UsageError(
            f"writing '{output}': kvtools reads {dialect.name} and does not write it; choose --to from"
            f" {', '.join(writable_dialects())}"
        )
    return dialect


def output_of(
    output: str | os.PathLike[str], to: str | Dialect, sources: Sequence[Checkpoint]
) -> str | os.PathLike[str]:
    """Return what `output` is to be: as a checkpoint may be named by one of its files, or by the folder that it is in,
    that is its prefix.

    A folder by which none of `sources` was named stays one, which a bundle does not replace: of several bundles in it
    nobody named any.

    Raises:
        UsageError: `output` is named as a folder, where dialect `to` writes files that share a name.
        OutputError: nobody can tell what is there; or `output` is in a folder of tables of `sources`, of which it would
            become a part.
    """
    output = local_path(output)
    dialect = _writable(output, to)
    kind = dialect.output_kind(str(output))
    for source in sources if kind != "url" else ():
        of_source = dialects().get(source.dialect)
        if of_source is not None and of_source.output in ("folder", "file_or_folder"):
            check_not_in(Path(output).absolute(), source.path)
    if "://" not in str(output):
        check_reachable(Path(f"{output}.index" if kind == "prefix" else output))
    if kind in ("prefix", "file") and str(output).endswith("/") and not Path(output).exists():
        raise UsageError(
            f"writing '{output}': that names a folder, and {dialect.name} is written to"
            f" {'files that share a name' if kind == 'prefix' else 'one file'}; name them in it, '{output}NAME'"
        )
    if kind != "prefix" or Path(f"{output}.index").exists():
        return output
    if not Path(output).is_dir():
        return prefix_of_file(Path(output)) or output
    try:
        prefix = locate(Path(output)).prefix
    except BadInputError:
        return output
    return prefix if any(Path(source.path).absolute() == prefix.absolute() for source in sources) else output


def check_output(output: str | os.PathLike[str], to: str | Dialect, *, force: bool) -> None:
    """Raise what is known beforehand to keep dialect `to` from being written to `output`.

    Raises:
        UsageError: the dialect cannot be written.
        OutputError: something is there that may not be replaced.
    """
    dialect = _writable(output, to)
    kind = dialect.output_kind(str(output))
    if ("://" in str(output)) != (kind == "url"):
        expected = "a URL" if kind == "url" else "a path"
        raise UsageError(f"writing '{output}': {dialect.name} is written to {expected}; see `kvtools dialects`")
    if kind in ("prefix", "file"):
        check_free(Path(output).absolute(), force=force)
    elif kind == "folder":
        check_replaceable(Path(output).absolute(), mark=FOLDER_MARK, force=force)


def copy_shard(task: CopyTask, progress: Progress | None = None) -> CopyResult:
    """Read the parts of a task and write their rows where they belong."""
    schema = task.fit.schema
    columns = Columns(values=True, slots=bool(schema.slots), freqs=schema.has_freqs, versions=schema.has_versions)
    total = cut = 0
    keys: list[Array] = []
    for part, starts in task.starts.items():
        at = dict(starts)
        rows = task.reader.chunk_rows(columns)
        if task.route is not None:
            rows *= min(max(1, schema.parts // 8), _LARGEST_CHUNK)
        for chunk in task.reader.chunks(columns, part=part, rows=rows):
            total += len(chunk)
            if task.tell_keys:
                keys.append(chunk.keys.copy())
            cut += task.fit.cut_freqs(chunk)
            chunk = task.fit.convert(chunk)
            _check_columns(chunk, schema)
            for target, piece in _routed(chunk, schema.parts, task.route, at):
                task.shard.write(target, at[target], piece)
                at[target] += len(piece)
            if progress:
                progress(schema.name, len(chunk), task.fit.source.rows)
    return CopyResult(schema.name, total, cut, task.shard.finish(), keys)


def _check_columns(chunk: Chunk, schema: TableSchema) -> None:
    """Raise `BadInputError` where columns are not of the rows that there are keys of: a reader may be anybody's."""
    columns = {"values": (chunk.values, schema.dim)}
    columns |= {f"slot '{slot.name}'": (chunk.slots.get(slot.name), slot.width) for slot in schema.slots}
    for name, (column, width) in columns.items():
        if column is None or column.shape != (len(chunk), width):
            got = "none" if column is None else list(column.shape)
            raise BadInputError(
                f"reading table '{schema.name}': got {name} {got} with {len(chunk)} keys, expected"
                f" {[len(chunk), width]}"
            )


def _routed(chunk: Chunk, parts: int, route: str | None, at: Mapping[int, int]) -> Iterator[tuple[int, Chunk]]:
    """Yield each target part that rows of a chunk go to, with these rows."""
    if route is None:
        yield next(iter(at)), chunk
        return
    owner = owners(chunk.keys, parts, route)
    order = np.argsort(owner, kind="stable")
    ordered, by_part = owner[order], chunk.take(order)
    # Of many parts most get nothing from a chunk: nothing here goes over all of them.
    begins = np.flatnonzero(np.diff(ordered, prepend=-1)).tolist()
    for start, end in zip(begins, [*begins[1:], len(ordered)], strict=True):
        yield int(ordered[start]), by_part.take(slice(start, end))


def _partitioned(fitted: Fit, options: WriteOptions) -> Fit:
    """Take the rule that the user asked for, where the dialect's parts own keys."""
    if options.partition is None or fitted.schema.partition is None:
        return fitted
    if options.partition not in RULES:
        raise UsageError(
            f"writing table '{fitted.source.name}': there is no partition rule '{options.partition}'; expected one of"
            f" {', '.join(RULES)}"
        )
    return dataclasses.replace(fitted, schema=dataclasses.replace(fitted.schema, partition=options.partition))


def _write_table(
    writer: CheckpointWriter,
    table: TableReader,
    fitted: Fit,
    dialect: Dialect,
    memory: int,
    workers: int | None,
    engine: Engine,
    progress: Progress | None,
    *,
    keys_once: bool,
) -> TableAccount:
    source, parts = table.schema, fitted.schema.parts
    route = fitted.schema.partition or source.partition or "floor_mod"
    # Where parts own keys, a row that stood in the wrong one goes to its own; elsewhere rows stay where they are.
    if parts > 1 and (dialect.holds.partition is not None or parts != source.parts):
        counts = _count_rows(table, fitted, parts, route, workers)
    else:
        counts = [
            {part if parts == source.parts else 0: rows} if rows else {} for part, rows in enumerate(source.part_rows)
        ]
    straight = all(len(of_part) <= 1 for of_part in counts)
    if not straight:
        fitted = without_row_extras(fitted)
    filled = [0] * parts
    targets: dict[int, dict[int, int]] = {}
    for part, of_part in enumerate(counts):
        targets[part] = {target: filled[target] for target in of_part}
        for target, rows in of_part.items():
            filled[target] += rows
        if not of_part:  # an empty part is read too: its checksums are checked
            targets[part][min(part, parts - 1)] = 0
    fitted = dataclasses.replace(fitted, schema=dataclasses.replace(fitted.schema, part_rows=tuple(filled)))

    def keys() -> Iterator[tuple[int, Array]]:
        for part, where in targets.items():
            for chunk in table.chunks(KEYS, rows=_KEY_ROWS, part=part):
                converted = fitted.keys(chunk.keys)
                for target, piece in _routed(Chunk(converted), parts, None if straight else route, where):
                    yield target, piece.keys

    output = writer.table(fitted.schema, keys)
    if engine != "local" and not output.distributable:
        raise UsageError(
            f"writing table '{source.name}' as {dialect.name} on {engine}: this dialect is written by one process;"
            " leave --engine out, or write another dialect"
        )
    look = not (keys_once or dialect.holds.keys_once or _holds_keys_once(source.dialect))
    in_memory = source.rows * _BYTES_PER_KEY <= memory
    tasks = [
        CopyTask(table, fitted, output.shard(), group, None if straight else route, tell_keys=look and in_memory)
        for group in _groups(targets, output, straight)
    ]
    rows = cut = 0
    told: list[Array] = []
    for result in _run(tasks, source.name, source.rows, workers, engine, progress):
        rows += result.rows
        cut += result.cut_freqs
        told += result.keys
        output.absorb(result.written)
    if rows != source.rows:
        raise BadInputError(
            f"reading table '{source.name}': got {rows} rows, expected {source.rows}; it changed while it was read"
        )
    for extra in fitted.schema.extras:
        output.extra(extra.name, fitted.extra(extra.name, table))
    output.close()
    repeated: int = output.duplicates
    notes: tuple[str, ...] = ()
    if look:
        repeated, notes = _repeated(told if in_memory else table.chunks(KEYS, rows=_KEY_ROWS), source.rows, memory)
    unmatched = table.unmatched() if fitted.schema.slots else Unmatched()
    losses, checks = (
        [*fitted.losses, *output.losses, *unmatched.left_out],
        [EVERY_ROW if rows_below(table) == rows else KEPT_ROWS],
    )
    if cut:
        dtype = str(fitted.schema.freq_dtype)
        losses.append(f"{cut} frequencies outside {dtype} were written as the nearest that it has")
    if source.checksums:
        checks.append(f"{source.checksums} of every column read")
    return TableAccount(
        name=source.name,
        rows_read=rows,
        rows_written=fitted.schema.rows - output.duplicates,
        parts=parts,
        bytes=(fitted.schema.rows - output.duplicates) * written_row_bytes(fitted.schema, dialect),
        part_rows=fitted.schema.part_rows,
        losses=tuple(losses),
        changes=(*fitted.changes, *unmatched.made_up),
        checks=tuple(checks),
        repeated_keys=repeated,
        notes=notes,
    )


def _holds_keys_once(dialect: str) -> bool:
    return dialect in dialects() and dialect_named(dialect).holds.keys_once


def _repeated(keys: Iterable[Array] | Iterable[Chunk], rows: int, memory: int) -> tuple[int, tuple[str, ...]]:
    """Count the rows whose key stands again in a later row, all of which were written, and say so."""
    try:
        count = count_repeated((k.keys if isinstance(k, Chunk) else k for k in keys), rows, memory=memory)
    except ScratchError as error:  # the rows are written: no reason to give them up
        return 0, (f"whether a key stands in several rows is not known: {error}",)
    if not count:
        return 0, ()
    whose = "1 row whose key stands" if count == 1 else f"{count:,} rows whose keys stand"
    return count, (
        f"{whose} again in a later row: all go along, and most readers take the last one; `kvtools repair` keeps one,"
        " by a rule that you choose",
    )


def _groups(
    targets: Mapping[int, Mapping[int, int]], output: TableWriter, straight: bool
) -> list[dict[int, Mapping[int, int]]]:
    """Cut the source's parts into shards of work that this writer can take at once."""
    if output.random_access:
        return [{part: where} for part, where in targets.items()]
    if not straight:
        return [dict(targets)]
    by_target: dict[int, dict[int, Mapping[int, int]]] = {}
    for part, where in targets.items():
        by_target.setdefault(next(iter(where)), {})[part] = where
    return list(by_target.values())


class _StoppedError(Exception):
    """Ends a shard of work whose result nobody waits for any more."""


def _run(
    tasks: Sequence[CopyTask],
    table: str,
    total: int,
    workers: int | None,
    engine: Engine,
    progress: Progress | None,
) -> Iterator[CopyResult]:
    done, lock, stop = 0, threading.Lock(), threading.Event()

    def advance(name: str, rows: int, _: int) -> None:
        nonlocal done
        if stop.is_set():
            raise _StoppedError
        with lock:
            done += rows
            if progress:
                progress(name, done, total)

    if engine == "local":
        yield from run_all(functools.partial(copy_shard, progress=advance), tasks, workers=workers, stop=stop)
        return
    for result in run_all(copy_shard, tasks, workers=workers, engine=engine):
        advance(table, result.rows, total)
        yield result


def _count_rows(table: TableReader, fitted: Fit, parts: int, route: str, workers: int | None) -> list[dict[int, int]]:
    """Count how many rows of each source part belong to which target parts, ascending; those without are left out."""

    def count(part: int) -> dict[int, int]:
        counts: collections.Counter[int] = collections.Counter()
        for chunk in table.chunks(KEYS, rows=_KEY_ROWS, part=part):
            owner = owners(fitted.keys(chunk.keys), parts, route)
            if parts <= len(chunk):  # faster, and no more than there are rows
                every = np.bincount(owner, minlength=parts)
                targets = np.flatnonzero(every)
                rows = every[targets]
            else:
                targets, rows = np.unique(owner, return_counts=True)
            counts.update(dict(zip(targets.tolist(), rows.tolist(), strict=True)))
        return dict(sorted(counts.items()))

    return list(run_all(count, range(table.parts), workers=workers))


@contextlib.contextmanager
def _staging(output: str, dialect: Dialect, options: WriteOptions) -> Iterator[str]:
    kind = dialect.output_kind(output)
    if kind == "url":
        yield output
    elif kind == "folder":
        with replace_folder(Path(output), mark=FOLDER_MARK, force=options.force, dry_run=options.dry_run) as folder:
            (folder / FOLDER_MARK).write_text(f"{dialect.name}\n")
            yield str(folder)
    else:
        with replace_files(Path(output), force=options.force, dry_run=options.dry_run) as path:
            yield str(path)


def _check_room(output: str | os.PathLike[str], dialect: Dialect, fits: Sequence[Fit]) -> None:
    if dialect.output != "prefix":
        return  # compressed, or elsewhere: nobody knows how much it will be
    needed = sum(fitted.schema.bytes for fitted in fits)
    free = shutil.disk_usage(folder_above(Path(output))).free
    if free < needed:
        raise OutputError(
            f"writing '{output}': {needed} bytes are needed and {free} are free; make room or name another place"
        )


__all__ = ["Account", "TableAccount", "VariableSchema", "check_output", "output_of", "write_tables"]
