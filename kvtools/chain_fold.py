"""A chain as one checkpoint, and increments applied to a checkpoint: row for row what training would have saved whole.

Which rows count is decided by a join of the keys alone, in bounded memory (`kvtools.merge`): an increment removes keys,
then puts in its rows, and the last row of a key stays. Rows are then streamed from the members that they lie in. The
join is made when a table is first asked for, so that opening a chain of many tables costs no more than its indexes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from kvtools import chain
from kvtools.chain_place import ChainPlace, chain_at, is_chain
from kvtools.chain_reader import is_increment, open_member, removed_keys
from kvtools.dialects.bundle import Bundle
from kvtools.dialects.chunk import KEYS, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, Finding, Origin, TableReader, Unmatched
from kvtools.dialects.location import locate
from kvtools.dialects.options import OpenOptions, Progress
from kvtools.dialects.schema import (
    ROW_EXTRAS,
    ExtraSchema,
    TableSchema,
    VariableSchema,
    are_initial_values,
    numpy_dtype,
    part_of_row_extra,
    row_bytes,
)
from kvtools.dialects.tfplugin import NAME as TFPLUGIN
from kvtools.dialects.tfplugin import PART_RECORDS, part_prefix, part_records
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, KvtoolsError, UsageError
from kvtools.key_join import row_numbers
from kvtools.merge import CHANGED_KEYS, Merged, MergedTable, merge_tables
from kvtools.migrate import Account, output_of, write_tables
from kvtools.partition import owners

_SCORES = "eviction_scores_"
_FILTERS = "admission_filter_"
_PENDING = ("filtered_keys", "filtered_freqs", "filtered_versions")
_KEY_ROWS = 1 << 18
_CHANGED_VALUES = "-sparse_incr_values"
_ATTEMPTS = 5
_STEP = re.compile(r"(\d+)(?:\.delta)?$")


class FoldedTable(TableReader):
    """A table of a full checkpoint and the increments after it, as it would be in a full one.

    Args:
        sources: the table in the full checkpoint, and in each increment that has it, in their order.
        paths: where each is, to be told.
        memory: bytes to stay within; what needs more goes to temporary files.
        exact: keep all that each part records of itself, to be written as training would write it.
    """

    def __init__(
        self, sources: Sequence[TableReader], paths: Sequence[str], *, memory: int, exact: bool = False
    ) -> None:
        self.sources = tuple(sources)
        self._paths = tuple(paths)
        self._memory = memory
        self._exact = exact
        self._folding = threading.Lock()
        self._progress: Progress | None = None
        self._result: tuple[MergedTable, Merged] | None = None

    def fold(self, progress: Progress | None = None) -> Merged:
        """Join the keys, unless that was done, and return what became of the rows."""
        self._progress = progress
        return self._joined[1]

    @property
    def _joined(self) -> tuple[MergedTable, Merged]:
        with self._folding:
            if self._result is None:
                sources = [_Removing(source) if is_increment(source) else source for source in self.sources]
                name = self.sources[0].schema.name
                labels = [f"'{path}'" for path in self._paths]
                table, merged = merge_tables(
                    name, sources, labels, memory=self._memory, progress=self._progress, wait=False
                )
                self._result = table, dataclasses.replace(merged, sources=self._paths)
            return self._result

    @property
    def _merged(self) -> MergedTable:
        return self._joined[0]

    @cached_property
    def _same_parts(self) -> bool:
        return len({source.parts for source in self.sources}) == 1

    @cached_property
    def schema(self) -> TableSchema:  # type: ignore[override]
        """What the table holds after the last increment; its parts are those of that one."""
        merged, last = self._merged.schema, self.sources[-1].schema
        part_rows = tuple(self._counts.sum(axis=0).tolist())
        metadata = {name: value for name, value in last.metadata.items() if name != "increment"}
        if self._exact and last.dialect == TFPLUGIN:
            metadata[PART_RECORDS] = part_records(self.sources[-1])
        schema = dataclasses.replace(
            merged,
            part_rows=part_rows,
            partition=last.partition,
            metadata=metadata,
            notes=self.sources[0].schema.notes,
            extras=(),
            bytes=sum(part_rows) * row_bytes(merged),
        )
        extras = tuple(ExtraSchema(name, array.dtype.name, array.shape) for name, array in self._small.items())
        return dataclasses.replace(schema, extras=(*self._large_extras(part_rows), *extras))

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part, those of the full checkpoint first; see `TableReader.read_part`."""
        for joined, (source, _) in enumerate(self._places):
            if not self._counts[joined, part]:
                continue
            for chunk in self._merged.read_part(joined, columns, rows, verify):
                if source.parts != self.sources[-1].parts:
                    chunk = chunk.take(np.flatnonzero(self._owners(chunk.keys) == part))
                if len(chunk):
                    yield dataclasses.replace(chunk, part=part)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        rows = self.row_numbers(rows)
        if not self._same_parts:
            return self._merged.take(self._order[rows], columns)
        first, in_merged = self._runs
        run = np.searchsorted(first, rows, side="right") - 1
        return self._merged.take(rows - first[run] + in_merged[run], columns)

    def unmatched(self) -> Unmatched:
        """Return what of the sources' slots does not fit their rows; see `TableReader.unmatched`."""
        return self._merged.unmatched()

    @cached_property
    def _places(self) -> list[tuple[TableReader, int]]:
        """The source, and the part of it, that each part of the joined table is."""
        return [(source, part) for source in self.sources for part in range(source.parts)]

    @cached_property
    def _counts(self) -> Array:
        """How many rows of each part of the joined table belong to each part here, int64 [joined parts, parts]."""
        parts, rows = self.sources[-1].parts, self._merged.schema.part_rows
        counts = np.zeros((len(self._places), parts), np.int64)
        for joined, (source, own) in enumerate(self._places):
            if source.parts == parts:
                counts[joined, own] = rows[joined]
                continue
            for chunk in self._merged.read_part(joined, KEYS, _KEY_ROWS, False):
                counts[joined] += np.bincount(self._owners(chunk.keys), minlength=parts)
        return counts

    def _owners(self, keys: Array) -> Array:
        last = self.sources[-1].schema
        return owners(keys, last.parts, last.partition or "floor_mod")

    @cached_property
    def _runs(self) -> tuple[Array, Array]:
        """The first row of each run that lies together, here and in the joined table; runs of no rows are left out."""
        counts = self._counts
        starts = np.cumsum([0, *self._merged.schema.part_rows])
        order = [(int(joined), part) for part in range(counts.shape[1]) for joined in np.flatnonzero(counts[:, part])]
        here = np.cumsum([0, *(counts[run] for run in order)])[: max(1, len(order))]
        return here, starts[[joined for joined, _ in order] or [0]]

    @cached_property
    def _order(self) -> Array:
        """The row of the joined table that each row here is, int64 [rows], where sources differ in parts."""
        counts, merged = self._counts, self._merged
        order = row_numbers(int(counts.sum()), memory=self._memory)
        part_starts = np.cumsum([0, *counts.sum(axis=0)])[:-1]
        starts = part_starts + np.cumsum(counts, axis=0) - counts
        first = 0
        for joined, rows in enumerate(merged.schema.part_rows):
            source, own = self._places[joined]
            if source.parts == counts.shape[1]:
                order[starts[joined, own] : starts[joined, own] + rows] = np.arange(first, first + rows)
            else:
                keys = (chunk.keys for chunk in merged.read_part(joined, KEYS, _KEY_ROWS, False))
                owner = np.concatenate([np.empty(0, np.int64), *map(self._owners, keys)])
                by_owner, at = np.argsort(owner, kind="stable"), 0
                for part, count in enumerate(counts[joined].tolist()):
                    order[starts[joined, part] : starts[joined, part] + count] = first + by_owner[at : at + count]
                    at += count
            first += rows
        return order

    def extra(self, name: str) -> Array:
        """Return an extra array; see `TableReader.extra`."""
        if name in self._small:
            return self._small[name]
        part = part_of_row_extra(name)
        if part is not None:
            return self._of_rows(name, part)
        return self._holder(name).extra(name)

    def check(self) -> Iterator[Finding]:
        """Yield what is wrong with the table in any member."""
        for source in self.sources:
            yield from source.check()

    @property
    def scores_lost(self) -> bool:
        """Whether members have scores of rows that the whole has not."""
        return has_scores(self.sources[-1].schema) and not has_scores(self.schema)

    def _holder(self, name: str) -> TableReader:
        """Return the newest source that has an extra array."""
        return next(s for s in reversed(self.sources) if any(extra.name == name for extra in s.schema.extras))

    def _large_extras(self, part_rows: tuple[int, ...]) -> tuple[ExtraSchema, ...]:
        """Return the extra arrays that are not made here: they are read from a source when they are asked for."""
        found: list[ExtraSchema] = []
        having = next(
            (s for s in reversed(self.sources) if any(are_initial_values(extra.name) for extra in s.schema.extras)),
            None,
        )
        if having is not None:
            found += [extra for extra in having.schema.extras if are_initial_values(extra.name)]
        found += [extra for extra in self.sources[-1].schema.extras if extra.name.startswith(_FILTERS)]
        if self._same_parts:
            for part, rows in enumerate(part_rows):
                for name in (f"{start}{part}" for start in ROW_EXTRAS):
                    if all(any(extra.name == name for extra in source.schema.extras) for source in self.sources):
                        found.append(ExtraSchema(name, "uint64", (rows,)))
        return tuple(found)

    def _of_rows(self, name: str, part: int) -> Array:
        """Return the numbers that an extra has for the rows of a part, in their order here."""
        parts, merged = self.sources[0].parts, self._merged
        runs = [source * parts + part for source in range(len(self.sources))]
        numbers = row_numbers(sum(merged.schema.part_rows[run] for run in runs), memory=self._memory).view(np.uint64)
        at = 0
        for source, run in zip(self.sources, runs, strict=True):
            of_source = source.extra(name)
            for start in range(0, len(of_source), _KEY_ROWS):
                some = of_source[start : start + _KEY_ROWS]
                kept = some[merged.mask.get(run, start, len(some))]
                numbers[at : at + len(kept)] = kept
                at += len(kept)
        return numbers

    @cached_property
    def _small(self) -> Mapping[str, Array]:
        """The lists of keys, as they are after the last increment: those banned, and those that wait for admission."""
        found: dict[str, Array] = {}
        names = {extra.name for source in self.sources for extra in source.schema.extras}
        if "blacklist" in names:
            banned = np.empty(0, self.sources[0].key_dtype)
            for source in self.sources:
                if is_increment(source):
                    banned = np.setdiff1d(banned, _keys_of(source))
                    banned = np.setdiff1d(banned, removed_keys(source))
                banned = np.union1d(banned, _listed(source, "blacklist"))
            found["blacklist"] = banned
        last = self.sources[-1]
        holder = last if last.schema.dialect == TFPLUGIN else self.sources[0]
        for name in _PENDING:
            if any(extra.name == name for extra in holder.schema.extras):
                found[name] = holder.extra(name)
        if "filtered_keys" in found and holder is not last:
            # Increments of DeepRec do not say which keys wait: those that came in since do not.
            waiting = np.ones(len(found["filtered_keys"]), np.bool_)
            for source in self.sources[1:]:
                waiting &= ~np.isin(found["filtered_keys"], _keys_of(source))
            found.update({name: found[name][waiting] for name in _PENDING if name in found})
        return found


class _Removing(TableReader):
    """An increment whose banned keys are among those that go: TFPlus takes the row of a key that it bans away."""

    def __init__(self, source: TableReader) -> None:
        self._source = source
        self._keys = np.union1d(removed_keys(source), _listed(source, "blacklist"))
        extras = tuple(extra for extra in source.schema.extras if extra.name not in ("deleted_keys", "blacklist"))
        deleted = ExtraSchema("deleted_keys", source.schema.key_dtype, self._keys.shape)
        self.schema = dataclasses.replace(source.schema, extras=(*extras, deleted))

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        return self._source.read_part(part, columns, rows, verify)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        return self._source.take(rows, columns)

    def extra(self, name: str) -> Array:
        return self._keys if name == "deleted_keys" else self._source.extra(name)

    def unmatched(self) -> Unmatched:
        return self._source.unmatched()


def has_scores(schema: TableSchema) -> bool:
    """Tell whether a table has a number for each row that it evicts by."""
    return any(extra.name.startswith(_SCORES) for extra in schema.extras)


def _listed(table: TableReader, name: str) -> Array:
    if any(extra.name == name for extra in table.schema.extras):
        return table.extra(name).astype(table.key_dtype, copy=False)
    return np.empty(0, table.key_dtype)


def _keys_of(table: TableReader) -> Array:
    return np.concatenate(
        [np.empty(0, table.key_dtype), *(chunk.keys for chunk in table.chunks(KEYS, rows=_KEY_ROWS, verify=False))]
    )


def open_chain(
    path: str | os.PathLike[str], options: OpenOptions | None = None, *, until: int | None = None
) -> Checkpoint:
    """Open the newest whole chain at a path as one checkpoint, folded; reads no more than indexes.

    Args:
        path: see `kvtools.chain_place.chain_at`.
        options: how to open the members.
        until: take no member of a larger number.

    Returns:
        The checkpoint; its `path` is the prefix of the last member that was taken.

    Raises:
        ChainError: the chain is not whole; the message names the member at fault.
        BadInputError, CorruptFileError: a member is damaged.

    Example:
        ```python
        print(open_chain("train").table("user").rows)
        ```
    """
    options = options or OpenOptions()
    found, checkpoints = open_members(chain_at(path), options, until)
    folded = fold_checkpoints(checkpoints, options.memory)
    again = functools.partial(_open_again, until=found[-1].number)
    for name, table in folded.tables.items():
        table.origin = Origin(str(Path(path).absolute()), options, name, again)
    return folded


def newest_of(place: ChainPlace, until: int | None = None) -> list[chain.Member]:
    """Return the newest whole chain there, at least one member; with `until`, as if there were none after that number.

    Raises:
        ChainError: it is not whole.
        BadInputError: there is no such member.
    """
    there = place.members
    if until is not None:
        if not any(member.number == until for member in there):
            numbers = f"{there[0].number} to {there[-1].number}" if there else "none"
            raise BadInputError(
                f"reading the chain in '{place.folder}': it has no member {until}; it has {numbers}, see `kvtools"
                f" inspect {place.folder}`"
            )
        there = [member for member in there if member.number <= until]
    return chain.chain_of(there)


def open_members(
    place: ChainPlace, options: OpenOptions, until: int | None = None
) -> tuple[list[chain.Member], list[Checkpoint]]:
    """Return the newest whole chain there, and its members opened; see `newest_of`.

    Training that goes on may remove what was listed: then it is listed anew.
    """
    for attempt in range(_ATTEMPTS):
        there = place.members
        try:
            found = newest_of(place, until)
            return found, [open_member(member, options) for member in found]
        except BadInputError:
            if attempt == _ATTEMPTS - 1 or place.members == there:
                raise
    raise AssertionError("the last attempt returns or raises")


def _open_again(origin: Origin, until: int) -> TableReader:
    return open_chain(origin.path, origin.options, until=until).table(origin.table)


def fold_checkpoints(checkpoints: Sequence[Checkpoint], memory: int, *, exact: bool = False) -> Checkpoint:
    """Return a full checkpoint and increments of it as one checkpoint; that they follow each other is not asked.

    Raises:
        BadInputError: the first is an increment, another is none, or they are of different dialects or tables.
    """
    first, *increments = checkpoints
    _check_kinds(checkpoints)
    tables: dict[str, TableReader] = {}
    for name, table in first.tables.items():
        having = [(one.tables[name], str(one.path)) for one in checkpoints if name in one.tables]
        readers = [reader for reader, _ in having]
        tables[name] = table
        if len(readers) > 1 or exact:
            tables[name] = FoldedTable(readers, [path for _, path in having], memory=memory, exact=exact)
    last = checkpoints[-1]
    whole = last if last.dialect == TFPLUGIN or not increments else _patched(checkpoints)
    broken: dict[str, KvtoolsError] = {}
    for one in checkpoints:
        broken.update(one.broken)
    for name in broken:
        tables.pop(name, None)

    def check() -> Iterator[Finding]:
        for one in checkpoints:
            yield from one.check()

    return dataclasses.replace(whole, dialect=first.dialect, tables=tables, broken=broken, check=check)


def _check_kinds(checkpoints: Sequence[Checkpoint]) -> None:
    first, *increments = checkpoints
    for name, table in first.tables.items():
        if is_increment(table):
            raise BadInputError(
                f"applying increments to '{first.path}': its table '{name}' is an increment itself, expected a full"
                " checkpoint; name that first"
            )
    for one in increments:
        doing = f"applying '{one.path}' to '{first.path}'"
        if one.dialect != first.dialect and one.tables:
            raise BadInputError(
                f"{doing}: it is of dialect {one.dialect}, the checkpoint of {first.dialect}; migrate one of them first"
            )
        if not one.tables and not one.broken:
            raise BadInputError(f"{doing}: it has no key-value table; see `kvtools inspect`")
        for name, table in one.tables.items():
            if not is_increment(table):
                raise BadInputError(
                    f"{doing}: its table '{name}' is no increment but whole; see `kvtools diff --output delta`, or"
                    " `kvtools merge` for checkpoints that are to become one"
                )
            if name not in first.tables and name not in first.broken:
                raise BadInputError(
                    f"{doing}: it is of table '{name}', which the checkpoint has not; it is of another model"
                )


def _patched(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """Return the dense variables of a checkpoint after increments of another engine: whole ones replace what was
    before, and changed rows, of which DeepRec saves keys and values, are put into theirs."""
    owner: dict[str, tuple[Checkpoint, VariableSchema]] = {}
    patches: dict[str, list[Checkpoint]] = {}
    for number, one in enumerate(checkpoints):
        names = {variable.name for variable in one.variables}
        for variable in one.variables:
            of = variable.name.removesuffix(CHANGED_KEYS).removesuffix(_CHANGED_VALUES)
            if number and of != variable.name and {of + CHANGED_KEYS, of + _CHANGED_VALUES} <= names:
                if variable.name.endswith(CHANGED_KEYS):
                    patches.setdefault(of, []).append(one)
                continue
            owner[variable.name] = one, variable
            patches.pop(variable.name, None)
    unknown = next((name for name in patches if name not in owner), None)
    if unknown is not None:
        raise BadInputError(
            f"applying increments to '{checkpoints[0].path}': they change rows of the dense variable '{unknown}', which"
            " it has not; it is of another model"
        )

    def read(name: str) -> Iterator[Array]:
        one, schema = owner[name]
        rows = one.read_variable(name)
        return _with_rows(name, schema, rows, patches[name]) if name in patches else rows

    last = checkpoints[-1]
    graph = next((one for one in reversed(checkpoints) if one.bookkeeping), last)
    for variable in graph.bookkeeping:
        owner[variable.name] = graph, variable
    bookkeeping = {variable.name for variable in graph.bookkeeping}
    variables = tuple(variable for name, (_, variable) in sorted(owner.items()) if name not in bookkeeping)
    return dataclasses.replace(last, variables=variables, read_variable=read, bookkeeping=graph.bookkeeping)


def _with_rows(
    name: str, schema: VariableSchema, rows: Iterator[Array], increments: Sequence[Checkpoint]
) -> Iterator[Array]:
    """Yield a dense variable's rows with those of increments in their places."""
    numbers, values = [], []
    for one in increments:
        numbers.append(np.concatenate([np.empty(0, np.int64), *one.read_variable(name + CHANGED_KEYS)]))
        none = np.empty((0, *schema.shape[1:]), numpy_dtype(schema.dtype))
        values.append(np.concatenate([none, *one.read_variable(name + _CHANGED_VALUES)]))
        if len(numbers[-1]) != len(values[-1]) or not all(0 <= n < schema.shape[0] for n in numbers[-1].tolist()):
            raise BadInputError(
                f"applying '{one.path}': its changed rows of '{name}' do not fit it; it is of another model"
            )
    at = 0
    for chunk in rows:
        chunk = np.array(chunk)
        for of, new in zip(numbers, values, strict=True):
            here = np.flatnonzero((of >= at) & (of < at + len(chunk)))
            if len(here):
                chunk[of[here] - at] = new[here].reshape(len(here), *schema.shape[1:]).astype(chunk.dtype)
        at += len(chunk)
        yield chunk


def apply_increments(
    base: str | os.PathLike[str],
    increments: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    parts: int | None = None,
    to: str | None = None,
    open_options: OpenOptions | None = None,
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    strict: bool = False,
) -> tuple[Account, list[Merged]]:
    """Write the checkpoint that a base and increments of it make.

    Args:
        base: a full checkpoint, or a chain, of which the newest whole one is taken.
        increments: in the order in which they are applied, each checked to follow what is before it; of DeepRec and
            TFPlus, whose increments do not say what they follow, by their numbers.
        output: where to write.
        parts, to, options, workers, progress, strict: as for `kvtools.migrate.write_tables`.
        open_options: how to open what is read.

    Returns:
        The account, and what became of the rows of each table.

    Raises:
        ChainError: an increment does not follow; nothing is written then.
        BadInputError: the base is an increment, or an increment is none, or is of other tables.
        OutputError: `output` exists, or cannot be written.

    Example:
        ```python
        apply_increments("train/ckpt-4", ["train/ckpt-5.delta", "train/ckpt-6.delta"], "model.ckpt")
        ```
    """
    open_options = dataclasses.replace(open_options or OpenOptions(), increments=True)
    if not increments:
        raise UsageError(f"applying increments to '{base}': got none, expected some; see `kvtools apply --help`")
    place: list[chain.Member] = []
    if is_chain(base):
        place, checkpoints = open_members(chain_at(base), open_options)
    else:
        checkpoints = [open_checkpoint(base, open_options)]
    opened = [open_checkpoint(path, open_options) for path in increments]
    _check_kinds([checkpoints[0], *opened])
    record = _check_order(place, checkpoints[0], opened)
    return write_folded([*checkpoints, *opened], output, record, parts, to, options, workers, progress, strict)


def merge_chain(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    until: int | None = None,
    parts: int | None = None,
    to: str | None = None,
    open_options: OpenOptions | None = None,
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    strict: bool = False,
) -> tuple[Account, list[Merged]]:
    """Write the newest whole chain at a path as one full checkpoint; arguments and errors as of `apply_increments`.

    What is written is a member of the chain, of the last increment's number and moment: later increments apply to it.
    """
    open_options = dataclasses.replace(open_options or OpenOptions(), increments=True)
    found, checkpoints = open_members(chain_at(path), open_options, until)
    record = folded_record(found[-1].prefix)
    return write_folded(checkpoints, output, record, parts, to, options, workers, progress, strict)


def write_folded(
    checkpoints: Sequence[Checkpoint],
    output: str | os.PathLike[str],
    record: chain.Record | None,
    parts: int | None,
    to: str | None,
    options: WriteOptions | None,
    workers: int | None,
    progress: Progress | None,
    strict: bool,
) -> tuple[Account, list[Merged]]:
    """Write a base and the increments of it as one checkpoint, and its record, where it has one."""
    options = options or WriteOptions()
    to = to or checkpoints[0].dialect
    if record is not None and to == TFPLUGIN:
        _check_name(Path(output), record)
    output = output_of(output, to, checkpoints)
    folded = fold_checkpoints(checkpoints, options.memory, exact=True)
    tables = list(folded.tables.values())
    merged = [table.fold(progress) for table in tables if isinstance(table, FoldedTable)]
    wanted = {name: parts or checkpoints[-1].tables.get(name, table).parts for name, table in folded.tables.items()}
    beside = folded
    if record is not None and to == TFPLUGIN:
        counts = {
            part_prefix(table.schema, part): chain.TableCounts(rows, 0, 0)
            for table in tables
            if table.parts == wanted[table.schema.name]
            for part, rows in enumerate(table.schema.part_rows)
        }
        beside = with_record(folded, dataclasses.replace(record, tables=counts))
    account = write_tables(
        tables,
        output,
        to,
        beside=beside,
        parts=wanted,
        options=options,
        workers=workers,
        progress=progress,
        strict=strict,
    )
    lost = [table.schema.name for table in tables if isinstance(table, FoldedTable) and table.scores_lost]
    if lost:
        told = f"eviction scores of {', '.join(lost)}: members of the chain differ in them, or in the number of parts"
        account = dataclasses.replace(account, losses=(*account.losses, told))
    if checkpoints[0].dialect == "deeprec" and len(checkpoints) > 1:
        told = "rows that training removed since the full checkpoint: DeepRec's increments do not say which, they stay"
        account = dataclasses.replace(account, losses=(*account.losses, told))
    return account, merged


def _check_name(output: Path, record: chain.Record) -> None:
    """Raise `UsageError` where a full checkpoint would be written by the name of another member of a chain."""
    named = chain.member_of(output)
    if named is None:
        return
    name = output.name.removesuffix(".delta").rpartition("-")[0]
    if named.kind == "delta" or (named.number != record.sequence and is_chain(output.parent / name)):
        raise UsageError(
            f"writing '{output}': by its name it would be {named.kind} {named.number} of a chain, and it is the full"
            f" checkpoint {record.sequence}; call it '{output.parent / name}-{record.sequence}', or by a name without a"
            " number"
        )


def with_record(checkpoint: Checkpoint, record: chain.Record) -> Checkpoint:
    """Return a checkpoint that has a chain's record beside its dense variables."""
    text = record.to_json().encode()
    schema = VariableSchema(chain.RECORD_TENSOR, "string", (), len(text))

    def read(name: str) -> Iterator[Array]:
        if name != chain.RECORD_TENSOR:
            return checkpoint.read_variable(name)
        scalar = np.empty((), object)
        scalar[()] = text
        return iter([scalar])

    return dataclasses.replace(checkpoint, bookkeeping=(*checkpoint.bookkeeping, schema), read_variable=read)


def record_at(prefix: Path) -> chain.Record | None:
    """Return the record of a member however its file is called; None where it has none."""
    bundle = Bundle(prefix)
    if chain.RECORD_TENSOR not in bundle:
        return None
    return chain.Record.from_json(bundle.strings(chain.RECORD_TENSOR)[0], prefix)


def _check_order(
    place: Sequence[chain.Member], first: Checkpoint, increments: Sequence[Checkpoint]
) -> chain.Record | None:
    """Raise `ChainError` unless each increment follows what is before it; return the record of the whole."""
    if first.dialect != TFPLUGIN:
        _check_numbers(first, increments)
        return None
    prefix = place[-1].prefix if place else locate(Path(first.path)).prefix
    record = record_at(prefix)
    known = {chain.fingerprint(prefix)}
    if record is not None and record.previous is not None and record.previous.sequence == record.sequence:
        known.add(record.previous.fingerprint)
    at = _Position(
        str(prefix), None if record is None else record.chain, None if record is None else record.sequence, known
    )
    for one in increments:
        at = at.next(Path(one.path))
    return folded_record(Path(increments[-1].path))


def folded_record(prefix: Path) -> chain.Record | None:
    """Return the record of the full checkpoint that stands for all up to a member: one of the same moment."""
    record = record_at(prefix)
    if record is None:
        return None
    same = record.kind == "full" and record.previous is not None and record.previous.sequence == record.sequence
    previous = record.previous if same else chain.Previous(record.sequence, chain.fingerprint(prefix))
    return dataclasses.replace(record, kind="full", full=record.sequence, previous=previous, tables={})


@dataclasses.dataclass
class _Position:
    """What increments have been applied up to: a member's name, chain, number, and fingerprints that stand for it."""

    name: str
    of: str | None
    sequence: int | None
    known: set[str]

    def next(self, prefix: Path) -> _Position:
        """Return the position after an increment; raises `chain.ChainError` unless it follows."""
        record = record_at(prefix)
        doing = f"applying '{prefix}' after '{self.name}'"
        if record is None or record.kind != "delta" or record.previous is None:
            raise chain.ChainError(
                f"{doing}: it has no record of a chain, so nobody knows what it follows; nothing was written",
                "other-chain",
            )
        if self.of is not None and record.chain != self.of:
            raise chain.ChainError(
                f"{doing}: it is of another chain ({record.chain} after {self.of}); nothing was written, name the"
                " increments of this one",
                "other-chain",
            )
        if self.sequence is not None and record.previous.sequence != self.sequence:
            self._refuse(doing, record)
        if record.previous.fingerprint not in self.known:
            raise chain.ChainError(
                f"{doing}: it was made after another checkpoint (number {record.previous.sequence}, fingerprint"
                f" {record.previous.fingerprint[:12]}...); nothing was written, name the checkpoint that it was made"
                " after",
                "fingerprint",
            )
        return _Position(str(prefix), record.chain, record.sequence, {chain.fingerprint(prefix)})

    def _refuse(self, doing: str, record: chain.Record) -> None:
        assert self.sequence is not None
        if record.sequence <= self.sequence:
            reason: chain.Reason = "duplicate" if record.sequence == self.sequence else "disorder"
            raise chain.ChainError(
                f"{doing}: {reason}: it is member {record.sequence}, and {self.sequence} was applied already;"
                " nothing was written, name each increment once, in the order of their numbers",
                reason,
            )
        raise chain.ChainError(
            f"{doing}: gap: it is member {record.sequence} and {self.sequence + 1} is missing; nothing was written,"
            " name all increments in between",
            "gap",
        )


def _check_numbers(first: Checkpoint, increments: Sequence[Checkpoint]) -> None:
    """Raise `ChainError` where the steps in the names of another engine's increments do not grow."""
    at, name = _step(first), str(first.path)
    for one in increments:
        step = _step(one)
        if step is not None and at is not None and step <= at:
            raise chain.ChainError(
                f"applying '{one.path}' after '{name}': disorder: it is of step {step}, and {at} came before it;"
                " nothing was written, name increments in the order of their steps",
            )
        at, name = (at if step is None else step), str(one.path)


def _step(checkpoint: Checkpoint) -> int | None:
    found = _STEP.search(Path(checkpoint.path).name)
    return None if found is None else int(found[1])
